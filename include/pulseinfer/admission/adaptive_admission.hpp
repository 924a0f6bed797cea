#pragma once

/// Admits as many rows as pay, from what steps were measured to cost.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pulseinfer {

/// What a step of so many rows is expected to take.
struct step_forecast {
  double compute = 0.0;  ///< seconds of all work but recalls
  double recall = 0.0;   ///< seconds that the link needs, with a margin for its spread
  double time = 0.0;     ///< seconds of the step
};

/// What steps have cost so far, those of `half_life` steps ago counting half.
class step_history {
 public:
  /// @param link bytes a second   @param keep weight of what is known already, against one step
  void add(step_sample const& sample, double link, double keep) noexcept
  {
    double const rows = sample.rows;
    double const time = seconds(sample.end - sample.begin);
    double const stalled = std::min(seconds(sample.stalled), time);
    double const bytes = static_cast<double>(sample.recalled_bytes);
    double const recall = bytes / link;
    double const compute = time - stalled;
    double const expected = forecast(sample.rows, 0.0, link).time;
    if (expected > 0.0) { correction_ = keep * correction_ + (1.0 - keep) * std::clamp(time / expected, 0.5, 4.0); }
    if (weight_ > 0.0) {
      double const surprise = bytes - rows * bytes_per_row_ / weight_;
      surprise_weight_ = keep * surprise_weight_ + 1.0;
      sum(keep, surprises_, surprise * surprise / rows);
    }
    weight_ = keep * weight_ + 1.0;
    sum(keep, rows_, rows);
    sum(keep, rows_squared_, rows * rows);
    sum(keep, compute_, compute);
    sum(keep, rows_compute_, rows * compute);
    sum(keep, bytes_per_row_, bytes / rows);
    // Steps of one size alone say nothing of what a row costs: what those of several sizes have said stays.
    double const mean_rows = rows_ / weight_;
    double const spread = rows_squared_ / weight_ - mean_rows * mean_rows;
    if (spread > 0.01 * mean_rows) {
      double const mean_compute = compute_ / weight_;
      double const slope = (rows_compute_ / weight_ - mean_rows * mean_compute) / spread;
      slope_ = std::clamp(slope, 0.0, mean_compute / mean_rows);
    }
    if (recall > 0.0 && recall < compute) {
      exposed_weight_ = keep * exposed_weight_ + 1.0;
      sum(keep, exposed_, std::min(stalled / recall, 1.0));
    }
    ++steps_;
  }

  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }

  /// @param margin standard deviations of the recalled bytes that are added   @return zeros while nothing was measured
  [[nodiscard]] step_forecast forecast(std::uint32_t rows, double margin, double link) const noexcept
  {
    if (weight_ == 0.0) { return {}; }
    double const mean_rows = rows_ / weight_;
    double const mean_compute = compute_ / weight_;
    double const mean_bytes = bytes_per_row_ / weight_;
    double const row_variance = surprise_weight_ > 0.0 ? surprises_ / surprise_weight_ : 0.0;
    step_forecast result;
    result.compute = mean_compute + slope_ * (rows - mean_rows);
    result.recall = (mean_bytes * rows + margin * std::sqrt(row_variance * rows)) / link;
    double const exposed = exposed_weight_ > 0.0 ? exposed_ / exposed_weight_ : first_exposed;
    result.time = std::max(result.compute, result.recall) + exposed * std::min(result.compute, result.recall);
    return result;
  }

  /// Measured over expected time.
  [[nodiscard]] double correction() const noexcept { return correction_; }

  [[nodiscard]] static double seconds(nanoseconds t) noexcept { return static_cast<double>(t.count()) * 1e-9; }

 private:
  static constexpr double first_exposed = 0.3;  // while no step was bound by its computing

  static void sum(double keep, double& sum, double value) noexcept { sum = keep * sum + value; }

  double weight_ = 0.0;
  double rows_ = 0.0;
  double rows_squared_ = 0.0;
  double compute_ = 0.0;
  double rows_compute_ = 0.0;
  double bytes_per_row_ = 0.0;
  double surprise_weight_ = 0.0;
  double surprises_ = 0.0;  // squared, over the rows: the variance of one row where rows are independent
  double slope_ = 0.0;      // seconds of computing for one row more
  double exposed_weight_ = 0.0;
  double exposed_ = 0.0;
  double correction_ = 1.0;
  std::uint64_t steps_ = 0;
};

/// A step of B rows is expected to take max(C, R) + e * min(C, R): C(B) = a + b * B is fitted to the time that steps did not
/// stall; R(B) is B times what a row recalls on average, and `caution` standard deviations of a step's sum, over the link's
/// rate; e, the part of the shorter one that the longer one does not hide, is measured. What steps took against what was
/// expected corrects the next forecast. A further row is let in while memory for its whole length is free (as
/// fixed_admission counts it), the step stays within `tpot_target`, and tokens a second grow by at least `least_gain` of a
/// row's fair share. Rows are let in by rounds, each of half as many as run; then `settle_steps` steps show what they cost.
struct adaptive_admission {
  nanoseconds tpot_target{0};           ///< longest step that a further row may make; 0: none
  double link_bytes_per_second = 50e9;  ///< of recalls, as measured on the machine
  double least_gain = 0.01;             ///< of a row's fair share of the throughput
  double caution = 1.28;                ///< standard deviations of the recalled bytes
  double target_caution = 2.6;          ///< likewise, where a target is to be kept in 99 steps of 100
  double most_link_share = 0.8;         ///< of the target that recalls may fill, where there is one
  std::uint32_t max_rows = 0;           ///< rows that run together; 0: as many as there are
  std::uint32_t half_life = 32;         ///< steps
  std::uint32_t settle_steps = 4;       ///< steps that show what further rows cost, before the next are let in
  step_history measured = {};
  std::uint64_t round_begin = 0;   ///< step in which the first of the last rows was let in
  std::uint32_t round_rows = 0;    ///< rows that ran before them
  std::uint32_t round_let_in = 0;  ///< of them

  void observe(step_sample const& sample) noexcept
  {
    if (sample.rows == 0 || sample.end <= sample.begin) { return; }
    measured.add(sample, link_bytes_per_second, std::exp2(-1.0 / std::max(half_life, 1U)));
  }

  /// @return rejected where the request could not run on an idle system either; an idle system takes what fits
  admission admit(demand const& request, capacity const& free) noexcept
  {
    fixed_admission memory{.max_rows = max_rows};
    admission const said = memory.admit(request, free);
    if (said != admission::admitted) { return said; }
    if (measured.steps() >= round_begin + settle_steps || free.rows_running == 0) {
      round_begin = measured.steps();
      round_rows = free.rows_running;
      round_let_in = 0;
    }
    bool const room = round_let_in < std::max(round_rows / 2, 1U);
    if (free.rows_running != 0 && !(room && pays(free.rows_running))) { return admission::queued; }
    ++round_let_in;
    return admission::admitted;
  }

  /// Whether one row more than `rows` raises the throughput enough, and keeps the target.
  [[nodiscard]] bool pays(std::uint32_t rows) const noexcept
  {
    if (measured.steps() == 0) { return true; }
    if (tpot_target > nanoseconds{0}) {
      double const target = step_history::seconds(tpot_target);
      step_forecast const worst = forecast(rows + 1, target_caution);
      if (worst.time > target || worst.recall > most_link_share * target) { return false; }
    }
    double const now = forecast(rows, caution).time;
    return (rows + 1) / forecast(rows + 1, caution).time - rows / now >= least_gain / now;
  }

  /// What a step of so many rows is expected to take, corrected.
  [[nodiscard]] step_forecast forecast(std::uint32_t rows, double margin) const noexcept
  {
    step_forecast expected = measured.forecast(rows, margin, link_bytes_per_second);
    expected.time *= measured.correction();
    return expected;
  }
};

static_assert(admission_policy<adaptive_admission>);

}  // namespace pulseinfer
