#pragma once

/// Baseline: rows are let in while what they have selected lately fits the slots.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// The rule of systems that size a batch by its working sets: a row is let in while the union of each row's last `window`
/// selections fits the slots, beside memory for its whole length (as fixed_admission counts it). What travels is not looked at.
/// The union is counted from samples: what the last step selected, and the blocks that came in the steps before it.
/// @source SparseServe, arXiv:2509.24626: a window of 12 steps
struct working_set_admission {
  static constexpr std::size_t window = 12;

  std::uint32_t max_rows = 0;            ///< rows that run together; 0: as many as there are
  std::array<double, window> came = {};  ///< blocks for each row, by step
  double selected = 0.0;                 ///< likewise, of the last step
  std::uint64_t steps = 0;

  void observe(step_sample const& sample) noexcept
  {
    if (sample.rows == 0) { return; }
    double const rows = sample.rows;
    selected = static_cast<double>(sample.selected_blocks) / rows;
    came[steps++ % window] = static_cast<double>(sample.recalled_blocks + sample.background_blocks) / rows;
  }

  /// Blocks of a row, over layers and lanes; 0 while nothing was measured.
  [[nodiscard]] double working_set() const noexcept
  {
    double sum = selected;
    for (std::size_t i = 0; i < std::min<std::uint64_t>(steps, window); ++i) { sum += came[i]; }
    // The newest step's are selected.
    return steps == 0 ? 0.0 : sum - came[(steps - 1) % window];
  }

  admission admit(demand const& request, capacity const& free) noexcept
  {
    admission const said = fixed_admission{.max_rows = max_rows}.admit(request, free);
    if (said != admission::admitted || free.rows_running == 0) { return said; }
    return fits(free) ? admission::admitted : admission::queued;
  }

  [[nodiscard]] std::string explain(demand const& request, capacity const& free) const
  {
    std::string memory = fixed_admission{.max_rows = max_rows}.explain(request, free);
    if (!memory.empty() || free.rows_running == 0 || fits(free)) { return memory; }
    return "the working sets of " + std::to_string(free.rows_running + 1) + " rows, " +
      std::to_string(static_cast<std::uint64_t>(working_set())) + " blocks each, are more than " +
      std::to_string(free.slots_total) + " slots";
  }

 private:
  /// Whether one row more fits.
  [[nodiscard]] bool fits(capacity const& free) const noexcept
  {
    return working_set() * (free.rows_running + 1.0) <= static_cast<double>(free.slots_total);
  }
};

static_assert(explaining_admission<working_set_admission>);

}  // namespace pulseinfer
