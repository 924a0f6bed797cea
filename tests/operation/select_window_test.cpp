#include <pulseinfer/operation/select_window.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Blocks that hold a token which some query of the step sees, or a sink: token by token.
std::vector<std::int32_t> blocks_of_window(
  std::uint32_t tokens, std::uint32_t new_tokens, std::uint32_t window, std::uint32_t sinks, std::uint32_t block_tokens)
{
  std::vector<std::int32_t> result;
  for (std::uint32_t token = 0; token < tokens; ++token) {
    bool seen = token / block_tokens * block_tokens < sinks;  // sinks are whole blocks
    for (std::uint32_t query = tokens - new_tokens; query < tokens; ++query) {
      seen = seen || (token <= query && query - token < window);
    }
    auto const block = static_cast<std::int32_t>(token / block_tokens);
    if (seen && (result.empty() || result.back() != block)) { result.push_back(block); }
  }
  return result;
}

std::vector<std::int32_t> selected(
  std::uint32_t tokens, std::uint32_t new_tokens, std::uint32_t window, std::uint32_t sinks, std::uint32_t block_tokens,
  std::uint32_t threads = 1)
{
  lane_books books{{.rows = 2, .head_groups = 2, .max_blocks = 200, .max_selected = 200}};
  for (row_info& row : books.info) {
    row = {.tokens = static_cast<std::int32_t>(tokens), .new_tokens = static_cast<std::int32_t>(new_tokens)};
  }
  std::ranges::fill(books.ids, block_id{55});
  row_id const row{1};
  select_window const op{
    .rows = {.ids = &row, .count = 1},
    .info = books.info.data(),
    .selection = books.selection(),
    .window_tokens = window,
    .sink_tokens = sinks,
    .block_tokens = block_tokens,
    .head_groups = 2};
  if (threads == 1) {
    run_solo(op);
  } else {
    run_parallel(op, threads);
  }
  std::vector<std::int32_t> result;
  for (std::uint32_t i = 0; i < books.counts[2]; ++i) { result.push_back(to_number(books.ids[2 * 200 + i])); }
  for (std::uint32_t i = books.counts[2]; i < 200; ++i) { RC_ASSERT(is_none(books.ids[2 * 200 + i])); }
  RC_ASSERT(books.counts[3] == books.counts[2]);
  RC_ASSERT(books.ids[0] == block_id{55});  // row 0 was not asked for
  return result;
}

}  // namespace

TEST_SUITE("operation")
{
  // Report: vllm-project/vllm#48959
  TEST_CASE("a window of n tokens touches at most so many blocks, wherever it begins")
  {
    CHECK(window_blocks(4095, 32) == 129);
    CHECK(window_blocks(7, 4) == 3);
    CHECK(window_blocks(1, 16) == 1);
    CHECK(window_blocks(16, 16) == 2);
    CHECK(window_blocks(17, 16) == 2);
    CHECK(window_blocks(18, 16) == 3);
    CHECK(window_blocks(2, 1) == 2);
    CHECK(window_blocks(0, 16) == 0);
    for (std::uint32_t block_tokens = 1; block_tokens < 9; ++block_tokens) {
      for (std::uint32_t n = 1; n < 40; ++n) {
        std::uint32_t most = 0;
        for (std::uint32_t begin = 0; begin < block_tokens; ++begin) {
          most = std::max(most, (begin + n - 1) / block_tokens - begin / block_tokens + 1);
        }
        REQUIRE(window_blocks(n, block_tokens) == most);
      }
    }
  }

  TEST_CASE("a window's selection is the blocks that its queries see, token by token, and the sinks")
  {
    CHECK(rc::check([] {
      auto const block_tokens = *rc::gen::inRange(1U, 9U), tokens = *rc::gen::inRange(1U, 150U);
      auto const new_tokens = *rc::gen::inRange(1U, std::min(tokens, 12U) + 1);
      auto const window = *rc::gen::inRange(1U, 60U), sinks = *rc::gen::inRange(0U, 20U);
      auto const threads = *rc::gen::element(1U, 3U);
      RC_ASSERT(
        selected(tokens, new_tokens, window, sinks, block_tokens, threads) ==
        blocks_of_window(tokens, new_tokens, window, sinks, block_tokens));
    }));
  }

  // Report: vllm-project/vllm#48959
  TEST_CASE("a window that slides by one token loses at most one block at a time and never passes its bound")
  {
    constexpr std::uint32_t block_tokens = 4, window = 8, sinks = 4;
    std::vector<std::int32_t> before = selected(10, 1, window, sinks, block_tokens);
    CHECK(before == std::vector<std::int32_t>{0, 1, 2});  // tokens 2 to 9 and the sinks
    for (std::uint32_t tokens = 11; tokens <= 30; ++tokens) {
      std::vector<std::int32_t> const now = selected(tokens, 1, window, sinks, block_tokens);
      CHECK(now.front() == 0);
      CHECK(now.size() <= window_blocks(window, block_tokens) + 1);
      std::vector<std::int32_t> left;
      std::ranges::set_difference(before, now, std::back_inserter(left));
      CHECK(left.size() <= 1);
      before = now;
    }
  }
}
