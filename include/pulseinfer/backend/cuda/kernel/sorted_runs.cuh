#pragma once

/// Ranks of distinct keys in shared memory: each warp sorts runs of 32, and a key's rank is what searches of all runs find.
/// Fewer steps than comparing all pairs, and two barriers.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t run_keys = 32;

/// Keys of a warp, ascending by lane.   @pre all lanes of the warp call it
template <class Key>
[[nodiscard]] __device__ Key sort_warp(Key key)
{
  std::uint32_t const lane = threadIdx.x % 32U;
#pragma unroll
  for (std::uint32_t size = 2; size <= 32U; size *= 2U) {
#pragma unroll
    for (std::uint32_t stride = size / 2U; stride > 0U; stride /= 2U) {
      Key const other = __shfl_xor_sync(0xFFFFFFFFU, key, static_cast<int>(stride));
      bool const keeps_smaller = ((lane & size) == 0U) == ((lane & stride) == 0U);
      key = (key < other) == keeps_smaller ? key : other;
    }
  }
  return key;
}

/// @param keys [32 * runs] shared, sorted in runs   @return how many of them are smaller than `key`
template <class Key>
[[nodiscard]] __device__ std::uint32_t rank_in_runs(Key const* keys, std::uint32_t runs, Key key)
{
  std::uint32_t rank = 0;
#pragma unroll 4
  for (std::uint32_t run = 0; run < runs; ++run) {
    Key const* const of_run = keys + run * run_keys;
    std::uint32_t smaller = 0;
#pragma unroll
    for (std::uint32_t step = run_keys / 2U; step > 0U; step /= 2U) {
      smaller += of_run[smaller + step - 1U] < key ? step : 0U;
    }
    rank += smaller + (of_run[smaller] < key ? 1U : 0U);
  }
  return rank;
}

}  // namespace pulseinfer::detail
