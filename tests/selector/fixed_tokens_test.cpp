#include <pulseinfer/selector/fixed_tokens.hpp>

#include <doctest/doctest.h>

#include <limits>

using pulseinfer::fixed_tokens;
using pulseinfer::layer_id;
using pulseinfer::token_budget;

TEST_SUITE("selector")
{
  TEST_CASE("fixed_tokens scales a layer's budget and nothing else, rounded down")
  {
    fixed_tokens const policy{.layer_factors = {4.0, 1.0, 0.33}};
    token_budget const base{.budget_tokens = 1024};
    CHECK(policy.of_layer(base, layer_id{0}).budget_tokens == 4096);
    CHECK(policy.of_layer(base, layer_id{1}).budget_tokens == 1024);
    CHECK(policy.of_layer(base, layer_id{2}).budget_tokens == 337);
    for (int layer = 0; layer < 3; ++layer) {
      token_budget const scaled = policy.of_layer(base, static_cast<layer_id>(layer));
      CHECK(scaled.recent_or_default() == 128);
      CHECK(scaled.dense_or_default() == 1024);
      CHECK(scaled.sink_tokens == 16);
    }
    CHECK(fixed_tokens{}.of_layer(base, layer_id{7}).budget_tokens == 1024);
  }

  TEST_CASE("fixed_tokens refuses factors that fit no layer or make no budget")
  {
    pulseinfer::kv_geometry const geometry{.layers = 3, .query_heads = 1, .kv_heads = 1, .head_dim = 1};
    CHECK_THROWS_WITH_AS(
      fixed_tokens{.layer_factors = {1.0}}.validate(geometry), "invalid_argument: 1 budget factors for 3 layers",
      pulseinfer::configuration_error);
    CHECK_NOTHROW(fixed_tokens{}.validate(geometry));
    for (double const factor : {0.0, -1.0, 1e9, std::numeric_limits<double>::quiet_NaN()}) {
      fixed_tokens const policy{.layer_factors = {factor}};
      CHECK_THROWS_AS(static_cast<void>(policy.of_layer({}, layer_id{0})), pulseinfer::configuration_error);
    }
  }
}
