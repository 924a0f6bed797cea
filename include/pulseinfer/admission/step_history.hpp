#pragma once

/// What steps have cost, and what they are expected to cost with other numbers of rows.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pulseinfer {

/// Follows the time of a step as T(B) = a + b B. The slope b is fitted over the last `slope_memory` steps (half-life), by least
/// squares, to times from which the surprise of the recalled bytes is taken out; the level a is the mean of the steps since the
/// number of rows changed by 15 %, of the last `level_memory` where that is long ago, and jumps where the last few steps say that
/// it has moved by more than their noise.
class step_history {
 public:
  /// @param link bytes a second
  void add(step_sample const& sample, double link) noexcept
  {
    double const rows = sample.rows;
    double const time = seconds(sample.end - sample.begin);
    double const recall = static_cast<double>(sample.recalled_bytes) / link;
    ++steps_;
    // The mean of the first steps, then one that forgets.
    auto const weight = [this](double memory) {
      return std::max(1.0 / static_cast<double>(steps_), 1.0 - std::exp2(-1.0 / memory));
    };
    double const surprise = recall - rows * recall_per_row_;
    if (steps_ > 1) {
      double const gain = weight(slope_memory);
      double const off = time - expected_by_line(rows);
      surprise_square_ += gain * (surprise * surprise - surprise_square_);
      surprise_times_off_ += gain * (surprise * off - surprise_times_off_);
    }
    recall_per_row_ += weight(recall_memory) * (recall / rows - recall_per_row_);
    double const exposed = surprise_square_ > 0.0 ? std::clamp(surprise_times_off_ / surprise_square_, 0.0, 1.0) : 0.0;
    fit_slope(rows, steps_ > 1 ? time - exposed * surprise : time);
    rows_ += weight(quick_memory) * (rows - rows_);
    follow_level(rows, time);
  }

  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
  /// Mean of the last steps.
  [[nodiscard]] double rows() const noexcept { return rows_; }
  /// Seconds that a row adds to a step.
  [[nodiscard]] double slope() const noexcept { return slope_; }
  /// One standard deviation of it; as large as a row's whole share of the step while rows have not varied.
  [[nodiscard]] double slope_error() const noexcept { return slope_error_; }
  /// Standard deviation of a step's time, in seconds.
  [[nodiscard]] double deviation() const noexcept { return mean_step_ * std::sqrt(spread_); }
  /// What the mean of a step's time may be off by: much while few steps have been of this size.
  [[nodiscard]] double level_error() const noexcept { return 2.0 * deviation() / std::sqrt(level_steps_); }
  /// Seconds of the link for a row's recalls of a step.
  [[nodiscard]] double recall_per_row() const noexcept { return recall_per_row_; }
  /// Seconds that a step of so many rows is expected to take; 0 while nothing was measured.
  [[nodiscard]] double expected(double rows) const noexcept
  {
    return steps_ == 0 ? 0.0 : std::max(expected_by_line(rows), recall_per_row_ * rows);
  }

  [[nodiscard]] static double seconds(nanoseconds t) noexcept { return static_cast<double>(t.count()) * 1e-9; }

 private:
  static constexpr double slope_memory = 512.0;  // steps: half-lives
  static constexpr double level_memory = 1024.0;
  static constexpr double recall_memory = 64.0;
  static constexpr double quick_memory = 12.0;
  static constexpr double quick_steps = 16.0;
  static constexpr double jump = 1.0;  // of a step's deviation: beyond what the mean of the last few is off by chance

  /// The mean of steps of about the same size. It begins anew where their number of rows has changed, or their time.
  void follow_level(double rows, double time) noexcept
  {
    double const level = time - slope_ * rows;
    bool const first = steps_ == 1;
    if (first || std::abs(rows - level_rows_) > 0.15 * level_rows_) {
      level_rows_ = rows;
      level_steps_ = 0.0;
    }
    double const forget = 1.0 - std::exp2(-1.0 / level_memory);
    level_steps_ = std::min(level_steps_ + 1.0, 1.0 / forget);
    double const off = level_steps_ > 1.0 ? level - level_ : 0.0;
    level_ = level_steps_ > 1.0 ? level_ + off / level_steps_ : level;
    quick_level_ =
      level_steps_ > 1.0 ? quick_level_ + (level - quick_level_) / std::min(level_steps_, quick_steps) : level;
    // Relative to the step's time, so that what was learnt with fewer rows says something of more.
    if (level_steps_ > 1.0) {
      spread_steps_ = std::min(spread_steps_ + 1.0, 1.0 / forget);
      // Steps of another level say nothing of how much those of one differ.
      double const most = spread_steps_ > 32.0 ? 3.0 * deviation() : std::abs(off);
      double const counted = std::min(std::abs(off), most) / time;
      spread_ += (counted * counted - spread_) / spread_steps_;
    }
    mean_step_ = first ? time : mean_step_ + (time - mean_step_) / std::min(level_steps_, quick_steps);
    if (level_steps_ > 2.0 * quick_steps && std::abs(quick_level_ - level_) > jump * deviation()) {
      level_ = quick_level_;
      level_steps_ = quick_steps;
    }
  }

  [[nodiscard]] double expected_by_line(double rows) const noexcept { return level_ + slope_ * rows; }

  void fit_slope(double rows, double time) noexcept
  {
    double const keep = std::exp2(-1.0 / slope_memory);
    weight_ = keep * weight_ + 1.0;
    double const away = rows - mean_rows_;
    mean_rows_ += away / weight_;
    double const late = time - mean_time_;
    mean_time_ += late / weight_;
    rows_square_ = keep * rows_square_ + away * (rows - mean_rows_);
    rows_times_time_ = keep * rows_times_time_ + away * (time - mean_time_);
    double const share = mean_time_ / std::max(mean_rows_, 1.0);
    if (rows_square_ < 1.0) {
      slope_ = 0.0;
      slope_error_ = share;
      return;
    }
    slope_ = std::clamp(rows_times_time_ / rows_square_, 0.0, share);
    // Steps in a row are alike: a few of them say as much as one.
    slope_error_ = std::min(share, 2.0 * deviation() / std::sqrt(rows_square_));
  }

  std::uint64_t steps_ = 0;
  double rows_ = 0.0;
  double recall_per_row_ = 0.0;
  double surprise_square_ = 0.0;
  double surprise_times_off_ = 0.0;
  double weight_ = 0.0;
  double mean_rows_ = 0.0;
  double mean_time_ = 0.0;
  double rows_square_ = 0.0;  // weighted sums, not means
  double rows_times_time_ = 0.0;
  double slope_ = 0.0;
  double slope_error_ = 0.0;
  double level_ = 0.0;
  double quick_level_ = 0.0;
  double level_rows_ = 0.0;   // around which the level was measured
  double level_steps_ = 0.0;  // that it is the mean of
  double mean_step_ = 0.0;
  double spread_ = 0.0;  // variance of a step's time over its square
  double spread_steps_ = 0.0;
};

}  // namespace pulseinfer
