#pragma once

/// resolve_blocks with all threads of a block at work on its lane, where the generic body leaves it to one.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t resolve_threads = 256;
/// Leases that are ranked by comparing all pairs, in shared memory that a block has without asking.
inline constexpr std::uint32_t most_resolved_lease = 2048;

/// Writes the slots that are to leave, ascending, into `victims`.
/// @param keys [max_lease] shared   @param victims [max_lease] shared, written   @return how many, in every thread
template <class Op>
__device__ std::uint32_t choose_victims(
  Op const& op, lane_id lane, std::uint32_t wanted, std::uint32_t now, std::uint64_t* keys, std::uint32_t* victims,
  std::uint32_t* unsorted, std::uint32_t* temp_storage)
{
  slot_id const* const lease = op.residency.lease_of_lane(op.layer, lane);
  std::uint32_t const leased = op.residency.lease_count[op.residency.lane_index(op.layer, lane)];
  std::uint32_t candidates = 0;
  for (std::uint32_t base = 0; base < leased; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool counts = false;
    std::uint64_t key = 0;
    if (i < leased) {
      slot_word const word = op.residency.slots[op.pool.word(op.layer, lease[i])];
      bool const empty = word.state == slot_state::empty;
      counts = empty || (word.state == slot_state::clean && word.last_used != now);
      std::uint64_t const order =
        empty ? 0 : (std::uint64_t{1} << 63U) | (std::uint64_t{op.policy.key(word, now)} << 31U);
      key = order | to_index(lease[i]);
    }
    std::uint32_t here = 0;
    std::uint32_t const place = candidates + block_exclusive_sum(counts ? 1U : 0U, here, temp_storage);
    if (counts) { keys[place] = key; }
    candidates += here;
  }
  __syncthreads();
  std::uint32_t const granted = wanted < candidates ? wanted : candidates;
  for (std::uint32_t i = threadIdx.x; i < candidates; i += blockDim.x) {
    std::uint64_t const key = keys[i];
    std::uint32_t rank = 0;
    for (std::uint32_t j = 0; j < candidates; ++j) { rank += keys[j] < key ? 1U : 0U; }
    if (rank < granted) { unsorted[rank] = static_cast<std::uint32_t>(key & 0x7FFFFFFFU); }
  }
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < granted; i += blockDim.x) {
    std::uint32_t const slot = unsorted[i];
    std::uint32_t rank = 0;
    for (std::uint32_t j = 0; j < granted; ++j) { rank += unsorted[j] < slot ? 1U : 0U; }
    victims[rank] = slot;
  }
  __syncthreads();
  return granted;
}

template <class Op>
__global__ void __launch_bounds__(resolve_threads) resolve_blocks_kernel(Op const op)
{
  extern __shared__ std::uint64_t resolve_scratch[];
  __shared__ std::uint32_t temp_storage[block_scan_words];
  std::uint64_t* const keys = resolve_scratch;
  auto* const victims = reinterpret_cast<std::uint32_t*>(keys + op.residency.max_lease);
  std::uint32_t* const unsorted = victims + op.residency.max_lease;
  let_next_kernel_begin();
  await_kernel_before();

  std::uint64_t const item = blockIdx.x;
  row_id const row = op.rows[item / op.head_groups];
  lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % op.head_groups), op.head_groups);
  std::uint64_t const lane_index = to_index(lane);
  std::uint64_t const books = op.residency.lane_index(op.layer, lane);
  block_id const* const wanted = op.selection.ids_of(lane);
  std::uint32_t const count = op.selection.counts[lane_index];
  slot_id* const slot_of = op.residency.slots_of_lane(op.layer, lane);
  std::uint32_t const now = *op.step;

  std::uint32_t misses = 0;
  std::uint32_t used = 0;
  for (std::uint32_t base = 0; base < count; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool misses_here = false;
    bool used_here = false;
    if (i < count) {
      slot_id const slot = slot_of[to_index(wanted[i])];
      misses_here = is_none(slot);
      if (!misses_here) {
        slot_word& word = op.residency.slots[op.pool.word(op.layer, slot)];
        used_here = word.ahead != 0U;
        word.last_used = now;
        word.ahead = 0;
      }
    }
    misses += static_cast<std::uint32_t>(__syncthreads_count(misses_here ? 1 : 0));
    used += static_cast<std::uint32_t>(__syncthreads_count(used_here ? 1 : 0));
  }
  std::uint32_t const granted =
    misses == 0 ? 0 : choose_victims(op, lane, misses, now, keys, victims, unsorted, temp_storage);

  slot_id* const listed = op.table.listed + books * op.table.stride;
  slot_id* const landed = op.table.landed + lane_index * op.selection.max_selected;
  recall_entry* const entries = op.plan.entries + lane_index * op.selection.max_selected;
  std::uint32_t missed = 0;
  std::uint32_t listed_count = 0;
  std::uint32_t landed_count = 0;
  std::uint32_t flying = 0;
  std::uint32_t wasted = 0;
  for (std::uint32_t base = 0; base < count; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool const asks = i < count;
    block_id const block = asks ? wanted[i] : none<block_id>;
    slot_id slot = asks ? slot_of[to_index(block)] : none<slot_id>;
    bool const misses_here = asks && is_none(slot);
    bool const flies =
      asks && !misses_here && op.residency.slots[op.pool.word(op.layer, slot)].state == slot_state::in_flight;
    __syncthreads();  // the words that follow change under no reader
    std::uint32_t total = 0;
    std::uint32_t const place = missed + block_exclusive_sum(misses_here ? 1U : 0U, total, temp_storage);
    bool const planned = misses_here && place < granted;
    bool wasted_here = false;
    if (planned) {
      slot = static_cast<slot_id>(victims[place]);
      slot_word& word = op.residency.slots[op.pool.word(op.layer, slot)];
      wasted_here = !is_none(word.block) && word.ahead != 0U;
      if (!is_none(word.block)) { slot_of[to_index(word.block)] = none<slot_id>; }
      word.block = block;
      word.state = slot_state::in_flight;
      word.last_used = now;
      word.ahead = 0;
      slot_of[to_index(block)] = slot;
      entries[place] = {
        .source = op.host_blocks[to_index(row) * op.residency.max_blocks + to_index(block)],
        .target = slot,
        .lane = lane,
        .block = block};
    }
    missed += total;
    bool const travels = planned || flies;
    bool const is_listed = asks && (travels ? !op.list_hits_only : !misses_here);
    std::uint32_t const packed = (is_listed ? 1U : 0U) | (travels ? 1U << 16U : 0U);  // at most 1024 of each
    std::uint32_t both = 0;
    std::uint32_t const before = block_exclusive_sum(packed, both, temp_storage);
    if (is_listed) { listed[listed_count + (before & 0xFFFFU)] = slot; }
    if (travels) { landed[landed_count + (before >> 16U)] = slot; }
    listed_count += both & 0xFFFFU;
    landed_count += both >> 16U;
    flying += static_cast<std::uint32_t>(__syncthreads_count(flies ? 1 : 0));
    wasted += static_cast<std::uint32_t>(__syncthreads_count(wasted_here ? 1 : 0));
  }
  // What an earlier, longer list left behind, up to its end.
  for (std::uint32_t base = listed_count; base < op.table.stride; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool const is_end = i >= op.table.stride || is_none(listed[i]);
    std::uint32_t total = 0;
    std::uint32_t const ends_before = block_exclusive_sum(is_end ? 1U : 0U, total, temp_storage);
    if (!is_end && ends_before == 0) { listed[i] = none<slot_id>; }
    if (total != 0) { break; }
  }
  for (std::uint32_t i = landed_count + threadIdx.x; i < op.selection.max_selected; i += blockDim.x) {
    landed[i] = none<slot_id>;
  }
  if (threadIdx.x == 0) {
    op.table.listed_count[books] = listed_count;
    op.table.landed_count[lane_index] = landed_count;
    op.plan.misses[lane_index] = granted;
    op.plan.flying[lane_index] = flying;
    op.plan.hits[lane_index] = count - misses - flying;
    op.plan.stalled[lane_index] = misses - granted;
    op.plan.count_ahead(lane_index, used, wasted);
  }
}

template <class Replacement>
struct kernel_override<resolve_blocks<Replacement>> {
  using op_type = resolve_blocks<Replacement>;

  [[nodiscard]] static std::size_t scratch_bytes(op_type const& op) noexcept
  {
    return std::size_t{op.residency.max_lease} * (sizeof(std::uint64_t) + 2 * sizeof(std::uint32_t));
  }

  [[nodiscard]] static bool takes(op_type const& op) noexcept { return op.residency.max_lease <= most_resolved_lease; }

  static cudaError_t launch(op_type const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<op_type*>(&op)};
    return launch_early(
      reinterpret_cast<void const*>(&resolve_blocks_kernel<op_type>), dim3{static_cast<unsigned int>(op.shape().items)},
      dim3{resolve_threads}, arguments, scratch_bytes(op), stream);
  }
};

}  // namespace pulseinfer::detail
