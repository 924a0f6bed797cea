#pragma once

/// A selection as one bit for each block.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// The bits of the blocks 32 word to 32 word + 31 among those selected.
/// @param ids [count] ascending   @complexity log(count)
[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint32_t selection_bits(
  block_id const* ids, std::uint32_t count, std::uint32_t word)
{
  auto const first = static_cast<std::int64_t>(word) * 32;
  std::uint32_t low = 0;
  for (std::uint32_t high = count; low < high;) {
    std::uint32_t const middle = low + (high - low) / 2U;
    if (to_number(ids[middle]) < first) {
      low = middle + 1U;
    } else {
      high = middle;
    }
  }
  std::uint32_t bits = 0;
  for (; low < count && to_number(ids[low]) < first + 32; ++low) {
    bits |= 1U << static_cast<std::uint32_t>(to_number(ids[low]) - first);
  }
  return bits;
}

/// Sets the bits of the selected blocks and clears all others. Each rank has words of its own.
/// @param ids [count] ascending, written by any rank before a sync   @param words [word_count], written   @sync none
template <thread_group Group>
PULSEINFER_HOST_DEVICE void remember_selection(
  Group const& group, block_id const* ids, std::uint32_t count, std::uint32_t* words, std::uint32_t word_count)
{
  for (std::uint32_t word = group.thread_rank(); word < word_count; word += group.size()) {
    words[word] = selection_bits(ids, count, word);
  }
}

}  // namespace pulseinfer::device
