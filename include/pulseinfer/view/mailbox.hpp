#pragma once

/// What the device tells the host, in words that the host polls and never waits for.

#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One row's words in mapped pinned memory. Each recall of a row has a sequence number; a word speaks of the recall whose
/// number it carries. The numbers are written last, with release order, so that what they speak of is there.
struct alignas(64) row_mailbox {
  std::uint64_t total_misses = 0;   ///< blocks that this row's recalls have planned so far, all sequences together
  std::uint64_t total_hits = 0;     ///< selected blocks that were resident, likewise
  std::uint64_t bytes = 0;          ///< bytes that the recall moves
  std::uint32_t misses = 0;         ///< blocks that the recall moves
  std::uint32_t hits = 0;           ///< selected blocks that were resident
  std::uint32_t flying = 0;         ///< selected blocks that an earlier recall still brings; the row waits for them too
  std::uint32_t stalled = 0;        ///< selected blocks for which no slot could be freed; 0 in a sound configuration
  std::uint32_t failed_blocks = 0;  ///< blocks that the recall numbered `failed` did not bring
  std::uint32_t failed_begin = 0;   ///< place of the first of them in landed_ref::failures
  std::uint32_t posted = 0;         ///< number of the recall whose counts stand above
  std::uint32_t landed = 0;         ///< number of the last recall whose blocks are all in their slots
  std::uint32_t failed = 0;         ///< number of the last recall of which a copy failed
};

static_assert(std::is_trivially_copyable_v<row_mailbox> && sizeof(row_mailbox) == 64);

}  // namespace pulseinfer
