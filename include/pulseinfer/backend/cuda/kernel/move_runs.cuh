#pragma once

/// move_runs with the loads and stores of the gather.

#include <pulseinfer/backend/cuda/kernel/gather_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/move_runs.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

/// A piece of `bytes` bytes, a multiple of Width, by a warp.
template <std::uint32_t Width>
__device__ void move_piece(std::byte* target, std::byte const* source, std::uint32_t bytes)
{
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const lanes = bytes / Width;
  for (std::uint32_t first = 0; first < lanes; first += 32U * gather_loads) {
    gather_lane<Width> values[gather_loads];
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      std::uint32_t const at = first + lane + i * 32U;
      if (at < lanes) { values[i].load(source + at * Width); }
    }
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      std::uint32_t const at = first + lane + i * 32U;
      if (at < lanes) { values[i].store(target + at * Width); }
    }
  }
}

template <class Op>
__global__ void __launch_bounds__(gather_threads) move_runs_kernel(__grid_constant__ Op const op)
{
  constexpr auto tile_bytes = static_cast<std::uint32_t>(Op::tile_bytes);
  static_assert(tile_bytes == 32 * gather_loads * 16);
  std::uint64_t const stride = std::uint64_t{gridDim.x} * (gather_threads / 32U);
  // Warps of all blocks in turn, so that few runs are spread over the blocks.
  std::uint64_t tile = threadIdx.x / 32U * gridDim.x + blockIdx.x;
  for (std::uint32_t i = 0; i < op.count; ++i) {
    copy_run const& run = op.runs[i];
    std::uint64_t const tiles = divide_up(run.bytes, tile_bytes);
    std::uint64_t const low =
      reinterpret_cast<std::uintptr_t>(run.target) | reinterpret_cast<std::uintptr_t>(run.source) | run.bytes;
    for (; tile < tiles; tile += stride) {
      std::uint64_t const offset = tile * tile_bytes;
      std::uint64_t const rest = run.bytes - offset;
      auto const bytes = static_cast<std::uint32_t>(rest < tile_bytes ? rest : tile_bytes);
      if (low % 16U == 0) {
        move_piece<16>(run.target + offset, run.source + offset, bytes);
      } else if (low % 8U == 0) {
        move_piece<8>(run.target + offset, run.source + offset, bytes);
      } else if (low % 4U == 0) {
        move_piece<4>(run.target + offset, run.source + offset, bytes);
      } else {
        move_piece<1>(run.target + offset, run.source + offset, bytes);
      }
    }
    tile -= tiles;  // counted from the next run's begin
  }
}

template <>
struct kernel_override<move_runs> {
  [[nodiscard]] static bool takes(move_runs const&) noexcept { return true; }

  static cudaError_t launch(move_runs const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<move_runs*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&move_runs_kernel<move_runs>), dim3{std::min(op.groups, most_gather_blocks)},
      dim3{gather_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<move_runs>);

}  // namespace pulseinfer::detail
