#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

using pulseinfer::dtype;
using pulseinfer::part;
using pulseinfer_test::cache;
using pulseinfer_test::row_shape;
using pulseinfer_test::tensor;

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Queries, output and log-sums of a batch, and the operation over them.
struct attention_call {
  attention_call(cache& c, dtype query_type, dtype out_type)
    : of{c},
      queries{query_type, c.tensor_tokens, c.geometry.query_heads, c.geometry.head_dim, 3},
      out{out_type, c.tensor_tokens, c.geometry.query_heads, c.layout.value_dim, 1},
      lse(c.tensor_tokens * c.geometry.query_heads, -1.0F),
      scale{1.0F / std::sqrt(static_cast<float>(c.geometry.head_dim))}
  {
    queries.randomise(c.random);
  }

  [[nodiscard]] pulseinfer::paged_attention operation(pulseinfer::block_table const& table)
  {
    return {
      .table = table,
      .rows = of.rows(),
      .queries = queries.view,
      .out = out.view,
      .lse = lse.data(),
      .scale = scale,
      .most_queries = of.most_new};
  }

  cache& of;
  tensor queries;
  tensor out;
  std::vector<float> lse;
  float scale;
};

/// Attention of one query in double precision over the blocks that `chosen(lane, block)` names.
struct reference_result {
  std::vector<double> out;
  double lse = 0;
};

template <class Chosen>
reference_result reference(
  attention_call const& call, std::uint32_t layer, std::uint32_t row, std::uint32_t query, std::uint32_t head,
  Chosen const& chosen, bool causal = true)
{
  cache const& c = call.of;
  auto const& info = c.info[row];
  std::uint32_t const kv_head = head / c.geometry.query_group();
  std::uint32_t const lane = row * c.geometry.head_groups + kv_head / c.layout.heads;
  auto const token = static_cast<std::uint64_t>(info.token_offset) + query;
  auto const own = static_cast<std::uint32_t>(info.tokens - info.new_tokens) + query;
  reference_result result{.out = std::vector<double>(c.layout.value_dim, 0.0), .lse = minus_infinity};
  std::vector<std::pair<std::uint32_t, double>> scores;
  double top = minus_infinity;
  for (std::uint32_t t = 0; t < static_cast<std::uint32_t>(info.tokens); ++t) {
    if (!chosen(lane, t / c.layout.block_tokens) || (causal && t > own)) { continue; }
    double score = 0;
    for (std::uint32_t j = 0; j < c.geometry.head_dim; ++j) {
      score += static_cast<double>(call.queries.at(token, head, j)) * c.key(layer, row, kv_head, t, j);
    }
    score *= static_cast<double>(call.scale);
    top = std::max(top, score);
    scores.emplace_back(t, score);
  }
  if (scores.empty()) { return result; }
  double total = 0;
  for (auto const& [t, score] : scores) {
    double const weight = std::exp(score - top);
    total += weight;
    for (std::uint32_t j = 0; j < c.layout.value_dim; ++j) {
      result.out[j] += weight * static_cast<double>(c.value(layer, row, kv_head, t, j));
    }
  }
  for (double& x : result.out) { x /= total; }
  result.lse = top + std::log(total);
  return result;
}

template <class Chosen>
void check_against_reference(attention_call const& call, std::uint32_t layer, Chosen const& chosen, double tolerance)
{
  cache const& c = call.of;
  for (std::uint32_t row = 0; row < c.info.size(); ++row) {
    for (std::uint32_t query = 0; query < static_cast<std::uint32_t>(c.info[row].new_tokens); ++query) {
      for (std::uint32_t head = 0; head < c.geometry.query_heads; ++head) {
        CAPTURE(row);
        CAPTURE(query);
        CAPTURE(head);
        auto const token = static_cast<std::uint64_t>(c.info[row].token_offset) + query;
        reference_result const right = reference(call, layer, row, query, head, chosen);
        double worst = 0;
        for (std::uint32_t j = 0; j < c.layout.value_dim; ++j) {
          worst = std::max(worst, std::abs(call.out.at(token, head, j) - right.out[j]));
          if (std::isnan(call.out.at(token, head, j))) { worst = 1e9; }
        }
        CHECK(worst <= tolerance);
        float const lse = call.lse[token * c.geometry.query_heads + head];
        if (std::isinf(right.lse)) {
          CHECK(lse == minus_infinity);
        } else {
          CHECK(std::abs(lse - right.lse) <= 2e-6 * std::max(1.0, std::abs(right.lse)));
        }
      }
    }
  }
}

auto const every_block = [](std::uint32_t, std::uint32_t) { return true; };

struct shape {
  std::uint32_t query_heads, kv_heads, head_groups, head_dim, value_dim, block_tokens;
  pulseinfer::token_order order;
  dtype type;
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("paged_attention equals a slow reference over shapes, types and orders")
  {
    using enum pulseinfer::token_order;
    for (shape const& s : std::vector<shape>{
           {9, 3, 1, 64, 0, 16, hnd, dtype::float32},
           {8, 8, 8, 46, 0, 1, nhd, dtype::float16},
           {8, 1, 1, 128, 0, 3, hnd, dtype::bfloat16},
           {12, 4, 2, 51, 33, 17, nhd, dtype::float16},
           {4, 2, 2, 256, 0, 64, hnd, dtype::float32},
           {10, 2, 1, 72, 0, 5, nhd, dtype::bfloat16},
           {7, 1, 1, 80, 16, 16, hnd, dtype::float8_e4m3},
         }) {
      CAPTURE(s.head_dim);
      CAPTURE(s.block_tokens);
      pulseinfer::kv_geometry geometry{
        .layers = 2,
        .query_heads = s.query_heads,
        .kv_heads = s.kv_heads,
        .head_dim = s.head_dim,
        .value_dim = s.value_dim,
        .block_tokens = s.block_tokens,
        .head_groups = s.head_groups,
        .key_type = s.type,
        .value_type = s.type,
        .order = s.order,
        .row_alignment = s.head_dim == 51 ? 16U : 1U};
      cache c{geometry, {{150, 1}, {1, 1}, {67, 5}, {16, 16}, {33, 2}, {0, 0}, {200, 40}}, s.head_dim};
      attention_call call{c, s.type == dtype::float8_e4m3 ? dtype::float16 : s.type, dtype::float32};
      pulseinfer_test::run_solo(call.operation(c.table(1, every_block)));
      check_against_reference(call, 1, every_block, 4e-6);
    }
  }
}
