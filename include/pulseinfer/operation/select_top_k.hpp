#pragma once

/// Chooses the blocks with the most votes beside those that are kept anyway.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Writes each lane's selection: ids ascending, their count, none behind them; and, where asked, the lane's previous
/// selection, which is then this one. One item is one lane.
struct select_top_k {
  static constexpr char const* name = "select_top_k";
  static constexpr operation_kind kind = operation_kind::metadata;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  float const* votes = nullptr;    // [lanes, vote_pitch]; read for rows of more than budget_blocks blocks
  selection_ref selection = {};    // written
  std::uint64_t vote_pitch = 0;    ///< floats
  std::uint32_t head_groups = 1;
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_blocks = 0;  ///< all kinds of blocks together; never more than selection.max_selected are used
  std::uint32_t sink_blocks = 0;
  std::uint32_t recent_blocks = 0;
  bool remember = true;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 256};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return device::top_k_temp_words(group_threads) * sizeof(std::uint32_t);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t blocks = 0;
    for (row_id const row : rows) { blocks += info[to_index(row)].blocks(block_tokens); }
    return {
      .device_bytes = head_groups *
        (10U * sizeof(float) * blocks + std::uint64_t{rows.count} * selection.max_selected * sizeof(block_id))};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t const budget = budget_blocks < selection.max_selected ? budget_blocks : selection.max_selected;
    device::kept_blocks const kept =
      device::keep_blocks(info[to_index(row)], block_tokens, budget, sink_blocks, recent_blocks);
    block_id* const ids = selection.ids_of(lane);
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();

    for (std::uint32_t i = rank; i < kept.head; i += size) { ids[i] = static_cast<block_id>(i); }
    std::uint32_t count = kept.head;
    if (kept.chosen != 0U) {
      count += device::top_k(
        group, votes + to_index(lane) * vote_pitch + kept.head, kept.tail - kept.head, kept.chosen, kept.head,
        ids + count, reinterpret_cast<std::uint32_t*>(scratch.data));
    }
    for (std::uint32_t i = kept.tail + rank; i < kept.blocks; i += size) {
      ids[count + i - kept.tail] = static_cast<block_id>(i);
    }
    count += kept.blocks - kept.tail;
    for (std::uint32_t i = count + rank; i < selection.max_selected; i += size) { ids[i] = none<block_id>; }
    if (rank == 0U) { selection.counts[to_index(lane)] = count; }
    group.sync();
    if (remember) {
      device::remember_selection(group, ids, count, selection.previous_of(layer, lane), selection.previous_words);
    }
  }
};

static_assert(operation<select_top_k>);

}  // namespace pulseinfer
