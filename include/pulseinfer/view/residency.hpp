#pragma once

/// The device's books: which block is in which leased slot. Changed in stream order only.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// State of a slot on the device. `free` slots belong to no lease.
enum class slot_state : std::uint32_t { free, empty, open, dirty, clean, in_flight };

/// Words of one slot: what it holds, in which state, and when it was last selected (the row's step count).
struct slot_word {
  block_id block = none<block_id>;
  slot_state state = slot_state::free;
  std::uint32_t last_used = 0;
  std::uint32_t ahead = 0;  ///< 1: the block came in the background, and no selection has named it since
};

static_assert(std::is_trivially_copyable_v<slot_word> && sizeof(slot_word) == 16);

/// Arrays of the device's books. All of them live in device memory that the manager allocated at construction.
struct residency_ref {
  slot_id* slot_of = nullptr;            // [layers, lanes, max_blocks] slot of a block, none where it is not resident
  slot_word* slots = nullptr;            // [slot words of all layers], see slot_pool_ref::word
  slot_id* lease = nullptr;              // [layers, lanes, max_lease] slots that `resolve` may refill
  std::uint32_t* lease_count = nullptr;  // [layers, lanes]
  slot_id* spare = nullptr;              // [layers, lanes, ring] slots given back by exchanges; host-readable
  std::uint32_t layers = 0;
  std::uint32_t lanes = 0;
  std::uint32_t max_blocks = 0;
  std::uint32_t max_lease = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint64_t lane_index(layer_id layer, lane_id lane) const
  {
    return to_index(layer) * lanes + to_index(lane);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE slot_id* slots_of_lane(layer_id layer, lane_id lane) const
  {
    return slot_of + lane_index(layer, lane) * max_blocks;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE slot_id* lease_of_lane(layer_id layer, lane_id lane) const
  {
    return lease + lane_index(layer, lane) * max_lease;
  }
};

static_assert(std::is_trivially_copyable_v<residency_ref>);

}  // namespace pulseinfer
