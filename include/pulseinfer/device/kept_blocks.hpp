#pragma once

/// Blocks of a row that are selected whatever their votes.

#include <pulseinfer/config.hpp>
#include <pulseinfer/view/row_info.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer::device {

/// Blocks [0, head) and [tail, blocks) are kept; votes decide on those between.
struct kept_blocks {
  std::uint32_t blocks = 0;  ///< of the row
  std::uint32_t head = 0;
  std::uint32_t tail = 0;
  std::uint32_t chosen = 0;  ///< selected by votes
  std::uint32_t open = 0;    ///< first open block: partial, or touched by this step's tokens
};

static_assert(std::is_trivially_copyable_v<kept_blocks>);

/// Open blocks come first, then the `recent` blocks before them, then the `sinks` at the begin; whatever is left of
/// `budget` is for votes. Where the budget is smaller than the kept ones, the later in this order lose, oldest first.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr kept_blocks keep_blocks(
  row_info const& row, std::uint32_t block_tokens, std::uint32_t budget, std::uint32_t sinks, std::uint32_t recent)
{
  auto const smaller = [](std::uint32_t a, std::uint32_t b) { return a < b ? a : b; };
  kept_blocks result;
  result.blocks = row.blocks(block_tokens);
  result.open = static_cast<std::uint32_t>(row.tokens - row.new_tokens) / block_tokens;
  if (result.blocks <= budget) {
    result.tail = 0;
    return result;
  }
  std::uint32_t const open = smaller(result.blocks - result.open, budget);
  std::uint32_t const newest = smaller(smaller(recent, result.open), budget - open);
  result.tail = result.blocks - open - newest;
  result.head = smaller(smaller(sinks, result.tail), budget - open - newest);
  result.chosen = smaller(result.tail - result.head, budget - open - newest - result.head);
  return result;
}

}  // namespace pulseinfer::device
