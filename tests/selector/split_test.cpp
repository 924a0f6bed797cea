// Digests of a block's pieces: as digests of shorter blocks, as slow references, and through a selector.

#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/error.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/split.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

using pulseinfer::dtype;
using pulseinfer::layer_id;
using pulseinfer::row_id;
using pulseinfer::solo_head_selector;
using pulseinfer::split;
using pulseinfer_test::cache;
using pulseinfer_test::harness;
using pulseinfer_test::selection_arrays;

namespace {

constexpr std::uint32_t head_dim = 24;

pulseinfer::kv_geometry geometry_of(std::uint32_t block_tokens)
{
  return {
    .layers = 1,
    .query_heads = 6,
    .kv_heads = 3,
    .head_dim = head_dim,
    .block_tokens = block_tokens,
    .key_type = dtype::float32};
}

/// Digests and scores of all heads of a cache by a policy's own operations.
template <class Digest>
struct scored {
  scored(cache& c, Digest const& policy, pulseinfer_test::tensor const& queries)
    : of{c}, digest{policy}, asked{queries}, arrays{c, 1, {digest.block_bytes(head_dim, 3)}}
  {
    table.queries = 2;
    table.heads = 6;
    table.pitch = pulseinfer::round_up(c.max_blocks, 16U);
    memory.assign(c.info.size() * 12 * std::size_t{table.pitch}, std::nanf(""));
    table.data = memory.data();
  }
  [[nodiscard]] auto update() const
  {
    return typename Digest::update_operation{
      .request = arrays.digest_request(0, of.max_blocks),
      .heads = {.first = 0, .count = 3},
      .digest_type = digest.type,
      .bounds_offset = digest.bounds_offset(head_dim, 3)};
  }
  [[nodiscard]] auto score() const
  {
    return typename Digest::score_operation{
      .request = arrays.select_request(0, asked.view),
      .scores = table,
      .heads = {.first = 0, .count = 3},
      .query_group = 2,
      .block_tokens = of.geometry.block_tokens,
      .digest_type = digest.type,
      .scale = 0.2F};
  }
  void run()
  {
    with_all_tokens_new(of, [&] { pulseinfer_test::run_solo(update()); });
    pulseinfer_test::run_solo(score());
  }
  [[nodiscard]] std::byte const* digests(std::uint32_t row, std::uint32_t block) const
  {
    return arrays.digests.address(layer_id{0}, static_cast<row_id>(row), block);
  }
  [[nodiscard]] double at(std::uint32_t row, std::uint32_t query, std::uint32_t head, std::uint32_t block) const
  {
    return static_cast<double>(table.row(static_cast<row_id>(row), query, head)[block]);
  }

  cache& of;
  Digest digest;
  pulseinfer_test::tensor const& asked;
  selection_arrays arrays;
  pulseinfer::score_table table;
  std::vector<float> memory;
};

/// ln of the sum of exp, in double precision.
double log_sum(std::vector<double> const& terms)
{
  double const top = *std::max_element(terms.begin(), terms.end());
  double sum = 0;
  for (double const term : terms) { sum += std::exp(term - top); }
  return top + std::log(sum);
}

/// A score of some tokens from their keys, in double precision.
template <class Digest>
double score_of(cache const& c, std::uint32_t row, std::uint32_t head, std::uint32_t begin, std::uint32_t end, auto q)
{
  double score = std::log(end - begin);
  for (std::uint32_t j = 0; j < head_dim; ++j) {
    double low = 1e300, high = -1e300, mean = 0, square = 0, distance = 0;
    for (std::uint32_t t = begin; t < end; ++t) {
      double const key = static_cast<double>(c.key(0, row, head, t, j));
      low = std::min(low, key);
      high = std::max(high, key);
      mean += key / (end - begin);
      square += key * key / (end - begin);
    }
    for (std::uint32_t t = begin; t < end; ++t) {
      distance += std::abs((low + high) / 2 - static_cast<double>(c.key(0, row, head, t, j))) / (end - begin);
    }
    double const x = q(j);
    if constexpr (std::is_same_v<Digest, pulseinfer::cuboid_mean>) {
      score += x * (low + high) / 2 + std::abs(x) * distance;
    } else if constexpr (std::is_same_v<Digest, pulseinfer::min_max>) {
      score += std::max(x * low, x * high);
    } else if constexpr (std::is_same_v<Digest, pulseinfer::mean_key>) {
      score += x * mean;
    } else {
      score += x * mean + x * x * (square - mean * mean) / 2;
    }
  }
  return score;
}

std::vector<pulseinfer_test::row_shape> const rows{{333, 1}, {1, 1}, {96, 2}, {21, 1}, {0, 0}};

template <class Digest, std::uint32_t Pieces>
void check_pieces(dtype type)
{
  CAPTURE(name_of(type));
  constexpr std::uint32_t bt = 12;
  constexpr std::uint32_t piece = bt / Pieces;
  cache blocks{geometry_of(bt), rows, 5};
  cache pieces{geometry_of(piece), rows, 6};
  for (std::uint32_t row = 0; row < blocks.info.size(); ++row) {
    for (std::uint32_t head = 0; head < 3; ++head) {
      for (std::uint32_t t = 0; t < static_cast<std::uint32_t>(blocks.info[row].tokens); ++t) {
        for (std::uint32_t j = 0; j < head_dim; ++j) {
          pieces.set_key(0, row, head, t, j, blocks.key(0, row, head, t, j));
          pieces.set_value(0, row, head, t, j, blocks.value(0, row, head, t, j));
        }
      }
    }
  }
  pulseinfer_test::tensor queries{dtype::float32, blocks.tensor_tokens, 6, head_dim};
  queries.randomise(blocks.random, 2.0F);
  using policy = split<Digest, Pieces>;
  scored<policy> ours{blocks, {.type = type, .bounds = true}, queries};
  scored<Digest> plain{pieces, {.type = type, .bounds = true}, queries};
  scored<policy> threads{blocks, {.type = type, .bounds = true}, queries};
  ours.run();
  plain.run();
  with_all_tokens_new(blocks, [&] { pulseinfer_test::run_parallel(threads.update(), 5); });
  pulseinfer_test::run_parallel(threads.score(), 5);
  CHECK(std::memcmp(ours.memory.data(), threads.memory.data(), ours.memory.size() * sizeof(float)) == 0);

  std::uint32_t wrong_digests = 0, wrong_scores = 0, far = 0, compared = 0;
  double most_shares_apart = 0;
  std::uint64_t const bytes = plain.digest.head_bytes(head_dim);
  for (std::uint32_t row = 0; row < blocks.info.size(); ++row) {
    std::uint32_t const count = blocks.info[row].blocks(bt);
    std::uint32_t const of_pieces = pieces.info[row].blocks(piece);
    for (std::uint32_t block = 0; block < count; ++block) {
      for (std::uint32_t i = 0; i < Pieces && block * Pieces + i < of_pieces; ++i) {
        for (std::uint32_t head = 0; head < 3; ++head) {
          std::byte const* const whole = ours.digests(row, block);
          std::byte const* const one = plain.digests(row, block * Pieces + i);
          wrong_digests += std::memcmp(whole + (head * Pieces + i) * bytes, one + head * bytes, bytes) != 0 ? 1U : 0U;
          wrong_digests += std::memcmp(
                             whole + 3 * Pieces * bytes + (head * Pieces + i) * std::size_t{8},
                             one + 3 * bytes + head * std::size_t{8}, 8) != 0
            ? 1U
            : 0U;
        }
      }
    }
    for (std::uint32_t query = 0; query < static_cast<std::uint32_t>(blocks.info[row].new_tokens); ++query) {
      for (std::uint32_t head = 0; head < 6; ++head) {
        std::vector<double> of_blocks, of_all;
        for (std::uint32_t block = 0; block < count; ++block) {
          std::vector<double> parts, slow;
          for (std::uint32_t at = block * Pieces; at < std::min(of_pieces, (block + 1) * Pieces); ++at) {
            parts.push_back(plain.at(row, query, head, at));
            std::uint32_t const end = std::min((at + 1) * piece, static_cast<std::uint32_t>(blocks.info[row].tokens));
            if (type == dtype::float32) {
              slow.push_back(score_of<Digest>(blocks, row, head / 2, at * piece, end, [&](std::uint32_t j) {
                return 0.2 *
                  static_cast<double>(
                         queries.at(static_cast<std::uint64_t>(blocks.info[row].token_offset) + query, head, j));
              }));
            }
          }
          double const found = ours.at(row, query, head, block);
          ++compared;
          wrong_scores += std::abs(found - log_sum(parts)) <= 2e-6 * (1 + std::abs(found)) ? 0U : 1U;
          if (!slow.empty()) { far += std::abs(found - log_sum(slow)) <= 2e-5 * (1 + std::abs(found)) ? 0U : 1U; }
          of_blocks.push_back(found);
          of_all.insert(of_all.end(), parts.begin(), parts.end());
        }
        for (std::uint32_t block = 0; block < count; ++block) {
          double sum = 0;
          for (std::size_t at = block * Pieces; at < std::min<std::size_t>(of_all.size(), (block + 1) * Pieces); ++at) {
            sum += std::exp(of_all[at] - log_sum(of_all));
          }
          double const share = std::exp(of_blocks[block] - log_sum(of_blocks));
          most_shares_apart = std::max(most_shares_apart, std::abs(share - sum));
        }
      }
    }
  }
  CHECK(compared == 6 * (28 + 1 + 2 * 8 + 2));
  CHECK(wrong_digests == 0);
  CHECK(wrong_scores == 0);
  CHECK(far == 0);
  CHECK(most_shares_apart <= 1e-5);
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE_TEMPLATE(
    "a block's pieces are digested as blocks of their tokens, and its share is the sum of what theirs would be", Digest,
    pulseinfer::cuboid_mean, pulseinfer::min_max, pulseinfer::mean_key, pulseinfer::log_mass)
  {
    check_pieces<Digest, 3>(dtype::float32);
    check_pieces<Digest, 4>(dtype::float16);
    check_pieces<Digest, 12>(dtype::int8);
  }

  TEST_CASE("a block of one piece is the plain digest, and pieces of pieces multiply")
  {
    CHECK(std::is_same_v<split<pulseinfer::min_max, 1>, pulseinfer::min_max>);
    CHECK(std::is_same_v<split<split<pulseinfer::min_max, 2>, 3>, split<pulseinfer::min_max, 6>>);
  }

  TEST_CASE("digests of pieces made token by token are those made at once")
  {
    for (dtype const type : {dtype::float16, dtype::int8}) {
      cache c{geometry_of(8), {{45, 1}}, 9};
      pulseinfer_test::tensor queries{dtype::float32, c.tensor_tokens, 6, head_dim};
      queries.randomise(c.random);
      using policy = split<pulseinfer::cuboid_mean, 4>;
      scored<policy> grown{c, {.type = type, .bounds = true}, queries};
      for (std::int32_t tokens = 1; tokens <= 45; ++tokens) {
        c.info[0].tokens = tokens;
        pulseinfer_test::run_solo(grown.update());
        scored<policy> whole{c, {.type = type, .bounds = true}, queries};
        with_all_tokens_new(c, [&] { pulseinfer_test::run_solo(whole.update()); });
        std::uint32_t wrong = 0;
        for (std::uint32_t block = 0; block < c.info[0].blocks(8); ++block) {
          // What no token has reached is garbage in both.
          wrong +=
            std::memcmp(grown.digests(0, block), whole.digests(0, block), grown.digest.block_bytes(head_dim, 3)) != 0
            ? 1U
            : 0U;
        }
        CHECK(wrong == 0);
      }
    }
  }

  TEST_CASE("pieces whose scores are beyond the numbers add nothing, and make no NaN")
  {
    cache c{geometry_of(4), {{8, 1}}, 2};
    pulseinfer_test::tensor queries{dtype::float32, c.tensor_tokens, 6, head_dim};
    for (std::uint64_t t = 0; t < c.tensor_tokens; ++t) {
      for (std::uint32_t head = 0; head < 6; ++head) {
        for (std::uint32_t j = 0; j < head_dim; ++j) { queries.set(t, head, j, 100.0F); }
      }
    }
    for (std::uint32_t t = 0; t < 8; ++t) {
      for (std::uint32_t head = 0; head < 3; ++head) {
        for (std::uint32_t j = 0; j < head_dim; ++j) { c.set_key(0, 0, head, t, j, t == 2 || t == 3 ? 0.25F : -3e38F); }
      }
    }
    scored<split<pulseinfer::mean_key, 2>> call{c, {.type = dtype::float32}, queries};
    call.run();
    CHECK(call.at(0, 0, 5, 0) == doctest::Approx(0.2 * 100 * 0.25 * head_dim + std::log(2.0)).epsilon(1e-6));
    CHECK(call.at(0, 0, 5, 1) == -HUGE_VAL);
  }

  TEST_CASE_TEMPLATE(
    "solo_head_selector selects by digests of pieces what a slow reference selects", Digest, pulseinfer::cuboid_mean,
    pulseinfer::log_mass)
  {
    cache c{geometry_of(16), {{331, 1}, {200, 2}}, 7};
    solo_head_selector<split<Digest, 4>, pulseinfer::few_heads> const options{
      .budget_tokens = 128,
      .sink_tokens = 16,
      .recent_tokens = 16,
      .digest = {.type = dtype::float32, .bounds = true},
      .heads = {.layers = {{.kv_heads = {0, 2}}}}};
    harness h{options, c, 0, 2};
    CHECK(h.bound.digest_bytes(layer_id{0}) == 2 * (4 * (2 * head_dim * 4 + 8)));
    h.select();
    for (std::uint32_t row = 0; row < 2; ++row) {
      std::uint32_t const tokens = static_cast<std::uint32_t>(c.info[row].tokens);
      std::vector<double> votes(c.info[row].blocks(16), 0.0);
      for (std::int32_t query = 0; query < c.info[row].new_tokens; ++query) {
        for (std::uint32_t const head : {0U, 1U, 4U, 5U}) {
          std::vector<double> scores;
          for (std::uint32_t at = 0; at * 4 < tokens; ++at) {
            scores.push_back(
              score_of<Digest>(c, row, head / 2, at * 4, std::min(at * 4 + 4, tokens), [&](std::uint32_t j) {
                return static_cast<double>(
                         h.queries.at(static_cast<std::uint64_t>(c.info[row].token_offset + query), head, j)) /
                  std::sqrt(static_cast<double>(head_dim));
              }));
          }
          double const all = log_sum(scores);
          for (std::size_t at = 0; at < scores.size(); ++at) { votes[at / 4] += std::exp(scores[at] - all); }
        }
      }
      pulseinfer_test::check_choice(
        h.arrays.selected(row), pulseinfer_test::selection_of(c.info[row], 16, votes, 8, 1, 1), votes);
    }
  }

  TEST_CASE("blocks that pieces do not divide are refused with the numbers")
  {
    cache c{geometry_of(6), {{60, 1}}, 1};
    pulseinfer_test::immediate_backend on;
    CHECK_THROWS_WITH_AS(
      (void)(solo_head_selector<split<pulseinfer::mean_key, 4>>{
               .budget_tokens = 24, .sink_tokens = 6, .recent_tokens = 6})
        .bind(on, pulseinfer_test::limits_of(c, 1)),
      "invalid_argument: digests of 4 pieces of a block: block_tokens 6 is no multiple of 4",
      pulseinfer::configuration_error);
  }
}
