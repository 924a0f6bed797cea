#pragma once

/// When a task ran, and what it cost.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <concepts>

namespace pulseinfer {

/// Written by a backend while it runs the task, complete when the task is.
struct observation {
  static constexpr nanoseconds never{-1};

  nanoseconds begin = never;  ///< on the backend's clock
  nanoseconds end = never;
  operation_cost cost = {};
};

/// A backend that can tell when a task ran. The observation must live until the task is complete; a task that has nothing to do
/// leaves it as it is.
template <class B>
concept observed_backend = backend<B> &&
  requires(B& backend, typename B::stream_ref stream, archetype::operation const& op, copy_list runs,
           observation* seen) {
    { backend.launch(stream, op, seen) } noexcept -> std::same_as<status>;
    { backend.copy(stream, runs, seen) } noexcept -> std::same_as<status>;
  };

}  // namespace pulseinfer
