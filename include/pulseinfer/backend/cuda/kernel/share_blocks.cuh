#pragma once

/// share_blocks with all threads of a block at work on a row of scores, which it reads and writes once where it can.

#include <pulseinfer/backend/cuda/kernel/block_reduce.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t share_threads = 512;
/// Scores that a block of threads takes at a time: four each.
inline constexpr std::uint32_t share_tile = share_threads * 4U;

/// Four scores from `begin` on; those behind the row's blocks are -inf, so that their shares are 0.
[[nodiscard]] __device__ inline float4 load_scores(float const* scores, std::uint32_t begin, std::uint32_t blocks)
{
  if (begin >= blocks) {
    return make_float4(device::minus_infinity, device::minus_infinity, device::minus_infinity, device::minus_infinity);
  }
  float4 four = *reinterpret_cast<float4 const*>(scores + begin);
  if (begin + 1U >= blocks) { four.y = device::minus_infinity; }
  if (begin + 2U >= blocks) { four.z = device::minus_infinity; }
  if (begin + 3U >= blocks) { four.w = device::minus_infinity; }
  return four;
}

[[nodiscard]] __device__ inline float largest_of(float4 const& four)
{
  device::maximum const larger{};
  return larger(larger(four.x, four.y), larger(four.z, four.w));
}

[[nodiscard]] __device__ inline float4 masses_below(float4 const& four, float top)
{
  return make_float4(
    device::exponential(four.x - top), device::exponential(four.y - top), device::exponential(four.z - top),
    device::exponential(four.w - top));
}

[[nodiscard]] __device__ inline float sum_of(float4 const& four) { return (four.x + four.y) + (four.z + four.w); }

/// `Tiles` tiles of scores are kept in registers, further ones read again. The order of the sums is the same for any `Tiles`.
template <class Op, std::uint32_t Tiles>
__global__ void __launch_bounds__(share_threads) share_blocks_kernel(Op const op)
{
  __shared__ float temp_storage[share_threads / 32U];
  std::uint32_t const head = blockIdx.x % op.scores.heads;
  std::uint32_t const query = blockIdx.x / op.scores.heads % op.most_queries;
  row_id const row = op.rows[blockIdx.x / op.scores.heads / op.most_queries];
  row_info const state = op.info[to_index(row)];
  std::uint32_t const blocks = state.blocks(op.block_tokens);
  if (blocks <= op.budget_blocks || query >= op.pass.count(state.new_tokens, op.scores.queries)) { return; }
  float* const scores = op.scores.row(row, query, head);
  std::uint32_t const padded = round_up(blocks, device::float_lanes::size);
  std::uint32_t const first = threadIdx.x * 4U;

  float4 kept[Tiles];
  float largest = device::minus_infinity;
  device::maximum const larger{};
#pragma unroll
  for (std::uint32_t i = 0; i < Tiles; ++i) {
    kept[i] = load_scores(scores, first + i * share_tile, blocks);
    largest = larger(largest, largest_of(kept[i]));
  }
  for (std::uint32_t begin = first + Tiles * share_tile; begin < blocks; begin += share_tile) {
    largest = larger(largest, largest_of(load_scores(scores, begin, blocks)));
  }
  float const top = block_reduce(largest, temp_storage, larger);

  float sum = 0.0F;
#pragma unroll
  for (std::uint32_t i = 0; i < Tiles; ++i) {
    kept[i] = masses_below(kept[i], top);
    sum += sum_of(kept[i]);
  }
  for (std::uint32_t begin = first + Tiles * share_tile; begin < padded; begin += share_tile) {
    float4 const masses = masses_below(load_scores(scores, begin, blocks), top);
    sum += sum_of(masses);
    *reinterpret_cast<float4*>(scores + begin) = masses;
  }
  float const factor = 1.0F / block_reduce(sum, temp_storage, device::plus{});

  auto const store = [&](std::uint32_t begin, float4 const& masses) {
    *reinterpret_cast<float4*>(scores + begin) =
      make_float4(masses.x * factor, masses.y * factor, masses.z * factor, masses.w * factor);
  };
#pragma unroll
  for (std::uint32_t i = 0; i < Tiles; ++i) {
    if (first + i * share_tile < padded) { store(first + i * share_tile, kept[i]); }
  }
  for (std::uint32_t begin = first + Tiles * share_tile; begin < padded; begin += share_tile) {
    store(begin, *reinterpret_cast<float4 const*>(scores + begin));
  }
}

template <std::same_as<share_blocks> Op>
struct kernel_override<Op> {
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    return reinterpret_cast<std::uintptr_t>(op.scores.data) % 16U == 0 && op.scores.pitch % 4U == 0 &&
      op.shape().items <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    void const* const kernel = op.most_blocks <= share_tile
      ? reinterpret_cast<void const*>(&share_blocks_kernel<Op, 1>)
      : reinterpret_cast<void const*>(&share_blocks_kernel<Op, 4>);
    void* arguments[] = {const_cast<Op*>(&op)};
    return cudaLaunchKernel(
      kernel, dim3{static_cast<unsigned int>(op.shape().items)}, dim3{share_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<share_blocks>);

}  // namespace pulseinfer::detail
