#pragma once

/// paged_attention at the speed of the device's memory: each key and value is read once for up to eight (token, query head)
/// pairs that share it, and up to eight blocks of threads split the tokens of a lane, so that few rows fill a GPU too.

#include <pulseinfer/backend/cuda/kernel/cluster.cuh>
#include <pulseinfer/backend/cuda/kernel/row_ring.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t attention_warps = 4;
inline constexpr std::uint32_t attention_threads = attention_warps * 32U;
/// Stretches of a lane's tokens, whose sums are joined in the end. Where there are few lanes each has a block of its own; where
/// there are many a block takes `many_lane_stretches` in turn, so that it begins and ends less often. Blocks of a lane read
/// each other's shared memory. Who takes a stretch changes no result.
inline constexpr std::uint32_t attention_stretches = 8;
inline constexpr std::uint32_t many_lane_stretches = 4;
inline constexpr std::uint32_t many_lanes = 256;
/// Tiles of a warp: all but one travel while one is worked on.
inline constexpr std::uint32_t attention_stages = 3;

/// How keys and values lie over the threads of a warp. `Latent`: values are prefixes of the keys.
template <
  class T, std::uint32_t Lanes, std::uint32_t KeyPieces, std::uint32_t ValuePieces, std::uint32_t Pairs, bool Latent>
struct attention_form {
  using element = T;
  static constexpr std::uint32_t lanes = Lanes;
  static constexpr std::uint32_t key_pieces = KeyPieces;      // of a thread
  static constexpr std::uint32_t value_pieces = ValuePieces;  // of a thread
  static constexpr std::uint32_t pairs = Pairs;
  static constexpr bool latent = Latent;
  static constexpr std::uint32_t groups = 32U / Lanes;
  static constexpr std::uint32_t tile = groups * ring_steps;
  static constexpr std::uint32_t elements = piece_elements<T>;
  static constexpr std::uint32_t stage_pieces = (KeyPieces + (Latent ? 0U : ValuePieces)) * ring_steps * 32U;
  static constexpr std::uint32_t ring_bytes = attention_warps * attention_stages * stage_pieces * piece_bytes;
  /// [pairs, value_dim] of one warp or block at most.
  static constexpr std::uint32_t partial_bytes = Pairs * ValuePieces * elements * Lanes * sizeof(float);
  /// As many as registers allow.
  static constexpr std::uint32_t blocks = Pairs * (KeyPieces + ValuePieces) * elements <= 64U ? 4U : 2U;
  /// A warp's sums fit where a tile of its was, and those of the other stretches beside the rings of all `blocks`.
  static constexpr bool takes_turns =
    partial_bytes <= stage_pieces * piece_bytes && partial_bytes <= 8192U / blocks && !Latent;

  static_assert(Pairs % 4U == 0U);
  static_assert(attention_warps * partial_bytes <= ring_bytes);

  /// Of a block that takes so many stretches: the sums of all but the last lie behind the ring.
  [[nodiscard]] static constexpr std::uint32_t shared_bytes(std::uint32_t stretches)
  {
    return ring_bytes + (stretches - 1U) * partial_bytes;
  }
};

/// e^(value - top), 0 where nothing was attended.
[[nodiscard]] __device__ inline float weight_below(float value, float top)
{
  return value == device::minus_infinity ? 0.0F : device::exponential(value - top);
}

/// The order of every sum follows from the form and the list's length alone. A cluster attends one KV head of one lane with
/// `Form::pairs` pairs: its blocks take `Stretches` equal stretches of the list each, their warps tiles of a stretch in turn.
template <class Op, class Form, std::uint32_t Stretches>
__global__ void __cluster_dims__(attention_stretches / Stretches, 1, 1)
  __launch_bounds__(attention_threads, Form::blocks) paged_attention_kernel(Op const op)
{
  using element = typename Form::element;
  using place_type = scattered_place<Form::lanes, Form::pairs>;
  constexpr std::uint32_t pairs = Form::pairs;
  constexpr std::uint32_t elements = Form::elements;
  constexpr std::uint32_t cluster = attention_stretches / Stretches;
  extern __shared__ uint4 row_ring[];
  __shared__ __align__(16) float warp_weights[attention_warps][Form::tile * pairs];
  __shared__ __align__(16) float warp_factors[attention_warps][pairs];
  __shared__ float warp_tops[attention_warps][pairs];
  __shared__ float warp_totals[attention_warps][pairs];
  __shared__ float* warp_partials[attention_warps];
  __shared__ float block_top[Stretches][pairs];
  __shared__ float block_total[Stretches][pairs];

  block_table const& table = op.table;
  // Words that may lie on the host are asked for before anything needs them.
  std::byte const* const slot_memory = table.pool.base(table.layer);
  std::uint32_t const share = op.query_group();
  std::uint32_t const pair_tiles = divide_up(op.query_limit() * share, pairs);
  std::uint32_t const item = blockIdx.x / cluster;
  std::uint32_t const rank = blockIdx.x % cluster;
  std::uint32_t const first_pair = item % pair_tiles * pairs;
  std::uint32_t const kv_head = item / pair_tiles % op.kv_heads();
  row_id const row = op.rows[item / pair_tiles / op.kv_heads()];
  row_info const state = table.info[to_index(row)];
  auto const asked = static_cast<std::uint32_t>(state.new_tokens);
  if (first_pair >= asked * share) { return; }  // so do all blocks of the cluster
  std::uint32_t const pair_count = asked * share - first_pair < pairs ? asked * share - first_pair : pairs;
  lane_id const list = lane_of(row, kv_head / table.layout.heads, table.head_groups);
  std::uint32_t const head = kv_head % table.layout.heads;
  std::uint32_t const tokens = table.tokens(list);
  // A query sees its own token and earlier ones. The landed part holds full earlier blocks only.
  auto const end_of_pair = [&](std::uint32_t pair) {
    std::uint32_t const later = table.which == part::landed ? 0U : asked - 1U - (first_pair + pair) / share;
    return tokens > later ? tokens - later : 0U;
  };

  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const warp = threadIdx.x / 32U;
  std::uint32_t const column = lane % Form::lanes;
  place_type const at{lane};
  std::uint32_t const stretch = round_up(divide_up(tokens, attention_stretches), Form::tile);
  std::uint32_t const seen = end_of_pair(pair_count - 1U);
  std::uint32_t const first_stretch = rank * Stretches;
  constexpr std::uint32_t stride = attention_warps * Form::tile;
  auto const end_of = [&](std::uint32_t of_list) {
    return (of_list + 1U) * stretch < seen ? (of_list + 1U) * stretch : seen;
  };

  // Tiles of the warp over all stretches of its block. Past the last one `tile` is not below `end`.
  struct tile_cursor {
    std::uint32_t tile;
    std::uint32_t end;
    std::uint32_t of_list;
  };
  auto const skip_empty = [&](tile_cursor& at_tile) {
    if constexpr (Stretches > 1U) {
      while (at_tile.tile >= at_tile.end && at_tile.of_list + 1U < first_stretch + Stretches) {
        ++at_tile.of_list;
        at_tile.tile = at_tile.of_list * stretch + warp * Form::tile;
        at_tile.end = end_of(at_tile.of_list);
      }
    }
  };
  auto const advance = [&](tile_cursor& at_tile) {
    at_tile.tile += stride;
    skip_empty(at_tile);
  };

  // Rows on their way ---------------------------------------------------------------------------------------------------

  std::uint32_t const block_tokens = table.layout.block_tokens;
  plane_layout const& key_plane = table.layout.key();
  std::uint32_t const key_pieces = key_plane.row_bytes / piece_bytes;
  std::uint32_t const value_pieces = table.layout.value_dim / elements;
  std::byte const* const keys = slot_memory + row_offset(key_plane, head, 0);
  [[maybe_unused]] std::uint64_t const to_values =
    row_offset(table.layout.value(), head, 0) - row_offset(key_plane, head, 0);  // may wrap around, and back
  slot_id const* const slots = table.slots + to_index(list) * table.stride;
  uint4* const ring = row_ring + warp * attention_stages * Form::stage_pieces + lane;

  // A lane knows where one row of a tile lies. It asks for the slot well before the rows are fetched.
  struct row_place {
    slot_id slot;
    std::uint32_t token;  // of the block
  };
  auto const look_up = [&](tile_cursor const& at_tile) {
    std::uint32_t const token = at_tile.tile + lane % Form::tile;
    row_place result{slot_id{0}, 0U};
    if (token < at_tile.end) {
      std::uint32_t const block = token / block_tokens;
      result = {slots[block], token - block * block_tokens};
    }
    return result;
  };
  auto const fetch = [&](tile_cursor const& at_tile, row_place const& place, std::uint32_t stage) {
    unsigned long long const offset =
      to_index(place.slot) * table.pool.slot_stride + place.token * key_plane.token_stride;
    uint4* const to = ring + stage * Form::stage_pieces;
#pragma unroll
    for (std::uint32_t step = 0; step < ring_steps; ++step) {
      std::uint32_t const of_tile = step * Form::groups + at.group;
      bool const listed = at_tile.tile + of_tile < at_tile.end;
      std::byte const* const from =
        keys + __shfl_sync(all_lanes, offset, static_cast<int>(of_tile)) + std::uint64_t{column} * piece_bytes;
#pragma unroll
      for (std::uint32_t i = 0; i < Form::key_pieces; ++i) {
        fetch_piece(
          to + (i * ring_steps + step) * 32U, from + i * Form::lanes * piece_bytes,
          listed && i * Form::lanes + column < key_pieces);
      }
      if constexpr (!Form::latent) {
#pragma unroll
        for (std::uint32_t i = 0; i < Form::value_pieces; ++i) {
          fetch_piece(
            to + ((Form::key_pieces + i) * ring_steps + step) * 32U, from + to_values + i * Form::lanes * piece_bytes,
            listed && i * Form::lanes + column < value_pieces);
        }
      }
    }
  };

  tile_cursor next{first_stretch * stretch + warp * Form::tile, end_of(first_stretch), first_stretch};
  skip_empty(next);
  row_place next_place{};
  {
    tile_cursor cursors[attention_stages];
    row_place ahead[attention_stages];
#pragma unroll
    for (std::uint32_t i = 0; i < attention_stages; ++i) {
      cursors[i] = next;
      ahead[i] = look_up(next);
      if (i + 1U < attention_stages) { advance(next); }
    }
#pragma unroll
    for (std::uint32_t i = 0; i + 1U < attention_stages; ++i) {
      if (cursors[i].tile < cursors[i].end) { fetch(cursors[i], ahead[i], i); }
      end_fetches();
    }
    next_place = ahead[attention_stages - 1U];
  }

  // Queries, while they travel ------------------------------------------------------------------------------------------

  float const scale = op.score_scale();
  float queries[pairs][Form::key_pieces * elements];
  device::visit_elements(op.queries.type, [&](auto stored) {
    using query_type = typename decltype(stored)::type;
#pragma unroll
    for (std::uint32_t pair = 0; pair < pairs; ++pair) {
      std::uint32_t const index = first_pair + (pair < pair_count ? pair : 0U);
      auto const* const query = reinterpret_cast<query_type const*>(op.queries.row(
        static_cast<std::uint64_t>(state.token_offset) + index / share, kv_head * share + index % share));
#pragma unroll
      for (std::uint32_t i = 0; i < Form::key_pieces; ++i) {
        std::uint32_t const piece = i * Form::lanes + column;
#pragma unroll
        for (std::uint32_t j = 0; j < elements; ++j) {
          bool const has = pair < pair_count && piece < key_pieces;
          queries[pair][i * elements + j] = has ? scale * device::widen(query[piece * elements + j]) : 0.0F;
        }
      }
    }
  });

  // Tiles ---------------------------------------------------------------------------------------------------------------

  std::uint32_t const visible_end = at.vector < pair_count ? end_of_pair(at.vector) : 0U;
  float* const weights = warp_weights[warp];
  float* const factors = warp_factors[warp];
  std::uint32_t const value_dim = table.layout.value_dim;
  // The block's sums of a stretch, [pairs, value_dim]: of the last one where the ring was.
  auto const sums_of = [&](std::uint32_t of_block) {
    return reinterpret_cast<float*>(row_ring) +
      (of_block + 1U == Stretches ? 0U : (Form::ring_bytes + of_block * Form::partial_bytes) / sizeof(float));
  };
  std::uint32_t stage = 0;
#pragma unroll 1
  for (std::uint32_t of_block = 0; of_block < Stretches; ++of_block) {
    float sums[pairs][Form::value_pieces * elements] = {};
    float top = device::minus_infinity;  // of the pair at.vector
    float total = 0.0F;                  // of this lane's tokens
    std::uint32_t const end = end_of(first_stretch + of_block);
    for (std::uint32_t tile = (first_stretch + of_block) * stretch + warp * Form::tile; tile < end; tile += stride) {
      await_fetches<attention_stages - 2>();
      if (next.tile < next.end) { fetch(next, next_place, stage == 0U ? attention_stages - 1U : stage - 1U); }
      end_fetches();
      advance(next);
      next_place = look_up(next);

      uint4 const* const own = ring + stage * Form::stage_pieces;
      stage = stage + 1U == attention_stages ? 0U : stage + 1U;
      float scores[pairs * ring_steps] = {};
      add_products<element, Form::key_pieces, pairs>(own, queries, scores);
      scatter_sums<pairs * ring_steps, Form::lanes / 2U>(scores, lane);

      bool visible[place_type::count];
      float largest = device::minus_infinity;
#pragma unroll
      for (std::uint32_t i = 0; i < place_type::count; ++i) {
        visible[i] = tile + (at.step + i) * Form::groups + at.group < visible_end;
        if (visible[i]) { largest = fmaxf(largest, scores[i]); }
      }
#pragma unroll
      for (std::uint32_t width = 1; width < place_type::vector_lanes; width *= 2U) {
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, static_cast<int>(width)));
      }
#pragma unroll
      for (std::uint32_t width = Form::lanes; width < 32U; width *= 2U) {
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, static_cast<int>(width)));
      }
      bool const rises = largest > top;
      float const next_top = rises ? largest : top;
      float const factor = rises ? weight_below(top, next_top) : 1.0F;
      top = next_top;
      total *= factor;
      bool const any_rises = __any_sync(all_lanes, rises ? 1 : 0) != 0;  // and all have read the weights before
      __syncwarp();
#pragma unroll
      for (std::uint32_t i = 0; i < place_type::count; ++i) {
        float const weight = visible[i] ? device::exponential(scores[i] - top) : 0.0F;
        if (at.is_first) {
          total += weight;
          weights[(at.group * ring_steps + at.step + i) * pairs + at.vector] = weight;
        }
      }
      if (any_rises && at.group == 0U && lane % place_type::vector_lanes == 0U) { factors[at.vector] = factor; }
      __syncwarp();
      if (any_rises) {
#pragma unroll
        for (std::uint32_t pair = 0; pair < pairs; ++pair) {
          float const of_pair = factors[pair];
#pragma unroll
          for (std::uint32_t i = 0; i < Form::value_pieces * elements; ++i) { sums[pair][i] *= of_pair; }
        }
      }
      uint4 const* const own_values = own + (Form::latent ? 0U : Form::key_pieces * ring_steps * 32U);
#pragma unroll
      for (std::uint32_t step = 0; step < ring_steps; ++step) {
        float weight[pairs];
#pragma unroll
        for (std::uint32_t pair = 0; pair < pairs; pair += 4U) {
          float4 const four = *reinterpret_cast<float4 const*>(weights + (at.group * ring_steps + step) * pairs + pair);
          weight[pair] = four.x;
          weight[pair + 1U] = four.y;
          weight[pair + 2U] = four.z;
          weight[pair + 3U] = four.w;
        }
#pragma unroll
        for (std::uint32_t i = 0; i < Form::value_pieces; ++i) {
          float values[elements];
          widen_piece<element>(own_values[(i * ring_steps + step) * 32U], values);
#pragma unroll
          for (std::uint32_t pair = 0; pair < pairs; ++pair) {
#pragma unroll
            for (std::uint32_t j = 0; j < elements; ++j) { sums[pair][i * elements + j] += weight[pair] * values[j]; }
          }
        }
      }
    }

    // Sums of the warp and the block

    bool const is_last = of_block + 1U == Stretches;
#pragma unroll
    for (std::uint32_t width = 1; width < place_type::vector_lanes; width *= 2U) {
      total += __shfl_xor_sync(all_lanes, total, static_cast<int>(width));
    }
#pragma unroll
    for (std::uint32_t width = Form::lanes; width < 32U; width *= 2U) {
      total += __shfl_xor_sync(all_lanes, total, static_cast<int>(width));
#pragma unroll
      for (std::uint32_t pair = 0; pair < pairs; ++pair) {
#pragma unroll
        for (std::uint32_t i = 0; i < Form::value_pieces * elements; ++i) {
          sums[pair][i] += __shfl_xor_sync(all_lanes, sums[pair][i], static_cast<int>(width));
        }
      }
    }
    // [pairs, value_dim] of each warp: the stage that no fetch is on its way to, or in the end all of the ring.
    float* partial = nullptr;
    if (is_last) {
      await_fetches<0>();
      __syncthreads();
      partial = reinterpret_cast<float*>(row_ring) + warp * pairs * value_dim;
    } else {
      __syncwarp();
      std::uint32_t const free_stage = stage == 0U ? attention_stages - 1U : stage - 1U;
      partial = reinterpret_cast<float*>(row_ring + (warp * attention_stages + free_stage) * Form::stage_pieces);
    }
    if (at.group == 0U) {
      if (lane % place_type::vector_lanes == 0U) {
        warp_tops[warp][at.vector] = top;
        warp_totals[warp][at.vector] = total;
      }
#pragma unroll
      for (std::uint32_t i = 0; i < Form::value_pieces; ++i) {
        std::uint32_t const piece = i * Form::lanes + column;
        if (piece >= value_pieces) { continue; }
#pragma unroll
        for (std::uint32_t pair = 0; pair < pairs; ++pair) {
          float* const to = partial + pair * value_dim + piece * elements;
#pragma unroll
          for (std::uint32_t j = 0; j < elements; j += 4U) {
            float const* const four = &sums[pair][i * elements + j];
            *reinterpret_cast<float4*>(to + j) = make_float4(four[0], four[1], four[2], four[3]);
          }
        }
      }
    }
    if (lane == 0U) { warp_partials[warp] = partial; }
    __syncthreads();
    if (threadIdx.x < pairs) {
      float highest = warp_tops[0][threadIdx.x];
#pragma unroll
      for (std::uint32_t i = 1; i < attention_warps; ++i) { highest = fmaxf(highest, warp_tops[i][threadIdx.x]); }
      float sum = 0.0F;
#pragma unroll
      for (std::uint32_t i = 0; i < attention_warps; ++i) {
        float const factor = weight_below(warp_tops[i][threadIdx.x], highest);
        sum += factor * warp_totals[i][threadIdx.x];
        warp_factors[i][threadIdx.x] = factor;
      }
      block_top[of_block][threadIdx.x] = highest;
      block_total[of_block][threadIdx.x] = sum;
    }
    __syncthreads();
    float* const joined = sums_of(of_block);
    for (std::uint32_t i = threadIdx.x; i < pairs * value_dim; i += attention_threads) {
      std::uint32_t const pair = i / value_dim;
      float sum = 0.0F;
#pragma unroll
      for (std::uint32_t j = 0; j < attention_warps; ++j) { sum += warp_factors[j][pair] * warp_partials[j][i]; }
      joined[i] = sum;  // the place of the first warp's, or another
    }
    if (!is_last) { __syncthreads(); }  // before fetches to that stage go on, and sums of the next stretch
  }

  // Sums of the cluster -------------------------------------------------------------------------------------------------

  sync_cluster();
  for (std::uint32_t i = rank * attention_threads + threadIdx.x; i < pair_count * value_dim;
       i += cluster * attention_threads) {
    std::uint32_t const pair = i / value_dim;
    float tops[attention_stretches];
    float highest = device::minus_infinity;
#pragma unroll
    for (std::uint32_t j = 0; j < attention_stretches; ++j) {
      tops[j] = load_of_block(&block_top[j % Stretches][pair], j / Stretches);
      highest = fmaxf(highest, tops[j]);
    }
    float all = 0.0F;
    float sum = 0.0F;
#pragma unroll
    for (std::uint32_t j = 0; j < attention_stretches; ++j) {
      float const factor = weight_below(tops[j], highest);
      all += factor * load_of_block(&block_total[j % Stretches][pair], j / Stretches);
      sum += factor * load_of_block(sums_of(j % Stretches) + i, j / Stretches);
    }
    float const divisor = highest > device::minus_infinity || all != 0.0F ? all : 1.0F;
    std::uint64_t const token = static_cast<std::uint64_t>(state.token_offset) + (first_pair + pair) / share;
    std::uint32_t const query_head = kv_head * share + (first_pair + pair) % share;
    std::uint32_t const place = i - pair * value_dim;
    device::visit_elements(op.out.type, [&](auto stored) {
      using out_type = typename decltype(stored)::type;
      reinterpret_cast<out_type*>(op.out.row(token, query_head))[place] = static_cast<out_type>(sum / divisor);
    });
    if (place == 0U && op.lse != nullptr) {
      op.lse[token * op.out.heads + query_head] = highest + device::logarithm(divisor);
    }
  }
  sync_cluster();  // nobody ends while others read its memory
}

/// A kernel of one form and the shared memory that its blocks need.
struct attention_kernel {
  void const* function = nullptr;
  std::uint32_t shared_bytes = 0;
  std::uint32_t pairs = 0;
  std::uint32_t cluster = 0;
};

template <class Op, class Form>
[[nodiscard]] attention_kernel attention_kernel_of(Op const& op) noexcept
{
  if constexpr (Form::takes_turns) {
    std::uint64_t const tiles = divide_up(std::uint64_t{op.query_limit()} * op.query_group(), Form::pairs);
    if (tiles * op.rows.count * op.kv_heads() >= many_lanes) {
      return {
        reinterpret_cast<void const*>(&paged_attention_kernel<Op, Form, many_lane_stretches>),
        Form::shared_bytes(many_lane_stretches), Form::pairs, attention_stretches / many_lane_stretches};
    }
  }
  return {
    reinterpret_cast<void const*>(&paged_attention_kernel<Op, Form, 1>), Form::shared_bytes(1), Form::pairs,
    attention_stretches};
}

/// The kernel for rows of this shape; none where the generic body is to run. The form follows from the shape alone, so that
/// results depend on no batch.
template <class Op, class T>
[[nodiscard]] attention_kernel choose_attention_kernel(Op const& op) noexcept
{
  std::uint32_t const pieces = op.table.layout.key().row_bytes / piece_bytes;
  bool const wide = op.query_group() > 4U;
  if (op.table.layout.value_is_key_prefix) {
    if constexpr (sizeof(T) == 2U) {
      bool const fits = pieces > 32U && pieces <= 96U && op.table.layout.value_dim <= 64U * piece_elements<T>;
      if (fits) { return attention_kernel_of<Op, attention_form<T, 32, 3, 2, 4, true>>(op); }
    }
    return {};
  }
  if constexpr (sizeof(T) == 2U) {
    if (pieces < 4U || pieces > 32U) { return {}; }
    if (pieces <= 8U) {
      return wide ? attention_kernel_of<Op, attention_form<T, 8, 1, 1, 8, false>>(op)
                  : attention_kernel_of<Op, attention_form<T, 8, 1, 1, 4, false>>(op);
    }
    if (pieces <= 16U) {
      return wide ? attention_kernel_of<Op, attention_form<T, 16, 1, 1, 8, false>>(op)
                  : attention_kernel_of<Op, attention_form<T, 16, 1, 1, 4, false>>(op);
    }
    return wide ? attention_kernel_of<Op, attention_form<T, 32, 1, 1, 8, false>>(op)
                : attention_kernel_of<Op, attention_form<T, 32, 1, 1, 4, false>>(op);
  } else {
    if (pieces < 8U || pieces > 64U) { return {}; }
    if (pieces <= 16U) { return attention_kernel_of<Op, attention_form<T, 16, 1, 1, 4, false>>(op); }
    if (pieces <= 32U) { return attention_kernel_of<Op, attention_form<T, 32, 1, 1, 4, false>>(op); }
    return attention_kernel_of<Op, attention_form<T, 32, 2, 2, 4, false>>(op);
  }
}

/// A template, so that programs that attend with kernels of their own compile none of these.
template <std::same_as<paged_attention> Op>
struct kernel_override<Op> {
  /// Keys and values of one type, float, half or bfloat16, of one size, in rows of whole pieces; head_dim from 64 (half and
  /// bfloat16 from 32) to 256, or a latent row of up to 768 half elements whose first 512 at most are the value.
  [[nodiscard]] static bool takes(Op const& op) noexcept
  {
    block_layout const& layout = op.table.layout;
    plane_layout const& key = layout.key();
    plane_layout const& value = layout.value();
    if (key.type != value.type || (!layout.value_is_key_prefix && key.row_bytes != value.row_bytes)) { return false; }
    if (key.token_stride != value.token_stride || layout.alignment % piece_bytes != 0) { return false; }
    if (std::uint64_t{layout.value_dim} * size_of(value.type) % piece_bytes != 0) { return false; }
    for (plane_layout const* const plane : {&key, &value}) {
      std::uint64_t const all = plane->offset | plane->head_stride | plane->token_stride | plane->row_bytes;
      if (all % piece_bytes != 0) { return false; }
    }
    if (op.table.pool.slot_stride % piece_bytes != 0 || op.query_group() == 0U || op.query_limit() == 0U) {
      return false;
    }
    attention_kernel const kernel = choose(op);
    return kernel.function != nullptr && blocks(op, kernel) <= std::numeric_limits<std::int32_t>::max();
  }

  static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept
  {
    attention_kernel const kernel = choose(op);
    cudaError_t const code = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kernel.shared_bytes));
    if (code != cudaSuccess) { return code; }
    // Else the driver may leave so much to the first cache that fewer blocks fit.
    cudaError_t const carved = cudaFuncSetAttribute(
      kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (carved != cudaSuccess) { return carved; }
    void* arguments[] = {const_cast<Op*>(&op)};
    return cudaLaunchKernel(
      kernel.function, dim3{static_cast<unsigned int>(blocks(op, kernel))}, dim3{attention_threads}, arguments,
      kernel.shared_bytes, stream);
  }

 private:
  [[nodiscard]] static std::uint64_t blocks(Op const& op, attention_kernel const& kernel) noexcept
  {
    std::uint64_t const tiles = divide_up(std::uint64_t{op.query_limit()} * op.query_group(), kernel.pairs);
    return tiles * op.rows.count * op.kv_heads() * kernel.cluster;
  }

  [[nodiscard]] static attention_kernel choose(Op const& op) noexcept
  {
    switch (op.table.layout.key().type) {
      case dtype::float32: return choose_attention_kernel<Op, float>(op);
      case dtype::float16: return choose_attention_kernel<Op, half>(op);
      case dtype::bfloat16: return choose_attention_kernel<Op, bfloat16>(op);
      default: return {};
    }
  }
};

static_assert(has_kernel_override<paged_attention>);

}  // namespace pulseinfer::detail
