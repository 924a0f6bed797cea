#include <doctest/doctest.h>
#include <support/laws/compositions.hpp>
#include <support/laws/rules.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Sequences come, decode and end, some of them in the middle; of the copies some fail or are very late.
struct served {
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<float>> outputs;  // by (sequence, position)
  std::uint64_t finished = 0;                                                     // sequences that came to their length
  std::uint64_t aborted = 0;                                                      // closed by the test
  std::uint64_t failed = 0;   // rows that could not go on and were closed
  std::uint64_t retried = 0;  // steps of rows that failed and were tried again
  std::uint64_t faults = 0;   // copies that failed or were refused
  std::uint64_t unasked = 0;  // blocks that came unasked and were used or replaced since
};

constexpr std::uint32_t row_count = 4, prompt_tokens = 24, length = 44, per_row = 8;

struct fault_rates {
  double fail = 0.0, refuse = 0.0, late = 0.0;
};

void add_faults(scripted_backend& backend, fault_rates const& rates)
{
  for (char const* const kind : {"gather_blocks", "copy to host"}) {
    script_rule rule = copies_that(script_effect::fail, kind, 0, script_rule::unlimited);
    rule.probability = rates.fail;
    backend.add_rule(rule);
    rule.effect = script_effect::refuse;
    rule.probability = rates.refuse;
    backend.add_rule(rule);
    rule.effect = script_effect::delay;
    rule.probability = rates.late;
    rule.delay = std::chrono::seconds{1};
    backend.add_rule(rule);
  }
}

/// @param aborts how often in a hundred a running sequence is closed in a step; the same sequences whatever the faults
/// @param near_share of blocks that come unasked, for which lanes have slots to spare
served serve(
  synthetic_model const& model, fault_rates const& rates, std::uint64_t seed, std::uint32_t aborts,
  float near_share = 0.0F)
{
  served result;
  scripted_backend backend{{.order = order_kind::seeded, .seed = seed, .fault_seed = seed}};
  auto const stream = backend.create_stream();
  scored kv{
    backend,
    stream,
    model.geometry,
    {.max_rows = row_count,
     .max_tokens = length,
     .max_prefill_tokens = per_row,
     .quota_tokens = near_share > 0.0F ? 36U : 28U,
     .near_share = near_share},
    {.budget_tokens = 20, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 20}};
  synthetic_engine<scripted_backend, scored> engine{backend, stream, model, kv, row_count, per_row};
  if (rates.fail + rates.refuse + rates.late > 0.0) { add_faults(backend, rates); }
  std::vector<std::uint64_t> running(row_count, 0);  // the sequence in each row, 0: none
  std::uint64_t next = 1;
  std::uint32_t step = 0;
  for (; step < 3000 && result.finished + result.aborted + result.failed < 40; ++step) {
    row_id row{};
    if (next <= 40 && kv.open({.prompt_tokens = prompt_tokens, .max_tokens = length}, row) == admission::admitted) {
      engine.assign(row, next);
      running[to_index(row)] = next++;
    }
    std::vector<step_row> batch;
    for (std::uint32_t r = 0; r < row_count; ++r) {
      if (running[r] == 0) { continue; }
      auto const id = static_cast<row_id>(r);
      std::uint32_t const now = kv.tokens_of(id);
      // Whether a sequence is given up follows from it and where it stands.
      if (mixed({seed, running[r], now, 3}) % 100 < aborts && now > prompt_tokens) {
        REQUIRE(kv.close(id) == status::ok);
        running[r] = 0;
        ++result.aborted;
        continue;
      }
      batch.push_back({.row = id, .tokens = now < prompt_tokens ? std::min(per_row, prompt_tokens - now) : 1});
    }
    for (bool begun = batch.empty(); !begun;) {
      try {
        engine.step(batch);
        begun = true;
      } catch (std::runtime_error const& e) {
        REQUIRE(std::string{e.what()} == "begin_step: transfer_failed");
        // The row that cannot go on says so, the others are asked again.
        auto const lost = std::ranges::find_if(
          batch, [&](step_row const& it) { return kv.row_status(it.row) == status::transfer_failed; });
        REQUIRE(lost != batch.end());
        REQUIRE(kv.close(lost->row) == status::ok);
        running[to_index(lost->row)] = 0;
        ++result.failed;
        batch.erase(lost);
        begun = batch.empty();
      }
    }
    REQUIRE(kv.audit() == "");
    for (step_row const& it : batch) {
      std::uint64_t& sequence = running[to_index(it.row)];
      if (kv.row_status(it.row) != status::ok) {
        REQUIRE(kv.row_status(it.row) == status::transfer_failed);
        ++result.retried;
      } else if (kv.tokens_of(it.row) == length) {
        REQUIRE(kv.close(it.row) == status::ok);
        sequence = 0;
        ++result.finished;
      }
    }
  }
  CHECK(step < 3000);
  REQUIRE(kv.drain(no_deadline) == status::ok);
  kv.poll();
  CHECK(kv.memory().slot_bytes == 0);
  CHECK(kv.memory().host_bytes == 0);
  CHECK(kv.audit() == "");
  CHECK(kv.in_flight().idle());
  CHECK(backend.counts().freed_under_copy == 0);
  result.outputs = engine.outputs();
  result.unasked = 0;
  for (std::uint32_t r = 0; r < row_count; ++r) {
    result.unasked += kv.books().totals()[r].used + kv.books().totals()[r].wasted;
  }
  result.faults = backend.counts().failed + backend.counts().refused;
  return result;
}

}  // namespace

TEST_SUITE("laws")
{
  TEST_CASE(
    "law 10: with copies that fail or are late and sequences that are given up, whoever comes through decodes the same")
  {
    synthetic_model const model{
      {.layers = 2,
       .query_heads = 2,
       .kv_heads = 1,
       .head_dim = 4,
       .block_tokens = 4,
       .key_type = dtype::float32,
       .value_type = dtype::float32}};
    std::uint64_t finished = 0, failed = 0, retried = 0, faults = 0, compared = 0, unasked = 0;
    for (std::uint64_t const seed : {1U, 2U, 3U}) {
      served const right = serve(model, {}, seed, 1);
      REQUIRE(right.failed == 0);
      for (fault_rates const rates : {fault_rates{0.005, 0.005, 0.01}, fault_rates{0.1, 0.1, 0.05}}) {
        // Of what comes unasked some fails too.
        served const now = serve(model, rates, seed, 1, seed == 1 ? 0.0F : 0.5F);
        unasked += now.unasked;
        for (auto const& [place, output] : now.outputs) {
          auto const expected = right.outputs.find(place);
          if (expected == right.outputs.end()) { continue; }  // given up there
          CAPTURE(place.first);
          CAPTURE(place.second);
          REQUIRE(output == expected->second);
          ++compared;
        }
        finished += now.finished;
        failed += now.failed;
        retried += now.retried;
        faults += now.faults;
      }
    }
    MESSAGE(
      finished << " sequences finished, " << failed << " failed, " << retried << " steps were tried again, " << faults
               << " copies failed, " << compared << " outputs were compared");
    CHECK(finished > 100);
    CHECK(retried > 0);
    CHECK(faults > 100);
    CHECK(compared > 3000);
    CHECK(unasked > 50);
  }
}
