#pragma once

/// Turns a row that had every block in a slot into one with a lease of hot slots.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// A slot that stays with a lane and the block in it (none: empty).
struct leased_slot {
  slot_id slot = none<slot_id>;
  block_id block = none<block_id>;
};

static_assert(std::is_trivially_copyable_v<leased_slot> && sizeof(leased_slot) == 8);

/// One lane's new lease: `lease_count` slots that resolve may refill, then `held_count` that the host keeps to itself.
struct lease_change {
  layer_id layer = none<layer_id>;
  lane_id lane = none<lane_id>;
  std::uint32_t first = 0;  ///< place of the lane's slots in install_lease::slots
  std::uint32_t lease_count = 0;
  std::uint32_t held_count = 0;
  std::uint32_t blocks = 0;  ///< blocks that the lane may hold a slot of: the places to clear
};

static_assert(std::is_trivially_copyable_v<lease_change>);

/// One item per change, at most one per (layer, lane). Every block that is not named loses its slot; leased blocks become
/// clean, used in the step before the present one, whose misses may take their slots; held ones keep their state.
struct install_lease {
  static constexpr char const* name = "install_lease";
  static constexpr operation_kind kind = operation_kind::metadata;

  lease_change const* changes = nullptr;  // [count], readable by the device until the launch has run
  leased_slot const* slots = nullptr;
  std::uint32_t count = 0;
  residency_ref residency = {};
  slot_pool_ref pool = {};
  std::uint32_t const* step = nullptr;

  [[nodiscard]] launch_shape shape() const { return {.items = count, .group_threads = 128}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = std::uint64_t{count} * (residency.max_blocks * 4ULL + residency.max_lease * 24ULL)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    lease_change const change = changes[item];
    slot_id* const slot_of = residency.slots_of_lane(change.layer, change.lane);
    slot_id* const lease = residency.lease_of_lane(change.layer, change.lane);
    std::uint32_t const now = *step;
    for (std::uint32_t b = group.thread_rank(); b < change.blocks; b += group.size()) { slot_of[b] = none<slot_id>; }
    group.sync();
    for (std::uint32_t i = group.thread_rank(); i < change.lease_count + change.held_count; i += group.size()) {
      leased_slot const entry = slots[change.first + i];
      slot_word& word = residency.slots[pool.word(change.layer, entry.slot)];
      bool const leased = i < change.lease_count;
      if (leased) { lease[i] = entry.slot; }
      word.ahead = 0;
      if (is_none(entry.block)) {
        word.block = none<block_id>;
        word.state = slot_state::empty;
      } else {
        slot_of[to_index(entry.block)] = entry.slot;
        if (leased) {
          word.block = entry.block;
          word.state = slot_state::clean;
          word.last_used = now - 1U;
        }
      }
    }
    if (group.thread_rank() == 0) {
      residency.lease_count[residency.lane_index(change.layer, change.lane)] = change.lease_count;
    }
  }
};

static_assert(operation<install_lease>);

}  // namespace pulseinfer
