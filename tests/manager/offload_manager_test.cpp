#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <memory>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

kv_geometry small_geometry()
{
  return {
    .layers = 3,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

/// A manager over the CPU backend with an engine that drives it.
template <class Transfer, class Scheduler>
struct rig {
  using manager_type = offload_manager<cpu_backend, solo_head_selector<>, Transfer, Scheduler, fixed_admission>;

  rig(
    synthetic_model const& model, manager_options const& options, solo_head_selector<> const& selector,
    cpu_options const& cpu = {.mode = cpu_mode::manual}, std::uint32_t per_row = 8)
    : backend{cpu},
      stream{backend.create_stream(stream_priority::normal)},
      kv{backend, stream, model.geometry, options, selector, Transfer{}, Scheduler{}, fixed_admission{}},
      engine{backend, stream, model, kv, options.max_rows, per_row}
  {}

  row_id open(std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens)
  {
    row_id row = none<row_id>;
    REQUIRE(kv.open({.prompt_tokens = prompt, .max_tokens = tokens}, row) == admission::admitted);
    engine.assign(row, seed);
    return row;
  }

  cpu_backend backend;
  cpu_backend::stream_ref stream;
  manager_type kv;
  synthetic_engine<cpu_backend, manager_type> engine;
};

using lockstep = lockstep_scheduler<visit_order::whole>;
using hits_lockstep = lockstep_scheduler<visit_order::hits_first>;
using interruptible = interruptible_scheduler<visit_order::hits_first>;

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 3: a budget that covers the sequence gives the dense result", Scheduler, lockstep, hits_lockstep,
    interruptible)
  {
    synthetic_model const model{small_geometry()};
    rig<gather_scatter_engine, Scheduler> r{
      model,
      {.max_rows = 2, .max_tokens = 64},
      {.budget_tokens = 64, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 12}};
    row_id const row = r.open(1, 10, 60);
    r.engine.prefill(row, 10, 4);
    for (std::uint32_t t = 10; t < 60; ++t) { r.engine.step({{.row = row}}); }
    auto const dense = dense_outputs(model, 1, 60);
    for (std::uint32_t t = 0; t < 60; ++t) { CHECK(difference(r.engine.output(1, t), dense[t]) < 1e-4F); }
    CHECK(r.kv.audit() == "");
  }

  TEST_CASE("a sparse row recalls what its slots do not hold, and decodes on")
  {
    synthetic_model const model{small_geometry()};
    rig<gather_scatter_engine, lockstep> r{
      model,
      {.max_rows = 1, .max_tokens = 200, .quota_tokens = 32},
      {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 24}};
    row_id const row = r.open(1, 100, 200);
    r.engine.prefill(row, 100, 8);
    std::uint64_t recalled = 0;
    for (std::uint32_t t = 100; t < 200; ++t) {
      r.engine.step({{.row = row}});
      r.kv.finish_sample();
      recalled += r.kv.last_sample().recalled_blocks;
      REQUIRE(r.kv.audit() == "");
    }
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    CHECK(recalled > 0);
    auto const dense = dense_outputs(model, 1, 200);
    for (std::uint32_t t = 0; t < 100; ++t) { CHECK(difference(r.engine.output(1, t), dense[t]) < 1e-4F); }
    REQUIRE(r.kv.close(row) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.kv.memory().slot_bytes == 0);
    CHECK(r.kv.memory().host_bytes == 0);
    CHECK(r.kv.audit() == "");
  }
}
