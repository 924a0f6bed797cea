#pragma once

/// Takes blocks out of the device's books: a sequence was cut back.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item per (layer, head group) of a row: blocks [first, last) have no slot any more, slots of the lease that held one
/// are empty, and no previous selection remembers them. Slots outside the lease keep their words: they are the host's.
struct forget_blocks {
  static constexpr char const* name = "forget_blocks";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_id row = none<row_id>;
  residency_ref residency = {};
  slot_pool_ref pool = {};
  selection_ref selection = {};
  host_block_id* host_blocks = nullptr;  // [rows, max_blocks]
  std::uint32_t first = 0;
  std::uint32_t last = 0;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = first == last ? 0 : std::uint64_t{residency.layers} * head_groups, .group_threads = 32};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = shape().items * (last - first) * 24}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    auto const layer = static_cast<layer_id>(item / head_groups);
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    slot_id* const slot_of = residency.slots_of_lane(layer, lane);
    slot_id const* const lease = residency.lease_of_lane(layer, lane);
    std::uint32_t const leased = residency.lease_count[residency.lane_index(layer, lane)];
    std::uint32_t* const previous = selection.previous_of(layer, lane);
    for (std::uint32_t i = 0; i < leased; ++i) {
      slot_word& word = residency.slots[pool.word(layer, lease[i])];
      bool const named = !is_none(word.block) && to_index(word.block) >= first && to_index(word.block) < last;
      if (named) {
        word.block = none<block_id>;
        word.state = slot_state::empty;
        word.ahead = 0;
      }
    }
    for (std::uint32_t b = first; b < last; ++b) {
      slot_of[b] = none<slot_id>;
      previous[b / 32] &= ~(1U << (b % 32));
      if (item == 0) { host_blocks[to_index(row) * residency.max_blocks + b] = none<host_block_id>; }
    }
  }
};

static_assert(operation<forget_blocks>);

}  // namespace pulseinfer
