#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace pulseinfer_test {

struct run_options {
  kv_geometry geometry = {};
  manager_options manager = {};
  solo_head_selector<> selector = {};
  std::array<std::uint32_t, 3> prompts = {100, 37, 64};
  std::uint32_t decoded = 60;
  bool stream_prompts = false;
};

struct run_result {
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<float>> outputs;
  std::uint64_t recalled = 0;
  std::uint64_t written = 0;
  std::uint64_t parts = 0;  ///< of streams
};

/// Three sequences of different lengths: prompts in chunks, then decoded together.
template <class Transfer, class Scheduler, class Backend>
run_result decode(Backend& backend, run_options const& options)
{
  using manager_type = offload_manager<Backend, solo_head_selector<>, Transfer, Scheduler, fixed_admission>;
  auto const stream = backend.create_stream(stream_priority::normal);
  synthetic_model const model{options.geometry};
  run_result result;
  {
    manager_type kv{backend,          stream,     model.geometry, options.manager,
                    options.selector, Transfer{}, Scheduler{},    fixed_admission{}};
    synthetic_engine<Backend, manager_type> engine{backend, stream, model, kv, options.manager.max_rows, 16};
    std::vector<step_row> rows;
    for (std::uint32_t i = 0; i < options.prompts.size(); ++i) {
      row_id row = none<row_id>;
      REQUIRE(
        kv.open(
          {.prompt_tokens = options.prompts[i],
           .max_tokens = options.prompts[i] + options.decoded,
           .stream_prompt = options.stream_prompts},
          row) == admission::admitted);
      engine.assign(row, i + 1);
      engine.prefill(row, options.prompts[i], 16);
      rows.push_back({.row = row});
    }
    for (std::uint32_t t = 0; t < options.decoded; ++t) {
      // Rows that are late are in the step already.
      std::vector<step_row> due;
      for (step_row const& r : rows) {
        if (!kv.is_late(r.row) && kv.tokens_of(r.row) < options.prompts[to_index(r.row)] + options.decoded) {
          due.push_back(r);
        }
      }
      engine.step(due);
      kv.finish_sample();
      result.recalled += kv.last_sample().recalled_blocks;
      result.written += kv.last_sample().written_bytes;
    }
    for (std::uint32_t tries = 0; tries < 100; ++tries) {
      bool late = false;
      for (step_row const& r : rows) { late = late || kv.is_late(r.row); }
      if (!late) { break; }
      engine.step({});
    }
    REQUIRE(kv.failures().empty());
    for (step_row const& r : rows) { REQUIRE(kv.close(r.row) == status::ok); }
    REQUIRE(kv.drain(no_deadline) == status::ok);
    REQUIRE(kv.audit() == "");
    result.outputs = engine.outputs();
    result.parts = engine.parts;
  }
  backend.destroy_stream(stream);
  return result;
}

/// @return the largest difference of outputs that both have
inline float difference(run_result const& a, run_result const& b, std::uint32_t& compared)
{
  float most = 0.0F;
  compared = 0;
  for (auto const& [place, output] : a.outputs) {
    auto const other = b.outputs.find(place);
    if (other == b.outputs.end()) { continue; }
    float const here = difference(output, other->second);
    most = here > most ? here : most;
    ++compared;
  }
  return most;
}

template <class Transfer, class Scheduler>
void equals_cpu(run_options const& options, float most)
{
  cuda_backend device;
  run_result const there = decode<Transfer, Scheduler>(device, options);
  CHECK(device.last_error() == "");
  CHECK(device.device_bytes() == 0);
  CHECK(device.pinned_bytes() == 0);
  // The CPU runs the null compositions: the result depends on neither the scheduler nor the mover.
  cpu_backend host{{.mode = cpu_mode::manual}};
  run_options resident = options;
  resident.stream_prompts = false;
  run_result const here = decode<fragment_copy_engine, lockstep_scheduler<visit_order::whole>>(host, resident);
  CHECK((there.parts > 50) == options.stream_prompts);
  CHECK(here.recalled > 0);
  CHECK(there.recalled > 0);
  std::uint32_t compared = 0;
  float const found = difference(here, there, compared);
  CHECK(compared >= 3 * (options.decoded - 8));
  CHECK(found < most);
  MESSAGE("outputs " << compared << ", largest difference " << found << ", recalled " << there.recalled);
}

inline run_options small_run(dtype type, std::uint32_t kv_heads, std::uint32_t head_groups)
{
  run_options options;
  options.geometry = {
    .layers = 3,
    .query_heads = 4,
    .kv_heads = kv_heads,
    .head_dim = 16,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = type,
    .value_type = type};
  options.manager = {.max_rows = 3, .max_tokens = 200, .max_prefill_tokens = 16, .quota_tokens = 32};
  options.selector = {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 24};
  return options;
}

}  // namespace pulseinfer_test

using lockstep = lockstep_scheduler<visit_order::whole>;
using interruptible = interruptible_scheduler<visit_order::hits_first>;

TEST_CASE("a manager on the GPU decodes as one on the CPU: rows in lockstep, gathered blocks")
{
  equals_cpu<gather_scatter_engine, lockstep>(small_run(dtype::float32, 2, 1), 2e-4F);
}

TEST_CASE("a manager on the GPU decodes as one on the CPU: rows parked at their layers, hits before what lands")
{
  equals_cpu<gather_scatter_engine, interruptible>(small_run(dtype::float32, 4, 4), 2e-4F);
}

TEST_CASE("a manager on the GPU decodes as one on the CPU: plans on the host, copies of the copy engine")
{
  equals_cpu<fragment_copy_engine, interruptible>(small_run(dtype::float32, 2, 1), 2e-4F);
}

TEST_CASE("a manager on the GPU streams prompts as one on the CPU keeps them resident")
{
  for (std::uint32_t const stream_tokens : {4U, 24U}) {
    run_options options = small_run(dtype::float32, 4, 4);
    options.manager.stream_tokens = stream_tokens;
    options.stream_prompts = true;
    equals_cpu<gather_scatter_engine, interruptible>(options, 2e-4F);
  }
}

TEST_SUITE_END();
