#pragma once

/// Runs an operation's items as a kernel.

#include <pulseinfer/backend/cuda/group.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

/// Items go round over the groups of the grid. `scratch_stride` bytes of shared memory belong to each group of a block.
template <class Group, class Op>
__global__ void run_items(
  Op const op, std::uint64_t const items, std::uint32_t const group_threads, std::uint32_t const scratch_stride,
  std::size_t const scratch_bytes)
{
  extern __shared__ __align__(16) std::byte shared_scratch[];
  Group const group{};
  std::uint32_t const groups = blockDim.x / group_threads;
  std::uint32_t const place = threadIdx.x / group_threads;
  scratch_ref const scratch{shared_scratch + place * scratch_stride, scratch_bytes};
  std::uint64_t const step = static_cast<std::uint64_t>(gridDim.x) * groups;
  for (std::uint64_t item = static_cast<std::uint64_t>(blockIdx.x) * groups + place; item < items; item += step) {
    op(group, item, scratch);
    group.sync();  // the next item takes the same scratch
  }
}

/// How a launch is laid out over blocks.
struct launch_plan {
  std::uint32_t group_threads = 0;  ///< as the groups will say by size()
  std::uint32_t groups = 0;         ///< of a block
  std::uint32_t blocks = 0;
  std::uint32_t scratch_stride = 0;
  std::size_t scratch_bytes = 0;  ///< of one item

  [[nodiscard]] unsigned int shared_bytes() const noexcept { return groups * scratch_stride; }
};

/// Threads that a group of `asked` threads gets: one, a warp, or a block of whole warps.
[[nodiscard]] constexpr std::uint32_t threads_of_group(std::uint32_t asked) noexcept
{
  return asked <= 1 ? 1 : divide_up(asked, 32U) * 32U;
}

/// Small groups share blocks of 128 threads, fewer when their scratch would not fit.
/// @pre shape.items > 0, group threads at most 1024, scratch at most `block_scratch_bytes`
[[nodiscard]] constexpr launch_plan plan_launch(
  launch_shape shape, std::size_t scratch_bytes, std::size_t block_scratch_bytes, std::uint32_t max_blocks) noexcept
{
  launch_plan plan;
  plan.group_threads = threads_of_group(shape.group_threads);
  plan.scratch_bytes = scratch_bytes;
  plan.scratch_stride = static_cast<std::uint32_t>(divide_up(scratch_bytes, 16U) * 16U);
  plan.groups = plan.group_threads <= 32 ? 128U / plan.group_threads : 1U;
  if (plan.scratch_stride > 0) {
    std::size_t const fit = std::max<std::size_t>(1, block_scratch_bytes / plan.scratch_stride);
    plan.groups = static_cast<std::uint32_t>(std::min<std::size_t>(plan.groups, fit));
  }
  std::uint64_t const blocks = divide_up(shape.items, plan.groups);
  plan.blocks = static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, max_blocks));
  return plan;
}

/// Shared memory that a block gets without asking.
inline constexpr std::size_t default_block_scratch_bytes = std::size_t{48} << 10U;

template <class Group, class Op>
[[nodiscard]] cudaError_t launch_as(
  Op const& op, std::uint64_t items, launch_plan const& plan, cudaStream_t stream) noexcept
{
  auto const kernel = &run_items<Group, Op>;
  if (plan.shared_bytes() > default_block_scratch_bytes) {
    cudaError_t const code = cudaFuncSetAttribute(
      reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(plan.shared_bytes()));
    if (code != cudaSuccess) { return code; }
  }
  std::uint32_t group_threads = plan.group_threads;
  std::uint32_t scratch_stride = plan.scratch_stride;
  std::size_t scratch_bytes = plan.scratch_bytes;
  void* arguments[] = {const_cast<Op*>(&op), &items, &group_threads, &scratch_stride, &scratch_bytes};
  // Not <<<>>>: this returns its own error and not one that somebody else has left.
  return cudaLaunchKernel(
    reinterpret_cast<void const*>(kernel), dim3{plan.blocks}, dim3{plan.group_threads * plan.groups}, arguments,
    plan.shared_bytes(), stream);
}

/// As the operation's own kernel where it has one (kernel_override.cuh) that takes it, else as its generic body.
/// Not inlined: a program may declare it `extern` for an operation, and so compile the operation's kernels in one source alone.
/// @pre as plan_launch
template <operation Op>
[[nodiscard]] __noinline__ cudaError_t
launch_operation(Op const& op, launch_plan const& plan, cudaStream_t stream) noexcept
{
  if constexpr (has_kernel_override<Op>) {
    if (kernel_override<Op>::takes(op)) { return kernel_override<Op>::launch(op, stream); }
  }
  std::uint64_t const items = op.shape().items;
  if (plan.group_threads == 1) { return launch_as<device::solo_group>(op, items, plan, stream); }
  if (plan.group_threads == 32) { return launch_as<device::warp_group>(op, items, plan, stream); }
  return launch_as<device::block_group>(op, items, plan, stream);
}

}  // namespace pulseinfer::detail
