#include <pulseinfer/admission/adaptive_admission.hpp>
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/admission/recorded_admission.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/workload/simulated_serving.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <type_traits>

using namespace pulseinfer;
using namespace std::chrono_literals;

namespace {

using lockstep = lockstep_scheduler<visit_order::hits_first>;

serving_options small_options(std::uint32_t rows)
{
  serving_options o;
  decode_options& d = o.decode;
  d.workload = {.layers = 4, .rows = rows, .budget_blocks = 32, .misses = {.mean_logit = -2.0}, .seed = 3};
  d.block_bytes = 1024;
  d.engine = {.pass = {.per_pass = 20us, .per_row = 4us}};
  d.machine.compute.per_launch = 0ns;
  d.machine.kernels = {
    .per_operation = 4us, .per_run = 0ns, .to_device_bytes_per_s = 1024e6, .to_host_bytes_per_s = 1e15};
  d.machine.copies = {
    .per_operation = 0ns, .per_run = 0ns, .to_device_bytes_per_s = 1024e6, .to_host_bytes_per_s = 1e15};
  return o;
}

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("every request that fits is served to its end, in its order, and what can never fit is refused")
  {
    serving_options o = small_options(4);
    std::uint64_t wanted = 0;
    for (std::uint32_t i = 0; i < 30; ++i) {
      o.requests.push_back({.at = i * 300us, .prompt_tokens = 1 + 16 * (i % 5), .output_tokens = 5 + i % 7});
      wanted += o.requests.back().output_tokens;
    }
    serving_result const r = simulate_serving(o, lockstep{}, fixed_admission{});
    CHECK(r.finished == 30);
    CHECK(r.tokens == wanted);
    CHECK(r.most_rows == 4);
    CHECK(r.rejected == 0);
    CHECK(r.waits.size() == 30);
    // Time goes on, and a step takes at least its passes.
    nanoseconds end{0};
    for (served_step const& s : r.steps) {
      CHECK(s.end > end);
      CHECK(s.time >= 4 * (20us + 4us));
      end = s.end;
    }
    o.host_blocks = 2;
    o.requests[3].prompt_tokens = 100;
    serving_result const refused = simulate_serving(o, lockstep{}, fixed_admission{});
    CHECK(refused.rejected > 0);
    CHECK(refused.finished + refused.rejected == 30);
    CHECK(refused.refusal.find("of 2 free) and 0 digest extents") != std::string::npos);
  }

  TEST_CASE(
    "where everything fits nothing is recalled; where it does not, rows offload, and come back as slots are free")
  {
    serving_options o = small_options(8);
    o.place_freely = true;
    o.join_steps = 4;
    for (std::uint32_t i = 0; i < 24; ++i) {
      o.requests.push_back({.at = i * 2ms, .prompt_tokens = 256 * 16, .output_tokens = 60});
    }
    o.requests.back().output_tokens = 400;
    o.slots = 8 * 4 * 280;
    serving_result const light = simulate_serving(o, lockstep{}, adaptive_admission{});
    CHECK(light.finished == 24);
    CHECK(light.recalled_blocks == 0);
    CHECK(light.launches == light.steps.size() * 4);
    o.slots = 3 * 4 * 280;
    serving_result const crowded = simulate_serving(o, lockstep{}, adaptive_admission{});
    CHECK(crowded.finished == 24);
    CHECK(crowded.recalled_blocks > 0);
    CHECK(crowded.most_rows > 3);
    CHECK(crowded.steps.back().offloaded == 0);
  }

  TEST_CASE(
    "law 8: a record of who was let in, where rows were placed and how slots were dealt out replays to the same run")
  {
    serving_options o = small_options(8);
    o.place_freely = true;
    o.max_quota_blocks = 6 * 32;
    o.join_steps = 4;
    for (std::uint32_t i = 0; i < 24; ++i) {
      o.requests.push_back({.at = i * 2ms, .prompt_tokens = 256 * 16, .output_tokens = 60});
    }
    o.requests.back().output_tokens = 400;
    o.slots = 3 * 4 * 280;
    decision_log log{100'000, 1, 10'000};
    serving_result const first = simulate_serving(o, lockstep{}, recorded_admission<adaptive_admission>{.log = &log});
    REQUIRE(log.complete());
    std::uint32_t moved = 0, spread = 0;
    for (decision_entry const& e : log.entries()) {
      moved += !is_none(e.demote) || !is_none(e.promote) ? 1U : 0U;
      spread += e.spread ? 1U : 0U;
    }
    CHECK(moved > 2);
    CHECK(spread > 0);
    serving_result const second = simulate_serving(o, lockstep{}, replay_admission{.log = &log});
    REQUIRE(first.steps.size() == second.steps.size());
    for (std::size_t i = 0; i < first.steps.size(); ++i) {
      CHECK(first.steps[i].end == second.steps[i].end);
      CHECK(first.steps[i].rows == second.steps[i].rows);
      CHECK(first.steps[i].offloaded == second.steps[i].offloaded);
      CHECK(first.steps[i].recalled_blocks == second.steps[i].recalled_blocks);
    }
  }

  TEST_CASE("digests are memory: what lacks it waits, what never has it is refused, and both are told the numbers")
  {
    serving_options o = small_options(8);
    for (std::uint32_t i = 0; i < 12; ++i) { o.requests.push_back({.prompt_tokens = 100 * 16, .output_tokens = 20}); }
    o.requests[5].prompt_tokens = 512 * 16;
    o.digest_bytes = 16;
    o.digest_extents = 7;  // of 64 blocks; a request takes 2, the long one 9
    serving_result const r = simulate_serving(o, lockstep{}, adaptive_admission{});
    CHECK(r.most_rows == 3);
    CHECK(r.finished == 11);
    CHECK(r.rejected == 1);
    CHECK(r.refusal.starts_with("lacks digest extents: "));
    CHECK(r.refusal.find("2 digest extents (1 of 7 free)") != std::string::npos);
  }

  TEST_CASE("of a request that waits although memory is free, the policy says why")
  {
    serving_options o = small_options(8);
    for (std::uint32_t i = 0; i < 12; ++i) { o.requests.push_back({.prompt_tokens = 1, .output_tokens = 20}); }
    std::string const fixed = simulate_serving(o, lockstep{}, fixed_admission{.max_rows = 3}).refusal;
    CHECK(fixed.starts_with("is held back: the policy lets 3 rows run at most: it needs a row (3 of 8 run)"));
    o.requests[0].output_tokens = 2000;
    std::string const adaptive = simulate_serving(o, lockstep{}, adaptive_admission{.tpot_target = 250us}).refusal;
    CHECK(adaptive.starts_with("is held back: "));
    CHECK(adaptive.find("lacks nothing") == std::string::npos);
  }

  TEST_CASE("slots dealt out by what layers miss save recalls")
  {
    serving_options o = small_options(4);
    for (std::uint32_t i = 0; i < 60; ++i) { o.requests.push_back({.prompt_tokens = 1, .output_tokens = 60}); }
    o.max_steps = 700;
    auto const late_misses = [](serving_result const& r) {
      std::uint64_t sum = 0;
      for (std::size_t i = r.steps.size() / 2; i < r.steps.size(); ++i) { sum += r.steps[i].recalled_blocks; }
      return static_cast<double>(sum) / static_cast<double>(r.steps.size() - r.steps.size() / 2);
    };
    double const equal = late_misses(simulate_serving(o, lockstep{}, adaptive_admission{}));
    o.max_quota_blocks = 6 * 32;
    double const dealt = late_misses(simulate_serving(o, lockstep{}, adaptive_admission{}));
    CHECK(dealt < 0.95 * equal);
  }

  TEST_CASE("a request with an extra logit misses more than the others")
  {
    serving_options o = small_options(2);
    for (int i = 0; i < 4; ++i) { o.requests.push_back({.prompt_tokens = 1, .output_tokens = 40}); }
    std::uint64_t const usual = simulate_serving(o, lockstep{}, fixed_admission{}).recalled_blocks;
    o.extra_logit = [](std::uint64_t number) { return number == 2 ? 8.0 : 0.0; };
    std::uint64_t const with = simulate_serving(o, lockstep{}, fixed_admission{}).recalled_blocks;
    CHECK(with > usual + 40 * 4 * 20);
  }
}
