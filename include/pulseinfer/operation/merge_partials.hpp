#pragma once

/// Joins the attention results of a visit's two parts.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/merge.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Merges `other` into `result`, in place, for all query heads of the rows' tokens. One item is one
/// head of one token of one row.
struct merge_partials {
  static constexpr char const* name = "merge_partials";
  static constexpr operation_kind kind = operation_kind::data;

  row_list rows = {};
  row_info const* info = nullptr;    // [max_rows], device memory
  tensor_view result = {};           // [tokens, query_heads, value dim], read and written
  float* result_lse = nullptr;       // [tokens, query_heads], read and written
  tensor_view other = {};            // [tokens, query_heads, value dim]
  float const* other_lse = nullptr;  // [tokens, query_heads]
  std::uint32_t most_queries = 0;    ///< no row has more query tokens; known to the host. 0: as many as `result` has

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t query_limit() const
  {
    return most_queries != 0 ? most_queries : static_cast<std::uint32_t>(result.tokens);
  }

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * query_limit() * result.heads, .group_threads = 32};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t tokens = 0;
    for (row_id const row : rows) { tokens += static_cast<std::uint64_t>(info[to_index(row)].new_tokens); }
    std::uint64_t const elements = tokens * result.heads * result.dim;
    return {.device_bytes = elements * (2U * size_of(result.type) + size_of(other.type)), .flops = 3U * elements};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    auto const head = static_cast<std::uint32_t>(item % result.heads);
    auto const query = static_cast<std::int32_t>(item / result.heads % query_limit());
    row_info const state = info[to_index(rows[item / result.heads / query_limit()])];
    PULSEINFER_EXPECTS(
      state.new_tokens <= static_cast<std::int32_t>(query_limit()), "a row has more queries than most_queries says");
    if (query >= state.new_tokens) { return; }
    auto const token = static_cast<std::uint64_t>(state.token_offset + query);
    device::merge_weights const weights =
      device::merge_log_sums(result_lse[token * result.heads + head], other_lse[token * result.heads + head]);
    device::visit_elements(result.type, [&](auto target) {
      device::visit_elements(other.type, [&](auto source) {
        using target_type = typename decltype(target)::type;
        auto* const values = reinterpret_cast<target_type*>(result.row(token, head));
        device::merge(
          group, values, reinterpret_cast<typename decltype(source)::type const*>(other.row(token, head)), weights,
          values, result.dim);
      });
    });
    group.sync();  // every rank has read the old log-sum
    if (group.thread_rank() == 0U) { result_lse[token * result.heads + head] = weights.lse; }
  }
};

static_assert(operation<merge_partials>);

}  // namespace pulseinfer
