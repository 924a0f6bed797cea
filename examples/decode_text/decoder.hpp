/// Something that decodes texts of several rows, one token at a time: with a dense cache, or through the library.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

namespace decode_text {

class decoder {
 public:
  /// Called with the number of prompt tokens that are in.
  using progress = std::function<void(std::uint32_t tokens)>;

  virtual ~decoder() = default;

  /// Takes a row's prompt in: all but the last token as a prefill, the last one as the row's first step. Afterwards `logits`
  /// holds what follows the prompt.
  virtual void prefill(std::uint32_t row, std::span<std::int32_t const> prompt, progress const& report) = 0;

  /// Runs one more token of each row; afterwards `logits` holds what follows it.
  /// @param tokens [rows]
  virtual void step(std::span<std::int32_t const> tokens) = 0;

  [[nodiscard]] virtual std::span<float const> logits(std::uint32_t row) const = 0;  // [vocabulary]
};

/// The likeliest next token.
[[nodiscard]] std::int32_t likeliest(std::span<float const> logits);

}  // namespace decode_text
