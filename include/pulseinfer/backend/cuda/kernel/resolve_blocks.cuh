#pragma once

/// resolve_blocks with all threads of a block at work on its lane, where the generic body leaves it to one.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/choose_victims.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/resolve_lane.cuh>
#include <pulseinfer/backend/cuda/kernel/sorted_runs.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t resolve_threads = 512;
/// Leases that are ranked in shared memory that a block has without asking.
inline constexpr std::uint32_t most_resolved_lease = 2048;
inline constexpr std::uint32_t none_ends = 0xFFFFFFFFU;

/// A block that a lane wants.
struct wanted_block {
  block_id block = none<block_id>;
  slot_id slot = none<slot_id>;
  host_block_id source = none<host_block_id>;
  bool misses = false;
  bool flies = false;

  /// Misses, hits and those that fly, ten bits each: their sums over a block of threads fit.
  [[nodiscard]] __device__ std::uint32_t packed() const
  {
    bool const hits = !is_none(block) && !misses && !flies;
    return (misses ? 1U : 0U) | (hits ? 1U << 10U : 0U) | (flies ? 1U << 20U : 0U);
  }
};
static_assert(resolve_threads < 1024 && resolve_threads >= most_lane_threads);

/// Lanes of any length.
template <class Op>
__global__ void __launch_bounds__(resolve_threads) resolve_blocks_kernel(Op const op)
{
  extern __shared__ std::uint64_t resolve_scratch[];
  __shared__ std::uint32_t temp_storage[block_scan_words];
  __shared__ std::uint32_t end_of_list;
  __shared__ std::uint32_t used;
  __shared__ std::uint32_t wasted;
  std::uint64_t* const keys = resolve_scratch;
  auto* const slots = reinterpret_cast<std::uint32_t*>(keys + round_up(op.residency.max_lease, run_keys));
  // The list of rows, which may lie on the host, was written before the launch: no kernel changes it.
  row_id const row = op.rows[blockIdx.x / op.head_groups];
  if (threadIdx.x == 0) {
    end_of_list = none_ends;
    used = 0;
    wasted = 0;
  }
  __syncthreads();
  let_next_kernel_begin();
  await_kernel_before();

  lane_id const lane = lane_of(row, blockIdx.x % op.head_groups, op.head_groups);
  std::uint64_t const lane_index = to_index(lane);
  std::uint64_t const books = op.residency.lane_index(op.layer, lane);
  block_id const* const wanted = op.selection.ids_of(lane);
  slot_id* const slot_of = op.residency.slots_of_lane(op.layer, lane);
  slot_id const* const lease = op.residency.lease_of_lane(op.layer, lane);
  host_block_id const* const sources = op.host_blocks + to_index(row) * op.residency.max_blocks;
  // What is wanted of every thread is asked for at once, whether or not it counts.
  std::uint32_t const count = op.selection.counts[lane_index];
  std::uint32_t const leased = op.residency.lease_count[books];
  std::uint32_t const now = *op.step;
  block_id const first_wanted = threadIdx.x < op.selection.max_selected ? wanted[threadIdx.x] : none<block_id>;
  slot_id const first_leased = threadIdx.x < op.residency.max_lease ? lease[threadIdx.x] : none<slot_id>;

  // Marks what is there as used.
  auto const look = [&](std::uint32_t i) {
    wanted_block result;
    if (i >= count) { return result; }
    result.block = i == threadIdx.x ? first_wanted : wanted[i];
    result.slot = slot_of[to_index(result.block)];
    result.source = sources[to_index(result.block)];
    result.misses = is_none(result.slot);
    if (!result.misses) {
      slot_word& word = op.residency.slots[op.pool.word(op.layer, result.slot)];
      result.flies = word.state == slot_state::in_flight;
      if (word.ahead != 0U) {
        atomicAdd(&used, 1U);
        word.ahead = 0;
      }
      word.last_used = now;
    }
    return result;
  };
  wanted_block const first = look(threadIdx.x);
  std::uint32_t of_first = 0;
  std::uint32_t const before_first = block_exclusive_sum(first.packed(), of_first, temp_storage);
  std::uint32_t misses = of_first & 1023U;
  for (std::uint32_t base = blockDim.x; base < count; base += blockDim.x) {
    misses += static_cast<std::uint32_t>(__syncthreads_count(look(base + threadIdx.x).misses ? 1 : 0));
  }
  std::uint32_t const* victims = slots;
  std::uint32_t const granted = misses == 0
    ? 0
    : choose_victims(
        op, lease, leased, first_leased, misses, now, [now](slot_word const& word) { return word.last_used != now; },
        keys, slots, victims);

  slot_id* const listed = op.table.listed + books * op.table.stride;
  slot_id* const landed = op.table.landed + lane_index * op.selection.max_selected;
  recall_entry* const entries = op.plan.entries + lane_index * op.selection.max_selected;
  std::uint32_t missed = 0;
  std::uint32_t hits = 0;
  std::uint32_t flying = 0;
  for (std::uint32_t base = 0; base < count; base += blockDim.x) {
    wanted_block asked = first;
    std::uint32_t before = before_first;
    std::uint32_t total = of_first;
    if (base != 0) {
      asked = look(base + threadIdx.x);
      before = block_exclusive_sum(asked.packed(), total, temp_storage);
    }
    std::uint32_t const place = missed + (before & 1023U);
    std::uint32_t const travelled = (place < granted ? place : granted) + flying + (before >> 20U);
    bool const planned = asked.misses && place < granted;
    if (planned) {
      asked.slot = static_cast<slot_id>(victims[place]);
      entries[place] = {.source = asked.source, .target = asked.slot, .lane = lane, .block = asked.block};
      slot_word& word = op.residency.slots[op.pool.word(op.layer, asked.slot)];
      if (!is_none(word.block)) {
        slot_of[to_index(word.block)] = none<slot_id>;
        if (word.ahead != 0U) { atomicAdd(&wasted, 1U); }
      }
      word.block = asked.block;
      word.state = slot_state::in_flight;
      word.last_used = now;
      word.ahead = 0;
      slot_of[to_index(asked.block)] = asked.slot;
    }
    bool const travels = planned || asked.flies;
    bool const is_listed = !is_none(asked.slot) && !(travels && op.list_hits_only);
    if (is_listed) { listed[hits + (before >> 10U & 1023U) + (op.list_hits_only ? 0U : travelled)] = asked.slot; }
    if (travels) { landed[travelled] = asked.slot; }
    missed += total & 1023U;
    hits += total >> 10U & 1023U;
    flying += total >> 20U;
  }
  std::uint32_t const landed_count = granted + flying;
  std::uint32_t const listed_count = hits + (op.list_hits_only ? 0U : landed_count);
  if (threadIdx.x == 0) {
    op.table.listed_count[books] = listed_count;
    op.table.landed_count[lane_index] = landed_count;
    op.plan.misses[lane_index] = granted;
    op.plan.flying[lane_index] = flying;
    op.plan.hits[lane_index] = hits;
    op.plan.stalled[lane_index] = misses - granted;
  }
  for (std::uint32_t i = landed_count + threadIdx.x; i < op.selection.max_selected; i += blockDim.x) {
    landed[i] = none<slot_id>;
  }
  // What an earlier, longer list left behind, up to its end.
  for (std::uint32_t base = listed_count; base < op.table.stride; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool const is_end = i >= op.table.stride || is_none(listed[i]);
    std::uint32_t const ends = __ballot_sync(0xFFFFFFFFU, is_end);
    if (threadIdx.x % 32U == 0 && ends != 0) {
      atomicMin(&end_of_list, i + static_cast<std::uint32_t>(__ffs(static_cast<int>(ends))) - 1U);
    }
    __syncthreads();
    std::uint32_t const end = end_of_list;
    if (!is_end && i < end) { listed[i] = none<slot_id>; }
    if (end != none_ends) { break; }
    __syncthreads();  // nobody writes the end before all have seen that it is not there
  }
  __syncthreads();
  if (threadIdx.x == 0) { op.plan.count_ahead(lane_index, used, wasted); }
}

/// Lanes whose blocks and slots have a thread each.
template <class Op>
__global__ void __launch_bounds__(resolve_threads) resolve_lanes_kernel(Op const op)
{
  __shared__ lane_memory memory;
  row_id const row = op.rows[blockIdx.x / op.head_groups];
  memory.reset();
  __syncthreads();
  let_next_kernel_begin();
  await_kernel_before();
  planned_lane const planned = plan_lane(op, row, blockIdx.x % op.head_groups, memory);
  list_lane(op, planned, memory);
}

template <class Replacement>
struct kernel_override<resolve_blocks<Replacement>> {
  using op_type = resolve_blocks<Replacement>;

  [[nodiscard]] static std::size_t scratch_bytes(op_type const& op) noexcept
  {
    return victim_scratch_bytes(op.residency.max_lease);
  }

  [[nodiscard]] static bool takes(op_type const& op) noexcept { return op.residency.max_lease <= most_resolved_lease; }

  /// Whether each lane's blocks and slots have a thread.
  [[nodiscard]] static bool has_short_lanes(op_type const& op) noexcept
  {
    return op.residency.max_lease <= most_lane_threads && op.selection.max_selected <= most_lane_threads;
  }

  static cudaError_t launch(op_type const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<op_type*>(&op)};
    dim3 const blocks{static_cast<unsigned int>(op.shape().items)};
    if (has_short_lanes(op)) {
      return launch_early(
        reinterpret_cast<void const*>(&resolve_lanes_kernel<op_type>), blocks, dim3{resolve_threads}, arguments, 0,
        stream);
    }
    return launch_early(
      reinterpret_cast<void const*>(&resolve_blocks_kernel<op_type>), blocks, dim3{resolve_threads}, arguments,
      scratch_bytes(op), stream);
  }
};

}  // namespace pulseinfer::detail
