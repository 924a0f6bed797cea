// What a selection leaves out, bounded and estimated from digests, beside attention over all blocks in double precision.

#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/device/certificate.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/split.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using pulseinfer::certificate_sums;
using pulseinfer::dtype;
using pulseinfer::solo_head_selector;
using pulseinfer::status;
using pulseinfer_test::cache;
using pulseinfer_test::harness;
using pulseinfer_test::numbers;

namespace {

/// Attention of one query head over some blocks, in double precision.
struct attended {
  double log_sum = 0;
  std::vector<double> out;
};

attended attend(
  cache const& c, pulseinfer_test::tensor const& queries, std::uint32_t row, std::uint64_t token, std::uint32_t head,
  numbers const& blocks)
{
  std::uint32_t const bt = c.layout.block_tokens;
  std::uint32_t const kv_head = head / c.geometry.query_group();
  double const scale = 1.0 / std::sqrt(static_cast<double>(c.geometry.head_dim));
  attended result{.out = std::vector<double>(c.layout.value_dim, 0.0)};
  double total = 0;
  for (std::uint32_t const block : blocks) {
    for (std::uint32_t t = block * bt; t < block * bt + c.info[row].valid_tokens(block, bt); ++t) {
      double logit = 0;
      for (std::uint32_t j = 0; j < c.geometry.head_dim; ++j) {
        logit +=
          scale * static_cast<double>(queries.at(token, head, j)) * static_cast<double>(c.key(0, row, kv_head, t, j));
      }
      double const mass = std::exp(logit);
      total += mass;
      for (std::uint32_t j = 0; j < c.layout.value_dim; ++j) {
        result.out[j] += mass * static_cast<double>(c.value(0, row, kv_head, t, j));
      }
    }
  }
  for (double& value : result.out) { value /= total; }
  result.log_sum = std::log(total);
  return result;
}

struct tally {
  std::uint32_t cases = 0;
  std::uint32_t beyond_share = 0;
  std::uint32_t beyond_error = 0;
  std::uint32_t estimated = 0;  // within a factor of 2
};

/// Certificates of a selection's query heads, held against the truth.
template <class Selector>
tally certified(Selector const& options, cache& c, float sharpness, std::vector<std::uint32_t> const& kv_heads)
{
  harness h{options, c, 0, 2};
  h.queries.randomise(c.random, sharpness);
  h.select();
  pulseinfer::certificate_table table{.queries = 2, .heads = h.bound.certified_heads(pulseinfer::layer_id{0})};
  std::vector<certificate_sums> sums(c.info.size() * 2 * std::size_t{table.heads}, {.log_bound = std::nanf("")});
  table.data = sums.data();
  REQUIRE(h.bound.certify_async({}, h.arrays.select_request(0, h.queries.view), table) == status::ok);
  tally result;
  std::uint32_t const group = c.geometry.query_group();
  for (std::uint32_t row = 0; row < c.info.size(); ++row) {
    numbers all(c.info[row].blocks(c.layout.block_tokens));
    for (std::uint32_t b = 0; b < all.size(); ++b) { all[b] = b; }
    for (std::int32_t query = 0; query < c.info[row].new_tokens; ++query) {
      auto const token = static_cast<std::uint64_t>(c.info[row].token_offset + query);
      for (std::uint32_t i = 0; i < table.heads; ++i) {
        std::uint32_t const head = kv_heads[i / group] * group + i % group;
        std::uint32_t const lane = row * c.geometry.head_groups + kv_heads[i / group] / c.geometry.group_heads();
        attended const dense = attend(c, h.queries, row, token, head, all);
        attended const sparse = attend(c, h.queries, row, token, head, h.arrays.selected(lane));
        double const skipped = 1.0 - std::exp(sparse.log_sum - dense.log_sum);
        double apart = 0;
        for (std::size_t j = 0; j < dense.out.size(); ++j) { apart += std::pow(dense.out[j] - sparse.out[j], 2.0); }
        auto const found = pulseinfer::device::certify(
          table.at(static_cast<pulseinfer::row_id>(row), static_cast<std::uint32_t>(query), i),
          static_cast<float>(sparse.log_sum));
        ++result.cases;
        result.beyond_share += static_cast<double>(found.share_bound) >= skipped - 1e-12 ? 0U : 1U;
        result.beyond_error += static_cast<double>(found.error_bound) >= std::sqrt(apart) - 1e-12 ? 0U : 1U;
        double const estimate = static_cast<double>(found.share_estimate);
        result.estimated += estimate <= 2 * skipped + 1e-9 && estimate >= skipped / 2 - 1e-9 ? 1U : 0U;
      }
    }
  }
  return result;
}

pulseinfer::kv_geometry geometry_of(std::uint32_t head_groups, dtype type)
{
  return {
    .layers = 1,
    .query_heads = 8,
    .kv_heads = 4,
    .head_dim = 32,
    .value_dim = 20,
    .block_tokens = 8,
    .head_groups = head_groups,
    .key_type = type,
    .value_type = type};
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE_TEMPLATE(
    "a certificate bounds the mass left out and the error in every case; its estimate is within 2x in 95 of 100",
    Digest, pulseinfer::min_max, pulseinfer::cuboid_mean, pulseinfer::mean_key, pulseinfer::log_mass,
    pulseinfer::split<pulseinfer::min_max, 4>, pulseinfer::split<pulseinfer::mean_key, 2>)
  {
    tally sum;
    for (dtype const type : {dtype::float32, dtype::float16, dtype::int8}) {
      for (float const sharpness : {0.3F, 1.0F, 2.0F}) {
        for (std::uint32_t const groups : {1U, 4U}) {
          cache c{
            geometry_of(groups, type == dtype::float32 ? dtype::float32 : dtype::float16),
            {{193, 1}, {161, 2}, {7, 1}},
            groups};
          solo_head_selector<Digest> const options{
            .budget_tokens = 80, .sink_tokens = 8, .recent_tokens = 16, .digest = {.type = type, .bounds = true}};
          tally const one = certified(options, c, sharpness, {0, 1, 2, 3});
          sum.cases += one.cases;
          sum.beyond_share += one.beyond_share;
          sum.beyond_error += one.beyond_error;
          sum.estimated += one.estimated;
        }
      }
    }
    CHECK(sum.cases == 3 * 3 * 2 * 4 * 8);
    CHECK(sum.beyond_share == 0);
    CHECK(sum.beyond_error == 0);
    // Scores of boxes are bounds and estimate nothing.
    if (!Digest::form::holds_keys) { CHECK(sum.estimated * 100 >= sum.cases * 95); }
  }

  TEST_CASE("certificates speak of the heads that choose, and say on many threads what they say on one")
  {
    cache c{geometry_of(1, dtype::float32), {{193, 1}, {161, 2}}, 3};
    solo_head_selector<pulseinfer::min_max, pulseinfer::few_heads> const options{
      .budget_tokens = 80,
      .sink_tokens = 8,
      .recent_tokens = 16,
      .digest = {.bounds = true},
      .heads = {.layers = {{.kv_heads = {0, 3}}}}};
    tally const few = certified(options, c, 1.0F, {0, 3});
    CHECK(few.cases == 3 * 4);
    CHECK(few.beyond_share + few.beyond_error == 0);

    harness h{options, c, 0, 2};
    h.select();
    std::vector<certificate_sums> sums[2];
    for (std::size_t i = 0; i < 2; ++i) {
      sums[i].resize(2 * 4);
      pulseinfer::certify_skipped<pulseinfer::min_max::form, pulseinfer::min_max::spread> const op{
        .request = h.arrays.select_request(0, h.queries.view),
        .table = {.data = sums[i].data(), .queries = 1, .heads = 4},
        .heads = {.first = 0, .count = 1},
        .query_group = 2,
        .group_heads = 4,
        .block_tokens = 8,
        .bounds_offset = options.digest.bounds_offset(32, 2),
        .scale = 0.2F};
      CHECK(op.cost().flops > 0);
      if (i == 0) {
        pulseinfer_test::run_solo(op);
      } else {
        pulseinfer_test::run_parallel(op, 5);
      }
    }
    for (std::size_t i : {0U, 1U, 4U, 5U}) {
      CHECK(sums[0][i].log_bound == doctest::Approx(sums[1][i].log_bound).epsilon(1e-4));
      CHECK(sums[0][i].log_skipped == doctest::Approx(sums[1][i].log_skipped).epsilon(1e-4));
      CHECK(sums[0][i].log_attended == doctest::Approx(sums[1][i].log_attended).epsilon(1e-4));
      CHECK(sums[0][i].value_norm == sums[1][i].value_norm);
    }
  }

  TEST_CASE("nothing left out is certified as nothing, and what cannot be bounded as all; calls that do not fit say so")
  {
    using pulseinfer::device::certify;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    auto const nothing = certify({.log_attended = 3.0F, .value_norm = 5.0F}, 3.0F);
    CHECK(nothing.share_bound == 0.0F);
    CHECK(nothing.share_estimate == 0.0F);
    CHECK(nothing.error_bound == 0.0F);
    CHECK(certify({.log_bound = infinity, .value_norm = 5.0F}, 3.0F).error_bound == 10.0F);
    CHECK(
      certify({.log_bound = 2.0F, .log_skipped = 2.0F, .log_attended = 2.0F, .value_norm = 1.0F}, 2.0F)
        .share_estimate == doctest::Approx(0.5));

    cache c{geometry_of(1, dtype::float32), {{193, 1}}, 3};
    std::vector<certificate_sums> sums(8);
    pulseinfer::certificate_table const table{.data = sums.data(), .queries = 1, .heads = 8};
    harness without{solo_head_selector<>{.budget_tokens = 80, .recent_tokens = 16}, c, 0, 1};
    auto const request = without.arrays.select_request(0, without.queries.view);
    CHECK(without.bound.certify_async({}, request, table) == status::invalid_state);
    harness with{solo_head_selector<>{.budget_tokens = 80, .recent_tokens = 16, .digest = {.bounds = true}}, c, 0, 1};
    auto other = with.arrays.select_request(0, with.queries.view);
    other.layer = pulseinfer::layer_id{1};
    CHECK(with.bound.certify_async({}, other, table) == status::out_of_range);
    other = with.arrays.select_request(0, {});
    CHECK(with.bound.certify_async({}, other, table) == status::invalid_argument);
    other = with.arrays.select_request(0, with.queries.view);
    CHECK(
      with.bound.certify_async({}, other, {.data = sums.data(), .queries = 1, .heads = 6}) == status::invalid_argument);
  }
}
