#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/operation/update_digests.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using pulseinfer::dtype;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;

namespace {

struct digest_call {
  digest_call(cache& c, pulseinfer::scoring_heads scoring, dtype type)
    : of{c},
      heads{scoring},
      digest_type{type},
      elements{pulseinfer::device::cuboid_mean_elements(c.geometry.head_dim)},
      arrays{
        c, 1, std::vector<std::uint64_t>(c.geometry.layers, std::uint64_t{scoring.count} * elements * size_of(type))}
  {}
  [[nodiscard]] pulseinfer::update_digests operation(std::uint32_t layer) const
  {
    return {
      .request = arrays.digest_request(layer, of.max_blocks),
      .heads = heads,
      .head_groups = of.geometry.head_groups,
      .digest_type = digest_type};
  }
  [[nodiscard]] float at(
    std::uint32_t layer, std::uint32_t row, std::uint32_t block, std::uint32_t head, std::uint32_t i) const
  {
    return pulseinfer::load_as_float(
      arrays.digests.address(static_cast<pulseinfer::layer_id>(layer), static_cast<pulseinfer::row_id>(row), block),
      digest_type, std::uint64_t{head} * elements + i);
  }
  void check_block(std::uint32_t layer, std::uint32_t row, std::uint32_t block, double tolerance) const
  {
    CAPTURE(row);
    CAPTURE(block);
    std::uint32_t const dim = of.geometry.head_dim;
    double worst = 0;
    for (std::uint32_t head = 0; head < heads.count; ++head) {
      for (std::uint32_t j = 0; j < dim; ++j) {
        auto const right = pulseinfer_test::digest_of(of, layer, row, heads.first + head, block, j);
        double const centre = std::abs(static_cast<double>(at(layer, row, block, head, j)) - right.centre);
        double const distance = std::abs(static_cast<double>(at(layer, row, block, head, dim + j)) - right.distance);
        worst = std::isfinite(centre + distance) ? std::max({worst, centre, distance}) : 1e9;
      }
    }
    CHECK(worst <= tolerance);
  }

  cache& of;
  pulseinfer::scoring_heads heads;
  dtype digest_type;
  std::uint32_t elements;
  selection_arrays arrays;
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("update_digests equals a slow reference over layouts, types, head groups and scoring heads")
  {
    using enum pulseinfer::token_order;
    for (std::uint32_t const block_tokens : {1U, 3U, 16U, 17U, 64U}) {
      for (auto const order : {hnd, nhd}) {
        for (dtype const type : {dtype::float32, dtype::float16, dtype::bfloat16}) {
          for (pulseinfer::scoring_heads const heads :
               {pulseinfer::scoring_heads{0, 4}, pulseinfer::scoring_heads{2, 1}}) {
            CAPTURE(block_tokens);
            CAPTURE(name_of(type));
            pulseinfer::kv_geometry geometry{
              .layers = 2,
              .query_heads = 4,
              .kv_heads = 4,
              .head_dim = 19,
              .block_tokens = block_tokens,
              .head_groups = heads.count == 4 ? 2U : 1U,
              .key_type = type,
              .value_type = type,
              .order = order};
            cache c{geometry, {{70, 70}, {1, 1}, {33, 33}, {0, 0}}, block_tokens};
            digest_call call{c, heads, dtype::float32};
            pulseinfer_test::run_solo(call.operation(1));
            for (std::uint32_t row = 0; row < c.info.size(); ++row) {
              for (std::uint32_t block = 0; block < c.info[row].blocks(block_tokens); ++block) {
                call.check_block(1, row, block, 2e-6);
              }
            }
            digest_call threads{c, heads, dtype::float32};
            pulseinfer_test::run_parallel(threads.operation(1), 3);
            std::uint32_t differing = 0;
            for (std::uint32_t block = 0; block < c.info[0].blocks(block_tokens); ++block) {
              for (std::uint32_t i = 0; i < heads.count * call.elements; ++i) {
                differing += call.at(1, 0, block, 0, i) != threads.at(1, 0, block, 0, i) ? 1U : 0U;
              }
            }
            CHECK(differing == 0);
          }
        }
      }
    }
  }

  // flashinfer-ai/flashinfer#941: what was never written behind the last token is NaN here
  TEST_CASE("update_digests of a block with one valid token is that token, and follows when another is appended")
  {
    for (auto const& [block_tokens, tokens] :
         std::vector<std::pair<std::uint32_t, std::uint32_t>>{{4, 13}, {64, 4033}}) {
      pulseinfer::kv_geometry geometry{
        .layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 8, .block_tokens = block_tokens};
      cache c{geometry, {{tokens + 1, 1}}, block_tokens};
      std::uint32_t const last = tokens / block_tokens;
      float const next = c.key(0, 0, 1, tokens, 2);
      c.info[0].tokens = static_cast<std::int32_t>(tokens);
      for (std::uint32_t head = 0; head < 2; ++head) {
        for (std::uint32_t j = 0; j < 8; ++j) {
          c.set_key(0, 0, head, tokens, j, std::numeric_limits<float>::quiet_NaN());
        }
      }
      digest_call call{c, {0, 2}, dtype::float16};
      pulseinfer_test::run_solo(call.operation(0));
      CHECK(c.info[0].valid_tokens(last, block_tokens) == 1);
      for (std::uint32_t j = 0; j < 8; ++j) {
        CHECK(call.at(0, 0, last, 1, j) == c.key(0, 0, 1, tokens - 1, j));
        CHECK(call.at(0, 0, last, 1, 8 + j) == 0.0F);
      }
      c.info[0].tokens = static_cast<std::int32_t>(tokens + 1);
      for (std::uint32_t head = 0; head < 2; ++head) {
        for (std::uint32_t j = 0; j < 8; ++j) { c.set_key(0, 0, head, tokens, j, next); }
      }
      float const before = call.at(0, 0, last, 1, 2);
      pulseinfer_test::run_solo(call.operation(0));
      call.check_block(0, 0, last, 4e-3);
      CHECK(call.at(0, 0, last, 1, 2) != before);
    }
  }

  TEST_CASE("update_digests touches the blocks of this step's tokens alone, and leaves one without a slot as it is")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 4, .block_tokens = 4};
    cache c{geometry, {{18, 7}}, 3};  // tokens 11 to 17: blocks 2, 3 and 4
    c.residency.slots_of_lane(pulseinfer::layer_id{0}, pulseinfer::lane_id{0})[3] =
      pulseinfer::none<pulseinfer::slot_id>;
    digest_call call{c, {0, 1}, dtype::float32};
    pulseinfer_test::run_solo(call.operation(0));
    CHECK(std::isnan(call.at(0, 0, 0, 0, 0)));
    CHECK(std::isnan(call.at(0, 0, 1, 0, 0)));
    call.check_block(0, 0, 2, 1e-6);
    CHECK(std::isnan(call.at(0, 0, 3, 0, 0)));
    call.check_block(0, 0, 4, 1e-6);
  }

  TEST_CASE("update_digests with nothing to do has no items")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 4};
    cache c{geometry, {{0, 0}}, 3};
    CHECK(digest_call{c, {0, 1}, dtype::float32}.operation(0).shape().items == 0);
  }
}
