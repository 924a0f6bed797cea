#include "caution.hpp"

#include <algorithm>

namespace decode_text {

std::vector<std::string> cautions(std::span<std::uint32_t const> prompts, std::uint32_t decoded, std::uint32_t budget)
{
  auto const number = [](std::uint64_t value) { return std::to_string(value); };
  std::vector<std::string> found;
  std::uint64_t const total = std::uint64_t{decoded} * prompts.size();

  // The i-th prediction reads i tokens and the prompt.
  std::uint64_t fitting = 0, longest = 0;
  for (std::uint32_t const prompt : prompts) {
    std::uint64_t const predictions = budget >= prompt ? std::uint64_t{budget} - prompt + 1 : 0;
    fitting += std::min<std::uint64_t>(predictions, decoded);
    longest = std::max(longest, std::uint64_t{prompt} + decoded);
  }
  if (total > 0 && fitting == total) {
    found.push_back(
      "the whole context of at most " + number(longest) + " tokens fits in the budget of " + number(budget) +
      ": nothing is selected or recalled, so that the columns cannot differ. Raise --context or lower --budget");
  } else if (fitting > 0) {
    found.push_back(
      "for " + number(fitting) + " of " + number(total) + " tokens the context still fits in the budget of " +
      number(budget) + " tokens: nothing is selected there. Raise --context or lower --budget");
  }
  if (total < enough_tokens) {
    found.push_back(
      "the perplexity of " + number(total) + " tokens is noisy: take " + number(enough_tokens) +
      " or more (--decode times --batch) to compare by percents");
  }
  return found;
}

}  // namespace decode_text
