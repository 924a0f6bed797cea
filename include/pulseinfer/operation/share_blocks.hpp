#pragma once

/// Turns the scores of each head and query into shares of its softmax mass.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/share.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Softmax over all blocks of a row, in place. One item is one scoring head and query token of one row.
struct share_blocks {
  static constexpr char const* name = "share_blocks";
  static constexpr operation_kind kind = operation_kind::data;

  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  score_table scores = {};         // read and written
  query_pass pass = {};
  std::uint32_t most_queries = 1;  ///< of the pass; known to the host
  std::uint32_t most_blocks = 0;   ///< no row has more; known to the host
  std::uint32_t block_tokens = 0;
  std::uint32_t budget_blocks = 0;  ///< rows of so many blocks and fewer have no scores

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * most_queries * scores.heads, .group_threads = 128};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return device::share_temp_floats(most_blocks, group_threads) * sizeof(float);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t shares = 0;
    for (row_id const row : rows) {
      row_info const& state = info[to_index(row)];
      std::uint64_t const blocks = state.blocks(block_tokens);
      if (blocks > budget_blocks) { shares += blocks * pass.count(state.new_tokens, scores.queries) * scores.heads; }
    }
    return {.device_bytes = 5U * sizeof(float) * shares, .flops = 20U * shares};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    auto const head = static_cast<std::uint32_t>(item % scores.heads);
    auto const query = static_cast<std::uint32_t>(item / scores.heads % most_queries);
    row_id const row = rows[item / scores.heads / most_queries];
    row_info const state = info[to_index(row)];
    std::uint32_t const blocks = state.blocks(block_tokens);
    if (blocks <= budget_blocks || query >= pass.count(state.new_tokens, scores.queries)) { return; }
    device::share(group, scores.row(row, query, head), blocks, reinterpret_cast<float*>(scratch.data));
  }
};

static_assert(operation<share_blocks>);

}  // namespace pulseinfer
