#pragma once

/// vote_blocks with the sums in registers: the generic body adds to memory for each voter.

#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t vote_threads = 128;
/// Blocks that a block of threads sums: four each, which lie in one word of bits.
inline constexpr std::uint32_t vote_stretch = vote_threads * 4U;

template <class Op>
__global__ void __launch_bounds__(vote_threads) vote_blocks_kernel(Op const op)
{
  std::uint32_t const stretches = divide_up(op.most_blocks, vote_stretch);
  std::uint32_t const begin = blockIdx.x % stretches * vote_stretch + threadIdx.x * 4U;
  std::uint32_t const head_group = blockIdx.x / stretches % op.head_groups;
  row_id const row = op.rows[blockIdx.x / stretches / op.head_groups];
  row_info const state = op.info[to_index(row)];
  std::uint32_t const blocks = state.blocks(op.block_tokens);
  if (blocks <= op.budget_blocks || begin >= blocks) { return; }

  lane_id const lane = lane_of(row, head_group, op.head_groups);
  float* const votes = op.votes + to_index(lane) * op.scores.pitch + begin;
  std::uint32_t const heads = op.scores.heads / op.head_groups;
  std::uint32_t const voters = op.pass.count(state.new_tokens, op.scores.queries) * heads;
  float4 sum = op.pass.first == 0U ? make_float4(0.0F, 0.0F, 0.0F, 0.0F) : *reinterpret_cast<float4 const*>(votes);
#pragma unroll 4
  for (std::uint32_t voter = 0; voter < voters; ++voter) {
    float4 const shares =
      *reinterpret_cast<float4 const*>(op.scores.row(row, voter / heads, head_group * heads + voter % heads) + begin);
    sum.x += shares.x;
    sum.y += shares.y;
    sum.z += shares.z;
    sum.w += shares.w;
  }
  if (op.pass.last && op.selection.previous_words != 0U) {
    std::uint32_t const bits = op.selection.previous_of(op.layer, lane)[begin / 32U] >> begin % 32U;
    sum.x *= (bits & 1U) != 0U ? op.favour : 1.0F;
    sum.y *= (bits & 2U) != 0U ? op.favour : 1.0F;
    sum.z *= (bits & 4U) != 0U ? op.favour : 1.0F;
    sum.w *= (bits & 8U) != 0U ? op.favour : 1.0F;
  }
  float const all[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (std::uint32_t i = 0; i < 4U; ++i) {
    if (begin + i < blocks) { votes[i] = all[i]; }
  }
}

template <std::same_as<vote_blocks> Op>
struct kernel_override<Op> {
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    return reinterpret_cast<std::uintptr_t>(op.scores.data) % 16U == 0 &&
      reinterpret_cast<std::uintptr_t>(op.votes) % 16U == 0 && op.scores.pitch % 4U == 0 &&
      blocks(op) <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    if (blocks(op) == 0) { return cudaSuccess; }
    void* arguments[] = {const_cast<Op*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&vote_blocks_kernel<Op>), dim3{static_cast<unsigned int>(blocks(op))},
      dim3{vote_threads}, arguments, 0, stream);
  }

 private:
  [[nodiscard]] static std::uint64_t blocks(Op const& op) noexcept
  {
    return std::uint64_t{op.rows.count} * op.head_groups * divide_up(op.most_blocks, vote_stretch);
  }
};

static_assert(has_kernel_override<vote_blocks>);

}  // namespace pulseinfer::detail
