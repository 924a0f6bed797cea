#include "support/cache.hpp"
#include "support/immediate_backend.hpp"
#include "support/selection.hpp"
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

using pulseinfer::designated_head;
using pulseinfer::dtype;
using pulseinfer::layer_id;
using pulseinfer::solo_head_selector;
using pulseinfer::status;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;
using pulseinfer_test::tensor;

namespace {

using backend = pulseinfer_test::immediate_backend;
using numbers = std::vector<std::uint32_t>;

pulseinfer::selector_limits limits_of(cache const& c, std::uint32_t step_tokens)
{
  return {
    .geometry = c.geometry,
    .layout = c.layout,
    .max_rows = static_cast<std::uint32_t>(c.info.size()),
    .max_blocks = c.max_blocks,
    .max_step_tokens = step_tokens};
}

/// A selector bound to a cache, with digests of all blocks of one layer.
template <class Selector>
struct harness {
  harness(Selector const& options, cache& c, std::uint32_t layer, std::uint32_t step_tokens)
    : of{c},
      bound{options.bind(on, limits_of(c, step_tokens))},
      at{layer},
      queries{dtype::float32, c.tensor_tokens, c.geometry.query_heads, c.geometry.head_dim},
      arrays{c, most_budget(), digest_bytes()}
  {
    queries.randomise(c.random, 2.0F);
    with_all_tokens_new(
      c, [&] { REQUIRE(bound.digest_async({}, arrays.digest_request(layer, c.max_blocks)) == status::ok); });
  }

  [[nodiscard]] std::uint32_t most_budget() const
  {
    std::uint32_t most = 0;
    for (std::uint32_t i = 0; i < of.geometry.layers; ++i) {
      most = std::max(most, bound.budget_blocks(static_cast<layer_id>(i)));
    }
    return most;
  }
  [[nodiscard]] std::vector<std::uint64_t> digest_bytes() const
  {
    std::vector<std::uint64_t> bytes;
    for (std::uint32_t i = 0; i < of.geometry.layers; ++i) {
      bytes.push_back(bound.digest_bytes(static_cast<layer_id>(i)));
    }
    return bytes;
  }
  void select() { REQUIRE(bound.select_async({}, arrays.select_request(at, queries.view)) == status::ok); }

  cache& of;
  backend on;
  typename Selector::template bound<backend> bound;
  std::uint32_t at;
  tensor queries;
  selection_arrays arrays;
};

/// The votes of float and double may order blocks differently where they are nearly equal: a selection is right if no
/// block it leaves out has clearly more votes than one it takes.
void check_choice(numbers const& selected, numbers const& right, std::vector<double> const& votes)
{
  REQUIRE(selected.size() == right.size());
  numbers extra;
  numbers lacking;
  std::set_difference(selected.begin(), selected.end(), right.begin(), right.end(), std::back_inserter(extra));
  std::set_difference(right.begin(), right.end(), selected.begin(), selected.end(), std::back_inserter(lacking));
  for (std::uint32_t const in : extra) {
    for (std::uint32_t const out : lacking) { CHECK(votes[out] - votes[in] <= 1e-3 * votes[in]); }
  }
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE("solo_head_selector selects what a slow reference selects, over shapes, types and orders")
  {
    struct shape {
      std::uint32_t query_heads, kv_heads, head_groups, head_dim, block_tokens, budget;
      pulseinfer::token_order order;
      dtype type;
      dtype digest;
    };
    using enum pulseinfer::token_order;
    for (shape const& s : std::vector<shape>{
           {9, 3, 1, 64, 16, 128, hnd, dtype::float32, dtype::float16},
           {8, 8, 8, 46, 1, 9, nhd, dtype::float16, dtype::float32},
           {8, 1, 1, 128, 3, 30, hnd, dtype::bfloat16, dtype::float32},
           {12, 4, 2, 51, 17, 120, nhd, dtype::float16, dtype::float16},
           {4, 2, 2, 256, 64, 400, hnd, dtype::float32, dtype::float32},
         }) {
      CAPTURE(s.head_dim);
      pulseinfer::kv_geometry geometry{
        .layers = 2,
        .query_heads = s.query_heads,
        .kv_heads = s.kv_heads,
        .head_dim = s.head_dim,
        .block_tokens = s.block_tokens,
        .head_groups = s.head_groups,
        .key_type = s.type,
        .value_type = s.type,
        .order = s.order};
      std::uint32_t const bt = s.block_tokens;
      cache c{geometry, {{30 * bt + 1, 1}, {1, 1}, {13 * bt, 2}, {5 * bt, 1}, {40 * bt - 1, 3}, {0, 0}}, s.head_dim};
      solo_head_selector<> const options{
        .budget_tokens = s.budget, .sink_tokens = bt, .recent_tokens = bt, .digest = {.type = s.digest}};
      harness h{options, c, 1, 3};
      std::uint32_t const budget = s.budget / bt;
      // The second selection sees the first as the previous one.
      std::vector<numbers> before(c.residency.lanes);
      for (int step = 0; step < 2; ++step) {
        h.select();
        for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
          CAPTURE(lane);
          std::uint32_t const row = lane / s.head_groups;
          std::uint32_t const group = lane % s.head_groups;
          std::uint32_t const heads = s.kv_heads / s.head_groups;
          auto const votes = votes_of(
            c, h.queries, 1, row, {.first = group * heads, .count = heads}, 1.0 / std::sqrt(s.head_dim), before[lane],
            0.25);
          numbers const selected = h.arrays.selected(lane);
          check_choice(selected, pulseinfer_test::selection_of(c.info[row], bt, votes, budget, 1, 1), votes);
          CHECK(h.arrays.rest_is_none(lane));
          CHECK(h.arrays.remembered(1, lane) == selected);
          CHECK(h.arrays.remembered(0, lane).empty());
          before[lane] = selected;
        }
        h.queries.randomise(c.random, 2.0F);
      }
    }
  }
}
