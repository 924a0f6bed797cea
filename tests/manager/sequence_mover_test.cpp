#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <string>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using manager_type = offload_manager<
  cpu_backend, solo_head_selector<>, gather_scatter_engine, interruptible_scheduler<visit_order::hits_first>,
  fixed_admission>;

kv_geometry small_geometry(std::uint32_t head_groups)
{
  return {
    .layers = 3,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

struct rig {
  explicit rig(synthetic_model const& model, float hysteresis = 0.25F, std::uint32_t rows = 3)
    : backend{{.mode = cpu_mode::manual}},
      stream{backend.create_stream(stream_priority::normal)},
      kv{
        backend,
        stream,
        model.geometry,
        {.max_rows = rows, .max_tokens = 160, .max_step_tokens = 3, .quota_tokens = 44, .host_blocks = rows * 60},
        {.budget_tokens = 32, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 40, .hysteresis = hysteresis}},
      engine{backend, stream, model, kv, rows, 8}
  {}

  row_id open(std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens)
  {
    row_id row = none<row_id>;
    REQUIRE(kv.open({.prompt_tokens = prompt, .max_tokens = tokens}, row) == admission::admitted);
    engine.assign(row, seed);
    return row;
  }

  void decode(row_id row, std::uint32_t until)
  {
    while (kv.tokens_of(row) < until) {
      engine.step({{.row = row}});
      REQUIRE(kv.audit() == "");
    }
  }

  cpu_backend backend;
  cpu_backend::stream_ref stream;
  manager_type kv;
  synthetic_engine<cpu_backend, manager_type> engine;
};

/// The outputs of a sequence that nothing disturbs.
std::vector<std::vector<float>> undisturbed(
  synthetic_model const& model, std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens,
  float hysteresis = 0.25F)
{
  rig r{model, hysteresis};
  row_id const row = r.open(seed, prompt, tokens);
  r.engine.prefill(row, prompt, 8);
  r.decode(row, tokens);
  std::vector<std::vector<float>> outputs;
  for (std::uint32_t t = 0; t < tokens; ++t) { outputs.push_back(r.engine.output(seed, t)); }
  return outputs;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("a preempted sequence goes on as if nothing had happened")
  {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      synthetic_model const model{small_geometry(head_groups)};
      for (std::uint32_t const at : {21U, 24U, 39U, 61U, 64U, 90U}) {
        CAPTURE(head_groups);
        CAPTURE(at);
        auto const expected = undisturbed(model, 1, 18, 120);
        rig r{model};
        row_id row = r.open(1, 18, 120);
        r.engine.prefill(row, 18, 8);
        r.decode(row, at);
        saved_id saved;
        REQUIRE(r.kv.preempt(row, saved) == status::ok);
        REQUIRE(r.kv.memory().slot_bytes == 0);
        REQUIRE(r.kv.audit() == "");
        row_id const other = r.open(2, 30, 100);  // takes the row and writes over its slots
        r.engine.prefill(other, 30, 8);
        r.decode(other, 80);
        REQUIRE(r.kv.resume(saved, row) == admission::admitted);
        CHECK(row != other);
        CHECK(r.kv.tokens_of(row) == at);
        r.engine.assign(row, 1);
        r.decode(row, 120);
        for (std::uint32_t t = 0; t < 120; ++t) { REQUIRE(difference(r.engine.output(1, t), expected[t]) < 1e-5F); }
        CHECK(r.kv.resume(saved, row) == admission::rejected);
      }
    }
  }

  TEST_CASE("a fork shares full blocks and writes into a partial block of its own")
  {
    // Seen in Avarok-Cybersecurity/atlas#1193: sequences emitted each other's text at a block boundary.
    synthetic_model const model{small_geometry(1)};
    for (std::uint32_t const at : {22U, 24U, 70U, 72U}) {
      CAPTURE(at);
      rig r{model};
      row_id const first = r.open(1, 18, 120);
      r.engine.prefill(first, 18, 8);
      r.decode(first, at);
      row_id second;
      REQUIRE(r.kv.fork(first, {.prompt_tokens = 18, .max_tokens = 120}, second) == admission::admitted);
      r.engine.assign(second, 1);
      for (std::uint32_t t = at; t < 100; ++t) { r.engine.step({{.row = first}, {.row = second}}); }
      auto const expected = undisturbed(model, 1, 18, 100);
      for (std::uint32_t t = 0; t < 100; ++t) { REQUIRE(difference(r.engine.output(1, t), expected[t]) < 1e-5F); }
      REQUIRE(r.kv.close(first) == status::ok);
      r.decode(second, 120);
      auto const longer = undisturbed(model, 1, 18, 120);
      for (std::uint32_t t = 100; t < 120; ++t) { REQUIRE(difference(r.engine.output(1, t), longer[t]) < 1e-5F); }
      REQUIRE(r.kv.close(second) == status::ok);
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      CHECK(r.kv.memory().host_bytes == 0);
    }
  }

  TEST_CASE("a retained prefix begins another sequence")
  {
    synthetic_model const model{small_geometry(1)};
    rig r{model};
    row_id const first = r.open(1, 50, 120);
    r.engine.prefill(first, 50, 8);
    saved_id prefix;
    REQUIRE(r.kv.retain(first, prefix) == status::ok);
    REQUIRE(r.kv.close(first) == status::ok);
    auto const expected = undisturbed(model, 1, 60, 120);
    for (int round = 0; round < 3; ++round) {
      row_id row;
      REQUIRE(r.kv.adopt(prefix, {.prompt_tokens = 60, .max_tokens = 120}, row) == admission::admitted);
      r.engine.assign(row, 1);
      REQUIRE(r.kv.tokens_of(row) == 48);
      r.engine.prefill(row, 12, 8);
      r.decode(row, 120);
      for (std::uint32_t t = 48; t < 120; ++t) { REQUIRE(difference(r.engine.output(1, t), expected[t]) < 1e-5F); }
      REQUIRE(r.kv.close(row) == status::ok);
    }
    CHECK(r.kv.release(prefix) == status::ok);
    CHECK(r.kv.release(prefix) == status::stale_ticket);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.kv.memory().host_bytes == 0);
  }

  TEST_CASE("a row cut back and fed again decodes as before, and the bytes that were cut are gone")
  {
    synthetic_model const model{small_geometry(1)};
    for (auto const& [from, to] : {std::pair{30U, 25U}, {30U, 20U}, {80U, 79U}, {80U, 61U}, {80U, 60U}, {83U, 44U}}) {
      CAPTURE(from);
      CAPTURE(to);
      rig r{model, 0.0F};  // hysteresis would remember which blocks the tokens that were cut had favoured
      row_id const row = r.open(1, 18, 120);
      r.engine.prefill(row, 18, 8);
      r.decode(row, to);
      r.engine.assign(row, 9);  // other tokens, to be taken back
      r.decode(row, from);
      REQUIRE(r.kv.truncate(row, to) == status::ok);
      REQUIRE(r.kv.audit() == "");
      r.engine.assign(row, 1);
      r.decode(row, 120);
      auto const expected = undisturbed(model, 1, 18, 120, 0.0F);
      for (std::uint32_t t = to; t < 120; ++t) { REQUIRE(difference(r.engine.output(1, t), expected[t]) < 1e-5F); }
      REQUIRE(r.kv.close(row) == status::ok);
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      CHECK(r.kv.memory().host_bytes == 0);
    }
  }

  TEST_CASE("at default sizes a row that fills the host store is preempted and resumed")
  {
    synthetic_model const model{small_geometry(1)};
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream(stream_priority::normal);
    manager_type kv{
      backend,
      stream,
      model.geometry,
      {.max_rows = 1, .max_tokens = 120},
      {.budget_tokens = 32, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 40}};
    synthetic_engine<cpu_backend, manager_type> engine{backend, stream, model, kv, 1, 8};
    row_id row = none<row_id>;
    REQUIRE(kv.open({.prompt_tokens = 18, .max_tokens = 120}, row) == admission::admitted);
    engine.assign(row, 1);
    engine.prefill(row, 18, 8);
    for (std::uint32_t t = 18; t < 120; ++t) {
      if (t % 7 == 0) {
        saved_id saved;
        REQUIRE(kv.preempt(row, saved) == status::ok);
        REQUIRE(kv.resume(saved, row) == admission::admitted);
        REQUIRE(kv.audit() == "");
      }
      engine.step({{.row = row}});
    }
    REQUIRE(kv.close(row) == status::ok);
    REQUIRE(kv.drain(no_deadline) == status::ok);
    CHECK(kv.memory().host_bytes == 0);
  }

  TEST_CASE("sizes that no row could run in are refused with the numbers")
  {
    synthetic_model const model{small_geometry(1)};
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream(stream_priority::normal);
    auto const refusal = [&](manager_options const& options) -> std::string {
      try {
        manager_type const kv{
          backend,
          stream,
          model.geometry,
          options,
          {.budget_tokens = 32, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 40}};
      } catch (configuration_error const& e) {
        return e.what();
      }
      return {};
    };
    std::byte memory[64] = {};
    CHECK(refusal({.max_tokens = 120}) == "");
    CHECK(
      refusal({.max_tokens = 120, .slots = 3}) ==
      "invalid_argument: 3 slots; one row of 120 tokens needs 72 once it decodes");
    CHECK(
      refusal({.max_tokens = 120, .lent_slots = {memory}}) ==
      "invalid_argument: 1 lent pools and 0 slots: say how many slots the lender's memory holds");
    CHECK(
      refusal({.max_tokens = 120, .host_blocks = 3}) ==
      "invalid_argument: 3 host blocks; the shortest sequence that offloads, of 41 tokens, has 11");
    CHECK(refusal({.max_tokens = 120, .max_tries = 0}) == "invalid_argument: max_tries is 0");
  }
}
