#pragma once

/// Keeps selections where the host can read them: what a row's last prompt queries would attend, or what it selected last.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item per lane of the rows.
struct keep_selection {
  static constexpr char const* name = "keep_selection";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  selection_ref selection = {};
  block_id* kept = nullptr;  // [layers, lanes, max_selected], mapped
  layer_id layer = none<layer_id>;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = std::uint64_t{rows.count} * head_groups}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = shape().items * selection.max_selected * 8}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    lane_id const lane = lane_of(rows[item / head_groups], static_cast<std::uint32_t>(item % head_groups), head_groups);
    block_id const* const ids = selection.ids_of(lane);
    std::uint32_t const count = selection.counts[to_index(lane)];
    block_id* const target = kept + (to_index(layer) * selection.lanes + to_index(lane)) * selection.max_selected;
    for (std::uint32_t i = group.thread_rank(); i < selection.max_selected; i += group.size()) {
      target[i] = i < count ? ids[i] : none<block_id>;
    }
  }
};

static_assert(operation<keep_selection>);

/// One item per selected layer and lane of a row: keeps what the row selected last, for a row that leaves the device.
struct keep_previous {
  static constexpr char const* name = "keep_previous";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_id row = none<row_id>;
  selection_ref selection = {};
  block_id* kept = nullptr;  // [layers, lanes, max_selected], mapped
  std::uint32_t layers = 0;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = std::uint64_t{layers} * head_groups}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = shape().items * (selection.max_selected + selection.previous_words) * 4};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    auto const layer = static_cast<layer_id>(item / head_groups);
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t const* const previous = selection.previous_of(layer, lane);
    block_id* const target = kept + (to_index(layer) * selection.lanes + to_index(lane)) * selection.max_selected;
    std::uint32_t count = 0;
    for (std::uint32_t w = 0; w < selection.previous_words; ++w) {
      for (std::uint32_t bit = 0; previous[w] != 0 && bit < 32 && count < selection.max_selected; ++bit) {
        if (((previous[w] >> bit) & 1U) != 0) { target[count++] = static_cast<block_id>(w * 32 + bit); }
      }
    }
    for (; count < selection.max_selected; ++count) { target[count] = none<block_id>; }
  }
};

static_assert(operation<keep_previous>);

/// One item per row: the same row, with the last `queries` of its tokens as the ones that ask.
struct last_queries {
  static constexpr char const* name = "last_queries";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows]
  row_info* asking = nullptr;      // [max_rows], written
  std::int32_t queries = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = rows.count}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = rows.count * 32ULL}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    row_info row = info[to_index(rows[item])];
    std::int32_t const kept = row.new_tokens < queries ? row.new_tokens : queries;
    row.token_offset += row.new_tokens - kept;
    row.new_tokens = kept;
    asking[to_index(rows[item])] = row;
  }
};

static_assert(operation<last_queries>);

}  // namespace pulseinfer
