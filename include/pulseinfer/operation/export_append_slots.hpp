#pragma once

/// Where a step's tokens go, for host engines that write their cache themselves.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// The slot mapping of the tokens that this step appends in a layer: slot * block_tokens + place in the block, at the token's
/// place in the engine's tensors; -1 where no token of `rows` stands, or its block has no slot. Run it before `enter`, and
/// the engine's own writes too: `enter` then gets empty keys and values, and makes digests of what stands in the slots.
struct export_append_slots {
  static constexpr char const* name = "export_append_slots";
  static constexpr operation_kind kind = operation_kind::metadata;
  static constexpr std::uint64_t tokens_per_item = 256;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  residency_ref residency = {};
  std::uint32_t block_tokens = 1;
  std::uint32_t head_groups = 1;
  std::uint64_t tokens = 0;              ///< tokens that the engine's tensors have places for
  std::int64_t* slot_mapping = nullptr;  // [head_groups, tokens], every place written

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = divide_up(tokens, tokens_per_item) * head_groups, .group_threads = 128};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = tokens * head_groups * (8ULL + rows.count * sizeof(row_info))};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    auto const head_group = static_cast<std::uint32_t>(item % head_groups);
    std::uint64_t const begin = item / head_groups * tokens_per_item;
    std::uint64_t const end = begin + tokens_per_item < tokens ? begin + tokens_per_item : tokens;
    for (std::uint64_t token = begin + group.thread_rank(); token < end; token += group.size()) {
      slot_mapping[head_group * tokens + token] = slot_of(token, head_group);
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::int64_t slot_of(std::uint64_t token, std::uint32_t head_group) const
  {
    for (row_id const row : rows) {
      row_info const state = info[to_index(row)];
      std::int64_t const place = static_cast<std::int64_t>(token) - state.token_offset;
      if (place < 0 || place >= state.new_tokens) { continue; }
      auto const position = static_cast<std::uint64_t>(state.tokens - state.new_tokens + place);
      std::uint64_t const block = position / block_tokens;
      if (block >= residency.max_blocks) { return -1; }
      slot_id const slot = residency.slots_of_lane(layer, lane_of(row, head_group, head_groups))[block];
      return is_none(slot) ? -1 : static_cast<std::int64_t>(to_index(slot) * block_tokens + position % block_tokens);
    }
    return -1;
  }
};

static_assert(operation<export_append_slots>);

}  // namespace pulseinfer
