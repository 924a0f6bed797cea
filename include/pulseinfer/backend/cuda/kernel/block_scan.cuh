#pragma once

/// Sums over the threads of a block, for kernels that place what each thread has.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

/// Words of shared memory that `block_exclusive_sum` needs.
inline constexpr std::uint32_t block_scan_words = 33;

/// @param total written in every thread: the sum of all
/// @param temp_storage [block_scan_words], free again after return
/// @return the sum of the values of threads with lower numbers   @pre whole warps, at most 1024 threads   @sync the block
[[nodiscard]] __device__ inline std::uint32_t block_exclusive_sum(
  std::uint32_t value, std::uint32_t& total, std::uint32_t* temp_storage)
{
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const warp = threadIdx.x / 32U;
  std::uint32_t sum = value;
#pragma unroll
  for (std::uint32_t width = 1; width < 32U; width *= 2) {
    std::uint32_t const below = __shfl_up_sync(0xFFFFFFFFU, sum, width);
    if (lane >= width) { sum += below; }
  }
  if (lane == 31U) { temp_storage[warp] = sum; }
  __syncthreads();
  if (warp == 0) {
    std::uint32_t const warps = blockDim.x / 32U;
    std::uint32_t of_warp = lane < warps ? temp_storage[lane] : 0U;
#pragma unroll
    for (std::uint32_t width = 1; width < 32U; width *= 2) {
      std::uint32_t const below = __shfl_up_sync(0xFFFFFFFFU, of_warp, width);
      if (lane >= width) { of_warp += below; }
    }
    temp_storage[lane] = of_warp;
  }
  __syncthreads();
  std::uint32_t const before = warp == 0 ? 0U : temp_storage[warp - 1];
  total = temp_storage[31];
  __syncthreads();
  return before + sum - value;
}

}  // namespace pulseinfer::detail
