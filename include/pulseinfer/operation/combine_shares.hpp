#pragma once

/// Makes a vote for each block of a lane from the weighted shares of its scoring heads and queries, or from the largest.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/vote.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// As vote_blocks, for head rules with weights or that take the largest share.
struct combine_shares {
  static constexpr char const* name = "combine_shares";
  static constexpr operation_kind kind = operation_kind::data;
  static constexpr std::uint32_t item_blocks = 512;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  score_table scores = {};         // shares
  float const* weights = nullptr;  // [scores.heads / query_group] of the scoring KV heads, device memory; null: 1 each
  float* votes = nullptr;          // [lanes, scores.pitch], written by the first pass, combined with by later ones
  selection_ref selection = {};    // `previous` is read
  query_pass pass = {};
  std::uint32_t head_groups = 1;
  std::uint32_t query_group = 1;  ///< query heads of a KV head
  std::uint32_t most_blocks = 0;  ///< no row has more; known to the host
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_blocks = 0;  ///< rows of so many blocks and fewer need no votes
  float favour = 1.0F;
  bool largest = false;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups * stretches(), .group_threads = 128};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t shares = 0;
    for (row_id const row : rows) {
      row_info const& state = info[to_index(row)];
      std::uint64_t const blocks = state.blocks(block_tokens);
      if (blocks > budget_blocks) { shares += blocks * pass.count(state.new_tokens, scores.queries) * scores.heads; }
    }
    return {.device_bytes = sizeof(float) * shares, .flops = 2U * shares};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint32_t const begin = static_cast<std::uint32_t>(item % stretches()) * item_blocks;
    auto const head_group = static_cast<std::uint32_t>(item / stretches() % head_groups);
    row_id const row = rows[item / stretches() / head_groups];
    row_info const state = info[to_index(row)];
    std::uint32_t const blocks = state.blocks(block_tokens);
    if (blocks <= budget_blocks || begin >= blocks) { return; }
    std::uint32_t const count = blocks - begin < item_blocks ? blocks - begin : item_blocks;

    lane_id const lane = lane_of(row, head_group, head_groups);
    float* const combined = votes + to_index(lane) * scores.pitch + begin;
    std::uint32_t const heads = scores.heads / head_groups;
    std::uint32_t const queries = pass.count(state.new_tokens, scores.queries);
    if (pass.first == 0U) {
      for (std::uint32_t b = group.thread_rank(); b < count; b += group.size()) { combined[b] = 0.0F; }
    }
    for (std::uint32_t i = 0; i < queries * heads; ++i) {
      std::uint32_t const head = head_group * heads + i % heads;
      float const weight = weights == nullptr ? 1.0F : weights[head / query_group];
      device::combine_share(group, scores.row(row, i / heads, head) + begin, weight, largest, count, combined);
    }
    if (pass.last && selection.previous_words != 0U) {
      device::favour_previous(group, selection.previous_of(layer, lane), begin, count, favour, combined);
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t stretches() const
  {
    return divide_up(most_blocks, item_blocks);
  }
};

static_assert(operation<combine_shares>);

}  // namespace pulseinfer
