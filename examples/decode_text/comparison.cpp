#include "comparison.hpp"

#include "decoder.hpp"

#include <algorithm>
#include <cmath>

namespace decode_text {

std::vector<float> log_probabilities(std::span<float const> logits)
{
  double const maximum = double{*std::ranges::max_element(logits)};
  double sum = 0.0;
  for (float const logit : logits) sum += std::exp(double{logit} - maximum);
  double const log_sum = maximum + std::log(sum);
  std::vector<float> result;
  result.reserve(logits.size());
  for (float const logit : logits) result.push_back(static_cast<float>(double{logit} - log_sum));
  return result;
}

void comparison::add(std::span<float const> reference, std::span<float const> candidate, std::int32_t next)
{
  ++steps_;
  reference_nats_ -= double{reference[static_cast<std::size_t>(next)]};
  candidate_nats_ -= double{candidate[static_cast<std::size_t>(next)]};
  agreed_ += likeliest(reference) == likeliest(candidate) ? 1U : 0U;
  for (std::size_t token = 0; token < reference.size(); ++token) {
    double const nats = double{reference[token]};
    kl_ += std::exp(nats) * (nats - double{candidate[token]});
  }
}

double comparison::perplexity_reference() const { return std::exp(mean(reference_nats_)); }
double comparison::perplexity_candidate() const { return std::exp(mean(candidate_nats_)); }
double comparison::kl_mean() const { return mean(kl_); }
double comparison::top1_agreement() const { return mean(static_cast<double>(agreed_)); }

}  // namespace decode_text
