#pragma once

/// The list of slots that attention reads, for the rows of a visit.

#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/row_info.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Part of a visit: all selected blocks, those that were resident when the recall was planned, or those it brought.
enum class part : std::uint8_t { whole, hits, landed };

[[nodiscard]] constexpr char const* name_of(part value)
{
  switch (value) {
    case part::whole: return "whole";
    case part::hits: return "hits";
    case part::landed: return "landed";
  }
  return "unknown";
}

/// Which lists a recall makes for attention: one of everything that it selects, or one of what was resident and one of what
/// it brings.
enum class recall_lists : std::uint8_t { whole, hits_then_landed };

/// Whether a part is among the lists that were made.
[[nodiscard]] constexpr bool has_part(recall_lists made, part which)
{
  return (made == recall_lists::whole) == (which == part::whole);
}

/// Dense table of slots with lengths: lane r * head_groups + g reads slots[lane * stride + i], i < counts[lane], blocks by
/// ascending id, the open block last. Device memory; valid until the row's next `enter`.
struct block_table {
  slot_id const* slots = nullptr;         // [lanes, stride]; places past a lane's count hold none
  std::uint32_t const* counts = nullptr;  // [lanes]
  row_info const* info = nullptr;         // [rows]
  slot_pool_ref pool = {};
  block_layout layout = {};
  layer_id layer = none<layer_id>;
  std::uint32_t stride = 0;
  std::uint32_t head_groups = 1;
  part which = part::whole;

  /// Valid tokens in the blocks that a lane's table lists. Only the last block of a whole or hits table can be partial.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t tokens(lane_id lane) const
  {
    std::uint32_t const count = counts[to_index(lane)];
    if (count == 0 || which == part::landed) { return count * layout.block_tokens; }
    row_info const& row = info[to_index(lane) / head_groups];
    std::uint32_t const last = row.blocks(layout.block_tokens) - 1U;
    return (count - 1U) * layout.block_tokens + row.valid_tokens(last, layout.block_tokens);
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte const* block(lane_id lane, std::uint32_t place) const
  {
    return pool.address(layer, slots[to_index(lane) * stride + place]);
  }
};

static_assert(std::is_trivially_copyable_v<block_table>);

}  // namespace pulseinfer
