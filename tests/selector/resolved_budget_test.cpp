#include "support/immediate_backend.hpp"
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

using pulseinfer::resolve_budget;
using pulseinfer::resolved_budget;
using pulseinfer::token_budget;

namespace {

std::string refusal(token_budget const& budget, std::uint32_t block_tokens, std::uint32_t step_tokens = 1)
{
  try {
    static_cast<void>(resolve_budget(budget, block_tokens, step_tokens));
  } catch (pulseinfer::configuration_error const& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_SUITE("selector")
{
  // kekzl/imp#1819: budgets were silently twice what was asked for on some models
  TEST_CASE("a budget in tokens means the same for every block size, and what is shown is what is used")
  {
    struct expectation {
      std::uint32_t block_tokens, blocks, recent;
    };
    for (expectation const& e :
         {expectation{16, 256, 16}, {32, 128, 8}, {1, 4096, 256}, {24, 170, 11}, {17, 240, 16}}) {
      CAPTURE(e.block_tokens);
      token_budget const budget{.budget_tokens = 4096, .recent_tokens = 256, .dense_tokens = 12288};
      resolved_budget const resolved = resolve_budget(budget, e.block_tokens, 1);
      CHECK(resolved.budget_blocks == e.blocks);
      CHECK(resolved.recent_blocks == e.recent);
      CHECK(resolved.sink_blocks == (16 + e.block_tokens - 1) / e.block_tokens);
      CHECK(resolved.open_blocks == 1);
      CHECK(resolved.dense_tokens + 1 == 12289);
      // The budget is never exceeded, the others never fall short.
      CHECK(resolved.budget_blocks * e.block_tokens <= 4096);
      CHECK((resolved.budget_blocks + 1) * e.block_tokens > 4096);
      CHECK(resolved.recent_blocks * e.block_tokens >= 256);

      pulseinfer::solo_head_selector<> const selector{
        .budget_tokens = 4096, .recent_tokens = 256, .dense_tokens = 12288};
      CHECK(selector.resolve(pulseinfer::layer_id{1}, e.block_tokens) == resolved);
      pulseinfer::selector_limits limits{
        .geometry = {.layers = 2, .query_heads = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = e.block_tokens},
        .max_rows = 1,
        .max_blocks = 8};
      pulseinfer_test::immediate_backend backend;
      auto const bound = selector.bind(backend, limits);
      CHECK(bound.budget(pulseinfer::layer_id{1}) == resolved);
      CHECK(bound.budget_blocks(pulseinfer::layer_id{1}) == resolved.budget_blocks);
      CHECK(bound.dense_tokens() == resolved.dense_tokens);
      pulseinfer::external_selector const external{
        .budget_tokens = 4096, .sink_tokens = 16, .recent_tokens = 256, .dense_tokens = 12288};
      CHECK(external.bind(backend, limits).budget(pulseinfer::layer_id{0}) == resolved);
    }
  }

  TEST_CASE("recent tokens are an eighth of the budget, at least 128, at most half; dense tokens are the budget")
  {
    CHECK(resolve_budget({.budget_tokens = 2048}, 16, 1).recent_blocks == 16);
    CHECK(resolve_budget({.budget_tokens = 512}, 16, 1).recent_blocks == 8);
    CHECK(resolve_budget({.budget_tokens = 64}, 16, 1).recent_blocks == 2);
    CHECK(resolve_budget({.budget_tokens = 512, .recent_tokens = 0}, 16, 1).recent_blocks == 0);
    CHECK(resolve_budget({.budget_tokens = 512}, 16, 1).dense_tokens == 512);
    CHECK(resolve_budget({.budget_tokens = 512, .dense_tokens = 0}, 16, 1).dense_tokens == 0);
  }

  TEST_CASE("a step of several tokens keeps room for as many open blocks as it can touch")
  {
    CHECK(resolve_budget({.budget_tokens = 512}, 16, 2).open_blocks == 2);
    CHECK(resolve_budget({.budget_tokens = 512}, 16, 17).open_blocks == 2);
    CHECK(resolve_budget({.budget_tokens = 512}, 16, 18).open_blocks == 3);
    CHECK(resolve_budget({.budget_tokens = 512, .recent_tokens = 8}, 1, 5).open_blocks == 5);
  }

  TEST_CASE("a budget that has no room for what is always selected is refused with the numbers")
  {
    CHECK(refusal({.budget_tokens = 0}, 16) == "invalid_argument: a budget of 0 tokens holds no block of 16");
    CHECK(refusal({.budget_tokens = 15}, 16) == "invalid_argument: a budget of 15 tokens holds no block of 16");
    CHECK(
      refusal({.budget_tokens = 100, .sink_tokens = 17, .recent_tokens = 49}, 16) ==
      "invalid_argument: a budget of 100 tokens is 6 blocks of 16, but 2 sink, 4 recent and 1 open blocks are always "
      "selected");
    CHECK(refusal({.budget_tokens = 112, .sink_tokens = 17, .recent_tokens = 49}, 16) == "accepted");
    CHECK(
      refusal({.budget_tokens = 112, .sink_tokens = 17, .recent_tokens = 49}, 16, 2).find("2 open") !=
      std::string::npos);
    CHECK(refusal({.budget_tokens = 112}, 0).find("block_tokens") != std::string::npos);
    CHECK(refusal({.budget_tokens = 112}, 16, 0).find("step") != std::string::npos);
    CHECK(refusal({.budget_tokens = 4294967295U, .sink_tokens = 4294967295U}, 1).find("sink") != std::string::npos);
  }
}
