#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/soft_vote.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using pulseinfer::designated_head;
using pulseinfer::layer_id;

TEST_SUITE("selector")
{
  TEST_CASE("designated_head names one KV head a layer, soft_vote all of them")
  {
    pulseinfer::kv_geometry const geometry{.layers = 3, .query_heads = 8, .kv_heads = 4, .head_dim = 1};
    designated_head const rule{.head_of_layer = {3, 0, 2}};
    rule.validate(geometry);
    using heads = std::vector<std::uint32_t>;
    CHECK(rule.of_layer(layer_id{0}, geometry).kv_heads == heads{3});
    CHECK(rule.of_layer(layer_id{2}, geometry).kv_heads == heads{2});
    CHECK(pulseinfer::soft_vote{}.of_layer(layer_id{1}, geometry).kv_heads == heads{0, 1, 2, 3});
  }

  TEST_CASE("designated_head refuses heads that do not exist, too few or many layers, and head groups")
  {
    pulseinfer::kv_geometry geometry{.layers = 3, .query_heads = 8, .kv_heads = 4, .head_dim = 1};
    CHECK_THROWS_WITH(
      (designated_head{.head_of_layer = {0, 4, 0}}.validate(geometry)),
      "invalid_argument: designated head 4 of layer 1, but there are 4 KV heads");
    CHECK_THROWS_WITH(
      (designated_head{.head_of_layer = {0, 1}}.validate(geometry)),
      "invalid_argument: 2 designated heads for 3 layers");
    CHECK_THROWS_WITH(designated_head{}.validate(geometry), "invalid_argument: 0 designated heads for 3 layers");
    geometry.head_groups = 2;
    CHECK_THROWS_WITH(
      (designated_head{.head_of_layer = {0, 1, 0}}.validate(geometry)),
      "invalid_argument: a designated head chooses for all heads, but the cache has 2 head groups with selections of "
      "their own");
  }
}
