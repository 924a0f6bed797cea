#pragma once

/// Measures the steps of a manager.

#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pulseinfer {

/// The sample of the step that runs, and that of the one before. What the device counts is read from the mailbox.
class step_meter {
 public:
  step_meter(std::uint32_t rows, nanoseconds now) : totals_(rows) { running_.begin = now; }

  /// Where the step counts what it does.
  [[nodiscard]] step_sample& running() noexcept { return running_; }
  [[nodiscard]] step_sample const& last() const noexcept { return last_; }

  /// Ends the step's sample and begins the next one.
  /// @param background words of the rows' background recalls, as `mailbox`
  /// @param lanes what has come of blocks that came in the background
  /// @param written bytes written back since construction   @return false: the step had no rows, and its sample is dropped
  bool close(
    row_mailbox const* mailbox, row_mailbox const* background, std::span<lane_foresight const> lanes,
    std::uint64_t step, std::uint32_t late_rows, std::uint64_t block_bytes, std::uint64_t written,
    nanoseconds now) noexcept
  {
    std::uint64_t misses = 0;
    std::uint64_t hits = 0;
    std::uint64_t brought = 0;
    for (std::size_t r = 0; r < totals_.size(); ++r) {
      brought += device::load_relaxed(&background[r].total_misses);
      totals const total{
        .misses = device::load_relaxed(&mailbox[r].total_misses), .hits = device::load_relaxed(&mailbox[r].total_hits)};
      std::uint64_t const row_misses = total.misses - totals_[r].misses;
      std::uint64_t const row_hits = total.hits - totals_[r].hits;
      totals_[r] = total;
      misses += row_misses;
      hits += row_hits;
      running_.thrash_steps += row_misses > row_hits ? 1U : 0U;
    }
    running_.step = step;
    running_.recalled_blocks = misses;
    running_.recalled_bytes = misses * block_bytes;
    running_.selected_blocks = misses + hits;
    running_.background_blocks = brought - brought_;
    brought_ = brought;
    sum_lanes(lanes, block_bytes);
    running_.written_bytes = written - written_;
    written_ = written;
    running_.late_rows = late_rows;
    running_.end = now;
    bool const counts = running_.rows != 0;
    if (counts) { last_ = running_; }
    running_ = step_sample{.begin = now};
    return counts;
  }

 private:
  void sum_lanes(std::span<lane_foresight const> lanes, std::uint64_t block_bytes) noexcept
  {
    lane_foresight sum;
    for (lane_foresight const& lane : lanes) {
      sum.used += device::load_relaxed(&lane.used);
      sum.wasted += device::load_relaxed(&lane.wasted);
      sum.plans += device::load_relaxed(&lane.plans);
      sum.deferred += device::load_relaxed(&lane.deferred);
      sum.skipped += device::load_relaxed(&lane.skipped);
      sum.most_skipped = std::max(sum.most_skipped, device::load_acquire(&lane.most_skipped));
    }
    constexpr double unit = 1.0 / 4294967296.0;
    running_.background_hits = sum.used - lanes_.used;
    running_.wasted_blocks = sum.wasted - lanes_.wasted;
    running_.wasted_bytes = running_.wasted_blocks * block_bytes;
    running_.deferrals = sum.plans - lanes_.plans;
    running_.deferred_blocks = sum.deferred - lanes_.deferred;
    running_.skipped_share = static_cast<double>(sum.skipped - lanes_.skipped) * unit;
    running_.most_skipped_share = static_cast<double>(sum.most_skipped) * unit;
    lanes_ = sum;
  }

  struct totals {
    std::uint64_t misses = 0;
    std::uint64_t hits = 0;
  };

  step_sample running_ = {};
  step_sample last_ = {};
  std::vector<totals> totals_;  // [rows] as they stood when the last sample ended
  std::uint64_t written_ = 0;
  std::uint64_t brought_ = 0;
  lane_foresight lanes_ = {};  // sums of all lanes as they stood then
};

}  // namespace pulseinfer
