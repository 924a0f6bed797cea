#pragma once

/// Sums of step samples.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>

namespace pulseinfer {

struct counters {
  std::uint64_t steps = 0;
  std::uint64_t rows = 0;
  std::uint64_t late_rows = 0;
  std::uint64_t visits = 0;
  std::uint64_t waits = 0;
  std::uint64_t selected_blocks = 0;
  std::uint64_t recalled_blocks = 0;
  std::uint64_t recalled_bytes = 0;
  std::uint64_t background_blocks = 0;  ///< brought ahead of need
  std::uint64_t background_hits = 0;    ///< of them, selected later
  std::uint64_t wasted_blocks = 0;      ///< of them, replaced before they were selected
  std::uint64_t wasted_bytes = 0;
  std::uint64_t deferrals = 0;  ///< see step_sample
  std::uint64_t deferred_blocks = 0;
  double skipped_share = 0.0;       ///< summed over deferrals
  double most_skipped_share = 0.0;  ///< of one deferral
  std::uint64_t written_bytes = 0;
  std::uint64_t failed_transfers = 0;
  std::uint64_t thrash_steps = 0;         ///< see step_sample: over rows and steps
  std::uint64_t peak_recalled_bytes = 0;  ///< of one step
  std::uint32_t peak_rows = 0;
  nanoseconds time{0};  ///< over steps, from begin to end
  nanoseconds stalled{0};

  void add(step_sample const& sample) noexcept
  {
    ++steps;
    rows += sample.rows;
    late_rows += sample.late_rows;
    visits += sample.visits;
    waits += sample.waits;
    selected_blocks += sample.selected_blocks;
    recalled_blocks += sample.recalled_blocks;
    recalled_bytes += sample.recalled_bytes;
    background_blocks += sample.background_blocks;
    background_hits += sample.background_hits;
    wasted_blocks += sample.wasted_blocks;
    wasted_bytes += sample.wasted_bytes;
    deferrals += sample.deferrals;
    deferred_blocks += sample.deferred_blocks;
    skipped_share += sample.skipped_share;
    most_skipped_share = std::max(most_skipped_share, sample.most_skipped_share);
    written_bytes += sample.written_bytes;
    failed_transfers += sample.failed_transfers;
    thrash_steps += sample.thrash_steps;
    peak_recalled_bytes = std::max(peak_recalled_bytes, sample.recalled_bytes);
    peak_rows = std::max(peak_rows, sample.rows);
    time += sample.end - sample.begin;
    stalled += sample.stalled;
  }

  /// Sums of two parts of a run, or of two runs.
  void add(counters const& other) noexcept
  {
    steps += other.steps;
    rows += other.rows;
    late_rows += other.late_rows;
    visits += other.visits;
    waits += other.waits;
    selected_blocks += other.selected_blocks;
    recalled_blocks += other.recalled_blocks;
    recalled_bytes += other.recalled_bytes;
    background_blocks += other.background_blocks;
    background_hits += other.background_hits;
    wasted_blocks += other.wasted_blocks;
    wasted_bytes += other.wasted_bytes;
    deferrals += other.deferrals;
    deferred_blocks += other.deferred_blocks;
    skipped_share += other.skipped_share;
    most_skipped_share = std::max(most_skipped_share, other.most_skipped_share);
    written_bytes += other.written_bytes;
    failed_transfers += other.failed_transfers;
    thrash_steps += other.thrash_steps;
    peak_recalled_bytes = std::max(peak_recalled_bytes, other.peak_recalled_bytes);
    peak_rows = std::max(peak_rows, other.peak_rows);
    time += other.time;
    stalled += other.stalled;
  }

  /// Share of selected blocks that were resident, in [0, 1]. 1 when nothing was selected: nothing was missed. Blocks recalled ahead
  /// of need count as misses, so the figure is never too good.
  [[nodiscard]] double hit_rate() const noexcept
  {
    if (selected_blocks == 0) { return 1.0; }
    double const missed = static_cast<double>(recalled_blocks) / static_cast<double>(selected_blocks);
    return std::max(0.0, 1.0 - missed);
  }

  /// Share of the blocks brought ahead of need that were selected later, in [0, 1]; 0 where none were brought.
  [[nodiscard]] double background_precision() const noexcept
  {
    return background_blocks == 0 ? 0.0 : static_cast<double>(background_hits) / static_cast<double>(background_blocks);
  }
  /// Share of the blocks that a selection lacked, or would have lacked, which had been brought ahead of need.
  [[nodiscard]] double background_recall() const noexcept
  {
    std::uint64_t const lacked = background_hits + recalled_blocks + deferred_blocks;
    return lacked == 0 ? 0.0 : static_cast<double>(background_hits) / static_cast<double>(lacked);
  }
  /// Mean share of the softmax mass that a row went without in a layer for what was left for later.
  [[nodiscard]] double mean_skipped_share() const noexcept
  {
    return deferrals == 0 ? 0.0 : skipped_share / static_cast<double>(deferrals);
  }

  /// Means are 0 without a step.
  [[nodiscard]] double rows_per_step() const noexcept { return per_step(static_cast<double>(rows)); }
  [[nodiscard]] double visits_per_step() const noexcept { return per_step(static_cast<double>(visits)); }
  [[nodiscard]] double recalled_blocks_per_step() const noexcept
  {
    return per_step(static_cast<double>(recalled_blocks));
  }
  [[nodiscard]] double recalled_bytes_per_step() const noexcept
  {
    return per_step(static_cast<double>(recalled_bytes));
  }
  [[nodiscard]] double step_seconds() const noexcept { return per_step(static_cast<double>(time.count()) * 1e-9); }

  /// Share of the time that was slept with nothing ready.
  [[nodiscard]] double stalled_share() const noexcept
  {
    return time.count() > 0 ? static_cast<double>(stalled.count()) / static_cast<double>(time.count()) : 0.0;
  }

 private:
  [[nodiscard]] double per_step(double sum) const noexcept
  {
    return steps > 0 ? sum / static_cast<double>(steps) : 0.0;
  }
};

/// Ten lines of text. The stream's flags change nothing.
inline std::ostream& operator<<(std::ostream& out, counters const& c)
{
  char text[768];
  auto const count = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  std::snprintf(
    text, sizeof(text),
    "steps             %llu, mean %.3f ms, %.1f %% of it stalled\n"
    "rows per step     %.2f, at most %u; %llu left late\n"
    "visits per step   %.2f; %llu waits\n"
    "selected blocks   %llu\n"
    "recalled blocks   %llu, %.2f per step\n"
    "hit rate          %.2f %%\n"
    "recalled bytes    %llu, %.0f per step, at most %llu\n"
    "written bytes     %llu\n"
    "failed transfers  %llu\n"
    "thrash steps      %llu\n",
    count(c.steps), c.step_seconds() * 1e3, c.stalled_share() * 100.0, c.rows_per_step(), c.peak_rows,
    count(c.late_rows), c.visits_per_step(), count(c.waits), count(c.selected_blocks), count(c.recalled_blocks),
    c.recalled_blocks_per_step(), c.hit_rate() * 100.0, count(c.recalled_bytes), c.recalled_bytes_per_step(),
    count(c.peak_recalled_bytes), count(c.written_bytes), count(c.failed_transfers), count(c.thrash_steps));
  return out << text;
}

}  // namespace pulseinfer
