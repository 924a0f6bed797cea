#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/operation/append_tokens.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using pulseinfer::dtype;
using pulseinfer_test::cache;
using pulseinfer_test::rounded;
using pulseinfer_test::tensor;

namespace {

struct appended {
  appended(cache& c, dtype type)
    : of{c},
      keys{type, c.tensor_tokens, c.geometry.kv_heads, c.geometry.head_dim, 2},
      values{type, c.tensor_tokens, c.geometry.kv_heads, c.layout.value_dim, 1}
  {
    keys.randomise(c.random);
    values.randomise(c.random);
  }
  [[nodiscard]] pulseinfer::append_tokens operation(std::uint32_t layer)
  {
    return {
      .layer = static_cast<pulseinfer::layer_id>(layer),
      .rows = of.rows(),
      .info = of.info.data(),
      .keys = keys.view,
      .values = of.layout.value_is_key_prefix ? pulseinfer::tensor_view{} : values.view,
      .residency = of.residency,
      .pool = of.pool,
      .layout = of.layout,
      .head_groups = of.geometry.head_groups,
      .most_tokens = of.most_new};
  }
  cache& of;
  tensor keys;
  tensor values;
};

/// Every row of every plane: new tokens as in the tensors, all else still NaN.
void check(appended const& a, std::uint32_t layer)
{
  cache const& c = a.of;
  std::uint32_t wrong = 0;
  for (std::uint32_t row = 0; row < c.info.size(); ++row) {
    auto const& info = c.info[row];
    std::uint32_t const capacity = info.blocks(c.layout.block_tokens) * c.layout.block_tokens;
    for (std::uint32_t position = 0; position < capacity; ++position) {
      std::int32_t const token = static_cast<std::int32_t>(position) - (info.tokens - info.new_tokens);
      bool const fresh = token >= 0 && token < info.new_tokens;
      auto const source = static_cast<std::uint64_t>(info.token_offset + (fresh ? token : 0));
      for (std::uint32_t head = 0; head < c.geometry.kv_heads; ++head) {
        for (std::uint32_t other = 0; other < c.geometry.layers; ++other) {
          bool const written = fresh && other == layer;
          for (std::uint32_t j = 0; j < c.geometry.head_dim; ++j) {
            float const key = c.key(other, row, head, position, j);
            wrong += written ? key != rounded(c.layout.key().type, a.keys.at(source, head, j)) : !std::isnan(key);
          }
          for (std::uint32_t j = 0; j < c.layout.value_dim; ++j) {
            float const value = c.value(other, row, head, position, j);
            float const right =
              c.layout.value_is_key_prefix ? a.keys.at(source, head, j) : a.values.at(source, head, j);
            wrong += written ? value != rounded(c.layout.value().type, right) : !std::isnan(value);
          }
        }
      }
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("append_tokens writes new keys and values to their positions and nothing else, over layouts and types")
  {
    using enum pulseinfer::token_order;
    for (std::uint32_t const block_tokens : {1U, 3U, 16U, 17U, 64U}) {
      for (auto const order : {hnd, nhd}) {
        for (dtype const plane : {dtype::float32, dtype::float16, dtype::bfloat16, dtype::float8_e4m3}) {
          for (dtype const source : {dtype::float32, plane}) {
            CAPTURE(block_tokens);
            CAPTURE(name_of(plane));
            pulseinfer::kv_geometry geometry{
              .layers = 2,
              .query_heads = 4,
              .kv_heads = 4,
              .head_dim = 9,
              .value_dim = block_tokens == 3 ? 5U : 0U,
              .block_tokens = block_tokens,
              .head_groups = block_tokens % 3 + 1 == 2 ? 2U : 1U,
              .key_type = plane,
              .value_type = plane,
              .order = order,
              .row_alignment = block_tokens == 17 ? 16U : 1U};
            cache c{geometry, {{40, 3}, {1, 1}, {64, 64}, {65, 1}, {17, 0}, {0, 0}}, block_tokens, false};
            appended a{c, source};
            pulseinfer_test::run_solo(a.operation(1));
            check(a, 1);
          }
        }
      }
    }
  }

  TEST_CASE("append_tokens gives the same bytes with several threads a group")
  {
    pulseinfer::kv_geometry geometry{.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 13, .block_tokens = 5};
    cache c{geometry, {{23, 2}, {9, 9}}, 4, false};
    appended a{c, dtype::float32};
    pulseinfer_test::run_parallel(a.operation(0), 4);
    check(a, 0);
  }

  TEST_CASE("append_tokens writes one latent row where values are a prefix of keys")
  {
    pulseinfer::kv_geometry geometry{
      .layers = 1,
      .query_heads = 4,
      .kv_heads = 1,
      .head_dim = 24,
      .value_dim = 16,
      .block_tokens = 4,
      .value_is_key_prefix = true};
    cache c{geometry, {{10, 3}}, 5, false};
    appended a{c, dtype::float32};
    pulseinfer_test::run_solo(a.operation(0));
    check(a, 0);
  }

  TEST_CASE("append_tokens leaves out a token whose block has no slot, and does nothing where keys are empty")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 4, .block_tokens = 4};
    cache c{geometry, {{9, 3}}, 6, false};  // tokens 6 and 7 in block 1, token 8 in block 2
    appended a{c, dtype::float32};
    auto const lane = static_cast<pulseinfer::lane_id>(0);
    pulseinfer::slot_id& slot = c.residency.slots_of_lane(pulseinfer::layer_id{0}, lane)[1];
    pulseinfer::slot_id const before = slot;
    slot = pulseinfer::none<pulseinfer::slot_id>;
    pulseinfer_test::run_solo(a.operation(0));
    slot = before;
    CHECK(std::isnan(c.key(0, 0, 0, 6, 0)));
    CHECK(std::isnan(c.key(0, 0, 0, 7, 3)));
    CHECK(
      c.key(0, 0, 0, 8, 3) ==
      rounded(dtype::float16, a.keys.at(static_cast<std::uint64_t>(c.info[0].token_offset + 2), 0, 3)));

    pulseinfer::append_tokens nothing = a.operation(0);
    nothing.keys = {};
    CHECK(nothing.shape().items == 0);
    CHECK(nothing.cost().device_bytes == 0);
  }

  TEST_CASE("append_tokens states the bytes it moves")
  {
    pulseinfer::kv_geometry geometry{.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 8, .block_tokens = 4};
    cache c{geometry, {{10, 3}, {4, 1}}, 7, false};
    appended a{c, dtype::float32};
    CHECK(a.operation(0).cost().device_bytes == 4 * 2 * 2 * (8 * 4 + 8 * 2));
  }
}
