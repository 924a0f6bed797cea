#pragma once

/// select_top_k with histograms in shared memory: three passes over the keys of a lane find the cut at most, one
/// writes the choice. Up to 16,384 votes of a lane are read once.

#include <pulseinfer/backend/cuda/group.cuh>
#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t top_k_threads = 1024;
inline constexpr std::uint32_t top_k_tile = top_k_threads * 4U;
/// A pass looks at this many bits of the keys, from the highest on, and counts keys by their value.
inline constexpr std::uint32_t top_k_digits = 2048;

/// Keys of four blocks from `begin` on. `counts` has a bit for each that is one of [first, last).
struct four_keys {
  std::uint32_t keys[4];
  std::uint32_t counts;
};

[[nodiscard]] __device__ inline four_keys load_keys(
  float const* votes, std::uint32_t begin, std::uint32_t first, std::uint32_t last)
{
  four_keys result{{0U, 0U, 0U, 0U}, 0U};
  if (begin >= last || begin + 4U <= first) { return result; }
  float4 const four = *reinterpret_cast<float4 const*>(votes + begin);
  float const values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (std::uint32_t i = 0; i < 4U; ++i) {
    result.keys[i] = device::order_key(values[i]);
    if (begin + i >= first && begin + i < last) { result.counts |= 1U << i; }
  }
  return result;
}

/// Tiles of keys that threads keep in registers: where a lane has no more, each vote is read once.
inline constexpr std::uint32_t top_k_kept_tiles = 4;
/// Counters of a digit: lanes of a warp whose keys begin alike add to four words in turn.
inline constexpr std::uint32_t top_k_copies = 4;

/// The keys of a lane's blocks [first, last), tile by tile: kept by the threads, or with no `Tiles` read whenever they are
/// visited.
template <std::uint32_t Tiles>
struct lane_keys {
  __device__ lane_keys(float const* of_lane, std::uint32_t from, std::uint32_t to)
    : votes{of_lane}, first{from}, last{to}
  {
    if constexpr (Tiles != 0U) {
#pragma unroll
      for (std::uint32_t i = 0; i < Tiles; ++i) { kept[i] = load_keys(votes, begin_of(i), first, last); }
    }
  }

  /// Calls visit(begin, keys) in every thread for each tile.
  template <class Visit>
  __device__ void visit_tiles(Visit const& visit) const
  {
    if constexpr (Tiles != 0U) {
#pragma unroll
      for (std::uint32_t i = 0; i < Tiles; ++i) {
        if (first / 4U * 4U + i * top_k_tile < last) { visit(begin_of(i), kept[i]); }
      }
    } else {
      for (std::uint32_t i = 0; first / 4U * 4U + i * top_k_tile < last; ++i) {
        visit(begin_of(i), load_keys(votes, begin_of(i), first, last));
      }
    }
  }

 private:
  [[nodiscard]] __device__ std::uint32_t begin_of(std::uint32_t tile) const
  {
    return first / 4U * 4U + tile * top_k_tile + threadIdx.x * 4U;
  }

  float const* votes;
  std::uint32_t first;
  std::uint32_t last;
  four_keys kept[Tiles == 0U ? 1U : Tiles];
};

/// The cut: blocks with larger keys are chosen, and of those with this key the first `equal`.
struct top_k_cut {
  std::uint32_t key = 0;
  std::uint32_t equal = 0;
};

[[nodiscard]] __device__ inline std::uint32_t sum_of_copies(uint4 const& copies)
{
  return copies.x + copies.y + copies.z + copies.w;
}

/// @param keys visit_tiles(visit) calls visit(begin, four_keys) in every thread   @param wanted of the keys, fewer than there
/// are, at least 1   @param digits [top_k_digits] shared   @param found [3] shared
/// @return the cut, in every thread   @pre `Threads` threads   @sync the block
template <std::uint32_t Threads, class Keys>
[[nodiscard]] __device__ top_k_cut
find_cut(Keys const& keys, std::uint32_t wanted, uint4* digits, std::uint32_t* found, std::uint32_t* temp_storage)
{
  constexpr std::uint32_t own = top_k_digits / Threads;
  top_k_cut cut{.key = 0U, .equal = wanted};
  std::uint32_t known = 0;  // bits of the key that earlier passes found
  auto* const counters = reinterpret_cast<std::uint32_t*>(digits) + threadIdx.x % top_k_copies;
  for (std::uint32_t pass = 0; pass < 3U; ++pass) {
    std::uint32_t const shift = pass == 0U ? 21U : pass == 1U ? 10U : 0U;
    std::uint32_t const mask = pass == 2U ? 1023U : 2047U;
    for (std::uint32_t i = threadIdx.x; i < top_k_digits; i += Threads) { digits[i] = make_uint4(0U, 0U, 0U, 0U); }
    __syncthreads();
    keys.visit_tiles([&](std::uint32_t, four_keys const& four) {
#pragma unroll
      for (std::uint32_t i = 0; i < 4U; ++i) {
        bool const counts = (four.counts >> i & 1U) != 0U && (four.keys[i] & known) == cut.key;
        if (counts) { atomicAdd(counters + (four.keys[i] >> shift & mask) * top_k_copies, 1U); }
      }
    });
    __syncthreads();
    // Threads in the order of falling digits, `own` each.
    std::uint32_t const highest = top_k_digits - 1U - own * threadIdx.x;
    std::uint32_t of_digit[own];
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < own; ++i) {
      of_digit[i] = sum_of_copies(digits[highest - i]);
      sum += of_digit[i];
    }
    std::uint32_t total = 0;
    std::uint32_t above = block_exclusive_sum(sum, total, temp_storage);
#pragma unroll
    for (std::uint32_t i = 0; i < own; ++i) {
      if (above < cut.equal && cut.equal <= above + of_digit[i]) {
        found[0] = highest - i;
        found[1] = cut.equal - above;
        found[2] = of_digit[i];
      }
      above += of_digit[i];
    }
    __syncthreads();
    cut.key |= found[0] << shift;
    cut.equal = found[1];
    known |= mask << shift;
    // All keys that begin so are chosen: the bits that follow decide nothing.
    if (cut.equal == found[2] && cut.key != 0U) { return {.key = cut.key - 1U, .equal = 0U}; }
  }
  return cut;
}

template <class Op, std::uint32_t Tiles>
__global__ void __launch_bounds__(top_k_threads) select_top_k_kernel(Op const op)
{
  let_next_kernel_begin();
  await_kernel_before();
  __shared__ uint4 digits[top_k_digits];
  __shared__ std::uint32_t found[3];
  __shared__ std::uint32_t temp_storage[block_scan_words];
  device::block_group const group{};
  row_id const row = op.rows[blockIdx.x / op.head_groups];
  lane_id const lane = lane_of(row, blockIdx.x % op.head_groups, op.head_groups);
  std::uint32_t const budget =
    op.budget_blocks < op.selection.max_selected ? op.budget_blocks : op.selection.max_selected;
  device::kept_blocks const kept =
    device::keep_blocks(op.info[to_index(row)], op.block_tokens, budget, op.sink_blocks, op.recent_blocks);
  block_id* const ids = op.selection.ids_of(lane);

  for (std::uint32_t i = threadIdx.x; i < kept.head; i += top_k_threads) { ids[i] = static_cast<block_id>(i); }
  std::uint32_t count = kept.head;
  if (kept.chosen != 0U && kept.chosen == kept.tail - kept.head) {
    for (std::uint32_t i = kept.head + threadIdx.x; i < kept.tail; i += top_k_threads) {
      ids[i] = static_cast<block_id>(i);
    }
    count += kept.chosen;
  } else if (kept.chosen != 0U) {
    float const* const votes = op.votes + to_index(lane) * op.vote_pitch;
    lane_keys<Tiles> const keys{votes, kept.head, kept.tail};
    top_k_cut const cut = find_cut<top_k_threads>(keys, kept.chosen, digits, found, temp_storage);
    std::uint32_t larger = 0;  // of the tiles before
    std::uint32_t equal = 0;
    keys.visit_tiles([&](std::uint32_t begin, four_keys const& four) {
      std::uint32_t own = 0;  // larger ones, and equal ones in the upper half: at most 4096 of each in a tile
#pragma unroll
      for (std::uint32_t i = 0; i < 4U; ++i) {
        bool const counts = (four.counts >> i & 1U) != 0U;
        own += counts && four.keys[i] > cut.key ? 1U : 0U;
        own += counts && four.keys[i] == cut.key ? 1U << 16U : 0U;
      }
      std::uint32_t total = 0;
      std::uint32_t const before = block_exclusive_sum(own, total, temp_storage);
      std::uint32_t larger_before = larger + (before & 0xFFFFU);
      std::uint32_t equal_before = equal + (before >> 16U);
#pragma unroll
      for (std::uint32_t i = 0; i < 4U; ++i) {
        if ((four.counts >> i & 1U) == 0U) { continue; }
        std::uint32_t const place = larger_before + (equal_before < cut.equal ? equal_before : cut.equal);
        if (four.keys[i] > cut.key) {
          ids[count + place] = static_cast<block_id>(begin + i);
          ++larger_before;
        } else if (four.keys[i] == cut.key) {
          if (equal_before < cut.equal) { ids[count + place] = static_cast<block_id>(begin + i); }
          ++equal_before;
        }
      }
      larger += total & 0xFFFFU;
      equal += total >> 16U;
    });
    count += kept.chosen;
  }
  for (std::uint32_t i = kept.tail + threadIdx.x; i < kept.blocks; i += top_k_threads) {
    ids[count + i - kept.tail] = static_cast<block_id>(i);
  }
  count += kept.blocks - kept.tail;
  for (std::uint32_t i = count + threadIdx.x; i < op.selection.max_selected; i += top_k_threads) {
    ids[i] = none<block_id>;
  }
  if (threadIdx.x == 0U) { op.selection.counts[to_index(lane)] = count; }
  __syncthreads();
  if (!op.remember) { return; }
  std::uint32_t* const words = op.selection.previous_of(op.layer, lane);
  if (op.selection.previous_words <= top_k_digits * top_k_copies) {  // no search for the ids of each word
    auto* const bits = reinterpret_cast<std::uint32_t*>(digits);
    for (std::uint32_t i = threadIdx.x; i < op.selection.previous_words; i += top_k_threads) { bits[i] = 0U; }
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < count; i += top_k_threads) {
      auto const id = static_cast<std::uint32_t>(ids[i]);
      if (id / 32U < op.selection.previous_words) { atomicOr(bits + id / 32U, 1U << id % 32U); }
    }
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < op.selection.previous_words; i += top_k_threads) { words[i] = bits[i]; }
  } else {
    device::remember_selection(group, ids, count, words, op.selection.previous_words);
  }
}

template <std::same_as<select_top_k> Op>
struct kernel_override<Op> {
  /// Votes that can be read by four.
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    return reinterpret_cast<std::uintptr_t>(op.votes) % 16U == 0 && op.vote_pitch % 4U == 0 &&
      op.shape().items <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<Op*>(&op)};
    void const* const kernel = op.vote_pitch <= top_k_kept_tiles * top_k_tile
      ? reinterpret_cast<void const*>(&select_top_k_kernel<Op, top_k_kept_tiles>)
      : reinterpret_cast<void const*>(&select_top_k_kernel<Op, 0>);
    return launch_early(
      kernel, dim3{static_cast<unsigned int>(op.shape().items)}, dim3{top_k_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<select_top_k>);

}  // namespace pulseinfer::detail
