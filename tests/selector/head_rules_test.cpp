#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/operation/combine_shares.hpp>
#include <pulseinfer/operation/select_top_p.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/max_share.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/top_p.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

using pulseinfer::dtype;
using pulseinfer::few_heads;
using pulseinfer::head_choice;
using pulseinfer::layer_id;
using pulseinfer::max_share;
using pulseinfer::solo_head_selector;
using pulseinfer::top_p;
using pulseinfer_test::cache;
using pulseinfer_test::check_choice;
using pulseinfer_test::harness;
using pulseinfer_test::numbers;

namespace {

/// Votes of a lane's blocks, from weights of the geometry's KV heads, where 0 does not vote.
std::vector<double> combined_votes(
  cache const& c, pulseinfer_test::tensor const& queries, std::uint32_t layer, std::uint32_t row,
  std::vector<double> const& weights, bool largest)
{
  std::vector<double> votes(c.info[row].blocks(c.layout.block_tokens), 0.0);
  double const scale = 1.0 / std::sqrt(static_cast<double>(c.geometry.head_dim));
  for (std::int32_t query = 0; query < c.info[row].new_tokens; ++query) {
    for (std::uint32_t head = 0; head < c.geometry.query_heads; ++head) {
      double const weight = weights[head / c.geometry.query_group()];
      if (weight == 0) { continue; }
      auto const shares = shares_of(
        c, queries, row, static_cast<std::uint64_t>(c.info[row].token_offset + query), head, scale,
        [&](double q, std::uint32_t kv_head, std::uint32_t block, std::uint32_t j) {
          auto const digest = pulseinfer_test::digest_of(c, layer, row, kv_head, block, j);
          return q * digest.centre + std::abs(q) * digest.distance;
        });
      for (std::size_t block = 0; block < votes.size(); ++block) {
        votes[block] = largest ? std::max(votes[block], shares[block]) : votes[block] + weight * shares[block];
      }
    }
  }
  return votes;
}

pulseinfer::kv_geometry small_geometry(std::uint32_t head_groups = 1)
{
  return {
    .layers = 2,
    .query_heads = 12,
    .kv_heads = 6,
    .head_dim = 24,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = dtype::float32};
}

template <class Options>
std::string refusal(Options const& options, pulseinfer::kv_geometry const& geometry)
{
  pulseinfer_test::immediate_backend on;
  try {
    static_cast<void>(options.bind(on, {.geometry = geometry, .max_rows = 1, .max_blocks = 100}));
  } catch (pulseinfer::configuration_error const& error) {
    return error.what();
  }
  return "accepted";
}

using few_selector = solo_head_selector<pulseinfer::cuboid_mean, few_heads>;

/// Selects twice, for drafts of three tokens in passes of two; the second selection favours the first.
template <class Selector>
void check_rule(
  Selector const& options, cache& c, std::vector<std::vector<double>> const& weights_of_lanes, bool largest)
{
  harness h{options, c, 1, 2};
  std::uint32_t const groups = c.geometry.head_groups;
  std::vector<numbers> before(c.residency.lanes);
  for (int step = 0; step < 2; ++step) {
    h.select();
    for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
      CAPTURE(lane);
      auto votes = combined_votes(c, h.queries, 1, lane / groups, weights_of_lanes[lane % groups], largest);
      for (std::uint32_t const block : before[lane]) { votes[block] *= std::exp(0.25); }
      numbers const selected = h.arrays.selected(lane);
      check_choice(selected, pulseinfer_test::selection_of(c.info[lane / groups], 4, votes, 10, 1, 1), votes);
      before[lane] = selected;
    }
    h.queries.randomise(c.random, 2.0F);
  }
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE("few_heads selects by the weighted shares of its heads, neighbours and others, with their digests alone")
  {
    struct choice {
      std::vector<std::uint32_t> heads;
      std::vector<float> weights;
    };
    for (choice const& chosen : std::vector<choice>{
           {{4}, {}}, {{0, 3}, {0.25F, 1.5F}}, {{1, 2, 5}, {2.0F, 0.0F, 0.125F}}, {{0, 1, 2, 3, 4, 5}, {}}}) {
      CAPTURE(chosen.heads.size());
      for (dtype const type : {dtype::float32, dtype::int8}) {
        cache c{small_geometry(), {{161, 1}, {90, 3}}, 5};
        few_selector const options{
          .budget_tokens = 40,
          .sink_tokens = 4,
          .recent_tokens = 4,
          .digest = {.type = type, .bounds = true},
          .heads = {.layers = {{.kv_heads = {5}}, {.kv_heads = chosen.heads, .weights = chosen.weights}}}};
        std::vector<double> weights(6, 0.0);
        for (std::size_t i = 0; i < chosen.heads.size(); ++i) {
          weights[chosen.heads[i]] = chosen.weights.empty() ? 1.0 : static_cast<double>(chosen.weights[i]);
        }
        if (type == dtype::float32) { check_rule(options, c, {weights}, false); }

        // What all heads' digests hold for these heads is what few_heads keeps, and the bounds behind it.
        harness few{options, c, 1, 2};
        harness all{solo_head_selector<>{.budget_tokens = 40, .recent_tokens = 4, .digest = options.digest}, c, 1, 2};
        pulseinfer::row_id const row{0};
        std::uint64_t const bytes = options.digest.head_bytes(24);
        std::uint32_t const count = static_cast<std::uint32_t>(chosen.heads.size());
        CHECK(few.bound.digest_bytes(layer_id{1}) == options.digest.block_bytes(24, count));
        std::uint32_t wrong = 0;
        for (std::uint32_t block = 0; block < 41; ++block) {
          std::byte const* const ours = few.arrays.digests.address(layer_id{1}, row, block);
          std::byte const* const theirs = all.arrays.digests.address(layer_id{1}, row, block);
          for (std::uint32_t i = 0; i < count; ++i) {
            std::uint32_t const head = chosen.heads[i];
            wrong += !std::equal(ours + i * bytes, ours + (i + 1) * bytes, theirs + head * bytes) ? 1U : 0U;
            std::byte const* const bounds = ours + options.digest.bounds_offset(24, count) + 8 * std::size_t{i};
            wrong += !std::equal(bounds, bounds + 8, theirs + all.of.geometry.kv_heads * bytes + 8 * std::size_t{head})
              ? 1U
              : 0U;
          }
        }
        CHECK(wrong == 0);
      }
    }
  }

  TEST_CASE("max_share selects by the largest share of any head and query, for one selection and for head groups")
  {
    for (std::uint32_t const groups : {1U, 3U}) {
      cache c{small_geometry(groups), {{161, 1}, {90, 3}, {37, 1}}, groups};
      solo_head_selector<pulseinfer::cuboid_mean, max_share> const options{
        .budget_tokens = 40, .sink_tokens = 4, .recent_tokens = 4, .digest = {.type = dtype::float32}};
      std::vector<std::vector<double>> weights(groups, std::vector<double>(6, 0.0));
      for (std::uint32_t head = 0; head < 6; ++head) { weights[head / (6 / groups)][head] = 1.0; }
      check_rule(options, c, weights, true);
    }
  }

  TEST_CASE("a head that alone sees a block keeps it with max_share, and loses it by a vote of many")
  {
    // Six heads see six blocks well; one of them sees block 9 with a share that five others do not outvote one by one.
    cache c{small_geometry(), {{45, 1}}, 1};
    for (std::uint32_t head = 0; head < 6; ++head) {
      for (std::uint32_t t = 0; t < 45; ++t) {
        for (std::uint32_t j = 0; j < 24; ++j) { c.set_key(1, 0, head, t, j, j == t / 4 ? 1.0F : 0.0F); }
      }
    }
    auto const ask = [&](auto& h) {
      for (std::uint32_t head = 0; head < 12; ++head) {
        for (std::uint32_t j = 0; j < 24; ++j) {
          float const needle = head < 2 ? (j == 9 ? 4.0F : 0.0F) : j < 4 ? 2.5F : 0.0F;
          h.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), head, j, needle);
        }
      }
    };
    solo_head_selector<> const vote{.budget_tokens = 20, .sink_tokens = 0, .recent_tokens = 0, .scale = 1.0F};
    solo_head_selector<pulseinfer::cuboid_mean, max_share> const most{
      .budget_tokens = 20, .sink_tokens = 0, .recent_tokens = 0, .scale = 1.0F};
    harness voted{vote, c, 1, 1};
    ask(voted);
    voted.select();
    CHECK(voted.arrays.selected(0) == numbers{0, 1, 2, 3, 11});
    harness largest{most, c, 1, 1};
    ask(largest);
    largest.select();
    CHECK(largest.arrays.selected(0) == numbers{0, 1, 2, 9, 11});
  }

  TEST_CASE("combine_shares gives the same bits with any group")
  {
    cache c{small_geometry(3), {{161, 1}, {90, 3}}, 5};
    harness h{solo_head_selector<>{.budget_tokens = 64}, c, 1, 3};
    pulseinfer::score_table scores{.queries = 3, .heads = 12, .pitch = 48};
    std::vector<float> shares(2 * 3 * 12 * 48);
    for (std::size_t i = 0; i < shares.size(); ++i) { shares[i] = 1.0F / static_cast<float>(1 + i % 97); }
    scores.data = shares.data();
    std::vector<float> const weights{0.5F, 2.0F, 0.0F, 1.0F, 0.25F, 3.0F};
    for (bool const largest : {false, true}) {
      std::vector<float> votes[2];
      for (std::size_t i = 0; i < 2; ++i) {
        votes[i].assign(6 * 48, -1.0F);
        pulseinfer::combine_shares const op{
          .layer = layer_id{1},
          .rows = c.rows(),
          .info = c.info.data(),
          .scores = scores,
          .weights = weights.data(),
          .votes = votes[i].data(),
          .selection = h.arrays.selection,
          .head_groups = 3,
          .query_group = 2,
          .most_blocks = 41,
          .block_tokens = 4,
          .budget_blocks = 10,
          .largest = largest};
        if (i == 0) {
          pulseinfer_test::run_solo(op);
          CHECK(op.cost().flops == 2U * 12U * (41 * 1 + 23 * 3));
        } else {
          pulseinfer_test::run_parallel(op, 5);
        }
      }
      CHECK(votes[0] == votes[1]);
    }
  }

  TEST_CASE("head choices that cannot work are refused at set-up with their numbers")
  {
    auto const with = [](head_choice const& choice, std::uint32_t groups = 1) {
      few_selector const options{.heads = {.layers = {{.kv_heads = {0, 1, 2, 3, 4, 5}}, choice}}};
      return refusal(options, small_geometry(groups));
    };
    CHECK(with({.kv_heads = {0, 5}, .weights = {1.0F, 0.0F}}) == "accepted");
    CHECK(with({}) == "invalid_argument: no head chooses in layer 1");
    CHECK(with({.kv_heads = {1, 6}}) == "invalid_argument: head 6 chooses in layer 1, but there are 6 KV heads");
    CHECK(with({.kv_heads = {2, 2}}) == "invalid_argument: heads that choose must ascend, but 2 follows 2 in layer 1");
    CHECK(
      with({.kv_heads = {1}, .weights = {1.0F, 2.0F}}) ==
      "invalid_argument: 2 weights for 1 heads that choose in layer 1");
    CHECK(with({.kv_heads = {1}, .weights = {-1.0F}}).find("-1.0") != std::string::npos);
    CHECK(with({.kv_heads = {1}, .weights = {std::nanf("")}}).find("nan") != std::string::npos);
    CHECK(with({.kv_heads = {1, 2}, .weights = {0.0F, 0.0F}}).find("are 0 in layer 1") != std::string::npos);
    CHECK(with({.kv_heads = {1, 2}}, 2).find("2 of 6 KV heads choose for all in layer 1") != std::string::npos);
    few_selector const lacking{.heads = {.layers = {{.kv_heads = {0}}}}};
    CHECK(refusal(lacking, small_geometry()) == "invalid_argument: heads are named for 1 layers, there are 2");
    using top_p_selector = solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::soft_vote, top_p>;
    CHECK(refusal(top_p_selector{.budget = {.share = 0.0}}, small_geometry()).find("0.0") != std::string::npos);
    CHECK(refusal(top_p_selector{.budget = {.share = 1.5}}, small_geometry()).find("1.5") != std::string::npos);
    CHECK(refusal(top_p_selector{.budget = {.buckets = 1}}, small_geometry()).find("1 sizes") != std::string::npos);
    CHECK(
      refusal(top_p_selector{.budget_tokens = 512, .budget = {.least_tokens = 600}}, small_geometry()) ==
      "invalid_argument: selections of at least 600 tokens exceed the budget of 512");
  }

  TEST_CASE("top_p takes the smallest size whose blocks have the share, favour decides who comes first and counts not")
  {
    std::vector<std::uint32_t> sizes_seen;
    for (double const share : {0.3, 0.6, 0.9, 1.0}) {
      for (float const sharpness : {0.5F, 2.0F, 6.0F}) {
        for (std::uint32_t const groups : {1U, 2U}) {
          CAPTURE(share);
          CAPTURE(sharpness);
          cache c{small_geometry(groups), {{321, 1}, {201, 2}, {100, 1}, {0, 0}}, 9};
          solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::soft_vote, top_p> const options{
            .budget_tokens = 128,
            .sink_tokens = 4,
            .recent_tokens = 8,
            .digest = {.type = dtype::float32},
            .budget = {.share = share, .least_tokens = 24, .buckets = 6}};
          harness h{options, c, 1, 2};
          CHECK(h.bound.budget_blocks(layer_id{1}) == 32);
          std::vector<numbers> before(c.residency.lanes);
          for (int step = 0; step < 3; ++step) {
            h.queries.randomise(c.random, sharpness);
            h.select();
            for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
              CAPTURE(lane);
              auto const& info = c.info[lane / groups];
              numbers const selected = h.arrays.selected(lane);
              CHECK(h.arrays.rest_is_none(lane));
              CHECK(h.arrays.remembered(1, lane) == selected);
              if (info.blocks(4) <= 32) {
                CHECK(selected.size() == info.blocks(4));
                continue;
              }
              std::vector<double> weights(6, 0.0);
              std::fill_n(weights.begin() + lane % groups * (6 / groups), 6 / groups, 1.0);
              auto const mass = combined_votes(c, h.queries, 1, lane / groups, weights, false);
              auto votes = mass;
              for (std::uint32_t const block : before[lane]) { votes[block] *= std::exp(0.25); }
              auto const part = [&](std::uint32_t size) {
                double sum = 0;
                double total = 0;
                for (std::uint32_t const block : pulseinfer_test::selection_of(info, 4, votes, size, 1, 2)) {
                  sum += mass[block];
                }
                for (double const one : mass) { total += one; }
                return sum / total;
              };
              auto const size = static_cast<std::uint32_t>(selected.size());
              check_choice(selected, pulseinfer_test::selection_of(info, 4, votes, size, 1, 2), votes);
              CHECK((size == 32 || (size >= 6 && (size - 6) % 6 == 0)));
              if (size != 32) { CHECK(part(size) >= share - 1e-4); }
              if (size != 6) { CHECK(part(size == 32 ? 30 : size - 6) < share + 1e-4); }
              sizes_seen.push_back(size);
              before[lane] = selected;
            }
          }
        }
      }
    }
    std::sort(sizes_seen.begin(), sizes_seen.end());
    sizes_seen.erase(std::unique(sizes_seen.begin(), sizes_seen.end()), sizes_seen.end());
    CHECK(sizes_seen == numbers{6, 12, 18, 24, 30, 32});
  }

  TEST_CASE("select_top_p is the same with any group, and takes the whole budget where votes are 0 or no numbers")
  {
    cache c{small_geometry(), {{321, 1}, {201, 2}, {1, 1}}, 9};
    std::vector<float> votes(3 * 96);
    for (std::size_t i = 0; i < votes.size(); ++i) { votes[i] = 1.0F / static_cast<float>(1 + (i * 37) % 101); }
    auto const op = [&](pulseinfer_test::selection_arrays const& arrays) {
      return pulseinfer::select_top_p{
        .most =
          {.layer = layer_id{0},
           .rows = c.rows(),
           .info = c.info.data(),
           .votes = votes.data(),
           .selection = arrays.selection,
           .vote_pitch = 96,
           .block_tokens = 4,
           .budget_blocks = 32,
           .sink_blocks = 1,
           .recent_blocks = 2},
        .sizes = {.least = 2, .step = 15},
        .share = 0.7F,
        .favour = 1.3F,
        .most_blocks = 81};
    };
    std::vector<std::uint64_t> const no_digests(2, 0);
    pulseinfer_test::selection_arrays solo{c, 32, no_digests};
    pulseinfer_test::selection_arrays threads{c, 32, no_digests};
    for (int step = 0; step < 2; ++step) {
      pulseinfer_test::run_solo(op(solo));
      pulseinfer_test::run_parallel(op(threads), 5);
      for (std::uint32_t lane = 0; lane < 3; ++lane) {
        CHECK(solo.selected(lane) == threads.selected(lane));
        CHECK(solo.remembered(0, lane) == threads.remembered(0, lane));
      }
    }
    std::uint32_t cut = 0;
    for (std::uint32_t lane = 0; lane < 3; ++lane) { cut += solo.selected(lane).size() == 17 ? 1U : 0U; }
    CHECK(cut > 0);
    for (float const same : {0.0F, std::nanf("")}) {
      std::fill(votes.begin(), votes.end(), same);
      pulseinfer_test::run_solo(op(solo));
      for (std::uint32_t lane = 0; lane < 3; ++lane) {
        CHECK(solo.selected(lane).size() == std::min(c.info[lane].blocks(4), 32U));
      }
    }
  }
}
