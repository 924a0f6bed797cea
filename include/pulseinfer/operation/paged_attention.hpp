#pragma once

/// Attention of a visit's rows over its table.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/attention.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Softmax attention with log-sum-exp, the reference for any kernel that reads the tables. One item attends some (token,
/// query head) pairs of one row that share a KV head. Query token t of a row is tensor row info.token_offset + t and sees
/// the tokens up to its own.
struct paged_attention {
  static constexpr char const* name = "paged_attention";
  static constexpr operation_kind kind = operation_kind::data;

  block_table table = {};
  row_list rows = {};
  tensor_view queries = {};  // [tokens, query_heads, key dim]
  tensor_view out = {};      // [tokens, query_heads, value dim], written; 0 where nothing was attended
  float* lse = nullptr;      // [tokens, query_heads], written unless null; natural logarithm, -inf where nothing was
  float scale = 0.0F;        ///< of the scores, before the softmax; 0: 1/sqrt(key dim)
  /// No row appends more tokens in this step; known to the host. 0: as many as `queries` has, which is always enough, and
  /// starts items without work where several rows share the tensor.
  std::uint32_t most_queries = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t query_limit() const
  {
    return most_queries != 0 ? most_queries : static_cast<std::uint32_t>(queries.tokens);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE float score_scale() const
  {
    return scale != 0.0F ? scale : 1.0F / std::sqrt(static_cast<float>(queries.dim));
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t kv_heads() const
  {
    return table.head_groups * table.layout.heads;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t query_group() const
  {
    return queries.heads / kv_heads();
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr device::attention_tile tile() const
  {
    return device::make_attention_tile(table.layout, query_limit() * query_group());
  }

  [[nodiscard]] launch_shape shape() const
  {
    PULSEINFER_EXPECTS(kv_heads() != 0, "a table that was refused cannot be attended");
    std::uint64_t const tiles = divide_up(std::uint64_t{query_limit()} * query_group(), tile().queries);
    return {.items = std::uint64_t{rows.count} * kv_heads() * tiles, .group_threads = 64};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return tile().scratch_floats() * sizeof(float); }

  [[nodiscard]] operation_cost cost() const
  {
    operation_cost result;
    std::uint64_t const token_bytes =
      table.layout.key().row_bytes + (table.layout.value_is_key_prefix ? 0U : table.layout.value().row_bytes);
    for (row_id const row : rows) {
      auto const asked = static_cast<std::uint64_t>(table.info[to_index(row)].new_tokens);
      for (std::uint32_t group = 0; group < table.head_groups; ++group) {
        std::uint64_t const tokens = table.tokens(lane_of(row, group, table.head_groups));
        result.device_bytes += tokens * token_bytes * table.layout.heads;
        result.flops +=
          2U * tokens * asked * table.layout.heads * query_group() * (table.layout.key().dim + table.layout.value_dim);
      }
    }
    return result;
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    device::attention_tile const sizes = tile();
    std::uint32_t const share = query_group();
    std::uint32_t const tiles = divide_up(query_limit() * share, sizes.queries);
    auto const first_pair = static_cast<std::uint32_t>(item % tiles) * sizes.queries;
    auto const kv_head = static_cast<std::uint32_t>(item / tiles % kv_heads());
    row_id const row = rows[item / tiles / kv_heads()];
    row_info const state = table.info[to_index(row)];
    PULSEINFER_EXPECTS(
      state.new_tokens <= static_cast<std::int32_t>(query_limit()), "a row has more queries than most_queries says");
    std::uint32_t const pairs = static_cast<std::uint32_t>(state.new_tokens) * share;
    if (first_pair >= pairs) { return; }

    device::attention_task task;
    task.lane = lane_of(row, kv_head / table.layout.heads, table.head_groups);
    task.head = kv_head % table.layout.heads;
    task.queries = queries;
    task.out = out;
    task.lse = lse;
    task.first_token = static_cast<std::uint64_t>(state.token_offset);
    task.tokens = static_cast<std::uint32_t>(state.new_tokens);
    task.first_query_head = kv_head * share;
    task.query_heads = share;
    task.first_pair = first_pair;
    task.pairs = pairs - first_pair < sizes.queries ? pairs - first_pair : sizes.queries;
    task.scale = score_scale();
    device::attend(group, table, task, sizes, scratch.data);
  }
};

static_assert(operation<paged_attention>);

}  // namespace pulseinfer
