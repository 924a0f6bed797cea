#pragma once

/// The pieces that a block falls into where each head is moved by itself.

#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/plane.hpp>

#include <cstdint>
#include <vector>

namespace pulseinfer {

/// A contiguous piece of a block.
struct block_fragment {
  std::uint64_t offset = 0;  ///< bytes from the block's begin
  std::uint64_t bytes = 0;
};

/// One fragment per KV head for keys and one for values where a head's rows lie together, else one per row; one for each
/// opaque plane. Padding between rows of a head moves with them, padding between fragments doesn't.
[[nodiscard]] inline std::vector<block_fragment> block_fragments(block_layout const& layout)
{
  std::vector<block_fragment> fragments;
  for (std::uint32_t p = 0; p < layout.plane_count; ++p) {
    plane_layout const& plane = layout.planes[p];
    if (plane.kind == plane_kind::opaque) {
      fragments.push_back({.offset = plane.offset, .bytes = plane.bytes});
      continue;
    }
    bool const rows_together = layout.heads == 1 || plane.head_stride >= layout.block_tokens * plane.token_stride;
    std::uint32_t const rows = rows_together ? 1 : layout.block_tokens;
    std::uint64_t const bytes =
      rows_together ? (layout.block_tokens - 1) * plane.token_stride + plane.row_bytes : plane.row_bytes;
    for (std::uint32_t head = 0; head < layout.heads; ++head) {
      for (std::uint32_t row = 0; row < rows; ++row) {
        fragments.push_back({.offset = row_offset(plane, head, row), .bytes = bytes});
      }
    }
  }
  return fragments;
}

}  // namespace pulseinfer
