#pragma once

/// One value of all threads of a block, in a fixed order.

#include <pulseinfer/device/reduce.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

/// Combines as a tree over the threads of each warp, then over the warps in their order.
/// @param temp_storage [warps] shared; free again after return   @return the result, in every thread
/// @pre whole warps   @sync the block
template <class T, class Combine>
[[nodiscard]] __device__ T block_reduce(T value, T* temp_storage, Combine combine)
{
#pragma unroll
  for (std::uint32_t width = 16; width > 0U; width /= 2U) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFFU, value, static_cast<int>(width)));
  }
  if (threadIdx.x % 32U == 0U) { temp_storage[threadIdx.x / 32U] = value; }
  __syncthreads();
  T result = temp_storage[0];
  for (std::uint32_t warp = 1; warp < blockDim.x / 32U; ++warp) { result = combine(result, temp_storage[warp]); }
  __syncthreads();
  return result;
}

}  // namespace pulseinfer::detail
