#include "support/cache.hpp"
#include "support/immediate_backend.hpp"
#include "support/selection.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

using pulseinfer::designated_head;
using pulseinfer::dtype;
using pulseinfer::layer_id;
using pulseinfer::solo_head_selector;
using pulseinfer::status;
using pulseinfer_test::cache;
using pulseinfer_test::check_choice;
using pulseinfer_test::harness;
using pulseinfer_test::limits_of;
using pulseinfer_test::numbers;

namespace {

/// What one channel adds to a block's score, in double precision from the keys.
template <class Digest>
double channel_score(
  cache const& c, std::uint32_t row, std::uint32_t kv_head, std::uint32_t block, std::uint32_t j, double q)
{
  std::uint32_t const bt = c.layout.block_tokens;
  std::uint32_t const valid = c.info[row].valid_tokens(block, bt);
  double mean = 0;
  double square = 0;
  double largest = -1e300;
  for (std::uint32_t t = 0; t < valid; ++t) {
    double const key = static_cast<double>(c.key(0, row, kv_head, block * bt + t, j));
    mean += key / valid;
    square += key * key / valid;
    largest = std::max(largest, q * key);
  }
  if constexpr (std::is_same_v<Digest, pulseinfer::cuboid_mean>) {
    auto const digest = pulseinfer_test::digest_of(c, 0, row, kv_head, block, j);
    return q * digest.centre + std::abs(q) * digest.distance;
  } else if constexpr (std::is_same_v<Digest, pulseinfer::min_max>) {
    return largest;
  } else if constexpr (std::is_same_v<Digest, pulseinfer::mean_key>) {
    return q * mean;
  } else {
    return q * mean + q * q * (square - mean * mean) / 2;
  }
}

/// A backend whose launches are dear.
struct dear_backend : pulseinfer_test::immediate_backend {
  static constexpr bool prefers_few_launches = true;
};

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

  TEST_CASE_TEMPLATE(
    "solo_head_selector selects by digests of any form, with floats as a slow reference does, with bytes nearly so",
    Digest, pulseinfer::cuboid_mean, pulseinfer::min_max, pulseinfer::mean_key, pulseinfer::log_mass)
  {
    pulseinfer::kv_geometry geometry{
      .layers = 1, .query_heads = 6, .kv_heads = 3, .head_dim = 40, .block_tokens = 8, .key_type = dtype::float32};
    cache c{geometry, {{331, 1}, {200, 2}}, 7};
    double const scale = 1.0 / std::sqrt(40.0);
    for (bool const bounds : {false, true}) {
      for (dtype const type : {dtype::float32, dtype::int8}) {
        harness h{
          solo_head_selector<Digest>{
            .budget_tokens = 96, .sink_tokens = 8, .recent_tokens = 8, .digest = {.type = type, .bounds = bounds}},
          c, 0, 2};
        h.select();
        for (std::uint32_t row = 0; row < 2; ++row) {
          std::vector<double> votes(c.info[row].blocks(8), 0.0);
          for (std::int32_t query = 0; query < c.info[row].new_tokens; ++query) {
            for (std::uint32_t head = 0; head < 6; ++head) {
              auto const shares = shares_of(
                c, h.queries, row, static_cast<std::uint64_t>(c.info[row].token_offset + query), head, scale,
                [&](double q, std::uint32_t kv_head, std::uint32_t block, std::uint32_t j) {
                  return channel_score<Digest>(c, row, kv_head, block, j, q);
                });
              for (std::size_t block = 0; block < votes.size(); ++block) { votes[block] += shares[block]; }
            }
          }
          numbers const selected = h.arrays.selected(row);
          numbers const right = pulseinfer_test::selection_of(c.info[row], 8, votes, 12, 1, 1);
          if (type == dtype::float32) {
            check_choice(selected, right, votes);
          } else {
            numbers both;
            std::set_intersection(
              selected.begin(), selected.end(), right.begin(), right.end(), std::back_inserter(both));
            CHECK(both.size() + 1 >= right.size());
          }
        }
      }
    }
  }

  TEST_CASE("a designated head selects by the shares of its own query group, with one head's digests")
  {
    for (std::uint32_t const head : {0U, 2U, 3U}) {
      CAPTURE(head);
      pulseinfer::kv_geometry geometry{
        .layers = 2, .query_heads = 12, .kv_heads = 4, .head_dim = 48, .block_tokens = 4, .key_type = dtype::float32};
      cache c{geometry, {{161, 1}, {90, 3}}, head + 1};
      solo_head_selector<pulseinfer::cuboid_mean, designated_head> const options{
        .budget_tokens = 40,
        .sink_tokens = 4,
        .recent_tokens = 4,
        .digest = {.type = dtype::float32},
        .heads = {.head_of_layer = {head == 0 ? 1U : 0U, head}}};
      harness h{options, c, 1, 3};
      pulseinfer_test::immediate_backend all;
      auto const voters = solo_head_selector<>{.digest = {.type = dtype::float32}}.bind(all, limits_of(c, 3));
      CHECK(h.bound.digest_bytes(layer_id{1}) * 4 == voters.digest_bytes(layer_id{1}));
      h.select();
      for (std::uint32_t row = 0; row < 2; ++row) {
        auto const votes = votes_of(c, h.queries, 1, row, {.first = head, .count = 1}, 1.0 / std::sqrt(48.0), {}, 0.25);
        check_choice(h.arrays.selected(row), pulseinfer_test::selection_of(c.info[row], 4, votes, 10, 1, 1), votes);
      }
    }
  }

  // mit-han-lab/Quest#22: a sequence shorter than the budget was thinned
  TEST_CASE("a sequence within the budget is read whole, one beyond it keeps its newest block")
  {
    numbers const lengths{1, 15, 16, 17, 50, 63, 64, 65, 80};
    numbers const counts{1, 1, 1, 2, 4, 4, 4, 4, 4};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      CAPTURE(lengths[i]);
      pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
      cache c{geometry, {{lengths[i], 1}}, lengths[i]};
      harness h{solo_head_selector<>{.budget_tokens = 64}, c, 0, 1};
      h.select();
      numbers const selected = h.arrays.selected(0);
      CHECK(selected.size() == counts[i]);
      CHECK(h.arrays.rest_is_none(0));
      CHECK(selected.back() == (lengths[i] - 1) / 16);
      if (lengths[i] <= 64) {
        for (std::uint32_t block = 0; block < selected.size(); ++block) { CHECK(selected[block] == block); }
      }
    }
  }

  TEST_CASE("where launches are dear a short list is chosen from in two launches, and the choice is the same")
  {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      for (std::uint32_t const new_tokens : {1U, 2U}) {
        pulseinfer::kv_geometry geometry{
          .layers = 2, .query_heads = 8, .kv_heads = 2, .head_dim = 16, .head_groups = head_groups};
        cache c{geometry, {{83 * 16 + 3, new_tokens}, {700 * 16, 1}, {40, 1}, {0, 0}}, 3};
        solo_head_selector<> const options{.budget_tokens = 640, .hysteresis = 0.7F};
        harness<solo_head_selector<>, dear_backend> together{options, c, 1, 2};
        harness<solo_head_selector<>> apart{options, c, 1, 2};
        for (std::uint32_t step = 0; step < 3; ++step) {
          together.queries.randomise(c.random, 2.0F);
          std::uint64_t const before = together.on.launches;
          together.select();
          REQUIRE(apart.bound.select_async({}, apart.arrays.select_request(1, together.queries.view)) == status::ok);
          // Eight voters are the most that fit.
          bool const fits = new_tokens * geometry.query_heads / head_groups <= 8;
          CHECK(together.on.launches == before + (fits ? 2 : 4));
          for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
            CHECK(together.arrays.selected(lane) == apart.arrays.selected(lane));
            CHECK(together.arrays.rest_is_none(lane));
            CHECK(together.arrays.remembered(1, lane) == apart.arrays.remembered(1, lane));
          }
        }
        std::uint64_t const before = together.on.launches;
        together.on.refuse_launch = before + 1;
        auto const request = together.arrays.select_request(1, together.queries.view);
        CHECK(together.bound.select_async({}, request) == status::resource_exhausted);
      }
    }
  }

  TEST_CASE("nothing is launched where there is nothing to select, and one operation where nothing is to be chosen")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
    cache c{geometry, {{80, 1}, {0, 0}}, 3};
    harness h{solo_head_selector<>{.budget_tokens = 64}, c, 0, 1};
    std::uint64_t const before = h.on.launches;
    auto request = h.arrays.select_request(0, h.queries.view);
    request.rows.count = 0;
    CHECK(h.bound.select_async({}, request) == status::ok);
    request = h.arrays.select_request(0, h.queries.view);
    request.most_blocks = 0;
    CHECK(h.bound.select_async({}, request) == status::ok);
    auto touched = h.arrays.digest_request(0, 0);
    CHECK(h.bound.digest_async({}, touched) == status::ok);
    CHECK(h.on.launches == before);

    request.most_blocks = 4;
    request.rows = {.ids = c.ids.data() + 1, .count = 1};  // the row of 0 tokens
    CHECK(h.bound.select_async({}, request) == status::ok);
    CHECK(h.on.launches == before + 1);
    CHECK(h.arrays.selected(0).empty());
    h.select();
    CHECK(h.on.launches == before + 5);
  }

  // flashinfer-ai/flashinfer#941: what was never written behind the last token is NaN in this cache and its digests
  TEST_CASE("a block of one valid token is scored finitely, and a new token changes its digest and its share")
  {
    for (auto const& [block_tokens, tokens] :
         std::vector<std::pair<std::uint32_t, std::uint32_t>>{{4, 13}, {64, 4033}}) {
      pulseinfer::kv_geometry geometry{
        .layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 8, .block_tokens = block_tokens};
      cache c{geometry, {{tokens, 0}}, tokens};  // no new token: the last block is open because it is partial
      harness h{solo_head_selector<>{.budget_tokens = 4 * block_tokens, .sink_tokens = 0, .recent_tokens = 0}, c, 0, 1};
      h.select();
      numbers const selected = h.arrays.selected(0);
      CHECK(selected.size() == 4);
      CHECK(selected.back() == tokens / block_tokens);
      CHECK(std::is_sorted(selected.begin(), selected.end()));
      CHECK(std::adjacent_find(selected.begin(), selected.end()) == selected.end());
    }
  }

  // FlashML-org/FreeToken#177: heads beyond a multiple attended with a wrong KV head
  TEST_CASE("each query head scores for its own KV head, for any group size")
  {
    for (auto const& [query_heads, kv_heads] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
           {48, 2}, {40, 2}, {80, 4}, {32, 8}, {8, 8}, {28, 4}, {64, 1}}) {
      CAPTURE(query_heads);
      CAPTURE(kv_heads);
      constexpr std::uint32_t bt = 4;
      std::uint32_t const dim = 12 * kv_heads;
      pulseinfer::kv_geometry geometry{
        .layers = 1,
        .query_heads = query_heads,
        .kv_heads = kv_heads,
        .head_dim = dim,
        .block_tokens = bt,
        .head_groups = kv_heads,
        .key_type = dtype::float32};
      // 12 full blocks, and an open one whose keys are zero.
      cache c{geometry, {{12 * bt + 1, 1}}, 1};
      for (std::uint32_t g = 0; g < kv_heads; ++g) {
        for (std::uint32_t t = 0; t <= 12 * bt; ++t) {
          for (std::uint32_t j = 0; j < dim; ++j) {
            c.set_key(0, 0, g, t, j, t < 12 * bt && j == g * 12 + t / bt ? 1.0F : 0.0F);
          }
        }
      }
      harness h{
        solo_head_selector<>{.budget_tokens = 2 * bt, .sink_tokens = 0, .recent_tokens = 0, .hysteresis = 0.0F}, c, 0,
        1};
      for (std::uint32_t head = 0; head < query_heads; ++head) {
        CAPTURE(head);
        std::uint32_t const own = head / (query_heads / kv_heads);
        for (std::uint32_t other = 0; other < query_heads; ++other) {
          for (std::uint32_t j = 0; j < dim; ++j) {
            bool const set = other == head && j == own * 12 + (own + 3) % 12;
            h.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), other, j, set ? 1.0F : 0.0F);
          }
        }
        h.select();
        for (std::uint32_t g = 0; g < kv_heads; ++g) {
          // Where nothing was asked all scores are alike, and the lowest id wins.
          CHECK(h.arrays.selected(g) == numbers{g == own ? (g + 3) % 12 : 0U, 12U});
        }
      }
    }
    for (std::uint32_t const query_heads : {33U, 3U}) {
      pulseinfer_test::immediate_backend on;
      pulseinfer::selector_limits const limits{
        .geometry = {.layers = 1, .query_heads = query_heads, .kv_heads = 2, .head_dim = 8},
        .max_rows = 1,
        .max_blocks = 200};
      CHECK_THROWS_WITH_AS(
        static_cast<void>(solo_head_selector<>{}.bind(on, limits)),
        (std::string{"invalid_argument: "} + std::to_string(query_heads) +
         " query heads are not a multiple of 2 KV heads")
          .c_str(),
        pulseinfer::configuration_error);
    }
  }

  TEST_CASE("hysteresis keeps a block of the previous selection against one that is little better, and only then")
  {
    pulseinfer::kv_geometry geometry{
      .layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = 1, .key_type = dtype::float32};
    // Keys of unit length in channel of their own: the query's channels are the blocks' scores.
    for (float const lead : {0.15F, 0.35F}) {
      cache c{geometry, {{11, 1}}, 1};
      for (std::uint32_t t = 0; t < 11; ++t) {
        for (std::uint32_t j = 0; j < 16; ++j) { c.set_key(0, 0, 0, t, j, j == t ? 1.0F : 0.0F); }
      }
      harness h{
        solo_head_selector<>{
          .budget_tokens = 2, .sink_tokens = 0, .recent_tokens = 0, .hysteresis = 0.25F, .scale = 1.0F},
        c, 0, 1};
      auto const ask = [&](std::uint32_t block, float score) {
        h.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), 0, block, score);
      };
      for (std::uint32_t block = 0; block < 16; ++block) { ask(block, 0.0F); }
      ask(4, 3.0F);
      h.select();
      CHECK(h.arrays.selected(0) == numbers{4, 10});
      ask(7, 3.0F + lead);
      // A prefetch sees the previous selection and does not become it.
      auto prefetch = h.arrays.select_request(0, h.queries.view);
      prefetch.remember = false;
      REQUIRE(h.bound.select_async({}, prefetch) == status::ok);
      CHECK(h.arrays.remembered(0, 0) == numbers{4, 10});
      h.select();
      CHECK(h.arrays.selected(0) == (lead < 0.25F ? numbers{4, 10} : numbers{7, 10}));
      CHECK(h.arrays.remembered(0, 0) == h.arrays.selected(0));
    }
  }

  TEST_CASE("law 3: a budget that covers the sequence selects every block, whatever the votes")
  {
    for (std::uint32_t const tokens : {1U, 63U, 64U, 641U, 1024U}) {
      pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16, .head_groups = 2};
      cache c{geometry, {{tokens, 1}, {700, 1}}, tokens};
      harness h{solo_head_selector<>{.budget_tokens = 1024}, c, 0, 1};
      h.select();
      for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
        std::uint32_t const blocks = c.info[lane / 2].blocks(16);
        numbers const selected = h.arrays.selected(lane);
        REQUIRE(selected.size() == blocks);
        for (std::uint32_t block = 0; block < blocks; ++block) { CHECK(selected[block] == block); }
      }
    }
  }

  TEST_CASE("law 8: the same inputs give the same selection in every run, with any memory and any other rows")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 6, .kv_heads = 3, .head_dim = 32, .block_tokens = 4};
    std::vector<numbers> first;
    for (int run = 0; run < 25; ++run) {
      cache c{geometry, {{401, 1}, {333, 2}, {222, 1}}, 99};
      harness h{solo_head_selector<>{.budget_tokens = 80, .recent_tokens = 8}, c, 0, 2};
      for (int step = 0; step < 3; ++step) {
        if (run % 2 == 0) {
          h.select();
        } else {  // each row alone
          for (std::uint32_t i = 0; i < 3; ++i) {
            auto request = h.arrays.select_request(0, h.queries.view);
            request.rows = {.ids = c.ids.data() + i, .count = 1};
            request.most_blocks = c.info[pulseinfer::to_index(c.ids[i])].blocks(4);
            REQUIRE(h.bound.select_async({}, request) == status::ok);
          }
        }
        for (std::uint32_t lane = 0; lane < 3; ++lane) {
          auto const place = static_cast<std::size_t>(step) * 3 + lane;
          if (run == 0) { first.push_back(h.arrays.selected(lane)); }
          CHECK(h.arrays.selected(lane) == first[place]);
        }
        h.queries.randomise(c.random, 2.0F);
      }
    }
  }

  TEST_CASE("a selector takes its memory at set-up and gives it back")
  {
    pulseinfer_test::immediate_backend on;
    {
      pulseinfer::selector_limits const limits{
        .geometry = {.layers = 2, .query_heads = 6, .kv_heads = 3, .head_dim = 8, .head_groups = 3},
        .max_rows = 4,
        .max_blocks = 100,
        .max_step_tokens = 2};
      auto const bound = solo_head_selector<>{}.bind(on, limits);
      CHECK(bound.allocated_bytes() == (4 * 2 * 6 * 112 + 4 * 3 * 112) * 4);
      CHECK(on.allocated == bound.allocated_bytes());
      CHECK(bound.digest_bytes(layer_id{0}) == 3 * 16 * 2);
    }
    CHECK(on.allocated == 0);
    CHECK(on.streams == 0);
    CHECK(on.events == 0);
  }

  TEST_CASE("calls that do not fit say so and launch nothing")
  {
    pulseinfer::kv_geometry geometry{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
    cache c{geometry, {{80, 1}}, 3};
    harness h{solo_head_selector<>{.budget_tokens = 64}, c, 0, 1};
    std::uint64_t const before = h.on.launches;
    auto const expect = [&](auto const& change, status right) {
      auto request = h.arrays.select_request(0, h.queries.view);
      change(request);
      CHECK(h.bound.select_async({}, request) == right);
    };
    expect([](auto& r) { r.layer = layer_id{2}; }, status::out_of_range);
    expect([](auto& r) { r.layer = pulseinfer::none<layer_id>; }, status::out_of_range);
    expect([](auto& r) { r.most_blocks = 6; }, status::capacity_exceeded);
    expect([](auto& r) { r.rows.count = 2; }, status::capacity_exceeded);
    expect([](auto& r) { r.queries = {}; }, status::invalid_argument);
    expect([](auto& r) { r.queries.heads = 2; }, status::invalid_argument);
    expect([](auto& r) { r.queries.dim = 8; }, status::invalid_argument);
    auto digests = h.arrays.digest_request(0, 1);
    digests.layer = layer_id{2};
    CHECK(h.bound.digest_async({}, digests) == status::out_of_range);
    CHECK(h.on.launches == before);
  }

  TEST_CASE("a launch that the backend refuses ends the selection with its status")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
    cache c{geometry, {{80, 1}}, 3};
    harness h{solo_head_selector<>{.budget_tokens = 64}, c, 0, 1};
    for (std::uint64_t launch = 0; launch < 4; ++launch) {
      std::uint64_t const before = h.on.launches;
      h.on.refuse_launch = before + launch;
      CHECK(h.bound.select_async({}, h.arrays.select_request(0, h.queries.view)) == status::resource_exhausted);
      CHECK(h.on.launches == before + launch);
      h.on.refuse_launch = pulseinfer_test::immediate_backend::never;
    }
    h.on.refuse_launch = h.on.launches;
    CHECK(h.bound.digest_async({}, h.arrays.digest_request(0, 1)) == status::resource_exhausted);
  }

  TEST_CASE("options that cannot work are refused at set-up with their numbers")
  {
    pulseinfer_test::immediate_backend on;
    pulseinfer::selector_limits const limits{
      .geometry = {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 8}, .max_rows = 2, .max_blocks = 100};
    auto const refusal = [&](auto const& options, pulseinfer::selector_limits const& with) -> std::string {
      try {
        static_cast<void>(options.bind(on, with));
      } catch (pulseinfer::configuration_error const& error) {
        return error.what();
      }
      return "accepted";
    };
    auto const has = [](std::string const& text, char const* part) { return text.find(part) != std::string::npos; };
    CHECK(refusal(solo_head_selector<>{}, limits) == "accepted");
    CHECK(has(refusal(solo_head_selector<>{.budget_tokens = 0}, limits), "0 tokens"));
    CHECK(has(refusal(solo_head_selector<>{.budget_tokens = 64, .recent_tokens = 64}, limits), "4 recent"));
    CHECK(has(refusal(solo_head_selector<>{.hysteresis = -1.0F}, limits), "-1"));
    CHECK(has(refusal(solo_head_selector<>{.hysteresis = std::nanf("")}, limits), "nan"));
    CHECK(has(refusal(solo_head_selector<>{.scale = -2.0F}, limits), "-2"));
    CHECK(has(refusal(solo_head_selector<>{.digest = {.type = dtype::bfloat16}}, limits), "bfloat16"));
    CHECK(has(refusal(solo_head_selector<>{.budget = {.layer_factors = {1.0}}}, limits), "1 budget factors"));
    CHECK(has(refusal(solo_head_selector<>{.budget = {.layer_factors = {1.0, 0.001}}}, limits), "2 tokens"));
    pulseinfer::selector_limits none = limits;
    none.max_rows = 0;
    CHECK(has(refusal(solo_head_selector<>{}, none), "0 rows"));
    none = limits;
    none.max_blocks = 0;
    CHECK(has(refusal(solo_head_selector<>{}, none), "0 blocks"));
    none = limits;
    none.max_step_tokens = 0;
    CHECK(has(refusal(solo_head_selector<>{}, none), "0 tokens"));
    CHECK(on.allocated == 0);
  }

  TEST_CASE("layers may have budgets of their own")
  {
    pulseinfer::kv_geometry geometry{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
    cache c{geometry, {{640, 1}}, 3};
    solo_head_selector<> const options{
      .budget_tokens = 128, .recent_tokens = 16, .budget = {.layer_factors = {2.0, 1.0}}};
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      harness h{options, c, layer, 1};
      h.select();
      CHECK(h.bound.budget_blocks(static_cast<layer_id>(layer)) == (layer == 0 ? 16 : 8));
      CHECK(h.arrays.selected(0).size() == (layer == 0 ? 16 : 8));
      CHECK(h.bound.dense_tokens() == 128);
    }
  }

  TEST_CASE("bodies ask of a backend no more than its contract names")
  {
    pulseinfer::archetype::backend on;
    auto bound = solo_head_selector<>{}.bind(
      on, {.geometry = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 8}, .max_rows = 1, .max_blocks = 1});
    pulseinfer::row_id const row{0};
    CHECK(bound.digest_async({}, {.layer = layer_id{0}, .rows = {&row, 1}, .most_touched = 1}) == status::ok);
    CHECK(bound.select_async({}, {.layer = layer_id{0}, .rows = {&row, 1}, .most_blocks = 1}) == status::ok);
  }
}
