#pragma once

/// Bounds and estimates the mass of the blocks that a selection leaves out, from digests with bounds.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/certificate.hpp>
#include <pulseinfer/device/digest_pieces.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Where certificate_sums lie.
struct certificate_table {
  certificate_sums* data = nullptr;  // [max_rows, queries, heads], device memory or host memory that the device writes
  std::uint32_t queries = 1;         ///< query tokens of a row that are certified: the first so many
  std::uint32_t heads = 0;           ///< scoring query heads of a layer, by ascending KV head

  [[nodiscard]] PULSEINFER_HOST_DEVICE certificate_sums& at(row_id row, std::uint32_t query, std::uint32_t head) const
  {
    return data[(to_index(row) * queries + query) * heads + head];
  }
};

static_assert(std::is_trivially_copyable_v<certificate_table>);

/// One item is one query and scoring query head of one row: a slow pass over all of its blocks, for reports and checks. What the
/// lane's selection names counts as read.
/// @tparam Form, Spread, Pieces of the digests
template <class Form, class Spread, std::uint32_t Pieces = 1>
struct certify_skipped {
  static constexpr char const* name = "certify_skipped";
  static constexpr operation_kind kind = operation_kind::data;

  select_request request = {};   // the selection is read
  certificate_table table = {};  // written
  scoring_heads heads = {};
  std::uint32_t first_head = 0;  ///< of the table, for the first scoring KV head
  std::uint32_t query_group = 1;
  std::uint32_t group_heads = 1;  ///< KV heads of a head group
  std::uint32_t head_groups = 1;
  std::uint32_t block_tokens = 0;
  std::uint64_t bounds_offset = 0;  ///< from a block's digest to the block_bounds of the scoring heads' pieces
  dtype digest_type = dtype::float16;
  float scale = 1.0F;

  [[nodiscard]] launch_shape shape() const
  {
    return {
      .items = std::uint64_t{request.rows.count} * table.queries * heads.count * query_group, .group_threads = 64};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return (std::size_t{elements()} + group_threads) * sizeof(float);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t blocks = 0;
    for (row_id const row : request.rows) { blocks += request.info[to_index(row)].blocks(block_tokens); }
    std::uint64_t const digest = device::digest_bytes(digest_type, Form::parts, request.queries.dim);
    std::uint64_t const passes = blocks * heads.count * query_group * table.queries * Pieces;
    return {.device_bytes = passes * (digest + sizeof(block_bounds)), .flops = passes * 6U * elements()};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    std::uint32_t const of_heads = heads.count * query_group;
    auto const head = static_cast<std::uint32_t>(item % of_heads);
    auto const query = static_cast<std::uint32_t>(item / of_heads % table.queries);
    row_id const row = request.rows[item / of_heads / table.queries];
    row_info const state = request.info[to_index(row)];
    if (query >= static_cast<std::uint32_t>(state.new_tokens)) { return; }
    auto* const spread = reinterpret_cast<float*>(scratch.data);
    float* const temp_storage = spread + elements();
    std::uint32_t const kv_head = heads.first + head / query_group;
    device::spread_query<Spread>(
      group,
      request.queries.row(static_cast<std::uint64_t>(state.token_offset) + query, heads.first * query_group + head),
      request.queries.type, request.queries.dim, scale, spread, device::digest_stride(digest_type, request.queries.dim),
      elements());
    group.sync();
    certificate_sums sums;
    device::visit_digests(digest_type, [&](auto stored) {
      sums = sum_blocks<typename decltype(stored)::type>(
        group, row, state, lane_of(row, kv_head / group_heads, head_groups), head / query_group, spread);
    });
    auto const add = [](float a, float b) { return device::add_logarithms(a, b); };
    sums.log_bound = device::reduce(group, sums.log_bound, temp_storage, add);
    sums.log_skipped = device::reduce(group, sums.log_skipped, temp_storage, add);
    sums.log_attended = device::reduce(group, sums.log_attended, temp_storage, add);
    sums.value_norm = device::reduce(group, sums.value_norm, temp_storage, device::maximum{});
    if (sums.log_bound > device::minus_infinity) {
      // Each addition of logarithms is off by so much at most.
      float const size = sums.log_bound < 0.0F ? -sums.log_bound : sums.log_bound;
      sums.log_bound += (1.0F + size) * 5e-7F * static_cast<float>(Pieces * state.blocks(block_tokens) + 8U);
    }
    if (group.thread_rank() == 0U) { table.at(row, query, first_head + head) = sums; }
    group.sync();
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t elements() const
  {
    return device::digest_elements(digest_type, Form::parts, request.queries.dim);
  }

  /// Of this rank's blocks.
  template <class T, thread_group Group>
  [[nodiscard]] PULSEINFER_HOST_DEVICE certificate_sums sum_blocks(
    Group const& group, row_id row, row_info const& state, lane_id lane, std::uint32_t head, float const* spread) const
  {
    using values = device::digest_values<T>;
    std::uint32_t const dim = request.queries.dim;
    float square = 0.0F;
    for (std::uint32_t j = 0; j < dim; ++j) { square += spread[j] * spread[j]; }
    float const norm = __builtin_sqrtf(square * (1.0F + static_cast<float>(dim + 8U) * 0x1p-24F)) * (1.0F + 0x1p-22F);
    block_id const* const ids = request.selection.ids_of(lane);
    std::uint32_t const count = request.selection.counts[to_index(lane)];
    certificate_sums sums;
    for (std::uint32_t block = group.thread_rank(); block < state.blocks(block_tokens); block += group.size()) {
      std::byte* const digests = request.digests.address(request.layer, row, block);
      std::uint32_t low = 0;
      for (std::uint32_t high = count; low < high;) {
        std::uint32_t const middle = low + (high - low) / 2U;
        if (to_index(ids[middle]) < block) {
          low = middle + 1U;
        } else {
          high = middle;
        }
      }
      bool const attended = low < count && to_index(ids[low]) == block;
      std::uint32_t const valid = state.valid_tokens(block, block_tokens);
      for (std::uint32_t i = 0; i < Pieces; ++i) {
        std::uint32_t const piece = head * Pieces + i;
        std::uint32_t const piece_valid = device::piece_tokens<Pieces>(valid, i, block_tokens);
        if (piece_valid == 0) { break; }
        values const digest{reinterpret_cast<T*>(digests + piece * values::bytes(Form::parts, dim)), elements()};
        block_bounds const bounds = reinterpret_cast<block_bounds const*>(digests + bounds_offset)[piece];
        float const tokens = device::logarithm(static_cast<float>(piece_valid));
        float const* const same[device::score_quad] = {spread, spread, spread, spread};
        float scores[device::score_quad];
        device::block_scores(same, digest, elements(), scores);
        sums.value_norm = bounds.value_norm > sums.value_norm ? bounds.value_norm : sums.value_norm;
        if (attended) {
          sums.log_attended = device::add_logarithms(sums.log_attended, scores[0] + tokens);
          continue;
        }
        sums.log_skipped = device::add_logarithms(sums.log_skipped, scores[0] + tokens);
        float const most =
          device::bound_logits(spread, digest, elements(), values::stride(dim), bounds, norm, Form::holds_keys);
        sums.log_bound = device::add_logarithms(sums.log_bound, most + tokens);
      }
    }
    return sums;
  }
};

}  // namespace pulseinfer
