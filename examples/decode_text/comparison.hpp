/// How far one decoder's predictions are from another's, and how well each predicts the text that really follows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace decode_text {

/// ln of the softmax of the logits.
[[nodiscard]] std::vector<float> log_probabilities(std::span<float const> logits);

class comparison {
 public:
  /// @param reference, candidate log probabilities [vocabulary] after the same tokens   @param next the token that follows
  void add(std::span<float const> reference, std::span<float const> candidate, std::int32_t next);

  [[nodiscard]] double perplexity_reference() const;  ///< of the tokens that follow
  [[nodiscard]] double perplexity_candidate() const;
  [[nodiscard]] double kl_mean() const;         ///< KL(reference || candidate), nats
  [[nodiscard]] double top1_agreement() const;  ///< share of steps whose likeliest token is the same
  [[nodiscard]] std::uint64_t steps() const { return steps_; }

 private:
  [[nodiscard]] double mean(double sum) const { return steps_ == 0 ? 0.0 : sum / static_cast<double>(steps_); }

  std::uint64_t steps_ = 0, agreed_ = 0;
  double reference_nats_ = 0.0, candidate_nats_ = 0.0, kl_ = 0.0;
};

}  // namespace decode_text
