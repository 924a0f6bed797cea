#pragma once

/// Copies bytes with the widest accesses that the addresses allow.

#include <pulseinfer/config.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Copies `count` lanes of `Width` bytes, by all ranks together; both addresses are multiples of Width. Eight lanes a rank
/// are loaded before the first is stored, so that as many reads travel over the link at once.
template <std::uint32_t Width>
PULSEINFER_HOST_DEVICE void copy_lanes(
  std::byte* target, std::byte const* source, std::uint64_t count, std::uint32_t rank, std::uint32_t ranks)
{
  struct alignas(Width) lane {
    std::byte bytes[Width];
  };
  constexpr std::uint32_t together = 8;
  auto const load = [&](lane& value, std::uint64_t place) {
    __builtin_memcpy(&value, __builtin_assume_aligned(source + place * Width, Width), Width);
  };
  auto const store = [&](lane const& value, std::uint64_t place) {
    __builtin_memcpy(__builtin_assume_aligned(target + place * Width, Width), &value, Width);
  };
  std::uint64_t place = rank;
  for (; place + std::uint64_t{together - 1} * ranks < count; place += std::uint64_t{together} * ranks) {
    lane values[together];
    for (std::uint32_t i = 0; i < together; ++i) { load(values[i], place + std::uint64_t{i} * ranks); }
    for (std::uint32_t i = 0; i < together; ++i) { store(values[i], place + std::uint64_t{i} * ranks); }
  }
  for (; place < count; place += ranks) {
    lane value;
    load(value, place);
    store(value, place);
  }
}

/// Copies `bytes` bytes by all ranks together: lanes of 16, 8, 4, 2 or 1 bytes as both addresses allow, then the rest byte by
/// byte. The ranges do not overlap.   @sync none
PULSEINFER_HOST_DEVICE inline void copy_bytes(
  std::byte* target, std::byte const* source, std::uint64_t bytes, std::uint32_t rank, std::uint32_t ranks)
{
#if !defined(__CUDA_ARCH__)
  if (ranks == 1) {
    __builtin_memcpy(target, source, bytes);
    return;
  }
#endif
  std::uint64_t const low = reinterpret_cast<std::uintptr_t>(target) | reinterpret_cast<std::uintptr_t>(source);
  std::uint64_t copied = 0;
  if (low % 16 == 0) {
    copy_lanes<16>(target, source, bytes / 16, rank, ranks);
    copied = bytes - bytes % 16;
  } else if (low % 8 == 0) {
    copy_lanes<8>(target, source, bytes / 8, rank, ranks);
    copied = bytes - bytes % 8;
  } else if (low % 4 == 0) {
    copy_lanes<4>(target, source, bytes / 4, rank, ranks);
    copied = bytes - bytes % 4;
  } else if (low % 2 == 0) {
    copy_lanes<2>(target, source, bytes / 2, rank, ranks);
    copied = bytes - bytes % 2;
  }
  copy_lanes<1>(target + copied, source + copied, bytes - copied, rank, ranks);
}

}  // namespace pulseinfer::device
