#pragma once

/// Hands a written-back slot over to the lease and takes another one out of it.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// A slot that the host knew, sealed and with a copy on the host.
struct slot_exchange {
  layer_id layer = none<layer_id>;
  lane_id lane = none<lane_id>;
  slot_id written = none<slot_id>;
  std::uint32_t spare_place = 0;  ///< place of residency_ref::spare that receives the other slot
};

static_assert(std::is_trivially_copyable_v<slot_exchange> && sizeof(slot_exchange) == 16);

/// One item per exchange, at most one per (layer, lane) in a launch. The written slot becomes a clean member of the lease;
/// the lease's worst clean or empty slot leaves it, empty, and its id is posted to residency.spare for the host, which
/// lets a later block of the lane open in it. Where the lease has no such slot, the written one itself leaves: its block has
/// a copy on the host.
template <replacement Replacement>
struct exchange_slots {
  static constexpr char const* name = "exchange_slots";
  static constexpr operation_kind kind = operation_kind::metadata;

  slot_exchange const* exchanges = nullptr;  // [count], readable by the device until the launch has run
  std::uint32_t count = 0;
  residency_ref residency = {};
  slot_pool_ref pool = {};
  std::uint32_t const* step = nullptr;
  Replacement policy = {};

  [[nodiscard]] launch_shape shape() const { return {.items = count, .group_threads = 32}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = std::uint64_t{count} * residency.max_lease * 20};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    slot_exchange const exchange = exchanges[item];
    std::uint64_t const books = residency.lane_index(exchange.layer, exchange.lane);
    slot_id* const lease = residency.lease_of_lane(exchange.layer, exchange.lane);
    std::uint32_t const leased = residency.lease_count[books];
    std::uint32_t const now = *step;
    std::uint32_t worst = leased;
    std::uint64_t worst_key = ~std::uint64_t{0};
    for (std::uint32_t i = 0; i < leased; ++i) {
      slot_word const word = residency.slots[pool.word(exchange.layer, lease[i])];
      if (word.state != slot_state::empty && word.state != slot_state::clean) { continue; }
      std::uint64_t const key = word.state == slot_state::empty
        ? to_index(lease[i])
        : (std::uint64_t{1} << 63U) | (std::uint64_t{policy.key(word, now)} << 31U) | to_index(lease[i]);
      if (key < worst_key) {
        worst_key = key;
        worst = i;
      }
    }
    slot_id const leaving = worst == leased ? exchange.written : lease[worst];
    slot_word& word = residency.slots[pool.word(exchange.layer, leaving)];
    if (!is_none(word.block)) {
      residency.slots_of_lane(exchange.layer, exchange.lane)[to_index(word.block)] = none<slot_id>;
    }
    word.block = none<block_id>;
    word.state = slot_state::empty;
    word.ahead = 0;
    if (worst != leased) {
      lease[worst] = exchange.written;
      residency.slots[pool.word(exchange.layer, exchange.written)].state = slot_state::clean;
    }
    residency.spare[exchange.spare_place] = leaving;
  }
};

}  // namespace pulseinfer
