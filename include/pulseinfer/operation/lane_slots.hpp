#pragma once

/// One lane's leased slots in a layer: who leaves, and what comes in. What resolving a demand and a background recall share.

#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/sort.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>

#include <cstdint>

namespace pulseinfer {

struct lane_slots {
  residency_ref residency = {};
  slot_pool_ref pool = {};
  layer_id layer = none<layer_id>;
  lane_id lane = none<lane_id>;

  /// Writes up to `wanted` slots to leave into `victims`, ascending by slot, so that adjacent misses get adjacent slots. Empty
  /// ones come first, then clean ones, worst first by the policy, ties to the lower slot; others never.
  /// @param now the step's number   @param idle (word) whether a clean slot may leave   @param victims [max_lease]
  /// @return how many
  template <replacement Replacement, class Idle>
  PULSEINFER_HOST_DEVICE std::uint32_t choose_victims(
    std::uint32_t wanted, std::uint32_t now, Replacement const& policy, Idle idle, std::uint64_t* victims) const
  {
    slot_id const* const lease = residency.lease_of_lane(layer, lane);
    std::uint32_t const leased = residency.lease_count[residency.lane_index(layer, lane)];
    std::uint32_t candidates = 0;
    for (std::uint32_t i = 0; i < leased; ++i) {
      slot_word const word = residency.slots[pool.word(layer, lease[i])];
      bool const empty = word.state == slot_state::empty;
      if (!empty && !(word.state == slot_state::clean && idle(word))) { continue; }
      std::uint64_t const key = empty ? 0 : (std::uint64_t{1} << 63U) | (std::uint64_t{policy.key(word, now)} << 31U);
      victims[candidates++] = key | to_index(lease[i]);
    }
    std::uint32_t const granted = wanted < candidates ? wanted : candidates;
    device::partial_sort(victims, candidates, granted);
    for (std::uint32_t i = 0; i < granted; ++i) { victims[i] &= 0x7FFFFFFFU; }
    device::heap_sort(victims, granted);
    return granted;
  }

  /// The slot is on its way to hold `block`; what it held is resident no more.
  /// @param ahead see slot_word   @return whether what it held had come in the background for nothing
  PULSEINFER_HOST_DEVICE bool take(slot_id slot, block_id block, std::uint32_t last_used, bool ahead) const
  {
    slot_id* const slot_of = residency.slots_of_lane(layer, lane);
    slot_word& word = residency.slots[pool.word(layer, slot)];
    bool const wasted = !is_none(word.block) && word.ahead != 0U;
    if (!is_none(word.block)) { slot_of[to_index(word.block)] = none<slot_id>; }
    word.block = block;
    word.state = slot_state::in_flight;
    word.last_used = last_used;
    word.ahead = ahead ? 1U : 0U;
    slot_of[to_index(block)] = slot;
    return wasted;
  }
};

}  // namespace pulseinfer
