#pragma once

/// A kernel is a value: formula, shape, cost and name.

#include <pulseinfer/device/group.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Items are independent of one another and run in any order; each is run by one thread group.
struct launch_shape {
  std::uint64_t items = 0;
  std::uint32_t group_threads = 32;  ///< threads of a group where the backend has many; a CPU uses one
};

/// Shared scratch memory of one item's group, 16-byte aligned, contents undefined at the item's begin.
struct scratch_ref {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// `metadata` operations read and write ids, counts and words, and always run. `data` operations touch keys, values,
/// digests or queries; a simulation charges their cost instead.
enum class operation_kind : std::uint8_t { metadata, data };

/// What an operation moves and computes. Read where device memory is readable by the host and earlier work has run.
struct operation_cost {
  std::uint64_t device_bytes = 0;  ///< read and written in device memory
  std::uint64_t link_bytes = 0;    ///< between host and device
  std::uint64_t link_runs = 0;     ///< contiguous pieces of them
  std::uint64_t flops = 0;
  bool to_host = false;        ///< direction of link_bytes
  std::int64_t device_ns = 0;  ///< time on the device beside what the bytes and flops take, where that is known
  bool continues = false;  ///< goes on where the operation before it on its stream ended: no cost per link operation
};

/// An operation is trivially copyable, at most `max_operation_bytes` large, and called as op(group, item, scratch).
inline constexpr std::size_t max_operation_bytes = 1024;

template <class T>
concept operation_names_itself = requires {
  { T::name } -> std::convertible_to<char const*>;
};

template <class T>
concept operation_states_kind = requires {
  { T::kind } -> std::convertible_to<operation_kind>;
};

template <class T>
concept operation_has_shape = requires(T const& op) {
  { op.shape() } -> std::same_as<launch_shape>;
  { op.scratch_bytes(std::uint32_t{}) } -> std::convertible_to<std::size_t>;
};

template <class T>
concept operation_has_cost = requires(T const& op) {
  { op.cost() } -> std::same_as<operation_cost>;
};

template <class T>
concept operation_runs = requires(
  T const& op, device::solo_group const& group, std::uint64_t item, scratch_ref scratch) { op(group, item, scratch); };

template <class T>
concept operation =
  std::is_trivially_copyable_v<T> && (sizeof(T) <= max_operation_bytes) && operation_names_itself<T> &&
  operation_states_kind<T> && operation_has_shape<T> && operation_has_cost<T> && operation_runs<T>;

/// One sentence for each requirement that `T` misses.
template <class T>
consteval bool explain_operation()
{
  static_assert(
    std::is_trivially_copyable_v<T>, "an operation must be trivially copyable: it crosses to the device by bytes");
  static_assert(
    sizeof(T) <= max_operation_bytes, "an operation must fit max_operation_bytes: pass pointers, not arrays");
  static_assert(operation_names_itself<T>, "an operation must have `static constexpr char const* name`");
  static_assert(operation_states_kind<T>, "an operation must have `static constexpr operation_kind kind`");
  static_assert(
    operation_has_shape<T>,
    "an operation must return launch_shape from shape() and bytes from scratch_bytes(group_threads)");
  static_assert(operation_has_cost<T>, "an operation must return operation_cost from cost()");
  static_assert(operation_runs<T>, "an operation must be callable as op(group, item, scratch)");
  return operation<T>;
}

/// Runs every item of `op` here, on one thread: the reference. `scratch` holds op.scratch_bytes(1) bytes.
template <operation Op>
void run_operation(Op const& op, scratch_ref scratch)
{
  launch_shape const shape = op.shape();
  for (std::uint64_t item = 0; item < shape.items; ++item) { op(device::solo_group{}, item, scratch); }
}

}  // namespace pulseinfer
