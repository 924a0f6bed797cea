#include "support/cache.hpp"
#include "support/immediate_backend.hpp"
#include "support/selection.hpp"
#include <pulseinfer/selector/external_selector.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

using pulseinfer::block_id;
using pulseinfer::dtype;
using pulseinfer::external_selector;
using pulseinfer::lane_id;
using pulseinfer::layer_id;
using pulseinfer::status;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;

namespace {

using numbers = std::vector<std::uint32_t>;

std::vector<block_id> blocks_of(numbers const& ids)
{
  std::vector<block_id> result;
  for (std::uint32_t const id : ids) { result.push_back(static_cast<block_id>(id)); }
  return result;
}

struct harness {
  harness(external_selector const& options, cache& c, std::uint32_t step_tokens = 1)
    : of{c},
      bound{options.bind(
        on,
        {.geometry = c.geometry,
         .layout = c.layout,
         .max_rows = static_cast<std::uint32_t>(c.info.size()),
         .max_blocks = c.max_blocks,
         .max_step_tokens = step_tokens})},
      arrays{c, bound.budget_blocks(layer_id{0}), std::vector<std::uint64_t>(c.geometry.layers, 0)}
  {}
  [[nodiscard]] status import(std::uint32_t lane, numbers const& ids, std::uint32_t blocks, std::uint32_t layer = 0)
  {
    return bound.import_selection(static_cast<layer_id>(layer), static_cast<lane_id>(lane), blocks_of(ids), blocks);
  }
  [[nodiscard]] status select(bool remember = true, std::uint32_t layer = 0)
  {
    auto request = arrays.select_request(layer, {});
    request.remember = remember;
    return bound.select_async({}, request);
  }
  [[nodiscard]] status import_scores(std::vector<float>& scores, std::uint32_t layer = 0)
  {
    auto const blocks = static_cast<std::uint32_t>(scores.size() / (of.info.size() * of.geometry.head_groups));
    return bound.import_scores(
      static_cast<layer_id>(layer),
      pulseinfer::contiguous_tensor(scores.data(), dtype::float32, of.info.size(), of.geometry.head_groups, blocks));
  }

  cache& of;
  pulseinfer_test::immediate_backend on;
  external_selector::bound<pulseinfer_test::immediate_backend> bound;
  selection_arrays arrays;
};

pulseinfer::kv_geometry geometry_of(std::uint32_t head_groups = 1)
{
  return {.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 1, .block_tokens = 4, .head_groups = head_groups};
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE("external_selector selects imported ids, in any order, and the open block")
  {
    cache c{geometry_of(2), {{81, 1}, {12, 1}}, 1, false};  // 21 and 3 blocks
    harness h{{.budget_tokens = 20}, c};
    CHECK(h.import(2, {11, 3, 7}, 21) == status::ok);
    CHECK(h.import(3, {20, 19, 0, 5}, 21) == status::ok);
    CHECK(h.import(0, {0}, 3) == status::ok);
    CHECK(h.import(1, {}, 3) == status::ok);
    REQUIRE(h.select() == status::ok);
    CHECK(h.arrays.selected(2) == numbers{3, 7, 11, 20});
    CHECK(h.arrays.selected(3) == numbers{0, 5, 19, 20});
    CHECK(h.arrays.selected(0) == numbers{0, 1, 2});  // within the budget: all
    CHECK(h.arrays.selected(1) == numbers{0, 1, 2});
    for (std::uint32_t lane = 0; lane < 4; ++lane) {
      CHECK(h.arrays.rest_is_none(lane));
      CHECK(h.arrays.remembered(0, lane) == h.arrays.selected(lane));
    }
    CHECK(h.bound.digest_bytes(layer_id{0}) == 0);
    CHECK(h.bound.digest_async({}, h.arrays.digest_request(0, 1)) == status::ok);
    CHECK(h.on.launches == 1);
  }

  TEST_CASE("an import serves one selection of its layer; a prefetch leaves it")
  {
    cache c{geometry_of(), {{81, 1}}, 1, false};
    harness h{{.budget_tokens = 20}, c};
    CHECK(h.select() == status::invalid_state);
    CHECK(h.import(0, {3}, 21) == status::ok);
    CHECK(h.select(true, 1) == status::invalid_state);
    CHECK(h.select(false) == status::ok);
    CHECK(h.arrays.selected(0) == numbers{3, 20});
    CHECK(h.arrays.remembered(0, 0).empty());
    CHECK(h.import(0, {4}, 21) == status::ok);  // replaces
    CHECK(h.select() == status::ok);
    CHECK(h.arrays.selected(0) == numbers{4, 20});
    CHECK(h.select() == status::invalid_state);
  }

  TEST_CASE("imports that are not right are refused by name and change nothing")
  {
    cache c{geometry_of(), {{81, 1}}, 1, false};
    harness h{{.budget_tokens = 20}, c};
    REQUIRE(h.import(0, {3, 5}, 21) == status::ok);
    CHECK(h.import(0, {3, 21}, 21) == status::out_of_range);
    CHECK(h.import(0, {3, 4000000000U}, 21) == status::out_of_range);
    CHECK(h.import(0, {3}, 22) == status::out_of_range);
    CHECK(h.import(1, {3}, 21) == status::out_of_range);
    CHECK(h.import(0, {3}, 21, 2) == status::out_of_range);
    CHECK(h.bound.import_selection(layer_id{0}, pulseinfer::none<lane_id>, {}, 21) == status::out_of_range);
    CHECK(h.bound.import_selection(pulseinfer::none<layer_id>, lane_id{0}, {}, 21) == status::out_of_range);
    CHECK(h.import(0, {3, 9, 3}, 21) == status::invalid_argument);
    CHECK(h.import(0, {0, 1, 2, 3, 4}, 21) == status::capacity_exceeded);  // no room for the open block
    CHECK(h.import(0, {0, 1, 2, 3, 4, 5}, 21) == status::capacity_exceeded);
    REQUIRE(h.select() == status::ok);
    CHECK(h.arrays.selected(0) == numbers{3, 5, 20});
    CHECK(h.import(0, {0, 1, 2, 3, 20}, 21) == status::ok);
    CHECK(h.select() == status::ok);
    CHECK(h.arrays.selected(0) == numbers{0, 1, 2, 3, 20});
  }

  TEST_CASE("external_selector chooses by scores of any sign, keeps what is asked, and takes NaN last")
  {
    cache c{geometry_of(2), {{81, 1}, {77, 1}}, 1, false};
    harness h{{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8}, c};
    std::mt19937 random{3};
    std::normal_distribution<float> normal;
    for (int round = 0; round < 20; ++round) {
      std::uint32_t const pitch = 21 + static_cast<std::uint32_t>(round % 3);
      std::vector<float> scores(4 * std::size_t{pitch});
      for (float& score : scores) {
        score = random() % 5 == 0 ? std::numeric_limits<float>::quiet_NaN() : normal(random);
      }
      REQUIRE(h.import_scores(scores) == status::ok);
      REQUIRE(h.select() == status::ok);
      for (std::uint32_t lane = 0; lane < 4; ++lane) {
        std::vector<float> own(
          scores.begin() + lane * pitch, scores.begin() + lane * pitch + c.info[lane / 2].blocks(4));
        for (float& score : own) { score = std::isnan(score) ? -1e30F : score; }
        CHECK(h.arrays.selected(lane) == pulseinfer_test::selection_of(c.info[lane / 2], 4, own, 6, 1, 2));
      }
      CHECK(h.select() == status::invalid_state);
      REQUIRE(h.import_scores(scores) == status::ok);
      CHECK(h.select(false) == status::ok);  // a prefetch leaves the scores
      CHECK(h.select() == status::ok);
    }
  }

  TEST_CASE("scores of a wrong shape are refused")
  {
    cache c{geometry_of(2), {{81, 1}}, 1, false};
    harness h{{.budget_tokens = 24}, c};
    std::vector<float> scores(42, 1.0F);
    auto const good = pulseinfer::contiguous_tensor(scores.data(), dtype::float32, 1, 2, 21);
    auto const expect = [&](auto const& change, status right) {
      pulseinfer::tensor_view view = good;
      change(view);
      CHECK(h.bound.import_scores(layer_id{0}, view) == right);
    };
    expect([](auto& v) { v.data = nullptr; }, status::invalid_argument);
    expect([](auto& v) { v.type = dtype::float16; }, status::invalid_argument);
    expect([](auto& v) { v.heads = 1; }, status::invalid_argument);
    expect([](auto& v) { v.token_stride += 4; }, status::invalid_argument);
    expect([](auto& v) { v.head_stride = 80; }, status::invalid_argument);
    CHECK(h.bound.import_scores(layer_id{2}, good) == status::out_of_range);
    CHECK(h.select() == status::invalid_state);
    auto few = good;
    few.dim = 20;
    CHECK(h.bound.import_scores(layer_id{0}, few) == status::ok);
    CHECK(h.select() == status::capacity_exceeded);
    auto short_of_rows = good;
    short_of_rows.tokens = 0;
    CHECK(h.bound.import_scores(layer_id{0}, short_of_rows) == status::ok);
    CHECK(h.select() == status::invalid_state);
    CHECK(h.bound.import_scores(layer_id{0}, good) == status::ok);
    CHECK(h.select() == status::ok);
  }

  // sgl-project/sglang#24654: tensor-parallel ranks chose different blocks for the same token
  TEST_CASE("law 8: two selectors agree on identical scores in every run, and on imported ids where scores differ")
  {
    cache c{geometry_of(), {{4000, 1}}, 1, false};  // 1000 blocks
    harness rank_0{{.budget_tokens = 64 * 4}, c};
    harness rank_1{{.budget_tokens = 64 * 4}, c};
    std::mt19937 random{8};
    std::uniform_real_distribution<float> uniform{0.0F, 1.0F};
    int differing = 0;
    for (int step = 0; step < 500; ++step) {
      std::vector<float> scores(1000);
      for (float& score : scores) { score = uniform(random) * 0.9F; }
      for (int i = 0; i < 40; ++i) { scores[random() % 999] = 0.95F + 1e-3F * static_cast<float>(i); }
      for (int i = 0; i < 50; ++i) { scores[random() % 999] = 0.93F; }  // ties about the 64th place
      std::vector<float> disturbed = scores;
      for (float& score : disturbed) { score = std::nextafter(score, random() % 2 == 0 ? 2.0F : -1.0F); }
      for (int again = 0; again < 2; ++again) {
        REQUIRE(rank_0.import_scores(scores) == status::ok);
        REQUIRE(rank_1.import_scores(scores) == status::ok);
        REQUIRE(rank_0.select() == status::ok);
        REQUIRE(rank_1.select() == status::ok);
        CHECK(rank_0.arrays.selected(0) == rank_1.arrays.selected(0));
        CHECK(rank_0.arrays.selected(0).size() == 64);
      }
      REQUIRE(rank_1.import_scores(disturbed) == status::ok);
      REQUIRE(rank_1.select() == status::ok);
      differing += rank_0.arrays.selected(0) != rank_1.arrays.selected(0) ? 1 : 0;
      REQUIRE(rank_1.import(0, rank_0.arrays.selected(0), 1000) == status::ok);
      REQUIRE(rank_1.select() == status::ok);
      CHECK(rank_0.arrays.selected(0) == rank_1.arrays.selected(0));
      CHECK(rank_0.arrays.remembered(0, 0) == rank_1.arrays.remembered(0, 0));
    }
    CHECK(differing > 400);  // without the import the ranks do part
    CHECK(rank_1.import(0, {3, 1000}, 1000) == status::out_of_range);
  }

  TEST_CASE("external_selector refuses options and limits that cannot work")
  {
    pulseinfer_test::immediate_backend on;
    pulseinfer::selector_limits limits{
      .geometry = {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 8}, .max_rows = 2, .max_blocks = 100};
    CHECK_THROWS_AS(
      static_cast<void>(external_selector{.budget_tokens = 8}.bind(on, limits)), pulseinfer::configuration_error);
    CHECK_THROWS_AS(
      static_cast<void>(external_selector{.budget_tokens = 32, .sink_tokens = 20}.bind(on, limits)),
      pulseinfer::configuration_error);
    limits.max_rows = 0;
    CHECK_THROWS_AS(static_cast<void>(external_selector{}.bind(on, limits)), pulseinfer::configuration_error);
    limits.max_rows = 2;
    limits.geometry.query_heads = 3;
    CHECK_THROWS_AS(static_cast<void>(external_selector{}.bind(on, limits)), pulseinfer::configuration_error);
    CHECK(on.allocated == 0);
  }
}
