#pragma once

/// What the device knows of a row in this step.

#include <pulseinfer/config.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Residency of a row: every block in a slot, or a lease of hot slots with the rest on the host.
enum class row_mode : std::int32_t { idle, dense_resident, sparse_resident, sparse_offloaded };

/// One row's state, written by `begin_step` in stream order. Sixteen bytes of int32 words, so that it can be patched.
struct row_info {
  std::int32_t tokens = 0;        ///< tokens in the cache once this step has appended its own
  std::int32_t new_tokens = 0;    ///< tokens that this step appends (and queries per head)
  std::int32_t token_offset = 0;  ///< the row's first token in the engine's [tokens, heads, dim] tensors
  row_mode mode = row_mode::idle;

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t blocks(std::uint32_t block_tokens) const
  {
    return (static_cast<std::uint32_t>(tokens) + block_tokens - 1U) / block_tokens;
  }

  /// Valid tokens of block `block`.
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t valid_tokens(
    std::uint32_t block, std::uint32_t block_tokens) const
  {
    std::uint32_t const before = block * block_tokens;
    std::uint32_t const total = static_cast<std::uint32_t>(tokens);
    if (total <= before) { return 0; }
    return total - before < block_tokens ? total - before : block_tokens;
  }
};

static_assert(std::is_trivially_copyable_v<row_info> && sizeof(row_info) == 16);

}  // namespace pulseinfer
