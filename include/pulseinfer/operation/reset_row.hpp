#pragma once

/// Clears what the device's books hold of a row, before a new sequence begins in it.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item per layer.
struct reset_row {
  static constexpr char const* name = "reset_row";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_id row = none<row_id>;
  residency_ref residency = {};
  selection_ref selection = {};
  lane_table_ref table = {};
  row_info* info = nullptr;              // [max_rows]
  host_block_id* host_blocks = nullptr;  // [rows, max_blocks]
  foresight_ref foresight = {};          // what the lanes want and owe is cleared; nothing where they never do
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = residency.layers, .group_threads = 256}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = std::uint64_t{residency.layers} * head_groups * residency.max_blocks * 8};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    auto const layer = static_cast<layer_id>(item);
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();
    for (std::uint32_t g = 0; g < head_groups; ++g) {
      lane_id const lane = lane_of(row, g, head_groups);
      std::uint64_t const books = residency.lane_index(layer, lane);
      for (std::uint32_t b = rank; b < residency.max_blocks; b += size) {
        residency.slot_of[books * residency.max_blocks + b] = none<slot_id>;
        table.listed[books * table.stride + b] = none<slot_id>;
      }
      for (std::uint32_t w = rank; w < selection.previous_words; w += size) {
        selection.previous_of(layer, lane)[w] = 0;
      }
      for (std::uint32_t w = rank; foresight.wanted != nullptr && w < foresight.words; w += size) {
        foresight.wanted_of(layer, lane)[w] = 0;
        if (foresight.owed != nullptr) { foresight.owed_of(layer, lane)[w] = 0; }
      }
      if (rank == 0) {
        residency.lease_count[books] = 0;
        table.listed_count[books] = 0;
      }
      if (item == 0) {
        for (std::uint32_t i = rank; i < selection.max_selected; i += size) {
          table.landed[to_index(lane) * selection.max_selected + i] = none<slot_id>;
        }
        if (rank == 0) { table.landed_count[to_index(lane)] = 0; }
      }
    }
    if (item == 0) {
      for (std::uint32_t b = rank; b < residency.max_blocks; b += size) {
        host_blocks[to_index(row) * residency.max_blocks + b] = none<host_block_id>;
      }
      if (rank == 0) { info[to_index(row)] = row_info{}; }
    }
  }
};

static_assert(operation<reset_row>);

}  // namespace pulseinfer
