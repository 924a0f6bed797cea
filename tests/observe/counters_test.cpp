#include <pulseinfer/observe/counters.hpp>

#include <doctest/doctest.h>

#include <ios>
#include <sstream>
#include <string>

TEST_SUITE_BEGIN("observe");

using namespace pulseinfer;

namespace {

[[nodiscard]] step_sample sample_of(std::uint32_t n)
{
  step_sample sample;
  sample.step = n;
  sample.rows = n;
  sample.late_rows = 2 * n;
  sample.visits = 3 * n;
  sample.waits = 5 * n;
  sample.selected_blocks = 100 * n;
  sample.recalled_blocks = 25 * n;
  sample.recalled_bytes = 1000 * n;
  sample.written_bytes = 7 * n;
  sample.failed_transfers = 11 * n;
  sample.thrash_steps = 13 * n;
  sample.begin = nanoseconds{1000};
  sample.end = nanoseconds{1000 + 2000 * n};
  sample.stalled = nanoseconds{500 * n};
  return sample;
}

}  // namespace

TEST_CASE("counters sum every field and keep the peaks")
{
  counters sums;
  for (std::uint32_t const n : {1U, 3U, 2U}) { sums.add(sample_of(n)); }
  CHECK(sums.steps == 3);
  CHECK(sums.rows == 6);
  CHECK(sums.late_rows == 12);
  CHECK(sums.visits == 18);
  CHECK(sums.waits == 30);
  CHECK(sums.selected_blocks == 600);
  CHECK(sums.recalled_blocks == 150);
  CHECK(sums.recalled_bytes == 6000);
  CHECK(sums.written_bytes == 42);
  CHECK(sums.failed_transfers == 66);
  CHECK(sums.thrash_steps == 78);
  CHECK(sums.peak_recalled_bytes == 3000);
  CHECK(sums.peak_rows == 3);
  CHECK(sums.time == nanoseconds{12000});
  CHECK(sums.stalled == nanoseconds{3000});
  CHECK(sums.hit_rate() == doctest::Approx(0.75));
  CHECK(sums.rows_per_step() == doctest::Approx(2.0));
  CHECK(sums.visits_per_step() == doctest::Approx(6.0));
  CHECK(sums.recalled_blocks_per_step() == doctest::Approx(50.0));
  CHECK(sums.recalled_bytes_per_step() == doctest::Approx(2000.0));
  CHECK(sums.step_seconds() == doctest::Approx(4e-6));
  CHECK(sums.stalled_share() == doctest::Approx(0.25));
}

TEST_CASE("counters of two parts of a run add up to those of the whole")
{
  counters whole, first, second;
  for (std::uint32_t n = 1; n < 10; ++n) {
    whole.add(sample_of(n));
    (n % 3 == 0 ? first : second).add(sample_of(n));
  }
  first.add(second);
  std::ostringstream a, b;
  a << whole;
  b << first;
  CHECK(a.str() == b.str());
  CHECK(first.peak_rows == whole.peak_rows);
  CHECK(first.time == whole.time);
}

TEST_CASE("counters without steps, selections or time divide by nothing")
{
  counters sums;
  CHECK(sums.hit_rate() == 1.0);
  CHECK(sums.rows_per_step() == 0.0);
  CHECK(sums.step_seconds() == 0.0);
  CHECK(sums.stalled_share() == 0.0);
  step_sample ahead;  // more recalled, ahead of need, than selected
  ahead.selected_blocks = 10;
  ahead.recalled_blocks = 12;
  sums.add(ahead);
  CHECK(sums.hit_rate() == 0.0);
}

TEST_CASE("counters sum what came in the background, and keep the largest share that was skipped")
{
  counters sums;
  sums.add(step_sample{
    .recalled_blocks = 30,
    .background_blocks = 40,
    .background_hits = 10,
    .wasted_blocks = 4,
    .wasted_bytes = 400,
    .deferrals = 8,
    .deferred_blocks = 60,
    .skipped_share = 0.125,
    .most_skipped_share = 0.0625});
  CHECK(sums.background_precision() == 0.25);
  CHECK(sums.background_recall() == 0.1);
  CHECK(sums.mean_skipped_share() == 0.015625);
  counters other;
  other.add(step_sample{.deferrals = 8, .skipped_share = 0.375, .most_skipped_share = 0.25});
  sums.add(other);
  CHECK(sums.wasted_blocks == 4);
  CHECK(sums.wasted_bytes == 400);
  CHECK(sums.deferrals == 16);
  CHECK(sums.mean_skipped_share() == 0.03125);
  CHECK(sums.most_skipped_share == 0.25);
  CHECK(counters{}.background_precision() == 0.0);
  CHECK(counters{}.background_recall() == 0.0);
  CHECK(counters{}.mean_skipped_share() == 0.0);
}

TEST_CASE("counters print whole numbers and means whatever the stream's flags are, up to the largest values")
{
  counters sums;
  sums.add(sample_of(4));
  std::ostringstream out;
  out << std::hex << std::scientific << sums;
  CHECK(
    out.str() ==
    "steps             1, mean 0.008 ms, 25.0 % of it stalled\n"
    "rows per step     4.00, at most 4; 8 left late\n"
    "visits per step   12.00; 20 waits\n"
    "selected blocks   400\n"
    "recalled blocks   100, 100.00 per step\n"
    "hit rate          75.00 %\n"
    "recalled bytes    4000, 4000 per step, at most 4000\n"
    "written bytes     28\n"
    "failed transfers  44\n"
    "thrash steps      52\n");
  constexpr std::uint64_t most = ~std::uint64_t{0};
  counters const large{
    .steps = most,
    .rows = most,
    .late_rows = most,
    .visits = most,
    .waits = most,
    .selected_blocks = most,
    .recalled_blocks = most,
    .recalled_bytes = most,
    .background_blocks = most,
    .background_hits = most,
    .wasted_blocks = most,
    .wasted_bytes = most,
    .deferrals = most,
    .deferred_blocks = most,
    .written_bytes = most,
    .failed_transfers = most,
    .thrash_steps = most,
    .peak_recalled_bytes = most,
    .peak_rows = ~0U,
    .time = nanoseconds::max(),
    .stalled = nanoseconds::max()};
  std::ostringstream full;
  full << large;
  CHECK(full.str().ends_with("thrash steps      18446744073709551615\n"));
}

TEST_SUITE_END();
