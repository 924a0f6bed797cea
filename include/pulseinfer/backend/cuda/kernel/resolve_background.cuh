#pragma once

/// resolve_background with all threads of a block at work on its lane, where the generic body leaves it to one.

#include <pulseinfer/backend/cuda/kernel/choose_victims.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t background_threads = 256;
/// Shared memory that a block has without asking.
inline constexpr std::size_t background_scratch_bytes = std::size_t{48} << 10U;

/// Blocks that are expected, by what bringing them depends on: the place of their slot among the victims, or `stays_resident`, or
/// `is_missing`; and whether the host has them.
inline constexpr std::uint32_t stays_resident = 0x7FFFFFFFU;
inline constexpr std::uint32_t is_missing = 0x7FFFFFFEU;
inline constexpr std::uint32_t has_no_source = 0x80000000U;

template <class Op>
__global__ void __launch_bounds__(background_threads) resolve_background_kernel(Op const op)
{
  extern __shared__ std::uint64_t background_scratch[];
  __shared__ std::uint32_t planned;
  std::uint32_t const max_lease = round_up(op.residency.max_lease, run_keys);
  std::uint64_t* const keys = background_scratch;
  auto* const slots = reinterpret_cast<std::uint32_t*>(keys + max_lease);
  std::uint32_t* const fates = slots + 2 * max_lease;
  std::uint32_t* const brought = fates + op.selection.max_selected;

  row_id const row = op.rows[blockIdx.x / op.head_groups];
  lane_id const lane = lane_of(row, blockIdx.x % op.head_groups, op.head_groups);
  std::uint64_t const lane_index = to_index(lane);
  block_id const* const wanted = op.selection.ids_of(lane);
  std::uint32_t const count = op.selection.counts[lane_index];
  slot_id* const slot_of = op.residency.slots_of_lane(op.layer, lane);
  slot_id const* const lease = op.residency.lease_of_lane(op.layer, lane);
  std::uint32_t const leased = op.residency.lease_count[op.residency.lane_index(op.layer, lane)];
  std::uint32_t const now = *op.step;
  auto const word_of = [&](slot_id slot) -> slot_word& { return op.residency.slots[op.pool.word(op.layer, slot)]; };

  std::uint32_t come = 0;
  for (std::uint32_t base = 0; base < count; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool comes = false;
    if (i < count) {
      bool const stored = !is_none(op.host_blocks[to_index(row) * op.residency.max_blocks + to_index(wanted[i])]);
      comes = stored && is_none(slot_of[to_index(wanted[i])]);
    }
    come += static_cast<std::uint32_t>(__syncthreads_count(comes ? 1 : 0));
  }
  std::uint32_t const most = come < op.most_misses ? come : op.most_misses;

  std::uint32_t const* victims = slots;
  std::uint32_t const granted = choose_victims(
    op, lease, leased, threadIdx.x < leased ? lease[threadIdx.x] : none<slot_id>, most, now,
    [now](slot_word const& word) { return word.last_used != now && word.last_used + 1U != now; }, keys, slots, victims);

  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    slot_id const slot = slot_of[to_index(wanted[i])];
    bool const stored = !is_none(op.host_blocks[to_index(row) * op.residency.max_blocks + to_index(wanted[i])]);
    std::uint32_t fate = is_none(slot) ? is_missing : stays_resident;
    for (std::uint32_t v = 0; v < granted && !is_none(slot); ++v) {
      if (victims[v] == to_index(slot)) { fate = v; }
    }
    fates[i] = fate | (stored ? 0U : has_no_source);
  }
  __syncthreads();
  // In turn, as a block that is expected may lose its slot to one before it.
  if (threadIdx.x == 0) {
    std::uint32_t taken = 0;
    std::uint32_t resident = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint32_t const fate = fates[i] & ~has_no_source;
      bool const here = fate == stays_resident || (fate != is_missing && fate >= taken);
      resident += here ? 1U : 0U;
      if (here || fate != fates[i] || taken == granted) { continue; }
      brought[taken++] = i;
    }
    planned = taken;
    op.plan.misses[lane_index] = taken;
    op.plan.flying[lane_index] = 0;
    op.plan.hits[lane_index] = resident;
    op.plan.stalled[lane_index] = 0;
  }
  __syncthreads();
  std::uint32_t wasted = 0;
  for (std::uint32_t base = 0; base < planned; base += blockDim.x) {
    std::uint32_t const place = base + threadIdx.x;
    bool wasted_here = false;
    if (place < planned) {
      slot_word const& word = word_of(static_cast<slot_id>(victims[place]));
      wasted_here = !is_none(word.block) && word.ahead != 0U;
      if (!is_none(word.block)) { slot_of[to_index(word.block)] = none<slot_id>; }
    }
    wasted += static_cast<std::uint32_t>(__syncthreads_count(wasted_here ? 1 : 0));
  }
  if (threadIdx.x == 0) { op.plan.count_ahead(lane_index, 0U, wasted); }
  __syncthreads();
  for (std::uint32_t place = threadIdx.x; place < planned; place += blockDim.x) {
    auto const slot = static_cast<slot_id>(victims[place]);
    block_id const block = wanted[brought[place]];
    slot_word& word = word_of(slot);
    word.block = block;
    word.state = slot_state::in_flight;
    word.last_used = now - 1U;
    word.ahead = 1U;
    slot_of[to_index(block)] = slot;
    op.plan.entries[lane_index * op.selection.max_selected + place] = {
      .source = op.host_blocks[to_index(row) * op.residency.max_blocks + to_index(block)],
      .target = slot,
      .lane = lane,
      .block = block};
  }
}

template <class Replacement>
struct kernel_override<resolve_background<Replacement>> {
  using op_type = resolve_background<Replacement>;

  [[nodiscard]] static std::size_t scratch_bytes(op_type const& op) noexcept
  {
    return victim_scratch_bytes(op.residency.max_lease) +
      std::size_t{op.selection.max_selected} * 2 * sizeof(std::uint32_t);
  }

  [[nodiscard]] static bool takes(op_type const& op) noexcept { return scratch_bytes(op) <= background_scratch_bytes; }

  static cudaError_t launch(op_type const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<op_type*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&resolve_background_kernel<op_type>),
      dim3{static_cast<unsigned int>(op.shape().items)}, dim3{background_threads}, arguments, scratch_bytes(op),
      stream);
  }
};

}  // namespace pulseinfer::detail
