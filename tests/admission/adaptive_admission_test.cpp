#include <pulseinfer/admission/adaptive_admission.hpp>
#include <pulseinfer/admission/recorded_admission.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>

using namespace pulseinfer;

namespace {

/// A machine whose steps cost what the formulas of admission say, with noise: what the policy has to find out.
struct plant {
  double per_step = 4e-3;      // seconds
  double per_row = 50e-6;      // seconds
  double bytes_per_row = 5e6;  // recalled in a step
  double spread = 0.35;        // of a row's bytes, relative
  double exposed = 0.25;
  double link = 50e9;
  std::uint64_t seed = 1;

  [[nodiscard]] double compute(std::uint32_t rows) const { return per_step + per_row * rows; }
  [[nodiscard]] double time(std::uint32_t rows, double recall) const
  {
    double const c = compute(rows);
    return std::max(c, recall) + exposed * std::min(c, recall);
  }
  [[nodiscard]] double throughput(std::uint32_t rows) const { return rows / time(rows, bytes_per_row * rows / link); }
  [[nodiscard]] double best(std::uint32_t most) const
  {
    double best = 0.0;
    for (std::uint32_t b = 1; b <= most; ++b) { best = std::max(best, throughput(b)); }
    return best;
  }
};

/// Requests wait all the time; none ends. Rows are let in as the policy says.
class server {
 public:
  server(plant const& costs, adaptive_admission const& admits, std::uint32_t rows)
    : machine{costs}, policy{admits}, random_{costs.seed}
  {
    free_.rows_total = rows;
    free_.host_blocks_free = free_.host_blocks_total = 1U << 30U;
    free_.slots_free = free_.slots_total = 1U << 30U;
    free_.digest_extents_free = free_.digest_extents_total = 1U << 30U;
  }

  /// @return seconds of the step
  double step()
  {
    while (running < free_.rows_total) {
      free_.rows_running = running;
      if (policy.admit({.max_tokens = 1000, .host_blocks = 10, .slots_decode = 10}, free_) != admission::admitted) {
        break;
      }
      ++running;
    }
    std::normal_distribution<double> normal{0.0, 1.0};
    double bytes = 0.0;
    for (std::uint32_t i = 0; i < running; ++i) {
      bytes += std::max(0.0, machine.bytes_per_row * (1.0 + machine.spread * normal(random_)));
    }
    double const recall = bytes / machine.link;
    double const time = machine.time(running, recall);
    step_sample sample{.rows = running, .recalled_bytes = static_cast<std::uint64_t>(bytes), .begin = now_};
    sample.stalled = nanoseconds{static_cast<std::int64_t>((time - machine.compute(running)) * 1e9)};
    now_ += nanoseconds{static_cast<std::int64_t>(time * 1e9)};
    sample.end = now_;
    policy.observe(sample);
    return time;
  }

  plant machine;
  adaptive_admission policy;
  std::uint32_t running = 0;

 private:
  capacity free_ = {};
  std::mt19937_64 random_;
  nanoseconds now_{0};
};

}  // namespace

TEST_SUITE("admission")
{
  TEST_CASE("steady load: throughput within 3 % of the best fixed number of rows in hindsight")
  {
    constexpr std::uint32_t most = 96;
    for (double const bytes : {0.0, 1e6, 5e6, 20e6, 80e6}) {
      for (double const per_row : {5e-6, 50e-6, 400e-6}) {
        for (double const exposed : {0.05, 0.25, 0.8}) {
          for (std::uint64_t seed = 1; seed <= 3; ++seed) {
            plant const machine{.per_row = per_row, .bytes_per_row = bytes, .exposed = exposed, .seed = seed};
            server s{machine, {}, most};
            for (int i = 0; i < 2000; ++i) { s.step(); }
            CAPTURE(bytes);
            CAPTURE(per_row);
            CAPTURE(exposed);
            CAPTURE(s.running);
            CHECK(machine.throughput(s.running) >= 0.97 * machine.best(most));
          }
        }
      }
    }
  }

  TEST_CASE("a target is kept in all but one step of a hundred, and most of what it allows is used")
  {
    for (double const target : {5e-3, 8e-3, 20e-3}) {
      for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        plant const machine{.bytes_per_row = 5e6, .seed = seed};
        server s{machine, {.tpot_target = nanoseconds{static_cast<std::int64_t>(target * 1e9)}}, 400};
        for (int i = 0; i < 1500; ++i) { s.step(); }
        std::uint32_t missed = 0;
        for (int i = 0; i < 1000; ++i) { missed += s.step() > target ? 1U : 0U; }
        CAPTURE(target);
        CAPTURE(s.running);
        CHECK(missed <= 10);
        std::uint32_t allowed = 0;
        while (machine.time(allowed + 1, machine.bytes_per_row * (allowed + 1) / machine.link) <= target) { ++allowed; }
        CHECK(s.running >= 0.85 * allowed);
      }
    }
  }

  TEST_CASE("where recalls grow, no further rows are let in; where they shrink again, they are")
  {
    plant machine{.bytes_per_row = 4e6};
    server s{machine, {.tpot_target = nanoseconds{10'000'000}}, 400};
    for (int i = 0; i < 1500; ++i) { s.step(); }
    std::uint32_t const before = s.running;
    s.machine.bytes_per_row *= 3.0;
    for (int i = 0; i < 200; ++i) { s.step(); }
    CHECK(s.running == before);
    s.running = before / 2;  // requests end
    for (int i = 0; i < 400; ++i) { s.step(); }
    CHECK(s.running < before);
    s.machine.bytes_per_row /= 3.0;
    for (int i = 0; i < 1500; ++i) { s.step(); }
    CHECK(s.running >= 0.9 * before);
  }

  TEST_CASE("a raise that had to be cut doubles the wait for the next, which goes half of the way; the search ends")
  {
    // Each time that more rows run than before, their steps take twice as long: no limit but the lowest lasts.
    plant const usual{.per_step = 1e-3, .per_row = 100e-6, .bytes_per_row = 1e5};
    server s{usual, {.tpot_target = nanoseconds{6'000'000}}, 400};
    auto const step = [&](double times) {
      s.machine.per_row = times * usual.per_row;
      s.running = std::min(s.running, s.policy.limit());
      s.step();
    };
    auto const steps_to_move = [&](double times, int most) {
      std::uint32_t const before = s.policy.limit();
      for (int i = 0; i < most; ++i) {
        step(times);
        if (s.policy.limit() != before) { return i + 1; }
      }
      return most;
    };
    for (int i = 0; i < 3000; ++i) { step(1.0); }
    std::uint32_t tried = s.policy.limit();
    CHECK(tried > 30);
    CHECK(s.policy.raised);
    std::uint64_t hold = adaptive_admission::least_hold;
    int rounds = 0;
    for (bool goes_on = true; goes_on; ++rounds) {
      REQUIRE(rounds < 6);
      for (int i = 0; i < 400; ++i) { step(2.0); }
      std::uint32_t const kept = s.policy.limit();
      CHECK(kept < tried);
      hold = std::min(2 * hold, adaptive_admission::most_hold);
      CHECK(s.policy.hold == hold);
      auto const waited = static_cast<std::uint64_t>(steps_to_move(1.0, 40'000)) + 400;
      CHECK(s.policy.limit() > kept);
      // Once no limit is left between what lasts and what did not that differs from the first, nothing moves for long.
      goes_on = (kept + tried) / 2 > kept + std::max(0.15 * kept, 2.0);
      CHECK(waited >= (goes_on ? hold / 4 : adaptive_admission::most_hold));
      if (goes_on) { CHECK(s.policy.limit() <= (kept + tried) / 2); }
      tried = s.policy.limit();
    }
    CHECK(rounds > 2);
  }

  TEST_CASE("a limit that nobody comes near does not move")
  {
    plant const machine{.bytes_per_row = 5e6, .spread = 0.8};
    server s{machine, {.tpot_target = nanoseconds{20'000'000}}, 400};
    for (int i = 0; i < 1500; ++i) { s.step(); }
    std::uint32_t const before = s.policy.limit();
    for (std::uint32_t i = 0; i < 3000; ++i) {
      s.running = before / 4 + i / 100 % 7;
      s.machine.bytes_per_row = i / 500 % 2 == 0 ? 5e6 : 6e6;
      s.policy.max_rows = s.running;
      s.step();
      CHECK(s.policy.limit() == before);
    }
  }

  TEST_CASE("why a request is held back: the limit with what steps take, or the round")
  {
    adaptive_admission policy{.tpot_target = std::chrono::milliseconds{5}};
    capacity free{.rows_total = 100, .rows_running = 8, .slots_free = 1000, .slots_total = 1000};
    CHECK(policy.explain({}, free).empty());
    nanoseconds now{0};
    for (std::uint32_t i = 0; i < 400; ++i) {
      std::uint32_t const rows = 8 + i % 5;
      step_sample sample{.rows = rows, .begin = now};
      now += std::chrono::microseconds{500 + 400 * rows};
      sample.end = now;
      policy.observe(sample);
    }
    free.rows_running = 12;
    REQUIRE(policy.limit() <= 12);
    CHECK(policy.admit({}, free) == admission::queued);
    std::string const limit = policy.explain({}, free);
    CHECK(limit.find("lets " + std::to_string(policy.limit()) + " rows run; a step of 12") != std::string::npos);
    CHECK(limit.find("with 5000 us allowed") != std::string::npos);
    free.rows_running = 4;
    while (policy.admit({}, free) == admission::admitted) {}
    CHECK(
      policy.explain({}, free).find("rows have been let in, and 4 steps show first what they cost") !=
      std::string::npos);
    CHECK(adaptive_admission{.max_rows = 4}.explain({}, free) == "the policy lets 4 rows run at most");
  }

  TEST_CASE("memory comes first: what does not fit waits, what never fits is rejected")
  {
    adaptive_admission policy;
    capacity const small{
      .rows_total = 4,
      .rows_running = 1,
      .host_blocks_free = 5,
      .slots_free = 8,
      .slots_total = 100,
      .host_blocks_total = 50};
    CHECK(policy.admit({.host_blocks = 5, .slots_prefill = 8, .slots_decode = 4}, small) == admission::admitted);
    CHECK(policy.admit({.host_blocks = 6, .slots_prefill = 8}, small) == admission::queued);
    CHECK(policy.admit({.host_blocks = 51}, small) == admission::rejected);
    CHECK(policy.admit({.slots_prefill = 101}, small) == admission::rejected);
    CHECK(policy.admit({.digest_extents = 1}, small) == admission::rejected);
  }

  TEST_CASE("an idle system takes a request whatever was measured, so that nobody waits for ever")
  {
    adaptive_admission policy{.tpot_target = nanoseconds{1000}};
    capacity const idle{.rows_total = 4, .slots_free = 8, .slots_total = 8};
    policy.observe(
      {.rows = 1, .recalled_bytes = 1U << 30U, .begin = nanoseconds{0}, .end = nanoseconds{1'000'000'000}});
    CHECK(policy.admit({.slots_prefill = 8}, idle) == admission::admitted);
    capacity busy = idle;
    busy.rows_running = 1;
    for (int i = 0; i < 100; ++i) {
      policy.observe(
        {.rows = 1, .recalled_bytes = 1U << 30U, .begin = nanoseconds{0}, .end = nanoseconds{1'000'000'000}});
    }
    CHECK(policy.admit({.slots_prefill = 8}, busy) == admission::queued);
  }

  TEST_CASE("samples that say nothing change nothing")
  {
    adaptive_admission policy;
    policy.observe({});
    policy.observe({.rows = 0, .begin = nanoseconds{0}, .end = nanoseconds{5}});
    policy.observe({.rows = 3, .begin = nanoseconds{9}, .end = nanoseconds{9}});
    CHECK(policy.measured.steps() == 0);
    CHECK(policy.measured.expected(4.0) == 0.0);
    CHECK(policy.limit() > 1'000'000);
  }

  TEST_CASE(
    "rows whose recalls together take longer than a step may are not let in, however little a row adds to steps so far")
  {
    adaptive_admission policy{.tpot_target = std::chrono::milliseconds{5}, .link_bytes_per_second = 50e9};
    nanoseconds now{0};
    for (std::uint32_t i = 0; i < 400; ++i) {
      std::uint32_t const rows = 8 + i % 5;
      // 40 us of the link for a row, hidden behind a millisecond of everything else.
      step_sample sample{.rows = rows, .recalled_bytes = rows * std::uint64_t{2000000}, .begin = now};
      now += std::chrono::microseconds{1000 + rows};
      sample.end = now;
      policy.observe(sample);
    }
    CHECK(policy.rows_that_pay() == doctest::Approx(125.0).epsilon(0.02));  // 5 ms / 40 us
  }
}
