#pragma once

/// Baseline: all rows go through the layers together.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <cstdint>
#include <span>

namespace pulseinfer {

/// Runs every row of the lowest layer and lets the stream wait for their recalls. Decides without the mailbox, so that a step
/// may be captured as one graph; no row is ever late.
template <visit_order Order = visit_order::whole>
struct lockstep_scheduler {
  static constexpr bool hits_first = Order == visit_order::hits_first;
  static constexpr bool reads_mailbox = false;

  /// @param chosen [rows.size()], written in the order of `rows`   @complexity rows
  decision decide(
    std::span<scheduler_row const> rows, link_state const&, nanoseconds, std::span<row_id> chosen) noexcept
  {
    if (rows.empty()) { return {.kind = decision_kind::end_step}; }
    layer_id lowest = rows.front().layer;
    for (scheduler_row const& row : rows) { lowest = row.layer < lowest ? row.layer : lowest; }
    decision made{.kind = decision_kind::run, .layer = lowest, .enqueue_wait = true};
    for (scheduler_row const& row : rows) {
      if (row.layer == lowest) { chosen[made.rows++] = row.row; }
    }
    return made;
  }
};

static_assert(layer_scheduler<lockstep_scheduler<visit_order::whole>>);
static_assert(layer_scheduler<lockstep_scheduler<visit_order::hits_first>>);

}  // namespace pulseinfer
