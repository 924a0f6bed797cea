#pragma once

/// Strong ids and byte arithmetic. A block id where a slot id is wanted does not compile.

#include <pulseinfer/config.hpp>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

enum class sequence_id : std::int64_t {};    ///< One request's token history; never reused by a manager.
enum class row_id : std::int32_t {};         ///< A sequence's place in the running batch.
enum class lane_id : std::int32_t {};        ///< (row, head group): row * head_groups + group.
enum class layer_id : std::int32_t {};       ///< A transformer layer.
enum class block_id : std::int32_t {};       ///< Ordinal of a block inside its sequence: token / block_tokens.
enum class slot_id : std::int32_t {};        ///< A block's place in the GPU pool.
enum class host_block_id : std::int32_t {};  ///< A block's place in the pinned host store; the same in every layer.

template <class T>
concept strong_id = std::is_enum_v<T> && !std::convertible_to<T, std::underlying_type_t<T>> &&
  std::is_signed_v<std::underlying_type_t<T>>;

/// The absent id, -1.
template <strong_id Id>
inline constexpr Id none = static_cast<Id>(-1);

/// The id's number, for address arithmetic: 64 bits from the first multiplication on. Undefined for `none`.
template <strong_id Id>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t to_index(Id id)
{
  return static_cast<std::uint64_t>(id);
}

/// The id's signed number, for printing and for arrays that may hold `none`.
template <strong_id Id>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::underlying_type_t<Id> to_number(Id id)
{
  return static_cast<std::underlying_type_t<Id>>(id);
}

template <strong_id Id>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr bool is_none(Id id)
{
  return to_number(id) < 0;
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr lane_id lane_of(
  row_id row, std::uint32_t group, std::uint32_t head_groups)
{
  return static_cast<lane_id>(to_index(row) * head_groups + group);
}

template <std::unsigned_integral T>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr T divide_up(T value, std::type_identity_t<T> divisor)
{
  return (value + divisor - 1) / divisor;
}

template <std::unsigned_integral T>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr T round_up(T value, std::type_identity_t<T> multiple)
{
  return divide_up(value, multiple) * multiple;
}

/// Time since a backend's own start. Virtual in the simulation backend.
using nanoseconds = std::chrono::nanoseconds;

}  // namespace pulseinfer
