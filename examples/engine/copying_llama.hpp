/// A model that needs no download and whose right answer is known: it continues a passage as that passage went on when it
/// stood in the text before, however long ago. Everything it knows lies in its KV cache.
#pragma once

#include "llama_weights.hpp"

#include <cstdint>
#include <vector>

namespace host_engine {

/// The vocabulary is split into passages of tokens with related codes, as the words of a paragraph are related.
struct copying_text_shape {
  static constexpr std::uint32_t passages = 128;
  static constexpr std::uint32_t passage_tokens = 64;
  static constexpr std::uint32_t vocabulary = passages * passage_tokens;
};

/// Weights of the Llama architecture, constructed: the first layer's heads carry the code of each token to the next
/// position, the second layer's look for the place whose previous token is the present one and copy what stands there.
/// Half of its KV heads look nowhere in particular, as many heads of real models do.
[[nodiscard]] llama_weights make_copying_llama(std::uint64_t seed);

/// A text for it: `prompt_tokens` tokens in passages, none twice, then `tokens` tokens that repeat passages of the prompt in
/// another order.
/// @throws std::invalid_argument if the prompt is longer than the vocabulary or shorter than a passage
[[nodiscard]] std::vector<std::int32_t> make_copying_text(
  std::uint32_t prompt_tokens, std::uint32_t tokens, std::uint64_t seed);

}  // namespace host_engine
