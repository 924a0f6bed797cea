#include "../support/captured_decode.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace pulseinfer_test {

/// Graphs of CUDA.
struct cuda_graphs {
  using graph = cudaGraphExec_t;

  cuda_backend& backend;
  cudaStream_t captured = nullptr;
  std::vector<cudaGraphExec_t> made = {};

  explicit cuda_graphs(cuda_backend& of) : backend{of} {}
  cuda_graphs(cuda_graphs&&) = delete;
  ~cuda_graphs()
  {
    static_cast<void>(backend.synchronize());
    for (cudaGraphExec_t const one : made) { CHECK(cudaGraphExecDestroy(one) == cudaSuccess); }
  }

  void begin(cuda_backend::stream_ref stream)
  {
    captured = stream.stream;
    REQUIRE(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  }
  [[nodiscard]] cudaGraphExec_t end()
  {
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t runnable = nullptr;
    REQUIRE(cudaStreamEndCapture(captured, &recorded) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&runnable, recorded, 0) == cudaSuccess);
    REQUIRE(cudaGraphDestroy(recorded) == cudaSuccess);
    made.push_back(runnable);
    return runnable;
  }
  static status launch(cudaGraphExec_t runnable, cuda_backend::stream_ref stream)
  {
    return cudaGraphLaunch(runnable, stream.stream) == cudaSuccess ? status::ok : status::capture_unsupported;
  }
};

template <class Scheduler>
void compare(captured_as how)
{
  cuda_backend one, other;
  CHECK(compare_with_loop<cuda_backend, Scheduler, cuda_graphs>(one, other, how, 64) > 100);
  CHECK(one.last_error() == "");
  CHECK(other.last_error() == "");
}

}  // namespace pulseinfer_test

using whole = lockstep_scheduler<visit_order::whole>;
using hits = lockstep_scheduler<visit_order::hits_first>;
using parking = interruptible_scheduler<visit_order::hits_first>;

TEST_CASE("a manager's step in one graph replays 64 times as its loop runs: tables, books and outputs alike")
{
  SUBCASE("each layer attended whole") { compare<whole>(captured_as::step); }
  SUBCASE("hits attended while misses travel") { compare<hits>(captured_as::step); }
}

TEST_CASE("a manager's visits replay as graphs as its loop runs, rows parked meanwhile")
{
  compare<parking>(captured_as::visits);
}

namespace pulseinfer_test {

/// All bytes that the host has of a row's first blocks, in every layer that selects and every head group.
template <class Decode>
std::vector<std::byte> host_bytes_of(Decode& run, row_id row, std::uint32_t blocks)
{
  REQUIRE(run.kv.drain(no_deadline) == status::ok);
  std::vector<std::byte> all;
  sequence_state const& sequence = run.kv.sequences()[row];
  for (std::uint32_t b = 0; b < blocks; ++b) {
    REQUIRE_FALSE(is_none(sequence.host_blocks[b]));
    for (std::uint32_t layer = 0; layer < run.kv.geometry().layers; ++layer) {
      if (run.kv.geometry().group_of(static_cast<layer_id>(layer)).kind != layer_kind::selected) { continue; }
      for (std::uint32_t group = 0; group < run.kv.geometry().head_groups; ++group) {
        std::byte const* const at =
          run.kv.store().ref().address(static_cast<layer_id>(layer), group, sequence.host_blocks[b]);
        all.insert(all.end(), at, at + run.kv.layout().block_bytes);
      }
    }
  }
  return all;
}

/// NaN in every host block.
template <class Decode>
void poison_host(Decode& run)
{
  for (std::uint32_t layer = 0; layer < run.kv.geometry().layers; ++layer) {
    for (std::uint32_t group = 0; group < run.kv.geometry().head_groups; ++group) {
      std::memset(
        run.kv.store().ref().address(static_cast<layer_id>(layer), group, host_block_id{0}), 0xFF,
        run.kv.store().blocks() * run.kv.layout().block_bytes);
    }
  }
}

}  // namespace pulseinfer_test

// Report: vllm-project/vllm#56158
TEST_CASE(
  "what 12 replays of a step sent to the host is there byte by byte, and comes back after all slots were overwritten")
{
  cuda_backend backend;
  captured_decode<cuda_backend, whole, cuda_graphs> run{backend, true};
  captured_decode<cuda_backend, whole, cuda_graphs> loop{backend};
  poison_host(run);  // a block that is not written shows
  row_id const row = run.open(1, 100);
  REQUIRE(loop.open(1, 100) == row);
  // One block in four tokens, each sealed and written back between replays.
  for (std::uint32_t t = 0; t < 12; ++t) {
    run.replayed({{.row = row}}, 1);
    loop.eager({{.row = row}});
  }
  REQUIRE(run.kv.sequences()[row].sealed == 28);
  std::vector<std::byte> const sent = host_bytes_of(run, row, 28);
  CHECK(sent.size() == std::uint64_t{28} * 2 * 2 * run.kv.layout().block_bytes);
  CHECK((sent == host_bytes_of(loop, row, 28)));
  // A replay that no begin_step made ready for is refused, and nothing has changed: its blocks would never be written.
  std::vector<std::uint32_t> const books = run.books();
  std::uint32_t const launches = run.launches;
  CHECK(run.replay() == status::invalid_state);
  CHECK(run.launches == launches);
  CHECK(run.kv.tokens_of(row) == 112);
  CHECK((run.books() == books));
  // What the sealed blocks must hold: the keys and values of a run that never leaves the slots.
  captured_decode<cuda_backend, whole, cuda_graphs> resident{backend};
  row_id const kept = resident.open(1, 100, true);
  for (std::uint32_t t = 0; t < 12; ++t) { resident.eager({{.row = kept}}); }
  // Both go on. The first has slots for 9 of its 28 blocks and recalls what else it selects; verify looks at every block.
  row_id const other = run.open(9, 120);
  for (std::uint32_t t = 0; t < 20; ++t) {
    run.replayed({{.row = row}}, 1);
    run.eager({{.row = other}});
    resident.eager({{.row = kept}});
  }
  REQUIRE(run.kv.failures().empty());
  REQUIRE(run.recalled > 20);
  for (std::uint32_t t = 100; t < 132; ++t) { REQUIRE(run.engine.output(1, t) == resident.engine.output(1, t)); }
}

TEST_CASE(
  "fp8 keys and values and a plane of scales go to the host and back on a GPU: outputs are those of a row that stays")
{
  kv_geometry geometry = captured_geometry();
  geometry.key_type = geometry.value_type = dtype::float8_e4m3;
  geometry.extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 20}};
  cuda_backend backend;
  // verify looks at every plane of every block that comes back.
  captured_decode<cuda_backend, whole, cuda_graphs> run{backend, true, 0.25F, geometry};
  captured_decode<cuda_backend, whole, cuda_graphs> resident{backend, false, 0.25F, geometry};
  row_id const row = run.open(1, 100);
  row_id const kept = resident.open(1, 100, true);
  for (std::uint32_t t = 0; t < 40; ++t) {
    if (t % 2 == 0) {
      run.replayed({{.row = row}}, 1);
    } else {
      run.eager({{.row = row}});
    }
    resident.eager({{.row = kept}});
    REQUIRE((run.engine.output(1, 100 + t) == resident.engine.output(1, 100 + t)));
  }
  REQUIRE(run.kv.failures().empty());
  REQUIRE(run.recalled > 20);
  CHECK(backend.last_error() == "");
}

TEST_CASE("rows that share a prefix read it once on a GPU, in graphs too, and decode as rows that share nothing")
{
  cuda_backend backend;
  captured_decode<cuda_backend, whole, cuda_graphs> run{backend, true};
  captured_decode<cuda_backend, whole, cuda_graphs> apart{backend};
  std::vector<step_row> batch{{.row = run.open(1, 100)}};
  REQUIRE(apart.open(1, 100) == batch[0].row);
  while (batch.size() < 4) {
    row_id fork{};
    REQUIRE(run.kv.fork(batch[0].row, {.prompt_tokens = 100, .max_tokens = 200}, fork) == admission::admitted);
    REQUIRE(apart.open(1, 100) == fork);
    batch.push_back({.row = fork});
  }
  // From here on each goes its own way.
  for (std::uint64_t i = 0; i < 4; ++i) {
    run.engine.assign(batch[i].row, 11 + i);
    apart.engine.assign(batch[i].row, 11 + i);
  }
  for (std::uint32_t t = 0; t < 40; ++t) {
    // Half of the steps by the loop, half by a graph that was captured while the rows shared blocks.
    if (t < 20) {
      run.eager(batch);
    } else {
      run.replayed(batch, 5);
    }
    apart.eager(batch);
    for (std::uint64_t seed = 11; seed < 15; ++seed) {
      REQUIRE((run.engine.output(seed, 100 + t) == apart.engine.output(seed, 100 + t)));
    }
  }
  REQUIRE(run.kv.failures().empty());
  REQUIRE(run.recalled > 80);
}

TEST_SUITE_END();
