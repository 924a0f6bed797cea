#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using manager_type = offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;

synthetic_model make_model()
{
  return synthetic_model{
    {.layers = 3,
     .query_heads = 4,
     .kv_heads = 2,
     .head_dim = 8,
     .block_tokens = 4,
     .key_type = dtype::float32,
     .value_type = dtype::float32}};
}

struct rig {
  rig(synthetic_model const& model, bool verify)
    : backend{{.mode = cpu_mode::manual}},
      stream{backend.create_stream(stream_priority::normal)},
      kv{
        backend,
        stream,
        model.geometry,
        {.max_rows = 2, .max_tokens = 160, .quota_tokens = 32, .verify = verify},
        {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 24}},
      engine{backend, stream, model, kv, 2, 8}
  {}

  row_id open(std::uint64_t seed)
  {
    row_id row = none<row_id>;
    REQUIRE(kv.open({.prompt_tokens = 40, .max_tokens = 160}, row) == admission::admitted);
    engine.assign(row, seed);
    engine.prefill(row, 40, 8);
    return row;
  }

  /// Flips a bit in every host block of the sequence in one layer.
  void damage(row_id row, layer_id layer)
  {
    REQUIRE(kv.drain(no_deadline) == status::ok);
    for (host_block_id const block : kv.sequences()[row].host_blocks) {
      if (!is_none(block)) { kv.store().ref().address(layer, 0, block)[37] ^= std::byte{1}; }
    }
  }

  cpu_backend backend;
  cpu_backend::stream_ref stream;
  manager_type kv;
  synthetic_engine<cpu_backend, manager_type> engine;
};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("law 1: verify mode names the block whose bytes changed on the host, and the other rows go on")
  {
    synthetic_model const model = make_model();
    rig reference{model, false};
    row_id const expected_row = reference.open(1);
    row_id const expected_other = reference.open(2);
    rig r{model, true};
    row_id const row = r.open(1);
    row_id const other = r.open(2);
    for (std::uint32_t t = 40; t < 60; ++t) {
      r.engine.step({{.row = row}, {.row = other}});
      reference.engine.step({{.row = expected_row}, {.row = expected_other}});
    }
    REQUIRE(r.kv.failures().empty());
    r.damage(row, layer_id{1});
    std::uint32_t steps = 0;
    while (r.kv.failures().empty() && steps < 60) {
      r.engine.step({{.row = row}, {.row = other}});
      ++steps;
    }
    REQUIRE_FALSE(r.kv.failures().empty());
    failure_record const failure = r.kv.failures().front();
    CHECK(failure.row == row);
    CHECK(failure.layer == layer_id{1});
    CHECK(failure.code == status::transfer_failed);
    CHECK(failure.tries == 2);
    CHECK(failure.sequence == r.kv.sequences()[row].id);
    CHECK(r.kv.row_status(row) == status::transfer_failed);
    CHECK(r.kv.row_status(other) == status::ok);
    CHECK(r.kv.audit() == "");
    // The failed token was dropped; with the bytes as they were, the row goes on from there.
    std::uint32_t const tokens = r.kv.tokens_of(row);
    CHECK(tokens == 60 + steps - 1);
    r.damage(row, layer_id{1});  // flips the bits back
    for (std::uint32_t t = tokens; t < 150; ++t) { r.engine.step({{.row = row}}); }
    for (std::uint32_t t = 60 + steps; t < 150; ++t) { r.engine.step({{.row = other}}); }
    for (std::uint32_t t = 60; t < 150; ++t) {
      reference.engine.step({{.row = expected_row}, {.row = expected_other}});
    }
    for (std::uint32_t t = 40; t < 150; ++t) {
      CAPTURE(t);
      REQUIRE(difference(r.engine.output(1, t), reference.engine.output(1, t)) < 1e-5F);
      REQUIRE(difference(r.engine.output(2, t), reference.engine.output(2, t)) < 1e-5F);
    }
  }

  TEST_CASE("without verify mode a changed byte goes unnoticed: what the mode is for")
  {
    synthetic_model const model = make_model();
    rig r{model, false};
    row_id const row = r.open(1);
    for (std::uint32_t t = 40; t < 60; ++t) { r.engine.step({{.row = row}}); }
    r.damage(row, layer_id{1});
    for (std::uint32_t t = 60; t < 100; ++t) { r.engine.step({{.row = row}}); }
    CHECK(r.kv.failures().empty());
  }
}
