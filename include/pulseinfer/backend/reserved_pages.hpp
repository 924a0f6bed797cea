#pragma once

/// Addresses without memory behind them until they are written to.

#include <cstddef>
#include <sys/mman.h>

namespace pulseinfer::detail {

/// @return aligned to pages, zero when read; nullptr where the system has no such addresses
[[nodiscard]] inline void* reserve_pages(std::size_t bytes) noexcept
{
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

inline void give_pages_back(void* memory, std::size_t bytes) noexcept { static_cast<void>(munmap(memory, bytes)); }

}  // namespace pulseinfer::detail
