#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using pulseinfer::dtype;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;
using pulseinfer_test::tensor;

namespace {

/// Digests of a cache, and the memory of scores and votes.
struct score_call {
  score_call(cache& c, pulseinfer::scoring_heads scoring, dtype digest, std::uint32_t pass_queries)
    : of{c},
      heads{scoring},
      digest_type{digest},
      queries{dtype::float32, c.tensor_tokens, c.geometry.query_heads, c.geometry.head_dim, 1},
      arrays{
        c, 1,
        std::vector<std::uint64_t>(
          c.geometry.layers,
          std::uint64_t{scoring.count} * pulseinfer::device::cuboid_mean_elements(c.geometry.head_dim) *
            size_of(digest))}
  {
    queries.randomise(c.random);
    with_all_tokens_new(c, [&] {
      pulseinfer_test::run_solo(pulseinfer::update_digests{
        .request = arrays.digest_request(0, c.max_blocks),
        .heads = heads,
        .head_groups = c.geometry.head_groups,
        .digest_type = digest});
    });
    table.queries = pass_queries;
    table.heads = heads.count * c.geometry.query_group();
    table.pitch = pulseinfer::round_up(c.max_blocks, 16U);
    memory.assign(c.info.size() * table.queries * table.heads * table.pitch, std::nanf(""));
    table.data = memory.data();
    votes.assign(std::size_t{c.residency.lanes} * table.pitch, std::nanf(""));
  }

  [[nodiscard]] pulseinfer::score_blocks score(pulseinfer::query_pass pass, std::uint32_t budget = 0) const
  {
    return {
      .request = arrays.select_request(0, queries.view),
      .scores = table,
      .pass = pass,
      .heads = heads,
      .query_group = of.geometry.query_group(),
      .block_tokens = of.geometry.block_tokens,
      .budget_blocks = budget,
      .digest_type = digest_type,
      .scale = scale};
  }
  [[nodiscard]] pulseinfer::share_blocks share(pulseinfer::query_pass pass, std::uint32_t budget = 0) const
  {
    return {
      .rows = of.rows(),
      .info = of.info.data(),
      .scores = table,
      .pass = pass,
      .most_queries = table.queries,
      .most_blocks = of.max_blocks,
      .block_tokens = of.geometry.block_tokens,
      .budget_blocks = budget};
  }
  [[nodiscard]] pulseinfer::vote_blocks vote(pulseinfer::query_pass pass, std::uint32_t budget = 0)
  {
    return {
      .layer = pulseinfer::layer_id{0},
      .rows = of.rows(),
      .info = of.info.data(),
      .scores = table,
      .votes = votes.data(),
      .selection = arrays.selection,
      .pass = pass,
      .head_groups = of.geometry.head_groups,
      .most_blocks = of.max_blocks,
      .block_tokens = of.geometry.block_tokens,
      .budget_blocks = budget,
      .favour = std::exp(0.25F)};
  }

  cache& of;
  pulseinfer::scoring_heads heads;
  dtype digest_type;
  tensor queries;
  selection_arrays arrays;
  pulseinfer::score_table table;
  std::vector<float> memory;
  std::vector<float> votes;
  float scale = 0.2F;
};

struct shape {
  std::uint32_t query_heads, kv_heads, head_groups, head_dim, block_tokens;
  pulseinfer::scoring_heads heads;
};

std::vector<shape> const shapes{
  {9, 3, 1, 64, 16, {0, 3}}, {8, 8, 8, 46, 1, {0, 8}}, {40, 2, 1, 51, 3, {1, 1}}, {12, 4, 2, 128, 17, {0, 4}}};

pulseinfer::kv_geometry geometry_of(shape const& s)
{
  return {
    .layers = 1,
    .query_heads = s.query_heads,
    .kv_heads = s.kv_heads,
    .head_dim = s.head_dim,
    .block_tokens = s.block_tokens,
    .head_groups = s.head_groups,
    .key_type = dtype::float32};
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("score_blocks equals a slow reference, over many blocks, heads and queries, for any group")
  {
    for (shape const& s : shapes) {
      CAPTURE(s.head_dim);
      std::uint32_t const bt = s.block_tokens;
      cache c{geometry_of(s), {{140 * bt + 1, 2}, {64 * bt, 1}, {1, 1}, {0, 0}}, s.head_dim};
      score_call call{c, s.heads, dtype::float32, 2};
      pulseinfer_test::run_solo(call.score({}));
      std::uint32_t const share = c.geometry.query_group();
      for (std::uint32_t row = 0; row < c.info.size(); ++row) {
        std::uint32_t const blocks = c.info[row].blocks(bt);
        for (std::uint32_t query = 0; query < 2; ++query) {
          bool const asked = static_cast<std::int32_t>(query) < c.info[row].new_tokens;
          for (std::uint32_t head = 0; head < call.table.heads; ++head) {
            float const* const scores = call.table.row(static_cast<pulseinfer::row_id>(row), query, head);
            std::uint32_t const query_head = s.heads.first * share + head;
            double worst = 0;
            for (std::uint32_t block = 0; block < blocks && asked; block += 7) {
              double right = 0;
              for (std::uint32_t j = 0; j < s.head_dim; ++j) {
                auto const digest = pulseinfer_test::digest_of(c, 0, row, query_head / share, block, j);
                double const q = static_cast<double>(
                  call.queries.at(static_cast<std::uint64_t>(c.info[row].token_offset) + query, query_head, j));
                right += q * digest.centre + std::abs(q) * digest.distance;
              }
              right = static_cast<double>(call.scale) * right + std::log(c.info[row].valid_tokens(block, bt));
              double const apart = std::abs(static_cast<double>(scores[block]) - right);
              worst = std::isnan(apart) ? 1e9 : std::max(worst, apart / std::max(1.0, std::abs(right)));
            }
            CHECK(worst <= 1e-5);
            if (!asked) { CHECK(std::isnan(scores[0])); }
          }
        }
      }
      std::vector<float> const solo = call.memory;
      std::fill(call.memory.begin(), call.memory.end(), std::nanf(""));
      pulseinfer_test::run_parallel(call.score({}), 5);
      CHECK(std::memcmp(solo.data(), call.memory.data(), solo.size() * sizeof(float)) == 0);
    }
  }

  TEST_CASE("scores, shares and votes in passes over few query tokens sum up to those of all at once")
  {
    for (shape const& s : shapes) {
      CAPTURE(s.head_dim);
      std::uint32_t const bt = s.block_tokens;
      cache c{geometry_of(s), {{70 * bt + 5, 5}, {33 * bt, 2}, {9 * bt, 3}}, s.head_dim};
      score_call call{c, s.heads, dtype::float16, 2};
      call.arrays.previous.assign(call.arrays.previous.size(), 0x21U);
      for (std::uint32_t first = 0; first < 5; first += 2) {
        pulseinfer::query_pass const pass{.first = first, .last = first == 4};
        pulseinfer_test::run_solo(call.score(pass));
        pulseinfer_test::run_solo(call.share(pass));
        pulseinfer_test::run_solo(call.vote(pass));
      }
      std::uint32_t const heads = s.heads.count / s.head_groups;
      for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
        CAPTURE(lane);
        std::uint32_t const row = lane / s.head_groups;
        std::vector<std::uint32_t> previous;
        for (std::uint32_t word = 0; word < call.arrays.words; ++word) {
          previous.push_back(32 * word);
          previous.push_back(32 * word + 5);
        }
        auto const right = votes_of(
          c, call.queries, 0, row, {.first = s.heads.first + lane % s.head_groups * heads, .count = heads},
          static_cast<double>(call.scale), previous, 0.25);
        double worst = 0;
        for (std::size_t block = 0; block < right.size(); ++block) {
          double const vote = static_cast<double>(call.votes[std::size_t{lane} * call.table.pitch + block]);
          worst = std::isnan(vote) ? 1e9 : std::max(worst, std::abs(vote - right[block]) / right[block]);
        }
        CHECK(worst <= 5e-3);  // digests are halves here
      }
    }
  }

  TEST_CASE("rows within their budget are neither scored nor shared nor voted on")
  {
    shape const s = shapes[0];
    cache c{geometry_of(s), {{160, 1}, {320, 1}}, 2};
    score_call call{c, s.heads, dtype::float32, 1};
    pulseinfer_test::run_solo(call.score({}, 10));
    pulseinfer_test::run_solo(call.share({}, 10));
    pulseinfer_test::run_solo(call.vote({}, 10));
    CHECK(std::isnan(*call.table.row(pulseinfer::row_id{1}, 0, 0)));
    CHECK(std::isnan(call.votes[call.table.pitch]));
    CHECK(!std::isnan(*call.table.row(pulseinfer::row_id{0}, 0, 0)));
    CHECK(!std::isnan(call.votes[0]));
    CHECK(call.score({}, 10).cost().flops == 2U * 20 * 3 * 3 * 128);
    CHECK(call.score({}, 20).cost().flops == 0);
  }
}
