#pragma once

/// From what lanes want to a list for the background.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Lists, for each lane, up to `most_blocks` of the blocks that it wants in the layer, that are on the host and not resident:
/// first those that it owes, then the others, each ascending. What is listed or resident is wanted no more. Tells how many are
/// left. One item is one lane.
struct list_wanted_blocks {
  static constexpr char const* name = "list_wanted_blocks";
  static constexpr operation_kind kind = operation_kind::metadata;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  selection_ref listed = {};  // written: ids and counts
  foresight_ref foresight = {};
  residency_ref residency = {};                // slot_of is read
  host_block_id const* host_blocks = nullptr;  // [rows, max_blocks], device memory
  std::uint32_t head_groups = 1;
  std::uint32_t most_blocks = 0;  ///< no more than listed.max_selected

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 128};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return foresight.words * sizeof(std::uint32_t); }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = shape().items * (std::uint64_t{foresight.words} * 12 + std::uint64_t{most_blocks} * 16)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t* const wanted = foresight.wanted_of(layer, lane);
    std::uint32_t const* const owed = foresight.owed_of(layer, lane);
    auto* const missing = reinterpret_cast<std::uint32_t*>(scratch.data);
    slot_id const* const slot_of = residency.slots_of_lane(layer, lane);
    for (std::uint32_t w = rank; w < foresight.words; w += group.size()) {
      std::uint32_t bits = wanted[w];
      for (std::uint32_t bit = 0; bits != 0U && bit < 32U; ++bit) {
        if ((bits >> bit & 1U) == 0U) { continue; }
        std::uint64_t const block = std::uint64_t{w} * 32U + bit;
        bool const stored = !is_none(host_blocks[to_index(row) * residency.max_blocks + block]);
        if (!stored || !is_none(slot_of[block])) { bits &= ~(1U << bit); }
      }
      missing[w] = bits;
    }
    group.sync();
    block_id* const ids = listed.ids_of(lane);
    if (rank == 0U) {
      std::uint32_t count = 0;
      std::uint32_t left = 0;
      for (std::uint32_t turn = 0; turn < 2U; ++turn) {
        for (std::uint32_t w = 0; w < foresight.words; ++w) {
          std::uint32_t const here = owed == nullptr ? 0U : owed[w];
          std::uint32_t const bits = missing[w] & (turn == 0U ? here : ~here);
          for (std::uint32_t bit = 0; bits != 0U && bit < 32U; ++bit) {
            if ((bits >> bit & 1U) == 0U) { continue; }
            if (count == most_blocks) {
              ++left;
              continue;
            }
            ids[count++] = static_cast<block_id>(std::uint64_t{w} * 32U + bit);
            missing[w] &= ~(1U << bit);
          }
        }
      }
      listed.counts[to_index(lane)] = count;
      device::store_release(&foresight.totals[to_index(lane)].left, left);
    }
    group.sync();
    for (std::uint32_t w = rank; w < foresight.words; w += group.size()) { wanted[w] = missing[w]; }
    for (std::uint32_t i = listed.counts[to_index(lane)] + rank; i < listed.max_selected; i += group.size()) {
      ids[i] = none<block_id>;
    }
  }
};

static_assert(operation<list_wanted_blocks>);

}  // namespace pulseinfer
