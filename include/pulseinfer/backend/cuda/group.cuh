#pragma once

/// The thread groups that run items on a GPU: one thread (device::solo_group), one warp, one block.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/group.hpp>

#include <cstdint>

namespace pulseinfer::device {

// Callable from the host as far as the compiler is concerned, since formulas are compiled for both; a host never runs them.

/// A warp of a one-dimensional block whose size is a multiple of 32.
struct warp_group {
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t thread_rank() const
  {
#if defined(__CUDA_ARCH__)
    return threadIdx.x % 32U;
#else
    return 0;
#endif
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t size() const { return 32; }
  PULSEINFER_HOST_DEVICE void sync() const
  {
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
};

/// All threads of a one-dimensional block.
struct block_group {
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t thread_rank() const
  {
#if defined(__CUDA_ARCH__)
    return threadIdx.x;
#else
    return 0;
#endif
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t size() const
  {
#if defined(__CUDA_ARCH__)
    return blockDim.x;
#else
    return 1;
#endif
  }
  PULSEINFER_HOST_DEVICE void sync() const
  {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
};

static_assert(thread_group<warp_group>);
static_assert(thread_group<block_group>);

}  // namespace pulseinfer::device
