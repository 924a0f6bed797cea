#pragma once

/// plan_recall and post_plan with their ways over the link side by side: the generic bodies take them one after the other.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/plan_box.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/post_plan.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

/// Lanes of one plan that the kernel takes: their counts lie in shared memory.
inline constexpr std::uint32_t most_planned_lanes = 4096;
inline constexpr std::uint32_t plan_threads = 512;

template <class Op>
__global__ void __launch_bounds__(plan_threads) plan_recall_kernel(Op const op)
{
  extern __shared__ std::uint32_t begins[];  // [lanes + 1], then the lanes' ids
  __shared__ std::uint32_t temp_storage[block_scan_words];
  std::uint32_t const lanes = op.rows.count * op.head_groups;
  std::uint32_t* const ids = begins + lanes + 1;
  // Lists that may lie on the host and were written before the launch are read while the kernel before ends.
  bool const posts = op.posts && threadIdx.x < op.rows.count;
  plan_box box;
  if (posts) { box.find(op.mailbox, op.rows, op.sequence, threadIdx.x); }
  for (std::uint32_t i = threadIdx.x; i < lanes; i += blockDim.x) {
    ids[i] =
      static_cast<std::uint32_t>(to_index(lane_of(op.rows[i / op.head_groups], i % op.head_groups, op.head_groups)));
  }
  let_next_kernel_begin();
  await_kernel_before();
  if (posts) { box.look(); }

  std::uint32_t end = 0;
  for (std::uint32_t base = 0; base < lanes; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    std::uint32_t const count = i < lanes ? op.lanes.misses[ids[i]] : 0U;
    std::uint32_t total = 0;
    std::uint32_t const before = block_exclusive_sum(count, total, temp_storage);
    if (i < lanes) { begins[i] = end + before; }
    end += total;
  }
  if (threadIdx.x == 0) { begins[lanes] = end; }
  __syncthreads();
  for (std::uint32_t place = threadIdx.x; place <= op.rows.count; place += blockDim.x) {
    op.row_begin[place] = begins[place * op.head_groups];
  }
  // A warp for each lane.
  for (std::uint32_t lane = threadIdx.x / 32U; lane < lanes; lane += blockDim.x / 32U) {
    recall_entry const* const from = op.lanes.entries + std::uint64_t{ids[lane]} * op.max_selected;
    std::uint32_t const count = begins[lane + 1] - begins[lane];
    for (std::uint32_t i = threadIdx.x % 32U; i < count; i += 32U) {
      op.entries[begins[lane] + i] = from[i];
      op.failed[begins[lane] + i] = 0;
    }
  }
  if (!posts) { return; }
  std::uint32_t hits = 0;
  std::uint32_t flying = 0;
  std::uint32_t stalled = 0;
  for (std::uint32_t g = 0; g < op.head_groups; ++g) {
    std::uint32_t const lane = ids[threadIdx.x * op.head_groups + g];
    hits += op.lanes.hits[lane];
    flying += op.lanes.flying[lane];
    stalled += op.lanes.stalled[lane];
  }
  std::uint32_t const planned = begins[(threadIdx.x + 1) * op.head_groups] - begins[threadIdx.x * op.head_groups];
  box.post(op.outcome == nullptr ? nullptr : op.outcome + threadIdx.x, op.block_bytes, planned, hits, flying, stalled);
}

inline constexpr std::uint32_t post_threads = 32;

template <class Op>
__global__ void __launch_bounds__(post_threads) post_plan_kernel(Op const op)
{
  std::uint32_t const place = blockIdx.x * post_threads + threadIdx.x;
  bool const posts = place < op.rows.count;
  plan_box box;
  row_id row = none<row_id>;
  if (posts) {
    row = op.rows[place];
    box.find(op.mailbox, op.rows, op.sequence, place);
  }
  let_next_kernel_begin();
  await_kernel_before();
  if (!posts) { return; }
  box.look();
  box.post(
    row, op.head_groups, op.lanes.counts(), op.outcome == nullptr ? nullptr : op.outcome + place, op.block_bytes);
}

template <>
struct kernel_override<plan_recall> {
  [[nodiscard]] static bool takes(plan_recall const& op) noexcept
  {
    return op.rows.count <= plan_threads && std::uint64_t{op.rows.count} * op.head_groups <= most_planned_lanes;
  }

  static cudaError_t launch(plan_recall const& op, cudaStream_t stream) noexcept
  {
    std::size_t const scratch = (std::size_t{2} * op.rows.count * op.head_groups + 1) * sizeof(std::uint32_t);
    void* arguments[] = {const_cast<plan_recall*>(&op)};
    return launch_early(
      reinterpret_cast<void const*>(&plan_recall_kernel<plan_recall>), dim3{1}, dim3{plan_threads}, arguments, scratch,
      stream);
  }
};

static_assert(has_kernel_override<plan_recall>);

template <>
struct kernel_override<post_plan> {
  [[nodiscard]] static bool takes(post_plan const&) noexcept { return true; }

  static cudaError_t launch(post_plan const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<post_plan*>(&op)};
    return launch_early(
      reinterpret_cast<void const*>(&post_plan_kernel<post_plan>), dim3{divide_up(op.rows.count, post_threads)},
      dim3{post_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<post_plan>);

}  // namespace pulseinfer::detail
