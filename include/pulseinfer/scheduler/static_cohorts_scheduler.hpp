#pragma once

/// Baseline: the rows are split once and for all, and each part goes through the layers by itself.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace pulseinfer {

/// Row r belongs to cohort r % cohorts. The cohort that is behind the others runs next, the lower one of two that are level, and
/// the stream waits for its recall; so one cohort computes while the blocks of the others travel. Decides without the mailbox.
template <visit_order Order = visit_order::hits_first>
struct static_cohorts_scheduler {
  static constexpr bool hits_first = Order == visit_order::hits_first;
  static constexpr bool reads_mailbox = false;

  std::uint32_t cohorts = 2;

  /// @param chosen [rows.size()], written in the order of `rows`   @complexity rows
  decision decide(
    std::span<scheduler_row const> rows, link_state const&, nanoseconds, std::span<row_id> chosen) noexcept
  {
    if (rows.empty()) { return {.kind = decision_kind::end_step}; }
    layer_id layer = rows.front().layer;
    std::uint32_t cohort = cohort_of(rows.front());
    for (scheduler_row const& row : rows) {
      std::uint32_t const own = cohort_of(row);
      if (row.layer < layer || (row.layer == layer && own < cohort)) {
        layer = row.layer;
        cohort = own;
      }
    }
    decision made{.kind = decision_kind::run, .layer = layer, .enqueue_wait = true};
    for (scheduler_row const& row : rows) {
      if (row.layer == layer && cohort_of(row) == cohort) { chosen[made.rows++] = row.row; }
    }
    return made;
  }

 private:
  [[nodiscard]] std::uint32_t cohort_of(scheduler_row const& row) const noexcept
  {
    return static_cast<std::uint32_t>(to_index(row.row)) % std::max(cohorts, 1U);
  }
};

static_assert(layer_scheduler<static_cohorts_scheduler<visit_order::whole>>);
static_assert(layer_scheduler<static_cohorts_scheduler<visit_order::hits_first>>);

}  // namespace pulseinfer
