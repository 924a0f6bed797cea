#pragma once

/// choose_blocks with a lane's scores, votes and keys in the registers of one block of threads.

#include <pulseinfer/backend/cuda/kernel/block_scan.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/select_top_k.cuh>
#include <pulseinfer/backend/cuda/kernel/share_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/operation/choose_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

/// As share_blocks has them: the sums of both have the same order, so that votes are the same bit by bit.
inline constexpr std::uint32_t choose_threads = share_threads;
inline constexpr std::uint32_t choose_tile = share_tile;
inline constexpr std::uint32_t choose_warps = choose_threads / 32U;
/// Voters whose scores are reduced together.
inline constexpr std::uint32_t choose_voters = 4;
/// Words of bits that a tile of blocks has.
inline constexpr std::uint32_t choose_tile_words = choose_tile / 32U;

/// Combines the values of all threads, one for each of four voters: a tree over the threads of each warp, then the warps in
/// their order, as block_reduce does.
/// @param partial [choose_warps] shared, not read again by other threads after the next barrier   @sync the block, once
template <class Combine>
__device__ void reduce_voters(float (&values)[choose_voters], float4* partial, Combine combine)
{
#pragma unroll
  for (std::uint32_t width = 16; width > 0U; width /= 2U) {
#pragma unroll
    for (float& value : values) {
      value = combine(value, __shfl_xor_sync(0xFFFFFFFFU, value, static_cast<int>(width)));
    }
  }
  if (threadIdx.x % 32U == 0U) { partial[threadIdx.x / 32U] = make_float4(values[0], values[1], values[2], values[3]); }
  __syncthreads();
  float4 all = partial[0];
#pragma unroll
  for (std::uint32_t warp = 1; warp < choose_warps; ++warp) {
    float4 const next = partial[warp];
    all = make_float4(combine(all.x, next.x), combine(all.y, next.y), combine(all.z, next.z), combine(all.w, next.w));
  }
  values[0] = all.x;
  values[1] = all.y;
  values[2] = all.z;
  values[3] = all.w;
}

/// Adds a share to a vote, rounded twice as where shares lie in memory between.
[[nodiscard]] __device__ inline float add_share(float vote, float mass, float factor)
{
  return __fadd_rn(vote, __fmul_rn(mass, factor));
}

/// Votes of a lane's blocks: thread t has four from each tile, begun at 4 * t.
template <class Op, std::uint32_t Tiles>
__device__ void add_votes(
  Op const& op, row_id row, row_info const& state, std::uint32_t head_group, std::uint32_t blocks,
  float4 (&votes)[Tiles], float4 (&partial)[2][choose_warps])
{
  std::uint32_t const heads = op.scores.heads / op.choose.head_groups;
  std::uint32_t const voters = query_pass{}.count(state.new_tokens, op.scores.queries) * heads;
  std::uint32_t const own = threadIdx.x * 4U;
  for (std::uint32_t base = 0; base < voters; base += choose_voters) {
    float4 scores[choose_voters][Tiles];
#pragma unroll
    for (std::uint32_t i = 0; i < choose_voters; ++i) {
      std::uint32_t const voter = base + i < voters ? base + i : base;  // the same once more changes nothing
      float const* const from = op.scores.row(row, voter / heads, head_group * heads + voter % heads);
#pragma unroll
      for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
        std::uint32_t const begin = own + tile * choose_tile;
        scores[i][tile] =
          begin + 4U <= blocks ? *reinterpret_cast<float4 const*>(from + begin) : load_scores(from, begin, blocks);
      }
    }
    float top[choose_voters];
    device::maximum const larger{};
#pragma unroll
    for (std::uint32_t i = 0; i < choose_voters; ++i) {
      top[i] = device::minus_infinity;
#pragma unroll
      for (std::uint32_t tile = 0; tile < Tiles; ++tile) { top[i] = larger(top[i], largest_of(scores[i][tile])); }
    }
    reduce_voters(top, partial[0], larger);
    float factor[choose_voters];
#pragma unroll
    for (std::uint32_t i = 0; i < choose_voters; ++i) {
      factor[i] = 0.0F;
#pragma unroll
      for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
        scores[i][tile] = masses_below(scores[i][tile], top[i]);
        factor[i] += sum_of(scores[i][tile]);
      }
    }
    reduce_voters(factor, partial[1], device::plus{});
#pragma unroll
    for (std::uint32_t i = 0; i < choose_voters; ++i) {
      if (base + i >= voters) { break; }
      float const scale = 1.0F / factor[i];
#pragma unroll
      for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
        votes[tile].x = add_share(votes[tile].x, scores[i][tile].x, scale);
        votes[tile].y = add_share(votes[tile].y, scores[i][tile].y, scale);
        votes[tile].z = add_share(votes[tile].z, scores[i][tile].z, scale);
        votes[tile].w = add_share(votes[tile].w, scores[i][tile].w, scale);
      }
    }
  }
}

/// Keys in registers, for find_cut.
template <std::uint32_t Tiles>
struct held_keys {
  four_keys kept[Tiles];

  template <class Visit>
  __device__ void visit_tiles(Visit const& visit) const
  {
#pragma unroll
    for (std::uint32_t i = 0; i < Tiles; ++i) { visit(i * choose_tile + threadIdx.x * 4U, kept[i]); }
  }
};

/// Bits of a word of 32 blocks from `begin` on that lie in [first, last).
[[nodiscard]] __device__ inline std::uint32_t range_bits(std::uint32_t begin, std::uint32_t first, std::uint32_t last)
{
  std::uint32_t const from = first > begin ? first - begin : 0U;
  std::uint32_t const to = last > begin ? last - begin : 0U;
  std::uint32_t const below_from = from >= 32U ? ~0U : (1U << from) - 1U;
  std::uint32_t const below_to = to >= 32U ? ~0U : (1U << to) - 1U;
  return below_to & ~below_from;
}

/// The first `count` of the bits.
[[nodiscard]] __device__ inline std::uint32_t first_bits(std::uint32_t bits, std::uint32_t count)
{
  for (std::uint32_t more = static_cast<std::uint32_t>(__popc(bits)); more > count; --more) {
    bits &= ~(0x80000000U >> __clz(static_cast<int>(bits)));
  }
  return bits;
}

template <class Op, std::uint32_t Tiles>
__global__ void __launch_bounds__(choose_threads, 1) choose_blocks_kernel(Op const op)
{
  __shared__ uint4 digits[top_k_digits];
  __shared__ std::uint32_t found[3];
  __shared__ float4 partial[2][choose_warps];
  __shared__ std::uint32_t larger_bits[Tiles * choose_tile_words];
  __shared__ std::uint32_t equal_bits[Tiles * choose_tile_words];
  __shared__ std::uint32_t temp_storage[block_scan_words];
  let_next_kernel_begin();
  await_kernel_before();
  auto const& choose = op.choose;
  row_id const row = choose.rows[blockIdx.x / choose.head_groups];
  std::uint32_t const head_group = blockIdx.x % choose.head_groups;
  lane_id const lane = lane_of(row, head_group, choose.head_groups);
  row_info const state = choose.info[to_index(row)];
  std::uint32_t const blocks = state.blocks(choose.block_tokens);
  std::uint32_t const own = threadIdx.x * 4U;
  float* const votes_of_lane = op.votes + to_index(lane) * choose.vote_pitch;
  std::uint32_t* const previous = choose.selection.previous_of(choose.layer, lane);
  std::uint32_t const previous_words = choose.selection.previous_words;
  bool const votes_count = blocks > choose.budget_blocks;
  std::uint32_t favoured[Tiles];  // bits of the blocks that were selected before
#pragma unroll
  for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
    std::uint32_t const begin = own + tile * choose_tile;
    bool const there = votes_count && begin < blocks && begin / 32U < previous_words;
    favoured[tile] = there ? previous[begin / 32U] >> begin % 32U : 0U;
  }

  float4 votes[Tiles];
#pragma unroll
  for (std::uint32_t tile = 0; tile < Tiles; ++tile) { votes[tile] = make_float4(0.0F, 0.0F, 0.0F, 0.0F); }
  if (votes_count) {
    add_votes(op, row, state, head_group, blocks, votes, partial);
#pragma unroll
    for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
      std::uint32_t const begin = own + tile * choose_tile;
      votes[tile].x *= (favoured[tile] & 1U) != 0U ? op.favour : 1.0F;
      votes[tile].y *= (favoured[tile] & 2U) != 0U ? op.favour : 1.0F;
      votes[tile].z *= (favoured[tile] & 4U) != 0U ? op.favour : 1.0F;
      votes[tile].w *= (favoured[tile] & 8U) != 0U ? op.favour : 1.0F;
      if (begin + 4U <= blocks) {
        *reinterpret_cast<float4*>(votes_of_lane + begin) = votes[tile];
      } else {
        float const all[4] = {votes[tile].x, votes[tile].y, votes[tile].z, votes[tile].w};
#pragma unroll
        for (std::uint32_t i = 0; i < 4U; ++i) {
          if (begin + i < blocks) { votes_of_lane[begin + i] = all[i]; }
        }
      }
    }
  } else {
#pragma unroll
    for (std::uint32_t tile = 0; tile < Tiles; ++tile) {  // votes of others, as select_top_k takes them
      std::uint32_t const begin = own + tile * choose_tile;
      if (begin < blocks) { votes[tile] = *reinterpret_cast<float4 const*>(votes_of_lane + begin); }
    }
  }

  std::uint32_t const budget =
    choose.budget_blocks < choose.selection.max_selected ? choose.budget_blocks : choose.selection.max_selected;
  device::kept_blocks const kept =
    device::keep_blocks(state, choose.block_tokens, budget, choose.sink_blocks, choose.recent_blocks);
  held_keys<Tiles> keys;
#pragma unroll
  for (std::uint32_t tile = 0; tile < Tiles; ++tile) {
    std::uint32_t const begin = own + tile * choose_tile;
    float const all[4] = {votes[tile].x, votes[tile].y, votes[tile].z, votes[tile].w};
    keys.kept[tile].counts = 0U;
#pragma unroll
    for (std::uint32_t i = 0; i < 4U; ++i) {
      keys.kept[tile].keys[i] = device::order_key(all[i]);
      if (begin + i >= kept.head && begin + i < kept.tail) { keys.kept[tile].counts |= 1U << i; }
    }
  }
  bool const cuts = kept.chosen != 0U && kept.chosen != kept.tail - kept.head;
  // Without a cut, all blocks between the kept ones are chosen, or none.
  top_k_cut cut{.key = 0U, .equal = kept.chosen};
  if (cuts) { cut = find_cut<choose_threads>(keys, kept.chosen, digits, found, temp_storage); }
  keys.visit_tiles([&](std::uint32_t begin, four_keys const& four) {
    std::uint32_t larger = 0;
    std::uint32_t equal = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 4U; ++i) {
      larger |= four.keys[i] > cut.key ? 1U << i : 0U;
      equal |= four.keys[i] == cut.key ? 1U << i : 0U;
    }
    larger = (cuts ? larger & four.counts : 0U) << begin % 32U;
    equal = (cuts ? equal & four.counts : four.counts) << begin % 32U;
#pragma unroll
    for (std::uint32_t width = 4; width > 0U; width /= 2U) {
      larger |= __shfl_xor_sync(0xFFFFFFFFU, larger, static_cast<int>(width));
      equal |= __shfl_xor_sync(0xFFFFFFFFU, equal, static_cast<int>(width));
    }
    if (threadIdx.x % 8U == 0U) {
      larger_bits[begin / 32U] = larger;
      equal_bits[begin / 32U] = equal;
    }
  });
  __syncthreads();

  static_assert(Tiles * choose_tile_words <= choose_threads);
  bool const has_word = threadIdx.x < Tiles * choose_tile_words;
  std::uint32_t const larger = has_word ? larger_bits[threadIdx.x] : 0U;
  std::uint32_t const equal = has_word ? equal_bits[threadIdx.x] : 0U;
  std::uint32_t total = 0;
  std::uint32_t const before =
    block_exclusive_sum(static_cast<std::uint32_t>(__popc(larger) | __popc(equal) << 16U), total, temp_storage);
  std::uint32_t const equal_before = before >> 16U < cut.equal ? before >> 16U : cut.equal;
  std::uint32_t const first = threadIdx.x * 32U;
  std::uint32_t const chosen = larger | first_bits(equal, cut.equal - equal_before);
  std::uint32_t const word =
    has_word ? chosen | range_bits(first, 0U, kept.head) | range_bits(first, kept.tail, kept.blocks) : 0U;
  block_id* const ids = choose.selection.ids_of(lane);
  if (has_word) {
    std::uint32_t place = (before & 0xFFFFU) + equal_before + (first < kept.head ? first : kept.head) +
      (first > kept.tail ? (first < kept.blocks ? first : kept.blocks) - kept.tail : 0U);
    for (std::uint32_t rest = word; rest != 0U; rest &= rest - 1U) {
      ids[place++] = static_cast<block_id>(first + static_cast<std::uint32_t>(__ffs(static_cast<int>(rest))) - 1U);
    }
  }
  std::uint32_t const count = kept.head + kept.chosen + kept.blocks - kept.tail;
  for (std::uint32_t i = count + threadIdx.x; i < choose.selection.max_selected; i += choose_threads) {
    ids[i] = none<block_id>;
  }
  if (threadIdx.x == 0U) { choose.selection.counts[to_index(lane)] = count; }
  if (!choose.remember) { return; }
  for (std::uint32_t i = threadIdx.x; i < previous_words; i += choose_threads) {
    previous[i] = i == threadIdx.x ? word : 0U;
  }
}

template <std::same_as<choose_blocks> Op>
struct kernel_override<Op> {
  /// Up to 8,192 blocks, scores and votes that can be read by four.
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    return op.most_blocks <= 4U * choose_tile && reinterpret_cast<std::uintptr_t>(op.scores.data) % 16U == 0 &&
      reinterpret_cast<std::uintptr_t>(op.votes) % 16U == 0 && op.scores.pitch % 4U == 0 &&
      op.choose.vote_pitch % 4U == 0 && op.choose.votes == op.votes &&
      op.shape().items <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    void const* const kernel = op.most_blocks <= 2U * choose_tile
      ? reinterpret_cast<void const*>(&choose_blocks_kernel<Op, 2>)
      : reinterpret_cast<void const*>(&choose_blocks_kernel<Op, 4>);
    void* arguments[] = {const_cast<Op*>(&op)};
    return launch_early(
      kernel, dim3{static_cast<unsigned int>(op.shape().items)}, dim3{choose_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<choose_blocks>);

}  // namespace pulseinfer::detail
