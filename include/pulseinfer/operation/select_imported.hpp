#pragma once

/// Takes over selections that the host engine has made.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Writes each lane's selection: the imported blocks before the open ones, then the open ones, whether imported or not. A
/// row of no more blocks than the budget reads all. One item is one lane.
struct select_imported {
  static constexpr char const* name = "select_imported";
  static constexpr operation_kind kind = operation_kind::metadata;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;            // [max_rows], device memory
  block_id const* ids = nullptr;             // [lanes, id_pitch] ascending, device-readable
  std::uint32_t const* id_counts = nullptr;  // [lanes], device-readable
  selection_ref selection = {};              // written
  std::uint32_t id_pitch = 0;
  std::uint32_t head_groups = 1;
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_blocks = 0;  ///< never more than selection.max_selected are used
  bool remember = true;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 128};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }

  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = std::uint64_t{rows.count} * head_groups * 2U * selection.max_selected * sizeof(block_id)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t const budget = budget_blocks < selection.max_selected ? budget_blocks : selection.max_selected;
    device::kept_blocks const kept = device::keep_blocks(info[to_index(row)], block_tokens, budget, 0U, 0U);
    block_id const* const imported = ids + to_index(lane) * id_pitch;
    block_id* const written = selection.ids_of(lane);
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();

    std::uint32_t const given = id_counts[to_index(lane)];
    std::uint32_t count = 0;  // imported blocks before kept.tail, as many as there is room for
    while (count < kept.chosen && count < given && to_index(imported[count]) < kept.tail) { ++count; }
    for (std::uint32_t i = rank; i < count; i += size) { written[i] = imported[i]; }
    for (std::uint32_t i = kept.tail + rank; i < kept.blocks; i += size) {
      written[count + i - kept.tail] = static_cast<block_id>(i);
    }
    count += kept.blocks - kept.tail;
    for (std::uint32_t i = count + rank; i < selection.max_selected; i += size) { written[i] = none<block_id>; }
    if (rank == 0U) { selection.counts[to_index(lane)] = count; }
    group.sync();
    if (remember) {
      device::remember_selection(group, written, count, selection.previous_of(layer, lane), selection.previous_words);
    }
  }
};

static_assert(operation<select_imported>);

}  // namespace pulseinfer
