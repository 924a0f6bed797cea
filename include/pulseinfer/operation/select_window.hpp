#pragma once

/// The selection of a windowed layer: a rule, no scores.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// First block that a windowed layer still reads beside its sinks, for a row whose step's first query stands at position
/// tokens - new_tokens: that query sees the last `window_tokens` tokens up to and with its own.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t first_window_block(
  std::uint32_t tokens, std::uint32_t new_tokens, std::uint32_t window_tokens, std::uint32_t block_tokens)
{
  std::uint32_t const first_query_end = tokens - new_tokens + 1U;
  return first_query_end <= window_tokens ? 0U : (first_query_end - window_tokens) / block_tokens;
}

/// Blocks of a windowed layer's sinks.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t sink_blocks(
  std::uint32_t sink_tokens, std::uint32_t block_tokens)
{
  return (sink_tokens + block_tokens - 1U) / block_tokens;
}

/// One item per lane: the sinks and the blocks that the window touches, ascending.
struct select_window {
  static constexpr char const* name = "select_window";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  selection_ref selection = {};
  std::uint32_t window_tokens = 0;
  std::uint32_t sink_tokens = 0;
  std::uint32_t block_tokens = 1;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = std::uint64_t{rows.count} * head_groups}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = shape().items * selection.max_selected * 4}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    row_info const state = info[to_index(row)];
    std::uint32_t const blocks = state.blocks(block_tokens);
    std::uint32_t const first = first_window_block(
      static_cast<std::uint32_t>(state.tokens), static_cast<std::uint32_t>(state.new_tokens), window_tokens,
      block_tokens);
    std::uint32_t const all_sinks = sink_blocks(sink_tokens, block_tokens);
    std::uint32_t const sinks = all_sinks < first ? all_sinks : first;
    std::uint32_t const count = sinks + (blocks - first);
    block_id* const ids = selection.ids_of(lane);
    for (std::uint32_t i = group.thread_rank(); i < selection.max_selected; i += group.size()) {
      std::uint32_t const block = i < sinks ? i : first + (i - sinks);
      ids[i] = i < count ? static_cast<block_id>(block) : none<block_id>;
    }
    if (group.thread_rank() == 0) { selection.counts[to_index(lane)] = count; }
  }
};

static_assert(operation<select_window>);

}  // namespace pulseinfer
