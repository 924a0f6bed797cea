#pragma once

/// One kind of data that a block carries for its tokens.

#include <pulseinfer/numeric.hpp>

#include <cstdint>
#include <string>
#include <type_traits>

namespace pulseinfer {

/// What a plane holds. Everything but keys and values is moved with the block and never read by the library.
enum class plane_kind : std::uint8_t { key, value, opaque };

/// A plane beyond keys and values, as a configuration names it: quantisation scales, index keys, and the like.
struct extra_plane {
  std::string name;
  std::uint32_t bytes_per_token = 0;  ///< Bytes that each token adds, for one head group.
  std::uint32_t bytes_per_block = 0;  ///< Bytes that each block carries besides, for one head group.
};

/// Where a plane lies inside a block. Row of (head, token): offset + head * head_stride + token * token_stride.
struct plane_layout {
  std::uint64_t offset = 0;        ///< bytes from the block's begin
  std::uint64_t head_stride = 0;   ///< bytes; 0 where the plane has no heads
  std::uint64_t token_stride = 0;  ///< bytes
  std::uint64_t bytes = 0;         ///< bytes of the plane in a block, padding excluded
  std::uint32_t row_bytes = 0;     ///< bytes of one (head, token) row
  std::uint32_t dim = 0;           ///< elements of a row; bytes for opaque planes
  dtype type = dtype::bytes;
  plane_kind kind = plane_kind::opaque;
};

static_assert(std::is_trivially_copyable_v<plane_layout>);

}  // namespace pulseinfer
