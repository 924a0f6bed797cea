#pragma once

/// Scores every block of the rows from its digest.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/certificate.hpp>
#include <pulseinfer/device/digest_pieces.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// ln(valid tokens) + the inner product of the query's spread form with the block's digest, for each scoring query head and
/// query token. One item is a stretch of blocks for the query heads of one scoring KV head of one row. Rows whose blocks are
/// all selected are left out. Where a block has pieces, that is the score of one, and the block's is ln of the sum of exp(score)
/// of those that have valid tokens: its share is the sum of what they would have as blocks.
/// @tparam Spread how a query meets the digest, device/block_score.hpp   @tparam Pieces of a block, selector/split.hpp
template <class Spread, std::uint32_t Pieces = 1>
struct score_digests {
  static constexpr char const* name = "score_blocks";
  static constexpr operation_kind kind = operation_kind::data;
  static constexpr std::uint32_t item_blocks = 64;
  static constexpr std::uint32_t item_queries = 16;  ///< (token, query head) pairs that scratch holds at a time

  select_request request = {};
  score_table scores = {};  // written: heads are those of `heads`, each with its query_group query heads
  query_pass pass = {};
  scoring_heads heads = {};
  std::uint32_t query_group = 1;  ///< query heads of a KV head
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_blocks = 0;  ///< rows of so many blocks and fewer need no scores
  dtype digest_type = dtype::float16;
  float scale = 1.0F;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{request.rows.count} * heads.count * stretches(), .group_threads = 64};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const
  {
    return std::size_t{item_queries} * elements() * sizeof(float);
  }

  [[nodiscard]] operation_cost cost() const
  {
    operation_cost result;
    std::uint64_t const digest = Pieces * device::digest_bytes(digest_type, Spread::parts, request.queries.dim);
    for (row_id const row : request.rows) {
      row_info const& state = request.info[to_index(row)];
      std::uint64_t const blocks = state.blocks(block_tokens);
      if (blocks <= budget_blocks) { continue; }
      std::uint64_t const queries = std::uint64_t{pass.count(state.new_tokens, scores.queries)} * query_group;
      result.device_bytes += blocks * heads.count * (digest + queries * sizeof(float));
      result.flops += 2U * blocks * heads.count * queries * Pieces * elements();
    }
    return result;
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    std::uint32_t const begin = static_cast<std::uint32_t>(item % stretches()) * item_blocks;
    auto const head = static_cast<std::uint32_t>(item / stretches() % heads.count);
    row_id const row = request.rows[item / stretches() / heads.count];
    row_info const state = request.info[to_index(row)];
    std::uint32_t const blocks = state.blocks(block_tokens);
    if (blocks <= budget_blocks || begin >= blocks) { return; }
    std::uint32_t const count = blocks - begin < item_blocks ? blocks - begin : item_blocks;

    auto* const spread = reinterpret_cast<float*>(scratch.data);
    std::uint32_t const stride = device::digest_stride(digest_type, request.queries.dim);
    std::uint32_t const pairs = pass.count(state.new_tokens, scores.queries) * query_group;
    for (std::uint32_t first = 0; first < pairs; first += item_queries) {
      std::uint32_t const held = pairs - first < item_queries ? pairs - first : item_queries;
      for (std::uint32_t i = 0; i < held; ++i) {
        std::uint32_t const token = pass.first + (first + i) / query_group;
        std::uint32_t const query_head = (heads.first + head) * query_group + (first + i) % query_group;
        device::spread_query<Spread>(
          group, request.queries.row(static_cast<std::uint64_t>(state.token_offset) + token, query_head),
          request.queries.type, request.queries.dim, scale, spread + std::size_t{i} * elements(), stride, elements());
      }
      group.sync();
      device::visit_digests(digest_type, [&](auto stored) {
        score<typename decltype(stored)::type>(group, row, state, head, begin, count, first, held, spread);
      });
      group.sync();
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t stretches() const
  {
    return divide_up(request.most_blocks, item_blocks);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t elements() const
  {
    return device::digest_elements(digest_type, Spread::parts, request.queries.dim);
  }

  template <class Digest, thread_group Group>
  PULSEINFER_HOST_DEVICE void score(
    Group const& group, row_id row, row_info const& state, std::uint32_t head, std::uint32_t begin, std::uint32_t count,
    std::uint32_t first_pair, std::uint32_t pairs, float const* spread) const
  {
    std::uint64_t const head_bytes = Pieces * device::digest_values<Digest>::bytes(Spread::parts, request.queries.dim);
    std::uint32_t const quads = divide_up(pairs, device::score_quad);
    for (std::uint32_t unit = group.thread_rank(); unit < count * quads; unit += group.size()) {
      std::uint32_t const block = begin + unit / quads;
      std::uint32_t const first = unit % quads * device::score_quad;
      float const* queries[device::score_quad];
      float result[device::score_quad];
      for (std::uint32_t i = 0; i < device::score_quad; ++i) {
        std::uint32_t const pair = first + i < pairs ? first + i : pairs - 1U;
        queries[i] = spread + std::size_t{pair} * elements();
      }
      score_pieces<Digest>(
        request.digests.address(request.layer, row, block) + head * head_bytes, state.valid_tokens(block, block_tokens),
        queries, result);
      for (std::uint32_t i = 0; i < device::score_quad && first + i < pairs; ++i) {
        std::uint32_t const pair = first_pair + first + i;
        scores.row(row, pair / query_group, head * query_group + pair % query_group)[block] = result[i];
      }
    }
  }

  /// Scores of a block from the digests of its pieces, one behind the other. The first always has a valid token.
  template <class Digest>
  PULSEINFER_HOST_DEVICE void score_pieces(
    std::byte* digests, std::uint32_t valid, float const* const (&queries)[device::score_quad],
    float (&result)[device::score_quad]) const
  {
    using values = device::digest_values<Digest>;
    for (std::uint32_t piece = 0; piece < Pieces; ++piece) {
      std::uint32_t const tokens = device::piece_tokens<Pieces>(valid, piece, block_tokens);
      if (piece != 0 && tokens == 0) { break; }
      float found[device::score_quad];
      device::block_scores(queries, values{reinterpret_cast<Digest*>(digests), elements()}, elements(), found);
      float const mass = device::logarithm(static_cast<float>(tokens));
      for (std::uint32_t i = 0; i < device::score_quad; ++i) {
        float const score = found[i] + mass;
        result[i] = piece == 0 ? score : device::add_logarithms(result[i], score);
      }
      digests += values::bytes(Spread::parts, request.queries.dim);
    }
  }
};

/// scale * (q . centre + sum |q| distance) + ln(valid tokens): scores of cuboid-mean and min-max digests.
using score_blocks = score_digests<device::absolute_spread>;

static_assert(operation<score_blocks>);

}  // namespace pulseinfer
