#pragma once

/// The k largest of n numbers, exact, ties to the lowest index, result ascending.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// A number whose unsigned order is the order of floats. NaN lies below all, -0 and 0 are equal.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t order_key(float value)
{
  std::uint32_t const bits = pulseinfer::detail::bit_cast<std::uint32_t>(value);
  std::uint32_t const magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) { return 0U; }
  if (magnitude == 0U) { return 0x80000000U; }
  return (bits & 0x80000000U) != 0U ? ~bits : bits | 0x80000000U;
}

/// Words of shared storage that `top_k` needs.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::size_t top_k_temp_words(std::uint32_t group_threads)
{
  return 16U + 16U * std::size_t{group_threads};
}

/// Writes the indices of the k largest values, ascending, each plus `first`. All of them where count <= k.
/// @param values [count]   @param ids [min(k, count)], written
/// @param temp_storage [top_k_temp_words(group.size())], shared by the group
/// @return ids written, in every rank   @sync several; one at the end   @complexity 10 passes over the values
/// @source radix selection, four bits a pass from the highest, over counts that each rank keeps for itself
template <thread_group Group>
PULSEINFER_HOST_DEVICE std::uint32_t top_k(
  Group const& group, float const* values, std::uint32_t count, std::uint32_t k, std::uint32_t first, block_id* ids,
  std::uint32_t* temp_storage)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  if (count <= k || k == 0U) {
    std::uint32_t const all = count <= k ? count : 0U;
    for (std::uint32_t i = rank; i < all; i += size) { ids[i] = static_cast<block_id>(first + i); }
    group.sync();
    return all;
  }

  constexpr std::uint32_t digits = 16;
  std::uint32_t* const totals = temp_storage;
  std::uint32_t* const counters = temp_storage + digits;
  std::uint32_t* const own = counters + std::size_t{rank} * digits;
  std::uint32_t const begin = static_cast<std::uint32_t>(std::uint64_t{count} * rank / size);
  std::uint32_t const end = static_cast<std::uint32_t>(std::uint64_t{count} * (rank + 1U) / size);

  // The key of the k-th largest value, digit by digit; `wanted` is its place among the keys that begin alike.
  std::uint32_t threshold = 0U;
  std::uint32_t wanted = k;
  for (std::uint32_t shift = 32U; shift > 0U;) {
    shift -= 4U;
    std::uint32_t const above = shift == 28U ? 0U : ~0U << (shift + 4U);
    for (std::uint32_t digit = 0; digit < digits; ++digit) { own[digit] = 0U; }
    for (std::uint32_t i = begin; i < end; ++i) {
      std::uint32_t const key = order_key(values[i]);
      if ((key & above) == threshold) { ++own[key >> shift & 15U]; }
    }
    group.sync();
    for (std::uint32_t digit = rank; digit < digits; digit += size) {
      std::uint32_t sum = 0U;
      for (std::uint32_t i = 0; i < size; ++i) { sum += counters[std::size_t{i} * digits + digit]; }
      totals[digit] = sum;
    }
    group.sync();
    std::uint32_t digit = digits - 1U;
    while (wanted > totals[digit]) {
      wanted -= totals[digit];
      --digit;
    }
    threshold |= digit << shift;
  }

  // Each rank writes what its own stretch holds, behind what lower ranks write.
  own[0] = 0U;
  own[1] = 0U;
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint32_t const key = order_key(values[i]);
    own[0] += key > threshold ? 1U : 0U;
    own[1] += key == threshold ? 1U : 0U;
  }
  group.sync();
  std::uint32_t larger = 0U;
  std::uint32_t equal = 0U;
  for (std::uint32_t i = 0; i < rank; ++i) {
    larger += counters[std::size_t{i} * digits];
    equal += counters[std::size_t{i} * digits + 1U];
  }
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint32_t const key = order_key(values[i]);
    std::uint32_t const place = larger + (equal < wanted ? equal : wanted);
    if (key > threshold) {
      ids[place] = static_cast<block_id>(first + i);
      ++larger;
    } else if (key == threshold) {
      if (equal < wanted) { ids[place] = static_cast<block_id>(first + i); }
      ++equal;
    }
  }
  group.sync();
  return k;
}

}  // namespace pulseinfer::device
