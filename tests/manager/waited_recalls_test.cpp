#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/scripted/scripted_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

template <class Transfer, visit_order Order>
using waiting_manager =
  offload_manager<scripted_backend, solo_head_selector<>, Transfer, lockstep_scheduler<Order>, fixed_admission>;

using whole = waiting_manager<gather_scatter_engine, visit_order::whole>;
using hits_first = waiting_manager<gather_scatter_engine, visit_order::hits_first>;
using fragments = waiting_manager<fragment_copy_engine, visit_order::whole>;

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

/// Two sequences of which one's blocks will not arrive.
template <class Manager>
struct two_rows {
  explicit two_rows(synthetic_model const& model, bool verify)
    : stream{backend.create_stream(stream_priority::normal)},
      kv{
        backend,
        stream,
        model.geometry,
        {.max_rows = 2, .max_tokens = 120, .quota_tokens = 32, .verify = verify},
        {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 24, .hysteresis = 0.0F}},
      engine{backend, stream, model, kv, 2, 8}
  {
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      row_id row = none<row_id>;
      REQUIRE(kv.open({.prompt_tokens = 40, .max_tokens = 120}, row) == admission::admitted);
      engine.assign(row, seed);
      engine.prefill(row, 40, 8);
      rows.push_back(row);
    }
  }
  ~two_rows() { static_cast<void>(backend.synchronize(stream)); }

  void step()
  {
    std::vector<step_row> batch;
    for (row_id const row : rows) {
      if (kv.tokens_of(row) < 120) { batch.push_back({.row = row}); }
    }
    engine.step(batch);
    REQUIRE(kv.audit() == "");
  }

  /// Flips a bit in every host block of the first sequence in one layer.
  void damage(layer_id layer)
  {
    REQUIRE(kv.drain(no_deadline) == status::ok);
    for (host_block_id const block : kv.sequences()[rows[0]].host_blocks) {
      if (!is_none(block)) { kv.store().ref().address(layer, 0, block)[37] ^= std::byte{1}; }
    }
  }

  /// Outputs of both sequences, whatever happened on the way, are those of a run in which nothing did.
  void check_outputs(synthetic_model const& model)
  {
    two_rows calm{model, false};
    while (calm.kv.tokens_of(calm.rows[0]) < 120) { calm.step(); }
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      for (std::uint32_t t = 40; t < 120; ++t) {
        CAPTURE(seed);
        CAPTURE(t);
        REQUIRE(difference(engine.output(seed, t), calm.engine.output(seed, t)) < 1e-5F);
      }
    }
  }

  scripted_backend backend;
  scripted_backend::stream_ref stream;
  Manager kv;
  synthetic_engine<scripted_backend, Manager> engine;
  std::vector<row_id> rows;
};

}  // namespace

TEST_SUITE("manager")
{
  // Report: ai-dynamo/dynamo#15079
  TEST_CASE_TEMPLATE(
    "law 10: a row that went on behind an enqueued wait fails where its blocks did not arrive, in any layer, and the "
    "others go on",
    Manager, whole, hits_first, fragments)
  {
    synthetic_model const model = make_model();
    for (std::int32_t layer = 0; layer < 3; ++layer) {
      CAPTURE(layer);
      two_rows<Manager> r{model, true};
      for (int i = 0; i < 20; ++i) { r.step(); }
      REQUIRE(r.kv.failures().empty());
      std::uint32_t before = 0;
      r.damage(static_cast<layer_id>(layer));
      for (int i = 0; i < 40 && r.kv.row_status(r.rows[0]) == status::ok; ++i) {
        before = r.kv.tokens_of(r.rows[0]);
        r.step();
      }
      CHECK(r.kv.row_status(r.rows[0]) == status::transfer_failed);
      CHECK(r.kv.row_status(r.rows[1]) == status::ok);
      CHECK(r.kv.tokens_of(r.rows[0]) == before);
      REQUIRE_FALSE(r.kv.failures().empty());
      for (failure_record const& failure : r.kv.failures()) {
        CHECK(failure.row == r.rows[0]);
        CHECK(failure.layer == static_cast<layer_id>(layer));
        CHECK(failure.sequence == r.kv.sequences()[r.rows[0]].id);
      }
      r.damage(static_cast<layer_id>(layer));  // flips the bits back
      r.kv.clear_failures();
      while (r.kv.tokens_of(r.rows[0]) < 120 || r.kv.tokens_of(r.rows[1]) < 120) {
        r.step();
        REQUIRE(r.kv.row_status(r.rows[0]) == status::ok);
      }
      CHECK(r.kv.failures().empty());
      r.check_outputs(model);
    }
  }

  TEST_CASE_TEMPLATE(
    "law 10: where a recall's launch or copy fails on the device behind an enqueued wait, its rows fail once and may "
    "be "
    "tried again",
    Manager, whole, hits_first, fragments)
  {
    synthetic_model const model = make_model();
    bool const copies = std::is_same_v<Manager, fragments>;
    for (std::uint64_t nth = 0; nth < 12; ++nth) {
      CAPTURE(nth);
      two_rows<Manager> r{model, false};
      for (int i = 0; i < 5; ++i) { r.step(); }
      r.backend.add_rule(
        {.effect = script_effect::fail,
         .call = copies ? script_call::copy : script_call::launch,
         .name = copies ? "copy to device" : "gather_blocks",
         .first = nth,
         .count = 2});
      int failed_steps = 0;
      std::vector<std::uint32_t> reached(2, 0);
      while (r.kv.tokens_of(r.rows[0]) < 120 || r.kv.tokens_of(r.rows[1]) < 120) {
        for (int i = 0; i < 2; ++i) { reached[i] = r.kv.tokens_of(r.rows[i]); }
        r.step();
        for (int i = 0; i < 2; ++i) {
          bool const failed = r.kv.row_status(r.rows[i]) == status::transfer_failed;
          failed_steps += failed ? 1 : 0;
          CHECK(r.kv.tokens_of(r.rows[i]) == (failed ? reached[i] : std::min(reached[i] + 1, 120U)));
        }
        REQUIRE(failed_steps <= 8);
      }
      CHECK(r.backend.counts().failed > 0);
      CHECK(failed_steps > 0);
      r.check_outputs(model);
    }
  }
}
