#pragma once

/// join_entries by a cluster of blocks: a thread for each entry, a table in device memory.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/cluster.cuh>
#include <pulseinfer/backend/cuda/kernel/entry_list.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t join_threads = 1024;
inline constexpr std::uint32_t join_blocks = 8;

template <class Op>
__global__ void __cluster_dims__(join_blocks, 1, 1) __launch_bounds__(join_threads) join_entries_kernel(Op const op)
{
  __shared__ std::uint32_t temp_storage[block_scan_words];
  __shared__ std::uint32_t base[2];
  entry_list const list = entry_list::of_rows(op.plan, op.first_row, op.row_count);
  std::uint32_t const count = list.count;
  std::uint32_t const places = Op::table_places(count);
  std::uint32_t const thread = blockIdx.x * join_threads + threadIdx.x;
  constexpr std::uint32_t threads = join_blocks * join_threads;

  for (std::uint32_t i = thread; i < places; i += threads) { op.table[i] = typename Op::found{}; }
  if (thread == 0) { op.row_begin[0] = op.row_begin[1] = op.row_begin[2] = 0; }
  sync_cluster();
  for (std::uint32_t i = thread; i < count; i += threads) {
    recall_entry const entry = list[i];
    std::uint32_t place = op.hash_of(entry) & (places - 1);
    for (;;) {
      std::uint32_t const other = atomicCAS(&op.table[place].entry, Op::nothing, i);
      if (other == Op::nothing) { break; }
      // Whichever of a place's entries this is, the others have the same source.
      if (op.same_source(list[other], entry)) {
        atomicMin(&op.table[place].entry, i);
        break;
      }
      place = (place + 1) & (places - 1);
    }
    op.stands[i] = {place, atomicAdd(&op.table[place].count, 1U)};
  }
  sync_cluster();
  // A block lists its entries in their order, behind what other blocks have listed.
  for (std::uint32_t from = blockIdx.x * join_threads; from < count; from += threads) {
    std::uint32_t const i = from + threadIdx.x;
    bool leads = false;
    std::uint32_t together = 0;
    std::uint32_t place = 0;
    if (i < count) {
      place = op.stands[i].place;
      leads = __ldcg(&op.table[place].entry) == i;
      together = leads ? __ldcg(&op.table[place].count) : 0U;
      together = together == 1 ? 0U : together;
    }
    std::uint32_t entries = 0;
    std::uint32_t const listed_before = block_exclusive_sum(leads ? 1U : 0U, entries, temp_storage);
    std::uint32_t targets = 0;
    std::uint32_t const targets_before = block_exclusive_sum(together, targets, temp_storage);
    if (threadIdx.x == 0) { base[0] = atomicAdd(op.row_begin + 1, entries); }
    if (threadIdx.x == 32) { base[1] = targets == 0 ? 0U : atomicAdd(op.row_begin + 2, targets); }
    __syncthreads();
    if (leads) {
      std::uint32_t const first = base[1] + targets_before;
      op.joined[base[0] + listed_before] = list[i];
      op.of[base[0] + listed_before] = {first, together};
      op.table[place].begin = first;
    }
    __syncthreads();  // the next turn writes `base`
  }
  sync_cluster();
  for (std::uint32_t i = thread; i < count; i += threads) {
    typename Op::standing const own = op.stands[i];
    if (__ldcg(&op.table[own.place].count) > 1) {
      op.targets[__ldcg(&op.table[own.place].begin) + own.number] = list[i].target;
    }
  }
}

template <>
struct kernel_override<join_entries> {
  [[nodiscard]] static bool takes(join_entries const&) noexcept { return true; }

  static cudaError_t launch(join_entries const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<join_entries*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&join_entries_kernel<join_entries>), dim3{join_blocks}, dim3{join_threads},
      arguments, 0, stream);
  }
};

static_assert(has_kernel_override<join_entries>);

}  // namespace pulseinfer::detail
