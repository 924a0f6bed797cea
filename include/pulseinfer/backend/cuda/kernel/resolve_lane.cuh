#pragma once

/// One lane resolved by a block of threads that has one for each selected block and for each slot of the lease: everything is read in
/// two trips to memory, and nothing is read again.

#include <pulseinfer/backend/cuda/kernel/sorted_runs.cuh>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

/// Selected blocks, and slots of a lease, of a lane that is resolved so.
inline constexpr std::uint32_t most_lane_threads = 512;
/// As many victims are found by looking for the least key so often; more by ranks.
inline constexpr std::uint32_t few_victims = 4;

/// Shared memory of the block.
struct lane_memory {
  block_id wanted[most_lane_threads];
  slot_id found[most_lane_threads];
  std::uint64_t keys[most_lane_threads];
  std::uint32_t victims[2][most_lane_threads];
  std::uint64_t least[few_victims][32];
  std::uint32_t misses[32];  // of each warp
  std::uint32_t others[32];  // of each warp: hits, and blocks that fly in the upper half
  std::uint32_t end_of_list;
  std::uint32_t used;
  std::uint32_t wasted;

  /// Before plan_lane, with a barrier between.
  __device__ void reset()
  {
    if (threadIdx.x != 0) { return; }
    end_of_list = ~std::uint32_t{0};
    used = 0;
    wasted = 0;
  }
};

/// What plan_lane leaves for list_lane: of the lane, and of the thread's place in the selection.
struct planned_lane {
  lane_id lane = none<lane_id>;
  std::uint32_t count = 0;    ///< blocks that are selected
  std::uint32_t misses = 0;   ///< of the lane
  std::uint32_t granted = 0;  ///< those that got a slot
  std::uint32_t now = 0;
  std::uint32_t place = 0;  ///< misses at places before the thread's
  slot_id slot = none<slot_id>;
  slot_id behind = none<slot_id>;  ///< listed at the thread's place behind `count` places
  slot_word word = {};             ///< of a hit
  bool hits = false;               ///< or flies
  bool planned = false;
};

[[nodiscard]] __device__ inline std::uint64_t least_of_warp(std::uint64_t key)
{
  auto const high = static_cast<std::uint32_t>(key >> 32U);
  std::uint32_t const least_high = __reduce_min_sync(0xFFFFFFFFU, high);
  std::uint32_t const low = high == least_high ? static_cast<std::uint32_t>(key) : ~std::uint32_t{0};
  return std::uint64_t{least_high} << 32U | __reduce_min_sync(0xFFFFFFFFU, low);
}

/// @param of_warps shared   @param before written: the sum of the warps before this one   @return the sum of all, in every thread
[[nodiscard]] __device__ inline std::uint32_t sum_of_warps(std::uint32_t const* of_warps, std::uint32_t& before)
{
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const own = lane < blockDim.x / 32U ? of_warps[lane] : 0U;
  before = __reduce_add_sync(0xFFFFFFFFU, lane < threadIdx.x / 32U ? own : 0U);
  return __reduce_add_sync(0xFFFFFFFFU, own);
}

/// Word of 16 bytes in one access.
[[nodiscard]] __device__ inline slot_word load_word(slot_word const* from)
{
  uint4 const words = *reinterpret_cast<uint4 const*>(from);
  slot_word result;
  result.block = static_cast<block_id>(words.x);
  result.state = static_cast<slot_state>(words.y);
  result.last_used = words.z;
  result.ahead = words.w;
  return result;
}

/// Whether the slot holds a block that is selected.
[[nodiscard]] __device__ inline bool is_selected(
  lane_memory const& memory, std::uint32_t count, block_id block, slot_id slot)
{
  std::uint32_t begin = 0;
  std::uint32_t end = count;
  while (begin < end) {
    std::uint32_t const middle = (begin + end) / 2U;
    if (to_number(memory.wanted[middle]) < to_number(block)) {
      begin = middle + 1U;
    } else {
      end = middle;
    }
  }
  return begin < count && memory.wanted[begin] == block && memory.found[begin] == slot;
}

/// Gives blocks that miss their slots, ascending by both.
/// @param key of the thread's leased slot, all ones where it may not leave   @param leaves written: whether that slot is taken
/// @param place of the thread's block among the misses   @param slot written where the block gets one   @return how many do
/// @sync the block
[[nodiscard]] __device__ inline std::uint32_t take_victims(
  lane_memory& memory, std::uint64_t key, std::uint32_t leased, std::uint32_t misses, bool asks, std::uint32_t place,
  bool& leaves, slot_id& slot)
{
  constexpr std::uint64_t no_key = ~std::uint64_t{0};
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const warp = threadIdx.x / 32U;
  auto const slot_of_key = [](std::uint64_t of) { return static_cast<std::uint32_t>(of) & 0x7FFFFFFFU; };
  if (misses <= few_victims) {
    std::uint32_t chosen[few_victims];
    std::uint32_t granted = 0;
#pragma unroll
    for (std::uint32_t turn = 0; turn < few_victims; ++turn) {
      chosen[turn] = ~std::uint32_t{0};
      if (turn != granted || turn >= misses) { continue; }
      std::uint64_t const of_warp = least_of_warp(key);
      if (lane == 0) { memory.least[turn][warp] = of_warp; }
      __syncthreads();
      std::uint64_t const least = least_of_warp(lane < blockDim.x / 32U ? memory.least[turn][lane] : no_key);
      if (least == no_key) { continue; }
      chosen[turn] = slot_of_key(least);
      ++granted;
      if (key == least) {
        leaves = true;
        key = no_key;
      }
    }
    if (asks && place < granted) {
#pragma unroll
      for (std::uint32_t i = 0; i < few_victims; ++i) {
        std::uint32_t rank = 0;
#pragma unroll
        for (std::uint32_t j = 0; j < few_victims; ++j) { rank += chosen[j] < chosen[i] ? 1U : 0U; }
        if (rank == place) { slot = static_cast<slot_id>(chosen[i]); }
      }
    }
    return granted;
  }
  if (threadIdx.x - lane < most_lane_threads) { memory.keys[threadIdx.x] = sort_warp(key); }
  auto const candidates = static_cast<std::uint32_t>(__syncthreads_count(key != no_key ? 1 : 0));
  std::uint32_t const granted = misses < candidates ? misses : candidates;
  if (key != no_key) {
    std::uint32_t const rank = rank_in_runs(memory.keys, divide_up(leased, run_keys), key);
    leaves = rank < granted;
    if (leaves) { memory.victims[0][rank] = slot_of_key(key); }
  }
  __syncthreads();
  std::uint32_t* const slots = memory.victims[0];
  std::uint32_t const runs = divide_up(granted, run_keys);
  if (threadIdx.x - lane < granted) {
    slots[threadIdx.x] = sort_warp(threadIdx.x < granted ? slots[threadIdx.x] : ~std::uint32_t{0});
  }
  __syncthreads();
  if (threadIdx.x < granted) {
    std::uint32_t const own = slots[threadIdx.x];
    memory.victims[1][rank_in_runs(slots, runs, own)] = own;
  }
  __syncthreads();
  if (asks && place < granted) { slot = static_cast<slot_id>(memory.victims[1][place]); }
  return granted;
}

/// Finds what is missing of a lane's selection and takes slots for it.
/// @pre memory.reset(), at most most_lane_threads selected and leased   @sync the block
template <class Op>
[[nodiscard]] __device__ planned_lane plan_lane(Op const& op, row_id row, std::uint32_t group, lane_memory& memory)
{
  planned_lane result;
  std::uint32_t const i = threadIdx.x;
  lane_id const lane = lane_of(row, group, op.head_groups);
  std::uint64_t const lane_index = to_index(lane);
  std::uint64_t const books = op.residency.lane_index(op.layer, lane);
  slot_id* const slot_of = op.residency.slots_of_lane(op.layer, lane);
  slot_word* const words = op.residency.slots + op.pool.word(op.layer, slot_id{0});
  result.lane = lane;
  // The first trip: all of it is asked for at once, whether or not it counts.
  result.count = op.selection.counts[lane_index];
  result.now = *op.step;
  std::uint32_t const leased = op.residency.lease_count[books];
  block_id const block = i < op.selection.max_selected ? op.selection.ids_of(lane)[i] : none<block_id>;
  slot_id const own = i < op.residency.max_lease ? op.residency.lease_of_lane(op.layer, lane)[i] : none<slot_id>;

  // The second, and behind it the words of what is there.
  bool const asks = i < result.count;
  bool const owns = i < leased;
  host_block_id source = none<host_block_id>;
  slot_word leaving;
  if (asks) {
    result.slot = slot_of[to_index(block)];
    source = op.host_blocks[to_index(row) * op.residency.max_blocks + to_index(block)];
  }
  if (owns) { leaving = load_word(words + to_index(own)); }
  std::uint32_t const behind = result.count + i;
  if (behind < op.table.stride) { result.behind = op.table.listed[books * op.table.stride + behind]; }
  bool const missing = asks && is_none(result.slot);
  result.hits = asks && !missing;
  if (result.hits) { result.word = load_word(words + to_index(result.slot)); }

  if (asks) {
    memory.wanted[i] = block;
    memory.found[i] = result.slot;
  }
  std::uint32_t const ballot = __ballot_sync(0xFFFFFFFFU, missing);
  if (i % 32U == 0) { memory.misses[i / 32U] = static_cast<std::uint32_t>(__popc(ballot)); }
  __syncthreads();
  result.misses = sum_of_warps(memory.misses, result.place);
  result.place += static_cast<std::uint32_t>(__popc(ballot & ((1U << i % 32U) - 1U)));
  if (result.misses == 0) { return result; }

  // Slots of this step's selection stay, those that its blocks are in now and those of an earlier look.
  std::uint64_t key = ~std::uint64_t{0};
  if (owns && leaving.state == slot_state::empty) {
    key = to_index(own);
  } else if (
    owns && leaving.state == slot_state::clean && leaving.last_used != result.now &&
    !is_selected(memory, result.count, leaving.block, own)) {
    key = std::uint64_t{1} << 63U | std::uint64_t{op.policy.key(leaving, result.now)} << 31U | to_index(own);
  }
  bool leaves = false;
  result.granted = take_victims(memory, key, leased, result.misses, missing, result.place, leaves, result.slot);
  if (leaves && !is_none(leaving.block)) {
    slot_of[to_index(leaving.block)] = none<slot_id>;
    if (leaving.ahead != 0U) { atomicAdd(&memory.wasted, 1U); }
  }
  result.planned = missing && !is_none(result.slot);
  if (result.planned) {
    op.plan.entries[lane_index * op.selection.max_selected + result.place] = {
      .source = source, .target = result.slot, .lane = lane, .block = block};
    words[to_index(result.slot)] = {.block = block, .state = slot_state::in_flight, .last_used = result.now};
    slot_of[to_index(block)] = result.slot;
  }
  return result;
}

/// Marks what is there as used, and writes the lane's lists and counts.   @sync the block
template <class Op>
__device__ void list_lane(Op const& op, planned_lane const& planned, lane_memory& memory)
{
  std::uint32_t const i = threadIdx.x;
  std::uint32_t const below = (1U << i % 32U) - 1U;
  std::uint64_t const lane_index = to_index(planned.lane);
  std::uint64_t const books = op.residency.lane_index(op.layer, planned.lane);
  slot_id* const listed = op.table.listed + books * op.table.stride;
  slot_id* const landed = op.table.landed + lane_index * op.selection.max_selected;
  bool const flies = planned.hits && planned.word.state == slot_state::in_flight;
  bool const hits = planned.hits && !flies;
  if (planned.hits) {
    slot_word& word = op.residency.slots[op.pool.word(op.layer, planned.slot)];
    word.last_used = planned.now;
    word.ahead = 0;
    if (planned.word.ahead != 0U) { atomicAdd(&memory.used, 1U); }
  }
  std::uint32_t const hit_ballot = __ballot_sync(0xFFFFFFFFU, hits);
  std::uint32_t const fly_ballot = __ballot_sync(0xFFFFFFFFU, flies);
  // What an earlier, longer list left behind, up to its end.
  bool is_end = planned.count + i >= op.table.stride || is_none(planned.behind);
  std::uint32_t const ends = __ballot_sync(0xFFFFFFFFU, is_end);
  if (i % 32U == 0) {
    memory.others[i / 32U] =
      static_cast<std::uint32_t>(__popc(hit_ballot)) | static_cast<std::uint32_t>(__popc(fly_ballot)) << 16U;
    if (ends != 0) {
      atomicMin(
        &memory.end_of_list, planned.count + i + static_cast<std::uint32_t>(__ffs(static_cast<int>(ends))) - 1U);
    }
  }
  __syncthreads();
  std::uint32_t before = 0;
  std::uint32_t const all = sum_of_warps(memory.others, before);
  std::uint32_t const all_hits = all & 0xFFFFU;
  std::uint32_t const all_flying = all >> 16U;
  std::uint32_t const hits_before = (before & 0xFFFFU) + static_cast<std::uint32_t>(__popc(hit_ballot & below));
  std::uint32_t const flying_before = (before >> 16U) + static_cast<std::uint32_t>(__popc(fly_ballot & below));
  std::uint32_t const travelled = flying_before + (planned.place < planned.granted ? planned.place : planned.granted);
  bool const travels = planned.planned || flies;
  if (hits || (travels && !op.list_hits_only)) {
    listed[hits_before + (op.list_hits_only ? 0U : travelled)] = planned.slot;
  }
  if (travels) { landed[travelled] = planned.slot; }
  std::uint32_t const landed_count = planned.granted + all_flying;
  std::uint32_t const listed_count = all_hits + (op.list_hits_only ? 0U : landed_count);
  for (std::uint32_t at = landed_count + i; at < op.selection.max_selected; at += blockDim.x) {
    landed[at] = none<slot_id>;
  }
  if (listed_count + i < planned.count) { listed[listed_count + i] = none<slot_id>; }
  std::uint32_t end = memory.end_of_list;
  for (std::uint32_t at = planned.count + i;;) {
    if (!is_end && at < end) { listed[at] = none<slot_id>; }
    if (end != ~std::uint32_t{0}) { break; }
    __syncthreads();  // nobody writes the end before all have seen that it is not there
    at += blockDim.x;
    is_end = at >= op.table.stride || is_none(listed[at]);
    if (is_end) { atomicMin(&memory.end_of_list, at); }
    __syncthreads();
    end = memory.end_of_list;
  }
  if (i == 0) {
    op.table.listed_count[books] = listed_count;
    op.table.landed_count[lane_index] = landed_count;
    op.plan.misses[lane_index] = planned.granted;
    op.plan.flying[lane_index] = all_flying;
    op.plan.hits[lane_index] = all_hits;
    op.plan.stalled[lane_index] = planned.misses - planned.granted;
    op.plan.count_ahead(lane_index, memory.used, memory.wasted);
  }
}

}  // namespace pulseinfer::detail
