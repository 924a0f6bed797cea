/// What keeps a run's figures from saying much.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace decode_text {

/// Fewer tokens than this make a noisy perplexity.
inline constexpr std::uint32_t enough_tokens = 512;

/// One sentence with the numbers for each reason; none for a sound run.
/// @param prompts tokens of each row's prompt   @param decoded tokens after it, of each row
/// @param budget tokens up to which a row reads everything
[[nodiscard]] std::vector<std::string> cautions(
  std::span<std::uint32_t const> prompts, std::uint32_t decoded, std::uint32_t budget);

}  // namespace decode_text
