#pragma once

/// Words that host and device share: written last with release order, read first with acquire order.

#include <pulseinfer/config.hpp>

#include <atomic>
#include <cstdint>

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

/// Adds to a counter that one thread at a time writes and others may read at any time.
PULSEINFER_HOST_DEVICE inline void add_relaxed(std::uint64_t* counter, std::uint64_t amount)
{
#if defined(__CUDA_ARCH__)
  *static_cast<std::uint64_t volatile*>(counter) = *static_cast<std::uint64_t volatile*>(counter) + amount;
#else
  std::atomic_ref<std::uint64_t> const shared{*counter};
  shared.store(shared.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
#endif
}

[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint64_t load_relaxed(std::uint64_t const* counter)
{
#if defined(__CUDA_ARCH__)
  return *static_cast<std::uint64_t const volatile*>(counter);
#else
  return std::atomic_ref<std::uint64_t>{*const_cast<std::uint64_t*>(counter)}.load(std::memory_order_relaxed);
#endif
}

}  // namespace pulseinfer::device
