#pragma once

/// Slots of a lease that are to leave, by all threads of a block.

#include <pulseinfer/backend/cuda/kernel/sorted_runs.cuh>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/residency.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

/// Shared memory that choose_victims needs: keys, then slots.
[[nodiscard]] constexpr std::size_t victim_scratch_bytes(std::uint32_t max_lease)
{
  return std::size_t{round_up(max_lease, run_keys)} * (sizeof(std::uint64_t) + 2 * sizeof(std::uint32_t));
}

/// Writes the slots that are to leave, ascending, into shared memory.
/// @param first the slot of the lease at the thread's number, where there is one   @param idle (word) whether a clean slot may leave
/// @param keys [max_lease, rounded up to runs] shared   @param slots [2, likewise] shared   @param victims points to them then
/// @return how many, in every thread   @sync the block
template <class Op, class Idle>
__device__ std::uint32_t choose_victims(
  Op const& op, slot_id const* lease, std::uint32_t leased, slot_id first, std::uint32_t wanted, std::uint32_t now,
  Idle idle, std::uint64_t* keys, std::uint32_t* slots, std::uint32_t const*& victims)
{
  constexpr std::uint64_t no_key = ~std::uint64_t{0};
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t candidates = 0;
  for (std::uint32_t base = 0; base < leased; base += blockDim.x) {
    std::uint32_t const i = base + threadIdx.x;
    bool counts = false;
    if (i - lane < leased) {
      std::uint64_t key = no_key;
      if (i < leased) {
        slot_id const slot = base == 0 ? first : lease[i];
        slot_word const word = op.residency.slots[op.pool.word(op.layer, slot)];
        bool const empty = word.state == slot_state::empty;
        counts = empty || (word.state == slot_state::clean && idle(word));
        std::uint64_t const order =
          empty ? 0 : (std::uint64_t{1} << 63U) | (std::uint64_t{op.policy.key(word, now)} << 31U);
        if (counts) { key = order | to_index(slot); }
      }
      keys[i] = sort_warp(key);
    }
    candidates += static_cast<std::uint32_t>(__syncthreads_count(counts ? 1 : 0));
  }
  std::uint32_t const granted = wanted < candidates ? wanted : candidates;
  std::uint32_t const runs = divide_up(leased, run_keys);
  for (std::uint32_t i = threadIdx.x; i < leased; i += blockDim.x) {
    if (i % run_keys >= granted || keys[i] == no_key) { continue; }
    std::uint32_t const rank = rank_in_runs(keys, runs, keys[i]);
    if (rank < granted) { slots[rank] = static_cast<std::uint32_t>(keys[i] & 0x7FFFFFFFU); }
  }
  __syncthreads();
  std::uint32_t const granted_runs = divide_up(granted, run_keys);
  for (std::uint32_t i = threadIdx.x; i - lane < granted; i += blockDim.x) {
    slots[i] = sort_warp(i < granted ? slots[i] : ~std::uint32_t{0});
  }
  __syncthreads();
  victims = slots;
  if (granted_runs > 1U) {
    std::uint32_t* const sorted = slots + round_up(op.residency.max_lease, run_keys);
    for (std::uint32_t i = threadIdx.x; i < granted; i += blockDim.x) {
      sorted[rank_in_runs(slots, granted_runs, slots[i])] = slots[i];
    }
    __syncthreads();
    victims = sorted;
  }
  return granted;
}

}  // namespace pulseinfer::detail
