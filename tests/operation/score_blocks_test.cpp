#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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

  TEST_CASE_TEMPLATE(
    "digests of every form and type, and their bounds, lie where scoring reads them, for any group", Policy,
    pulseinfer::cuboid_mean, pulseinfer::min_max, pulseinfer::mean_key, pulseinfer::log_mass)
  {
    for (dtype const type : {dtype::float32, dtype::float16, dtype::int8}) {
      for (shape const& s : shapes) {
        CAPTURE(s.head_dim);
        CAPTURE(name_of(type));
        std::uint32_t const bt = s.block_tokens;
        pulseinfer::kv_geometry geometry = geometry_of(s);
        geometry.value_dim = 24;
        geometry.key_type = geometry.value_type = dtype::float16;
        cache c{geometry, {{9 * bt + 1, 2}, {3 * bt, 1}, {0, 0}}, s.head_dim};
        Policy const policy{.type = type, .bounds = true};
        policy.validate();
        std::vector<std::uint64_t> const bytes{policy.block_bytes(s.head_dim, s.heads.count)};
        CHECK(bytes[0] % 16 == 0);
        selection_arrays solo{c, 1, bytes};
        selection_arrays threads{c, 1, bytes};
        auto const digests = [&](selection_arrays const& arrays) {
          return typename Policy::update_operation{
            .request = arrays.digest_request(0, c.max_blocks),
            .heads = s.heads,
            .head_groups = s.head_groups,
            .digest_type = type,
            .bounds_offset = policy.bounds_offset(s.head_dim, s.heads.count)};
        };
        with_all_tokens_new(c, [&] {
          pulseinfer_test::run_solo(digests(solo));
          pulseinfer_test::run_parallel(digests(threads), 3);
        });

        tensor queries{dtype::float32, c.tensor_tokens, s.query_heads, s.head_dim, 1};
        queries.randomise(c.random);
        std::uint32_t const group = geometry.query_group();
        pulseinfer::score_table table{
          .queries = 2, .heads = s.heads.count * group, .pitch = pulseinfer::round_up(c.max_blocks, 16U)};
        std::vector<float> memory(c.info.size() * 2 * std::size_t{table.heads} * table.pitch, std::nanf(""));
        table.data = memory.data();
        typename Policy::score_operation const score{
          .request = solo.select_request(0, queries.view),
          .scores = table,
          .heads = s.heads,
          .query_group = group,
          .block_tokens = bt,
          .digest_type = type,
          .scale = 0.2F};
        pulseinfer_test::run_solo(score);
        std::vector<float> const scored = memory;
        std::fill(memory.begin(), memory.end(), std::nanf(""));
        pulseinfer_test::run_parallel(score, 5);
        CHECK(std::memcmp(scored.data(), memory.data(), scored.size() * sizeof(float)) == 0);
        CHECK(score.cost().flops > 0);

        double worst = 0;
        std::uint32_t wrong = 0;
        for (std::uint32_t row = 0; row < 2; ++row) {
          for (std::uint32_t block = 0; block < c.info[row].blocks(bt); ++block) {
            auto const at = [&](selection_arrays const& arrays) {
              return arrays.digests.address(pulseinfer::layer_id{0}, static_cast<pulseinfer::row_id>(row), block);
            };
            wrong += std::memcmp(at(solo), at(threads), s.heads.count * policy.head_bytes(s.head_dim)) != 0 ? 1U : 0U;
            for (std::uint32_t head = 0; head < s.heads.count; ++head) {
              // The first part and what queries make of it, read value by value.
              std::vector<double> parts;
              std::uint32_t const elements = pulseinfer::device::digest_elements(type, Policy::form::parts, s.head_dim);
              pulseinfer::device::visit_digests(type, [&](auto stored) {
                using value = typename decltype(stored)::type;
                pulseinfer::device::digest_values<value> const digest{
                  reinterpret_cast<value*>(at(solo) + head * policy.head_bytes(s.head_dim)), elements};
                for (std::uint32_t first = 0; first < elements; first += 16) {
                  pulseinfer::device::float_lanes lanes;
                  digest.load(first, lanes);
                  float sixteen[16];
                  lanes.store(sixteen);
                  parts.insert(parts.end(), sixteen, sixteen + 16);
                }
              });
              std::uint32_t const stride = pulseinfer::device::digest_stride(type, s.head_dim);
              pulseinfer::block_bounds bounds[2];
              std::memcpy(&bounds[0], at(solo) + s.heads.count * policy.head_bytes(s.head_dim) + 8U * head, 8);
              std::memcpy(&bounds[1], at(threads) + s.heads.count * policy.head_bytes(s.head_dim) + 8U * head, 8);
              wrong += std::memcmp(&bounds[0], &bounds[1], 8) != 0 ? 1U : 0U;
              double radius = 0;
              double norm = 0;
              for (std::uint32_t t = 0; t < c.info[row].valid_tokens(block, bt); ++t) {
                double distance = 0;
                for (std::uint32_t j = 0; j < s.head_dim; ++j) {
                  double const key = static_cast<double>(c.key(0, row, s.heads.first + head, block * bt + t, j));
                  distance += (key - parts[j]) * (key - parts[j]);
                }
                double square = 0;
                for (std::uint32_t j = 0; j < 24; ++j) {
                  double const value = static_cast<double>(c.value(0, row, s.heads.first + head, block * bt + t, j));
                  square += value * value;
                }
                radius = std::max(radius, std::sqrt(distance));
                norm = std::max(norm, std::sqrt(square));
              }
              wrong += static_cast<double>(bounds[0].key_radius) < radius ? 1U : 0U;
              wrong += static_cast<double>(bounds[0].key_radius) > radius * 1.0001 + 1e-12 ? 1U : 0U;
              wrong += static_cast<double>(bounds[0].value_norm) < norm ? 1U : 0U;
              wrong += static_cast<double>(bounds[0].value_norm) > norm * 1.0001 ? 1U : 0U;

              for (std::uint32_t i = 0; i < group; ++i) {
                std::uint32_t const query_head = (s.heads.first + head) * group + i;
                double right = std::log(c.info[row].valid_tokens(block, bt));
                double size = 1.0;
                for (std::uint32_t j = 0; j < s.head_dim; ++j) {
                  double const q = 0.2F *
                    static_cast<double>(
                                     queries.at(static_cast<std::uint64_t>(c.info[row].token_offset), query_head, j));
                  double term = q * parts[j];
                  if constexpr (std::is_same_v<Policy, pulseinfer::log_mass>) {
                    term += q * q / 2 * parts[stride + j];
                  } else if constexpr (Policy::form::parts == 2) {
                    term += std::abs(q) * parts[stride + j];
                  }
                  right += term;
                  size += std::abs(term);
                }
                double const got = static_cast<double>(
                  scored[((std::size_t{row} * 2) * table.heads + head * group + i) * table.pitch + block]);
                worst = std::isnan(got) ? 1e9 : std::max(worst, std::abs(got - right) / size);
              }
            }
          }
        }
        CHECK(wrong == 0);
        CHECK(worst <= 2e-6);
      }
    }
  }
}
