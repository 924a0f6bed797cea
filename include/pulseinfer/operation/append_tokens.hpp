#pragma once

/// Writes a step's keys and values into the open blocks.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item writes one KV head of the new token of one row: its key and value, rounded to the planes' types.
/// Token t of a row comes from tensor row info.token_offset + t and goes to position info.tokens - info.new_tokens + t.
/// A token whose block has no slot is left out, as is everything where `keys` is empty: the host engine writes itself.
struct append_tokens {
  static constexpr char const* name = "append_tokens";
  static constexpr operation_kind kind = operation_kind::data;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  tensor_view keys = {};           // [tokens, kv_heads, key dim]
  tensor_view values = {};         // [tokens, kv_heads, value dim]; empty where values are a prefix of keys
  residency_ref residency = {};
  slot_pool_ref pool = {};
  block_layout layout = {};
  std::uint32_t head_groups = 1;
  std::uint32_t most_tokens = 1;  ///< no row appends more; known to the host

  [[nodiscard]] launch_shape shape() const
  {
    std::uint64_t const items = keys.empty() ? 0 : std::uint64_t{rows.count} * head_groups * layout.heads * most_tokens;
    return {.items = items, .group_threads = 32};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t tokens = 0;
    for (row_id const row : rows) { tokens += static_cast<std::uint64_t>(info[to_index(row)].new_tokens); }
    std::uint64_t const heads = std::uint64_t{layout.heads} * head_groups;
    std::uint64_t bytes = keys.dim * size_of(keys.type) + layout.key().row_bytes;
    if (!layout.value_is_key_prefix) { bytes += values.dim * size_of(values.type) + layout.value().row_bytes; }
    return {.device_bytes = keys.empty() ? 0 : tokens * heads * bytes};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    auto const kv_head = static_cast<std::uint32_t>(item % (std::uint64_t{head_groups} * layout.heads));
    std::uint64_t const of_heads = item / (std::uint64_t{head_groups} * layout.heads);
    auto const token = static_cast<std::int32_t>(of_heads % most_tokens);
    row_id const row = rows[of_heads / most_tokens];
    std::uint32_t const head_group = kv_head / layout.heads;
    std::uint32_t const head = kv_head % layout.heads;
    row_info const state = info[to_index(row)];
    if (token >= state.new_tokens) { return; }
    auto const position = static_cast<std::uint32_t>(state.tokens - state.new_tokens + token);
    std::uint32_t const block = position / layout.block_tokens;
    if (block >= residency.max_blocks) { return; }
    slot_id const slot = residency.slots_of_lane(layer, lane_of(row, head_group, head_groups))[block];
    if (is_none(slot)) { return; }

    std::byte* const target = pool.address(layer, slot);
    std::uint32_t const place = position % layout.block_tokens;
    auto const source = static_cast<std::uint64_t>(state.token_offset + token);
    plane_layout const& key = layout.key();
    device::convert_row(
      group, keys.row(source, kv_head), keys.type, target + row_offset(key, head, place), key.type, key.dim);
    if (layout.value_is_key_prefix) { return; }
    plane_layout const& value = layout.value();
    device::convert_row(
      group, values.row(source, kv_head), values.type, target + row_offset(value, head, place), value.type, value.dim);
  }
};

static_assert(operation<append_tokens>);

}  // namespace pulseinfer
