#include "decoder.hpp"

#include <algorithm>

namespace decode_text {

std::int32_t likeliest(std::span<float const> logits)
{
  return static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
}

}  // namespace decode_text
