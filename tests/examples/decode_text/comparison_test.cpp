#include "decode_text/comparison.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

using decode_text::comparison;

namespace {

std::vector<float> logs_of(std::vector<double> const& probabilities)
{
  std::vector<float> result;
  for (double const p : probabilities) result.push_back(static_cast<float>(std::log(p)));
  return result;
}

}  // namespace

TEST_SUITE_BEGIN("examples/decode_text");

TEST_CASE("log_probabilities sums to one, however large the logits")
{
  for (float const shift : {0.0F, 5000.0F, -5000.0F}) {
    std::vector<float> const logits{1.0F + shift, 2.0F + shift, 3.0F + shift};
    double sum = 0;
    for (float const log : decode_text::log_probabilities(logits)) sum += std::exp(double{log});
    CHECK(sum == doctest::Approx(1.0));
  }
}

TEST_CASE("comparison computes perplexity, divergence and agreement as they are defined")
{
  comparison figures;
  CHECK(figures.kl_mean() == 0.0);
  figures.add(logs_of({0.5, 0.25, 0.25}), logs_of({0.25, 0.5, 0.25}), 0);
  figures.add(logs_of({0.5, 0.25, 0.25}), logs_of({0.5, 0.25, 0.25}), 1);
  CHECK(figures.steps() == 2);
  CHECK(figures.perplexity_reference() == doctest::Approx(std::sqrt(2.0 * 4.0)));
  CHECK(figures.perplexity_candidate() == doctest::Approx(std::sqrt(4.0 * 4.0)));
  double const first = 0.5 * std::log(2.0) + 0.25 * std::log(0.5);
  CHECK(figures.kl_mean() == doctest::Approx(first / 2));
  CHECK(figures.top1_agreement() == 0.5);
}

TEST_SUITE_END();
