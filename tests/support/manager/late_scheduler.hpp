#pragma once

/// A scheduler that ends steps when a test says so.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <cstdint>
#include <span>

namespace pulseinfer_test {

/// Decides as the interruptible scheduler does, until `decisions` of them have been made in a step; then it leaves the rest
/// late, if no row must finish. What it did is counted in `log`, which outlives it.
struct late_scheduler {
  static constexpr bool hits_first = true;
  static constexpr bool reads_mailbox = true;

  struct record {
    std::uint32_t decisions = ~0U;  ///< the test's wish for each step
    std::uint32_t made = 0;         ///< in this step; the test sets it back
    std::uint64_t ended = 0;        ///< steps ended with rows left
    std::uint64_t forced = 0;       ///< steps that would have ended, had no row had to finish
    bool careless = false;          ///< control: rows that must finish are left all the same
  };

  record* log = nullptr;
  pulseinfer::interruptible_scheduler<pulseinfer::visit_order::hits_first> base = {};

  pulseinfer::decision decide(
    std::span<pulseinfer::scheduler_row const> rows, pulseinfer::link_state const& link, pulseinfer::nanoseconds now,
    std::span<pulseinfer::row_id> chosen) noexcept
  {
    if (log != nullptr && log->made++ >= log->decisions) {
      bool must_finish = false;
      for (pulseinfer::scheduler_row const& row : rows) { must_finish = must_finish || row.must_finish; }
      must_finish = must_finish && !log->careless;
      ++(must_finish ? log->forced : log->ended);
      if (!must_finish) { return {.kind = pulseinfer::decision_kind::end_step}; }
    }
    return base.decide(rows, link, now, chosen);
  }
};

static_assert(pulseinfer::layer_scheduler<late_scheduler>);

}  // namespace pulseinfer_test
