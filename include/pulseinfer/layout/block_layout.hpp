#pragma once

/// Addresses inside one block of one layer and head group.

#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/plane.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// The planes of a block. Made by `make_block_layout` from a geometry; trivially copyable, so kernels take it by value.
struct block_layout {
  static constexpr std::uint32_t max_planes = 8;

  plane_layout planes[max_planes] =
    {};  ///< planes[0] keys, planes[1] values (absent with a shared latent row), then extras
  std::uint32_t plane_count = 0;
  std::uint32_t block_tokens = 0;
  std::uint32_t heads = 0;           ///< KV heads of one head group
  std::uint64_t block_bytes = 0;     ///< bytes of a block, a multiple of `alignment`
  std::uint32_t alignment = 0;       ///< bytes that every block's address may be assumed to be a multiple of
  bool value_is_key_prefix = false;  ///< MLA: the value row is the first `value_dim` elements of the key row
  std::uint32_t value_dim = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr plane_layout const& key() const { return planes[0]; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr plane_layout const& value() const
  {
    return value_is_key_prefix ? planes[0] : planes[1];
  }
};

static_assert(std::is_trivially_copyable_v<block_layout>);

/// Byte offset of the (head, token) row of `plane` from the block's begin.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t row_offset(
  plane_layout const& plane, std::uint32_t head, std::uint32_t token)
{
  return plane.offset + std::uint64_t{head} * plane.head_stride + std::uint64_t{token} * plane.token_stride;
}

}  // namespace pulseinfer
