#include "../support/captured_decode.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <cstdint>
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

TEST_CASE("what 12 replays of a step sent to the host comes back from there, all slots overwritten meanwhile")
{
  // vllm-project/vllm#56158: one block in four tokens, each sealed and written back between replays.
  cuda_backend backend;
  captured_decode<cuda_backend, whole, cuda_graphs> run{backend, true};
  row_id const row = run.open(1, 100);
  for (std::uint32_t t = 0; t < 12; ++t) { run.replayed({{.row = row}}, 1); }
  sequence_state const& sequence = run.kv.sequences()[row];
  REQUIRE(sequence.sealed == 28);
  for (std::uint32_t b = 0; b < 28; ++b) { REQUIRE_FALSE(is_none(sequence.host_blocks[b])); }
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

TEST_SUITE_END();
