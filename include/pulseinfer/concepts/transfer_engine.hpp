#pragma once

/// Moves blocks between host and device. Meanings: docs/concepts.md#transfer-engine.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <concepts>
#include <utility>

namespace pulseinfer {

/// What the manager tells a transfer engine at set-up.
struct transfer_limits {
  std::uint32_t max_rows = 0;
  std::uint32_t max_entries = 0;  ///< most entries of one plan
  std::uint32_t head_groups = 1;
  block_layout layout = {};
};

/// The state that `T` makes when it is bound to a backend.
template <class T, class B>
using bound_transfer_t =
  decltype(std::declval<T const&>().bind(std::declval<B&>(), std::declval<transfer_limits const&>()));

template <class T, class B>
concept transfer_engine_binds = requires { typename bound_transfer_t<T, B>; };

template <class T>
concept transfer_engine_states_place = requires {
  { T::plans_on } -> std::convertible_to<plan_place>;
};

template <class T, class B>
concept transfer_engine_recalls = transfer_engine_binds<T, B> &&
  requires(bound_transfer_t<T, B>& self, typename B::stream_ref stream, recall_plan_ref const& plan,
           landed_ref landed) {
    { self.recall_async(stream, plan, landed) } noexcept -> std::same_as<status>;
  };

template <class T, class B>
concept transfer_engine_moves =
  transfer_engine_binds<T, B> && requires(bound_transfer_t<T, B>& self, typename B::stream_ref stream, copy_list runs) {
    { self.move_async(stream, runs) } noexcept -> std::same_as<status>;
  };

template <class T, class B>
concept transfer_engine_for =
  backend<B> && transfer_engine_states_place<T> && transfer_engine_recalls<T, B> && transfer_engine_moves<T, B>;

/// One sentence for each requirement that `T` misses on `B`.
template <class T, class B>
consteval bool explain_transfer_engine()
{
  static_assert(transfer_engine_binds<T, B>, "a transfer engine must make its state in bind(backend, transfer_limits)");
  static_assert(transfer_engine_states_place<T>, "a transfer engine must state `plans_on`, host or device");
  if constexpr (transfer_engine_binds<T, B>) {
    static_assert(
      transfer_engine_recalls<T, B>,
      "a transfer engine must return status, noexcept, from recall_async(stream, plan, landed)");
    static_assert(
      transfer_engine_moves<T, B>, "a transfer engine must return status, noexcept, from move_async(stream, runs)");
  }
  return transfer_engine_for<T, B>;
}

}  // namespace pulseinfer
