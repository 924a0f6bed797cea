#pragma once

/// Decides at a layer boundary who runs next. Meanings: docs/concepts.md#layer-scheduler.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <concepts>
#include <span>

namespace pulseinfer {

template <class S>
concept scheduler_states_traits = requires {
  { S::hits_first } -> std::convertible_to<bool>;     // a hits visit follows each enter
  { S::reads_mailbox } -> std::convertible_to<bool>;  // false: decides without knowing misses; capturable as one graph
};

template <class S>
concept scheduler_decides = requires(
  S& self, std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) {
  { self.decide(rows, link, now, chosen) } noexcept -> std::same_as<decision>;
};

template <class S>
concept layer_scheduler = scheduler_states_traits<S> && scheduler_decides<S>;

/// One sentence for each requirement that `S` misses.
template <class S>
consteval bool explain_layer_scheduler()
{
  static_assert(scheduler_states_traits<S>, "a layer scheduler must state `hits_first` and `reads_mailbox`");
  static_assert(
    scheduler_decides<S>, "a layer scheduler must return decision, noexcept, from decide(rows, link, now, chosen)");
  return layer_scheduler<S>;
}

}  // namespace pulseinfer
