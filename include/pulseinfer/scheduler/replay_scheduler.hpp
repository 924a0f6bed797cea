#pragma once

/// Decides what a log says, whenever the rows that it names are there.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/view/decision_record.hpp>

#include <cstddef>
#include <span>

namespace pulseinfer {

/// Reads no clock and no link: a replay makes the same visits with the same rows in the same order, however long copies take.
/// A decision whose rows are not at its layer yet, or still travel although the recorded run did not wait on the stream for
/// them, is waited for. Past the log's end the step ends. Entries of admission are passed over.
template <visit_order Order = visit_order::hits_first>
struct replay_scheduler {
  static constexpr bool hits_first = Order == visit_order::hits_first;
  static constexpr bool reads_mailbox = true;

  decision_log const* log = nullptr;
  std::size_t next = 0;

  decision decide(
    std::span<scheduler_row const> rows, link_state const&, nanoseconds, std::span<row_id> chosen) noexcept
  {
    if (log == nullptr || rows.empty()) { return {.kind = decision_kind::end_step}; }
    std::span<decision_entry const> const entries = log->entries();
    auto const schedules = [](decision_entry const& e) {
      return e.kind == record_kind::run || e.kind == record_kind::end_step;
    };
    while (next < entries.size() && !schedules(entries[next])) { ++next; }
    if (next == entries.size()) { return {.kind = decision_kind::end_step}; }
    decision_entry const& entry = entries[next];
    if (entry.kind == record_kind::end_step) {
      ++next;
      return {.kind = decision_kind::end_step};
    }
    std::span<row_id const> const wanted = log->rows_of(entry);
    if (wanted.size() > chosen.size()) { return {.kind = decision_kind::end_step}; }
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (!is_there(rows, wanted[i], entry)) { return {.kind = decision_kind::wait}; }
      chosen[i] = wanted[i];
    }
    ++next;
    return {
      .kind = decision_kind::run,
      .layer = entry.layer,
      .rows = static_cast<std::uint32_t>(wanted.size()),
      .enqueue_wait = entry.enqueue_wait};
  }

 private:
  [[nodiscard]] static bool is_there(
    std::span<scheduler_row const> rows, row_id row, decision_entry const& entry) noexcept
  {
    for (scheduler_row const& r : rows) {
      if (r.row != row) { continue; }
      return r.layer == entry.layer && (r.phase == row_phase::ready || entry.enqueue_wait);
    }
    return false;
  }
};

static_assert(layer_scheduler<replay_scheduler<>>);

}  // namespace pulseinfer
