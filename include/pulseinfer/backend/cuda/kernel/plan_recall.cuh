#pragma once

/// plan_recall with its ways over the link side by side: the generic body takes them one after the other.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/plan_recall.hpp>
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
  let_next_kernel_begin();
  await_kernel_before();

  // Words on the host are asked for before anything needs them.
  bool const posts = threadIdx.x < op.rows.count;
  std::uint32_t number = 0;
  std::uint64_t misses_before = 0;
  std::uint64_t hits_before = 0;
  row_mailbox* box = nullptr;
  if (posts) {
    number = op.sequence[threadIdx.x];
    box = op.mailbox + to_index(op.rows[threadIdx.x]);
    misses_before = static_cast<std::uint64_t const volatile&>(box->total_misses);
    hits_before = static_cast<std::uint64_t const volatile&>(box->total_hits);
  }

  std::uint32_t end = 0;
  for (std::uint32_t base = 0; base < lanes; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    std::uint32_t count = 0;
    if (i < lanes) {
      ids[i] =
        static_cast<std::uint32_t>(to_index(lane_of(op.rows[i / op.head_groups], i % op.head_groups, op.head_groups)));
      count = op.lanes.misses[ids[i]];
    }
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
  box->bytes = planned * op.block_bytes;
  box->misses = planned;
  box->flying = flying;
  box->hits = hits;
  box->stalled = stalled;
  if (op.outcome != nullptr) {
    op.outcome[threadIdx.x].planned = planned;
    op.outcome[threadIdx.x].hits = hits;
    device::store_release(&op.outcome[threadIdx.x].stalled, stalled);
    device::store_release(&op.outcome[threadIdx.x].flying, flying);
  }
  static_cast<std::uint64_t volatile&>(box->total_misses) = misses_before + planned;
  static_cast<std::uint64_t volatile&>(box->total_hits) = hits_before + hits;
  device::store_release(&box->posted, number);
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

}  // namespace pulseinfer::detail
