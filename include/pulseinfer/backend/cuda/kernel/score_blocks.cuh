#pragma once

/// score_blocks at the speed of the device's memory: digests stream through shared memory, each read once for up to eight
/// (token, query head) pairs.

#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/row_ring.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t score_warps = 4;
inline constexpr std::uint32_t score_threads = score_warps * 32U;
inline constexpr std::uint32_t score_stages = 4;
/// Blocks that the threads of one block score, where that makes at least so many blocks of threads: long stretches begin less
/// often, short ones fill a GPU and end together. A score does not depend on its stretch.
struct score_stretch {
  std::uint32_t blocks;
  std::uint32_t least;
};
inline constexpr score_stretch long_score_stretches[] = {{384, 4096}, {256, 1024}, {128, 512}};
inline constexpr std::uint32_t short_score_stretch = 64;

/// How digests lie over the threads of a warp.
template <class T, std::uint32_t Lanes, std::uint32_t Pieces, std::uint32_t Pairs>
struct score_form {
  using element = T;
  static constexpr std::uint32_t lanes = Lanes;
  static constexpr std::uint32_t pieces = Pieces;  // of a thread
  static constexpr std::uint32_t pairs = Pairs;
  static constexpr std::uint32_t groups = 32U / Lanes;
  static constexpr std::uint32_t tile = groups * ring_steps;
  static constexpr std::uint32_t elements = piece_elements<T>;
  static constexpr std::uint32_t stage_pieces = Pieces * ring_steps * 32U;
  static constexpr std::uint32_t shared_bytes = score_warps * score_stages * stage_pieces * piece_bytes;
  static constexpr std::uint32_t blocks =
    Pairs == 4U && Pieces * elements <= 8U ? 6U : 4U;  // as many as registers allow
};

/// Pairs of the row with the most.
template <class Op>
[[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t most_score_pairs(Op const& op)
{
  std::uint32_t const rest = op.request.most_queries > op.pass.first ? op.request.most_queries - op.pass.first : 0U;
  return (rest < op.scores.queries ? rest : op.scores.queries) * op.query_group;
}

template <class Op, class Form>
__global__ void __launch_bounds__(score_threads, Form::blocks) score_blocks_kernel(Op const op, std::uint32_t stretch)
{
  let_next_kernel_begin();
  using element = typename Form::element;
  constexpr std::uint32_t pairs = Form::pairs;
  constexpr std::uint32_t elements = Form::elements;
  extern __shared__ uint4 row_ring[];

  select_request const& request = op.request;
  // Words that may lie on the host are asked for before anything needs them.
  digest_store_ref const& store = request.digests;
  std::uint64_t const block_bytes = store.block_bytes[to_index(request.layer)];
  std::uint64_t const layer_offset = store.layer_offset[to_index(request.layer)];
  std::uint32_t const stretches = divide_up(request.most_blocks, stretch);
  std::uint32_t const pair_tiles = divide_up(most_score_pairs(op), pairs);
  std::uint32_t const first_pair = blockIdx.x % pair_tiles * pairs;
  std::uint32_t const item = blockIdx.x / pair_tiles;
  std::uint32_t const first_block = item % stretches * stretch;
  std::uint32_t const head = item / stretches % op.heads.count;
  row_id const row = request.rows[item / stretches / op.heads.count];
  row_info const state = request.info[to_index(row)];
  std::uint32_t const blocks = state.blocks(op.block_tokens);
  std::uint32_t const asked = op.pass.count(state.new_tokens, op.scores.queries) * op.query_group;
  if (blocks <= op.budget_blocks || first_block >= blocks || first_pair >= asked) { return; }
  std::uint32_t const pair_count = asked - first_pair < pairs ? asked - first_pair : pairs;

  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const warp = threadIdx.x / 32U;
  std::uint32_t const column = lane % Form::lanes;
  scattered_place<Form::lanes, pairs> const at{lane};
  std::uint32_t const end = blocks - first_block < stretch ? blocks : first_block + stretch;
  std::uint32_t const begin = first_block + warp * Form::tile;
  constexpr std::uint32_t stride = score_warps * Form::tile;

  std::uint32_t const head_dim = request.queries.dim;
  std::uint32_t const digest_elements = device::cuboid_mean_elements(head_dim);
  std::uint32_t const pieces = digest_elements / elements;
  std::byte const* const digests = store.base + layer_offset + std::uint64_t{head} * digest_elements * sizeof(element);
  std::int32_t const* const extents = store.extent_of + to_index(row) * store.max_extents;
  uint4* const ring = row_ring + warp * score_stages * Form::stage_pieces + lane;

  // A lane knows where one digest of a tile lies. It asks for the extent well before the digests are fetched.
  struct digest_place {
    std::int32_t extent;
    std::uint32_t block;  // of the extent
  };
  auto const look_up = [&](std::uint32_t tile) {
    std::uint32_t const block = tile + lane % Form::tile;
    digest_place result{0, 0U};
    if (block < end) {
      std::uint32_t const extent = block / store.extent_blocks;
      result = {extents[extent], block - extent * store.extent_blocks};
    }
    return result;
  };
  auto const fetch = [&](std::uint32_t tile, digest_place const& place, std::uint32_t stage) {
    unsigned long long const offset =
      static_cast<std::uint64_t>(place.extent) * store.extent_bytes + place.block * block_bytes;
    uint4* const to = ring + stage * Form::stage_pieces;
#pragma unroll
    for (std::uint32_t step = 0; step < ring_steps; ++step) {
      std::uint32_t const of_tile = step * Form::groups + at.group;
      bool const listed = tile + of_tile < end;
      std::byte const* const from =
        digests + __shfl_sync(all_lanes, offset, static_cast<int>(of_tile)) + std::uint64_t{column} * piece_bytes;
#pragma unroll
      for (std::uint32_t i = 0; i < Form::pieces; ++i) {
        fetch_piece(
          to + (i * ring_steps + step) * 32U, from + i * Form::lanes * piece_bytes,
          listed && i * Form::lanes + column < pieces);
      }
    }
  };

  digest_place ahead[score_stages];
#pragma unroll
  for (std::uint32_t i = 0; i < score_stages; ++i) { ahead[i] = look_up(begin + i * stride); }
#pragma unroll
  for (std::uint32_t i = 0; i + 1U < score_stages; ++i) {
    if (begin + i * stride < end) { fetch(begin + i * stride, ahead[i], i); }
    end_fetches();
  }
  digest_place next_place = ahead[score_stages - 1U];
  std::uint32_t next = begin + (score_stages - 1U) * stride;

  // Queries in the form of digests, while those travel: scale * q, scale * |q|, zeros.
  float queries[pairs][Form::pieces * elements];
  device::visit_elements(request.queries.type, [&](auto stored) {
    using query_type = typename decltype(stored)::type;
#pragma unroll
    for (std::uint32_t pair = 0; pair < pairs; ++pair) {
      std::uint32_t const index = first_pair + (pair < pair_count ? pair : 0U);
      auto const* const query = reinterpret_cast<query_type const*>(request.queries.row(
        static_cast<std::uint64_t>(state.token_offset) + op.pass.first + index / op.query_group,
        (op.heads.first + head) * op.query_group + index % op.query_group));
#pragma unroll
      for (std::uint32_t i = 0; i < Form::pieces; ++i) {
#pragma unroll
        for (std::uint32_t j = 0; j < elements; ++j) {
          std::uint32_t const place = (i * Form::lanes + column) * elements + j;
          float value = 0.0F;
          if (pair < pair_count && place < 2U * head_dim) {
            value = op.scale * device::widen(query[place < head_dim ? place : place - head_dim]);
            if (place >= head_dim && value < 0.0F) { value = -value; }
          }
          queries[pair][i * elements + j] = value;
        }
      }
    }
  });

  bool const writes = at.is_first && at.vector < pair_count;
  std::uint32_t const pair = first_pair + (at.vector < pair_count ? at.vector : 0U);
  float* const target = op.scores.row(row, pair / op.query_group, head * op.query_group + pair % op.query_group);
  std::uint32_t stage = 0;
  for (std::uint32_t tile = begin; tile < end; tile += stride) {
    await_fetches<score_stages - 2>();
    if (next < end) { fetch(next, next_place, stage == 0U ? score_stages - 1U : stage - 1U); }
    end_fetches();
    next += stride;
    next_place = look_up(next);

    float scores[pairs * ring_steps] = {};
    add_products<element, Form::pieces, pairs>(ring + stage * Form::stage_pieces, queries, scores);
    stage = stage + 1U == score_stages ? 0U : stage + 1U;
    scatter_sums<pairs * ring_steps, Form::lanes / 2U>(scores, lane);
#pragma unroll
    for (std::uint32_t i = 0; i < decltype(at)::count; ++i) {
      std::uint32_t const block = tile + (at.step + i) * Form::groups + at.group;
      if (writes && block < end) {
        float const mass = device::logarithm(static_cast<float>(state.valid_tokens(block, op.block_tokens)));
        target[block] = scores[i] + mass;
      }
    }
  }
  await_fetches<0>();
}

struct score_kernel {
  void const* function = nullptr;
  std::uint32_t shared_bytes = 0;
  std::uint32_t pairs = 0;
};

template <class Op, class Form>
[[nodiscard]] score_kernel score_kernel_of() noexcept
{
  return {reinterpret_cast<void const*>(&score_blocks_kernel<Op, Form>), Form::shared_bytes, Form::pairs};
}

/// The kernel for digests of this shape; none where the generic body is to run.
template <class Op, class T>
[[nodiscard]] score_kernel choose_score_kernel(Op const& op) noexcept
{
  std::uint32_t const pieces = device::cuboid_mean_elements(op.request.queries.dim) / piece_elements<T>;
  bool const wide = op.query_group > 4U;
  if (pieces < 8U || pieces > 64U) { return {}; }
  if (pieces <= 16U) {
    return wide ? score_kernel_of<Op, score_form<T, 16, 1, 8>>() : score_kernel_of<Op, score_form<T, 16, 1, 4>>();
  }
  if (pieces <= 32U) {
    return wide ? score_kernel_of<Op, score_form<T, 32, 1, 8>>() : score_kernel_of<Op, score_form<T, 32, 1, 4>>();
  }
  return score_kernel_of<Op, score_form<T, 32, 2, 4>>();
}

/// A template, so that programs that do not select compile none of these.
template <std::same_as<score_blocks> Op>
struct kernel_override<Op> {
  /// Digests of half or float elements, 128 to 1024 bytes a head, that begin at multiples of 16 bytes.
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    digest_store_ref const& store = op.request.digests;
    if (reinterpret_cast<std::uintptr_t>(store.base) % piece_bytes != 0 || store.extent_bytes % piece_bytes != 0) {
      return false;
    }
    if (most_score_pairs(op) == 0U || op.request.most_blocks == 0U) { return false; }
    score_kernel const kernel = choose(op);
    return kernel.function != nullptr && blocks(op, kernel, stretch(op)) <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    score_kernel const kernel = choose(op);
    cudaError_t const code = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kernel.shared_bytes));
    if (code != cudaSuccess) { return code; }
    // Else the driver may leave so much to the first cache that fewer blocks fit.
    cudaError_t const carved = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (carved != cudaSuccess) { return carved; }
    std::uint32_t of_block = stretch(op);
    void* arguments[] = {const_cast<Op*>(&op), &of_block};
    return cudaLaunchKernel(
      kernel.function, dim3{static_cast<unsigned int>(blocks(op, kernel, of_block))}, dim3{score_threads}, arguments,
      kernel.shared_bytes, stream);
  }

 private:
  [[nodiscard]] static std::uint32_t stretch(Op const& op) noexcept
  {
    std::uint64_t const items = std::uint64_t{op.request.rows.count} * op.heads.count;
    for (score_stretch const& stretch : long_score_stretches) {
      if (items * divide_up(op.request.most_blocks, stretch.blocks) >= stretch.least) { return stretch.blocks; }
    }
    return short_score_stretch;
  }

  [[nodiscard]] static std::uint64_t blocks(Op const& op, score_kernel const& kernel, std::uint32_t of_block) noexcept
  {
    return std::uint64_t{divide_up(most_score_pairs(op), kernel.pairs)} * op.request.rows.count * op.heads.count *
      divide_up(op.request.most_blocks, of_block);
  }

  [[nodiscard]] static score_kernel choose(Op const& op) noexcept
  {
    switch (op.digest_type) {
      case dtype::float32: return choose_score_kernel<Op, float>(op);
      case dtype::float16: return choose_score_kernel<Op, half>(op);
      default: return {};
    }
  }
};

static_assert(has_kernel_override<score_blocks>);

}  // namespace pulseinfer::detail
