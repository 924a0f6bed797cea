#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/scheduler/recorded_scheduler.hpp>
#include <pulseinfer/scheduler/replay_scheduler.hpp>
#include <pulseinfer/scheduler/static_cohorts_scheduler.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/workload/block_generator.hpp>
#include <pulseinfer/workload/simulated_decode.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

namespace {

/// One block takes a microsecond of the link.
[[nodiscard]] decode_options small_options(std::uint32_t rows, double mean_logit = -2.0)
{
  decode_options o;
  o.workload = {.layers = 8, .rows = rows, .budget_blocks = 64, .misses = {.mean_logit = mean_logit}, .seed = 3};
  o.engine = {.pass = {.per_pass = 20us, .per_row = 4us}};
  o.machine.compute.per_launch = 0ns;
  o.machine.kernels = {
    .per_operation = 4us, .per_run = 0ns, .to_device_bytes_per_s = 65536e6, .to_host_bytes_per_s = 1e15};
  o.machine.copies = {.per_operation = 0ns, .per_run = 0ns, .to_device_bytes_per_s = 1e15, .to_host_bytes_per_s = 1e15};
  o.steps = 12;
  o.warm_steps = 2;
  return o;
}

/// Asks again every few microseconds.
struct impatient_scheduler {
  static constexpr bool hits_first = true;
  static constexpr bool reads_mailbox = true;
  std::uint64_t* asked = nullptr;
  interruptible_scheduler<> base = {};

  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    ++*asked;
    bool const flies =
      std::ranges::any_of(rows, [](scheduler_row const& row) { return row.phase != row_phase::ready; });
    if (flies) { return {.kind = decision_kind::wait, .until = now + 3us}; }
    return base.decide(rows, link, now, chosen);
  }
};

static_assert(layer_scheduler<impatient_scheduler>);

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("lockstep on counts takes what the formula says: weights, rows and recalls one after another")
  {
    decode_options const o = small_options(4);
    decode_result const r = simulate_decode(o, lockstep_scheduler<visit_order::whole>{});
    CHECK(r.tokens == 48);
    CHECK(r.compute == 12 * 8 * (20us + 4 * 4us));
    CHECK(r.link == r.totals.misses * 1us + 12 * 8 * 4us);
    CHECK(r.passes == 12 * 8);
    CHECK(r.visits == 12 * 8);
    CHECK(r.time >= r.compute + r.link);
    CHECK(r.time <= r.compute + r.link + 12 * 2ns);  // words that begin_step patches
    CHECK(
      r.efficiency() == doctest::Approx(static_cast<double>(r.bound().count()) / static_cast<double>(r.time.count())));
    CHECK(r.late_rows == 0);
  }

  TEST_CASE(
    "the resumption of both streams and the hits' launch lengthen every layer, the select chain delays its recall")
  {
    decode_options o = small_options(4);
    nanoseconds const plain = simulate_decode(o, lockstep_scheduler<visit_order::hits_first>{}).time;
    o.machine.control.resume = 2us;
    o.engine.hits_launch = 1us;
    decode_result const r = simulate_decode(o, lockstep_scheduler<visit_order::hits_first>{});
    CHECK(r.time > plain);
    CHECK(r.time <= plain + 12 * 8 * 5us);
    CHECK(r.visits == 2 * r.passes);
    // The chain is a part of per_pass: where nothing overlaps it changes nothing.
    nanoseconds const without = simulate_decode(o, lockstep_scheduler<visit_order::whole>{}).time;
    CHECK(without >= r.compute + r.link + 12 * 8 * 4us);
    CHECK(without <= r.compute + r.link + 12 * 8 * 4us + 12 * 2ns);
    o.counts.select_chain = 10us;
    CHECK(simulate_decode(o, lockstep_scheduler<visit_order::whole>{}).time == without);
  }

  TEST_CASE("no scheduler is faster than the bound, and hits first, cohorts and predictions each gain on those before")
  {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      decode_options o = small_options(16, -1.6);
      o.workload.seed = seed;
      o.warm_steps = 30;  // layers and rows are known, and a plan has been found
      double const whole = simulate_decode(o, lockstep_scheduler<visit_order::whole>{}).efficiency();
      double const hits = simulate_decode(o, lockstep_scheduler<visit_order::hits_first>{}).efficiency();
      double const cohorts = simulate_decode(o, static_cohorts_scheduler<>{2}).efficiency();
      double const ours = simulate_decode(o, make_interruptible(o)).efficiency();
      o.foresight.prefetch = true;
      double const predicted = simulate_decode(o, make_interruptible(o)).efficiency();
      CHECK(whole < hits);
      CHECK(hits < cohorts);
      CHECK(cohorts < ours);
      CHECK(ours < predicted);
      CHECK(predicted < 1.0);
    }
  }

  TEST_CASE("deferral skips no more than it may, and pays for what it left for later")
  {
    decode_options o = small_options(16, -1.8);
    o.foresight.deferred_share = 0.02;
    o.warm_steps = 8;
    decode_result const r = simulate_decode(o, make_interruptible(o));
    CHECK(r.efficiency() > 0.95);
    CHECK(r.efficiency() <= 1.0);
    REQUIRE(r.skipped.size() > 1000);
    CHECK(*std::ranges::max_element(r.skipped) <= 0.02F);
    CHECK(r.totals.deferred > 0);
    // Every block moves once, but for the few that are still waited for.
    auto const moved = static_cast<double>(r.totals.demanded + r.totals.moved - r.totals.wasted);
    CHECK(moved == doctest::Approx(static_cast<double>(r.totals.misses)).epsilon(0.06));
  }

  TEST_CASE("law 8: a run is the same each time, and its decision record replays to the same visits")
  {
    decode_options const o = small_options(8, -1.5);
    decision_log log{100'000, 1'000'000}, again{100'000, 1'000'000}, replayed{100'000, 1'000'000};
    using recorded = recorded_scheduler<interruptible_scheduler<>>;
    decode_result const first = simulate_decode(o, recorded{make_interruptible(o), &log});
    decode_result const second = simulate_decode(o, recorded{make_interruptible(o), &again});
    REQUIRE(log.complete());
    CHECK(first.time == second.time);
    CHECK(log == again);
    CHECK(first.passes > 12 * 8);  // rows were parked
    decode_result const third =
      simulate_decode(o, recorded_scheduler<replay_scheduler<>>{replay_scheduler<>{.log = &log}, &replayed});
    CHECK(log == replayed);
    CHECK(third.passes == first.passes);
    CHECK(third.tokens == first.tokens);
  }

  TEST_CASE("a scheduler that asks again before anything is complete gets its rows through all the same")
  {
    decode_options const o = small_options(4, -1.0);
    std::uint64_t asked = 0;
    decode_result const r = simulate_decode(o, impatient_scheduler{.asked = &asked});
    CHECK(r.tokens == 48);
    CHECK(r.passes == 12 * 8);
    CHECK(asked > 3 * r.visits);
  }

  TEST_CASE("counts and blocks agree: real selections, residency and plans take the time that their numbers take")
  {
    constexpr std::uint32_t rows = 3, layers = 4, budget = 16, prompt_blocks = 160, block_tokens = 4, steps = 60;
    constexpr std::uint64_t block_bytes = 4096;
    workload_options const load{
      .layers = layers, .rows = rows, .budget_blocks = budget, .misses = {.mean_logit = -1.5}, .seed = 11};
    sim_options machine;
    machine.compute = {.per_launch = 0ns, .device_bytes_per_s = 1e18, .flops_per_s = 1e18};
    machine.kernels = {.per_operation = 2us, .per_run = 0ns, .to_device_bytes_per_s = 2e9, .to_host_bytes_per_s = 1e15};
    machine.copies = {.per_operation = 0ns, .per_run = 0ns, .to_device_bytes_per_s = 1e15, .to_host_bytes_per_s = 1e15};
    engine_cost const cost{.pass = {.per_pass = 20us, .per_row = 3us, .attention_share = 0.0}};
    kv_geometry const geometry{
      .layers = layers,
      .query_heads = 1,
      .kv_heads = 1,
      .head_dim = static_cast<std::uint32_t>(block_bytes / (4 * block_tokens)),
      .block_tokens = block_tokens};
    std::uint32_t const max_tokens = (prompt_blocks + steps) * block_tokens;
    manager_options const sizes{
      .max_rows = rows,
      .max_tokens = max_tokens,
      .max_prefill_tokens = 64,
      .quota_tokens = (budget + 1) * 3 * block_tokens,
      .slots = 20'000};

    std::vector<nanoseconds> block_steps, count_steps;
    std::vector<std::uint64_t> block_misses, count_misses;
    {
      sim_backend backend{machine};
      auto const stream = backend.create_stream();
      using manager = offload_manager<
        sim_backend, external_selector, gather_scatter_engine, interruptible_scheduler<>, fixed_admission>;
      manager kv{backend, stream, geometry, sizes, external_selector{.budget_tokens = (budget + 1) * block_tokens}};
      auto shares = [](row_id, layer_id, part) { return 0.0; };
      timed_engine<sim_backend, manager, decltype(shares)> engine{backend, stream, kv, rows, cost, shares};
      miss_generator generator{load};
      block_generator blocks{generator, prompt_blocks, kv.budget().lease};
      engine.before_enter = [&](layer_id layer, row_list list) {
        for (row_id const row : list) {
          if (kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
          auto const count = static_cast<std::uint32_t>(blocks_of(kv.tokens_of(row) + 1, block_tokens));
          REQUIRE(
            kv.selector().import_selection(layer, lane_of(row, 0, 1), blocks.select(row, layer), count) == status::ok);
        }
      };
      std::vector<row_id> all;
      for (std::uint32_t i = 0; i < rows; ++i) {
        row_id row = none<row_id>;
        std::uint32_t const prompt = prompt_blocks * block_tokens;
        REQUIRE(kv.open({.prompt_tokens = prompt, .max_tokens = max_tokens}, row) == admission::admitted);
        all.push_back(row);
        for (std::uint32_t done = 0; done < prompt; done += 64) {
          REQUIRE(engine.append(row, std::min(64U, prompt - done)) == status::ok);
        }
      }
      for (std::uint32_t step = 0; step < steps; ++step) {
        generator.next_step();
        nanoseconds const begin = backend.now();
        REQUIRE(engine.step(all, [](row_id) {}, [] {}) == status::ok);
        REQUIRE(backend.synchronize(stream) == status::ok);
        block_steps.push_back(backend.now() - begin);
        block_misses.push_back(kv.finish_sample().recalled_blocks);
      }
      CHECK(kv.audit() == "");
    }
    {
      miss_generator generator{load};
      counted_workload workload{generator, {}};
      counts_backend backend{machine, {.fused_gather = false, .smallest_first = false}, workload};
      auto const stream = backend.create_stream();
      using manager = offload_manager<
        counts_backend, counted_selector, gather_scatter_engine, interruptible_scheduler<>, fixed_admission>;
      manager kv{backend, stream, geometry, sizes, counted_selector{budget + 1}};
      auto shares = [](row_id, layer_id, part) { return 0.0; };
      timed_engine<counts_backend, manager, decltype(shares)> engine{backend, stream, kv, rows, cost, shares};
      std::vector<row_id> all;
      for (std::uint32_t i = 0; i < rows; ++i) {
        row_id row = none<row_id>;
        REQUIRE(kv.open({.prompt_tokens = 1, .max_tokens = max_tokens}, row) == admission::admitted);
        all.push_back(row);
      }
      REQUIRE(engine.step(all, [](row_id) {}, [] {}) == status::ok);
      for (std::uint32_t step = 0; step < steps; ++step) {
        generator.next_step();
        nanoseconds const begin = backend.now();
        REQUIRE(engine.step(all, [](row_id) {}, [] {}) == status::ok);
        REQUIRE(backend.synchronize(stream) == status::ok);
        count_steps.push_back(backend.now() - begin);
        count_misses.push_back(kv.finish_sample().recalled_blocks);
      }
    }
    // At first the real slots still hold what the prompt left there.
    std::uint32_t const settled = steps / 2;
    std::int64_t blocks_time = 0, counts_time = 0;
    for (std::uint32_t step = settled; step < steps; ++step) {
      CHECK(block_misses[step] == count_misses[step]);
      blocks_time += block_steps[step].count();
      counts_time += count_steps[step].count();
    }
    CHECK(blocks_time == doctest::Approx(static_cast<double>(counts_time)).epsilon(0.002));
  }
}
