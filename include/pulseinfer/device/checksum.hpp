#pragma once

/// Checksums of a block's planes, to find bytes that a copy lost or changed.

#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/block_layout.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// 32 bits over `count` bytes, each mixed with its place, so that swapped, shifted, stale and zeroed bytes all show. Made for
/// faults, not for adversaries.
/// @complexity count; one thread
[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint32_t checksum_bytes(std::byte const* bytes, std::uint64_t count)
{
  std::uint64_t state = 0x9E3779B97F4A7C15ULL ^ count;
  for (std::uint64_t i = 0; i < count; i += 8) {
    std::uint64_t word = 0;
    std::uint64_t const left = count - i < 8 ? count - i : 8;
    for (std::uint64_t b = 0; b < left; ++b) { word |= static_cast<std::uint64_t>(bytes[i + b]) << (8 * b); }
    state = (state ^ word) * 0xD6E8FEB86659FD93ULL;
    state ^= state >> 32U;
  }
  return static_cast<std::uint32_t>(state ^ (state >> 29U));
}

/// Checksum of one plane of a block. Padding between planes is not looked at: no append writes it.
[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint32_t checksum_plane(
  std::byte const* block, block_layout const& layout, std::uint32_t plane)
{
  return checksum_bytes(block + layout.planes[plane].offset, layout.planes[plane].bytes);
}

}  // namespace pulseinfer::device
