#pragma once

/// From scores to a selection in one launch: shares, votes and the choice of a lane.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/share.hpp>
#include <pulseinfer/device/vote.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// What share_blocks, vote_blocks and select_top_k leave in votes and selection, for query tokens that one pass scores. The
/// scores stay scores: shares are not written. One item is one lane.
///
/// Three launches that depend on one another take longer than their work where lists are short, which `fits` says.
struct choose_blocks {
  static constexpr char const* name = "choose_blocks";
  static constexpr operation_kind kind = operation_kind::data;
  /// Blocks and voters (query tokens x scoring heads of a lane) up to which one group of threads a lane is the faster way.
  /// @source measured: benchmarks/results/h200/history/select-2.json
  static constexpr std::uint32_t most_blocks_that_fit = 4096;
  static constexpr std::uint32_t most_voters_that_fit = 8;

  [[nodiscard]] static constexpr bool fits(std::uint32_t most_blocks, std::uint32_t voters)
  {
    return most_blocks <= most_blocks_that_fit && voters <= most_voters_that_fit;
  }

  select_top_k choose = {};       // its rows, budgets, votes and selection are those of the shares and votes too
  score_table scores = {};        // read
  float* votes = nullptr;         // choose.votes, written
  std::uint32_t most_blocks = 0;  ///< no row has more; known to the host
  float favour = 1.0F;            ///< blocks of the previous selection count so many times

  [[nodiscard]] launch_shape shape() const { return choose.shape(); }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return std::max(
      device::share_temp_floats(most_blocks, group_threads) * sizeof(float), choose.scratch_bytes(group_threads));
  }

  [[nodiscard]] operation_cost cost() const
  {
    operation_cost result = choose.cost();
    for (row_id const row : choose.rows) {
      row_info const& state = choose.info[to_index(row)];
      std::uint64_t const blocks = state.blocks(choose.block_tokens);
      if (blocks <= choose.budget_blocks) { continue; }
      std::uint64_t const shares = blocks * query_pass{}.count(state.new_tokens, scores.queries) * scores.heads;
      result.device_bytes += sizeof(float) * shares;
      result.flops += 22U * shares;
    }
    return result;
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = choose.rows[item / choose.head_groups];
    auto const head_group = static_cast<std::uint32_t>(item % choose.head_groups);
    row_info const state = choose.info[to_index(row)];
    std::uint32_t const blocks = state.blocks(choose.block_tokens);
    if (blocks > choose.budget_blocks) {
      lane_id const lane = lane_of(row, head_group, choose.head_groups);
      float* const sums = votes + to_index(lane) * choose.vote_pitch;
      std::uint32_t const heads = scores.heads / choose.head_groups;
      std::uint32_t const voters = query_pass{}.count(state.new_tokens, scores.queries) * heads;
      for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) { sums[b] = 0.0F; }
      for (std::uint32_t voter = 0; voter < voters; ++voter) {
        float const* const own = scores.row(row, voter / heads, head_group * heads + voter % heads);
        device::share_scale const scale =
          device::find_share_scale(group, own, blocks, reinterpret_cast<float*>(scratch.data));
        for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) {
          float const share = device::exponential(own[b] - scale.top) * scale.factor;
          sums[b] += share;
        }
      }
      if (choose.selection.previous_words != 0U) {
        device::favour_previous(group, choose.selection.previous_of(choose.layer, lane), 0U, blocks, favour, sums);
      }
      group.sync();
    }
    choose(group, item, scratch);
  }
};

static_assert(operation<choose_blocks>);

}  // namespace pulseinfer
