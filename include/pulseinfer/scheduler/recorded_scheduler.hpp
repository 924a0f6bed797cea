#pragma once

/// Any scheduler, with its decisions written down.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/view/decision_record.hpp>

#include <span>

namespace pulseinfer {

/// Decides as `Scheduler` does. The log must outlive the manager that the scheduler is given to.
template <layer_scheduler Scheduler>
struct recorded_scheduler {
  static constexpr bool hits_first = Scheduler::hits_first;
  static constexpr bool reads_mailbox = Scheduler::reads_mailbox;

  Scheduler scheduler = {};
  decision_log* log = nullptr;

  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    decision const made = scheduler.decide(rows, link, now, chosen);
    if (log == nullptr || made.kind == decision_kind::wait) { return made; }
    bool const runs = made.kind == decision_kind::run;
    log->add(
      {.kind = runs ? record_kind::run : record_kind::end_step, .enqueue_wait = made.enqueue_wait, .layer = made.layer},
      chosen.first(runs ? made.rows : 0));
    return made;
  }
};

static_assert(layer_scheduler<recorded_scheduler<interruptible_scheduler<visit_order::hits_first>>>);

}  // namespace pulseinfer
