/// Figures over documents, with intervals.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace accuracy {

/// 95 % interval of a statistic of the mean over documents: documents are drawn again, with replacement, 2,000 times.
/// @param transform of the mean   @return lower and upper end; the same numbers for the same values
template <class Transform>
[[nodiscard]] std::array<double, 2> bootstrap(std::vector<double> const& values, Transform const& transform)
{
  if (values.empty()) { return {0.0, 0.0}; }
  constexpr std::size_t draws = 2000;
  std::mt19937_64 random{1};
  std::vector<double> results;
  for (std::size_t draw = 0; draw < draws; ++draw) {
    double sum = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) { sum += values[random() % values.size()]; }
    results.push_back(transform(sum / static_cast<double>(values.size())));
  }
  std::sort(results.begin(), results.end());
  return {results[draws / 40], results[draws - 1 - draws / 40]};
}

[[nodiscard]] inline double mean(std::vector<double> const& values)
{
  double sum = 0.0;
  for (double const value : values) { sum += value; }
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

/// The value that `part` of all do not exceed.
[[nodiscard]] inline double quantile(std::vector<double> values, double part)
{
  if (values.empty()) { return 0.0; }
  std::sort(values.begin(), values.end());
  auto const place = static_cast<std::size_t>(std::ceil(part * static_cast<double>(values.size())));
  return values[std::min(values.size() - 1, place == 0 ? 0 : place - 1)];
}

}  // namespace accuracy
