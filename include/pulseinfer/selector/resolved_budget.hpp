#pragma once

/// A budget in tokens, as users give it, and in blocks, as selection uses it.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace pulseinfer {

/// Tokens of one lane and layer.
struct token_budget {
  std::uint32_t budget_tokens = 2048;               ///< everything that attention reads: kept and chosen
  std::uint32_t sink_tokens = 16;                   ///< at the begin, always selected
  std::optional<std::uint32_t> recent_tokens = {};  ///< before the open ones, always selected; see recent_or_default
  std::optional<std::uint32_t> dense_tokens = {};   ///< rows of so many tokens stay dense; absent: budget_tokens

  /// An eighth of the budget, at least 128 tokens, at most half of the budget, where nothing else is asked.
  [[nodiscard]] constexpr std::uint32_t recent_or_default() const
  {
    if (recent_tokens) { return *recent_tokens; }
    std::uint32_t const eighth = budget_tokens / 8U > 128U ? budget_tokens / 8U : 128U;
    return eighth < budget_tokens / 2U ? eighth : budget_tokens / 2U;
  }

  [[nodiscard]] constexpr std::uint32_t dense_or_default() const { return dense_tokens.value_or(budget_tokens); }
};

/// What selection works with. The budget in blocks is rounded down, so that it is never exceeded; sink and recent blocks
/// are rounded up, so that they never fall short.
struct resolved_budget {
  std::uint32_t budget_blocks = 0;  ///< most blocks of a selection, all kinds together
  std::uint32_t sink_blocks = 0;
  std::uint32_t recent_blocks = 0;  ///< full blocks before the open ones
  std::uint32_t open_blocks = 0;    ///< most blocks that a step's tokens can touch
  std::uint32_t dense_tokens = 0;   ///< sparse begins at dense_tokens + 1

  friend bool operator==(resolved_budget const&, resolved_budget const&) = default;
};

/// @param step_tokens most tokens that a decoding row appends in one step
/// @throws configuration_error where a budget has no room for what is always selected, with the numbers
[[nodiscard]] inline resolved_budget resolve_budget(
  token_budget const& budget, std::uint32_t block_tokens, std::uint32_t step_tokens)
{
  auto const number = [](std::uint64_t value) { return std::to_string(value); };
  if (block_tokens == 0) { throw configuration_error{"block_tokens is 0"}; }
  if (step_tokens == 0) { throw configuration_error{"a step of 0 tokens"}; }
  resolved_budget result{
    .budget_blocks = budget.budget_tokens / block_tokens,
    .sink_blocks = static_cast<std::uint32_t>(blocks_of(budget.sink_tokens, block_tokens)),
    .recent_blocks = static_cast<std::uint32_t>(blocks_of(budget.recent_or_default(), block_tokens)),
    .open_blocks = static_cast<std::uint32_t>(window_blocks(step_tokens, block_tokens)),
    .dense_tokens = budget.dense_or_default()};
  if (result.budget_blocks == 0) {
    throw configuration_error{
      "a budget of " + number(budget.budget_tokens) + " tokens holds no block of " + number(block_tokens)};
  }
  std::uint64_t const kept = std::uint64_t{result.sink_blocks} + result.recent_blocks + result.open_blocks;
  if (result.budget_blocks < kept) {
    throw configuration_error{
      "a budget of " + number(budget.budget_tokens) + " tokens is " + number(result.budget_blocks) + " blocks of " +
      number(block_tokens) + ", but " + number(result.sink_blocks) + " sink, " + number(result.recent_blocks) +
      " recent and " + number(result.open_blocks) + " open blocks are always selected"};
  }
  return result;
}

}  // namespace pulseinfer
