#pragma once

/// order_entries as a counting sort of a cluster of blocks, which read one another's counts.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/cluster.cuh>
#include <pulseinfer/backend/cuda/kernel/entry_list.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/order_entries.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t order_threads = 1024;
inline constexpr std::uint32_t order_blocks = 8;
inline constexpr std::uint32_t order_ahead = 4;  ///< entries that a thread asks for at once
static_assert(order_entries::most_stretches == order_threads * order_blocks);

template <class Op>
__global__ void __cluster_dims__(order_blocks, 1, 1) __launch_bounds__(order_threads) order_entries_kernel(Op const op)
{
  __shared__ std::uint32_t places[order_entries::most_stretches];
  __shared__ std::uint32_t temp_storage[block_scan_words];
  __shared__ std::uint32_t of_part;  // entries of the eighth that this block has looked at
  std::uint32_t const blocks = op.stretch_blocks();
  std::uint32_t const of_group = op.group_stretches();
  entry_list const list = entry_list::of_rows(op.plan, op.first_row, op.row_count);
  std::uint32_t const count = list.count;
  std::uint32_t const part = divide_up(count, order_blocks);
  std::uint32_t const first = blockIdx.x * part < count ? blockIdx.x * part : count;
  std::uint32_t const last = count - first < part ? count : first + part;

  for (std::uint32_t i = threadIdx.x; i < order_entries::most_stretches; i += order_threads) { places[i] = 0; }
  __syncthreads();
  // Several entries at once: otherwise each turn waits for memory.
  auto const for_each_entry = [&](auto visit) {
    for (std::uint32_t i = first + threadIdx.x; i < last; i += order_ahead * order_threads) {
      recall_entry entries[order_ahead];
#pragma unroll
      for (std::uint32_t k = 0; k < order_ahead; ++k) {
        if (last - i > k * order_threads) { entries[k] = list[i + k * order_threads]; }
      }
#pragma unroll
      for (std::uint32_t k = 0; k < order_ahead; ++k) {
        if (last - i > k * order_threads) { visit(entries[k]); }
      }
    }
  };
  for_each_entry([&](recall_entry const& entry) { atomicAdd(places + op.stretch_of(entry, blocks, of_group), 1U); });
  sync_cluster();
  // Each block finds where the entries of an eighth of the stretches begin, those of earlier blocks first, a thread for each.
  std::uint32_t* const own = places + blockIdx.x * order_threads + threadIdx.x;
  std::uint32_t of_block[order_blocks];
  std::uint32_t sum = 0;
#pragma unroll
  for (std::uint32_t block = 0; block < order_blocks; ++block) {
    of_block[block] = load_of_block(own, block);
    sum += of_block[block];
  }
  std::uint32_t total = 0;
  std::uint32_t next = block_exclusive_sum(sum, total, temp_storage);
  if (threadIdx.x == 0U) { of_part = total; }
  sync_cluster();
#pragma unroll
  for (std::uint32_t block = 0; block < order_blocks; ++block) {
    std::uint32_t const before = load_of_block(&of_part, block);
    next += block < blockIdx.x ? before : 0U;
  }
#pragma unroll
  for (std::uint32_t block = 0; block < order_blocks; ++block) {
    store_of_block(own, block, next);
    next += of_block[block];
  }
  sync_cluster();
  for_each_entry([&](recall_entry const& entry) {
    op.ordered[atomicAdd(places + op.stretch_of(entry, blocks, of_group), 1U)] = entry;
  });
  if (blockIdx.x == 0U && threadIdx.x == 0U) {
    op.row_begin[0] = 0;
    op.row_begin[1] = count;
  }
  sync_cluster();  // nobody ends while others read its memory
}

template <>
struct kernel_override<order_entries> {
  [[nodiscard]] static bool takes(order_entries const& op) noexcept
  {
    return op.stretches() <= order_entries::most_stretches;
  }

  static cudaError_t launch(order_entries const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<order_entries*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&order_entries_kernel<order_entries>), dim3{order_blocks}, dim3{order_threads},
      arguments, 0, stream);
  }
};

static_assert(has_kernel_override<order_entries>);

}  // namespace pulseinfer::detail
