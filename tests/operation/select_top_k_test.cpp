#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/operation/select_top_k.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

using pulseinfer_test::cache;
using pulseinfer_test::row_shape;
using pulseinfer_test::selection_arrays;

namespace {

using numbers = std::vector<std::uint32_t>;

pulseinfer::kv_geometry geometry_of(std::uint32_t block_tokens, std::uint32_t head_groups = 1)
{
  return {
    .layers = 2,
    .query_heads = head_groups,
    .kv_heads = head_groups,
    .head_dim = 1,
    .block_tokens = block_tokens,
    .head_groups = head_groups};
}

pulseinfer::select_top_k operation_of(
  cache const& c, selection_arrays const& arrays, std::vector<float> const& votes, std::uint32_t budget,
  std::uint32_t sinks, std::uint32_t recent)
{
  return {
    .layer = pulseinfer::layer_id{1},
    .rows = c.rows(),
    .info = c.info.data(),
    .votes = votes.data(),
    .selection = arrays.selection,
    .vote_pitch = c.max_blocks,
    .head_groups = c.geometry.head_groups,
    .block_tokens = c.geometry.block_tokens,
    .budget_blocks = budget,
    .sink_blocks = sinks,
    .recent_blocks = recent};
}

}  // namespace

TEST_SUITE("operation")
{
  // vllm-project/vllm#51323: a tail that was not written held the ids of an earlier call
  TEST_CASE(
    "select_top_k fills a buffer with ties to the lowest ids, and the next shorter row leaves none behind its own")
  {
    cache c{geometry_of(1), {{8192, 0}}, 1};
    selection_arrays arrays{c, 2048, {0, 0}};
    std::vector<float> const votes(8192, 0.0F);
    numbers lowest(2048);
    std::iota(lowest.begin(), lowest.end(), 0U);
    for (int i = 0; i < 20; ++i) {
      c.info[0].tokens = 8192;
      pulseinfer_test::run_solo(operation_of(c, arrays, votes, 2048, 0, 0));
      CHECK(arrays.selected(0) == lowest);
      c.info[0].tokens = 1000;
      pulseinfer_test::run_solo(operation_of(c, arrays, votes, 2048, 0, 0));
      CHECK(arrays.selected(0) == numbers(lowest.begin(), lowest.begin() + 1000));
      CHECK(arrays.rest_is_none(0));
      CHECK(arrays.selection.counts[0] == 1000);
    }
  }

  // mit-han-lab/Quest#22, lucidrains/native-sparse-attention-pytorch#18
  TEST_CASE("select_top_k with a budget beyond a row's blocks gives them all and none behind")
  {
    cache c{geometry_of(16), {{48, 1}}, 1};
    selection_arrays arrays{c, 100, {0, 0}};
    pulseinfer_test::run_solo(operation_of(c, arrays, {}, 100, 1, 1));
    CHECK(arrays.selected(0) == numbers{0, 1, 2});
    CHECK(arrays.rest_is_none(0));
  }

  TEST_CASE("law 8: select_top_k equals a slow selection for any votes, budgets and groups of threads, run after run")
  {
    std::mt19937 random{4};
    for (int round = 0; round < 60; ++round) {
      std::uint32_t const block_tokens = std::vector<std::uint32_t>{1, 3, 16, 17, 64}[random() % 5];
      std::uint32_t const groups = 1 + static_cast<std::uint32_t>(random() % 3);
      std::vector<row_shape> shapes;
      for (int row = 0; row < 4; ++row) {
        auto const tokens = static_cast<std::uint32_t>(random() % (block_tokens * 90));
        shapes.push_back({tokens, std::min(tokens, static_cast<std::uint32_t>(random() % 4))});
      }
      cache c{geometry_of(block_tokens, groups), shapes, static_cast<std::uint32_t>(round), false};
      if (c.max_blocks == 0) { continue; }
      auto const budget = static_cast<std::uint32_t>(6 + random() % 40);
      auto const sinks = static_cast<std::uint32_t>(random() % 3);
      auto const recent = static_cast<std::uint32_t>(random() % 3);
      std::vector<float> votes(std::size_t{c.residency.lanes} * c.max_blocks);
      for (float& vote : votes) { vote = static_cast<float>(random() % 11); }  // many ties
      selection_arrays solo{c, budget + 3, {0, 0}};
      selection_arrays threads{c, budget + 3, {0, 0}};
      pulseinfer_test::run_solo(operation_of(c, solo, votes, budget, sinks, recent));
      pulseinfer_test::run_parallel(
        operation_of(c, threads, votes, budget, sinks, recent), static_cast<std::uint32_t>(1 + random() % 8));
      for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
        CAPTURE(round);
        CAPTURE(lane);
        std::vector<float> const own(
          votes.begin() + static_cast<std::ptrdiff_t>(lane * c.max_blocks),
          votes.begin() + static_cast<std::ptrdiff_t>((lane + 1) * c.max_blocks));
        std::vector<float> const valid(own.begin(), own.begin() + c.info[lane / groups].blocks(block_tokens));
        numbers const right =
          pulseinfer_test::selection_of(c.info[lane / groups], block_tokens, valid, budget, sinks, recent);
        CHECK(solo.selected(lane) == right);
        CHECK(solo.rest_is_none(lane));
        CHECK(solo.remembered(1, lane) == right);
        CHECK(solo.remembered(0, lane).empty());
        CHECK(threads.selected(lane) == right);
        CHECK(threads.rest_is_none(lane));
        CHECK(threads.remembered(1, lane) == right);
      }
    }
  }

  TEST_CASE("select_top_k that is not to be remembered leaves the previous selection")
  {
    cache c{geometry_of(4), {{80, 1}}, 1};
    selection_arrays arrays{c, 5, {0, 0}};
    arrays.previous.assign(arrays.previous.size(), 0x10U);
    std::vector<float> const votes(20, 1.0F);
    pulseinfer::select_top_k op = operation_of(c, arrays, votes, 5, 1, 1);
    op.remember = false;
    pulseinfer_test::run_solo(op);
    CHECK(arrays.selected(0) == numbers{0, 1, 2, 18, 19});
    CHECK(arrays.remembered(1, 0) == numbers{4, 36});
  }

  TEST_CASE("select_top_k keeps to the memory of the selection where that is smaller than the budget")
  {
    cache c{geometry_of(4), {{80, 1}}, 1};
    selection_arrays arrays{c, 3, {0, 0}};
    std::vector<float> votes(20, 1.0F);
    votes[7] = 2.0F;
    pulseinfer_test::run_solo(operation_of(c, arrays, votes, 9, 0, 1));
    CHECK(arrays.selected(0) == numbers{7, 18, 19});
  }
}
