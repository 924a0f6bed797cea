#pragma once

/// Words that host and device share: written last with release order, read first with acquire order.

#include <atomic>
#include <cstdint>

#include <pulseinfer/config.hpp>

namespace pulseinfer::device {

/// Publishes `value`: who sees it with load_acquire sees all that was written before.
PULSEINFER_HOST_DEVICE inline void store_release(std::uint32_t* word, std::uint32_t value)
{
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  *static_cast<std::uint32_t volatile*>(word) = value;
#else
  std::atomic_ref<std::uint32_t>{*word}.store(value, std::memory_order_release);
#endif
}

[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint32_t load_acquire(std::uint32_t const* word)
{
#if defined(__CUDA_ARCH__)
  std::uint32_t const value = *static_cast<std::uint32_t const volatile*>(word);
  __threadfence_system();
  return value;
#else
  return std::atomic_ref<std::uint32_t>{*const_cast<std::uint32_t*>(word)}.load(std::memory_order_acquire);
#endif
}

}  // namespace pulseinfer::device
