#pragma once

/// Pieces of a block that have digests of their own.

#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Valid tokens of one of a block's `Pieces` equal pieces, the first `valid` of the block being valid; 0 where none is.
/// @param block_tokens a multiple of Pieces
template <std::uint32_t Pieces>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t piece_tokens(
  std::uint32_t valid, std::uint32_t piece, std::uint32_t block_tokens)
{
  std::uint32_t const whole = block_tokens / Pieces;
  std::uint32_t const first = piece * whole;
  if (valid <= first) { return 0; }
  return valid - first < whole ? valid - first : whole;
}

}  // namespace pulseinfer::device
