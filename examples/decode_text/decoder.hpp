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

/// A decoder whose cache holds everything: what the others are compared with.
class reference_decoder : public decoder {
 public:
  /// From now on attention reads these blocks only, the one that is being filled among the recent ones.
  virtual void read_only(std::uint32_t sink_blocks, std::uint32_t recent_blocks) = 0;

  /// The cache after the prompts, so that one prefill serves two decodings. `logits` is not taken over.
  /// @param other of the same kind and sizes
  virtual void copy_prompts_from(reference_decoder const& other) = 0;

  [[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;
};

/// The likeliest next token.
[[nodiscard]] std::int32_t likeliest(std::span<float const> logits);

}  // namespace decode_text
