#pragma once

/// Two partial attention results of one query become one.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Shares of two partial results in their union, and the union's log-sum-exp.
struct merge_weights {
  float first = 0.0F;
  float second = 0.0F;
  float lse = minus_infinity;
};

/// Nothing attended is a log-sum-exp of -inf: it has no weight, and the other result passes unchanged.
/// @source log-sum-exp of disjoint sets: e^lse = e^first + e^second
[[nodiscard]] PULSEINFER_HOST_DEVICE inline merge_weights merge_log_sums(float first, float second)
{
  if (second == minus_infinity) {
    return {.first = first == minus_infinity ? 0.0F : 1.0F, .second = 0.0F, .lse = first};
  }
  if (first == minus_infinity) { return {.first = 0.0F, .second = 1.0F, .lse = second}; }
  float const top = second > first ? second : first;
  float const low = second > first ? first : second;
  float const rest = exponential(low - top);
  float const larger = 1.0F / (1.0F + rest);
  float const smaller = rest / (1.0F + rest);
  return {
    .first = second > first ? smaller : larger,
    .second = second > first ? larger : smaller,
    .lse = top + logarithm(1.0F + rest)};
}

/// Writes the result over the union of two disjoint sets of tokens. `out` may be one of the parts.
/// @param first, second, out [count] values of one query   @param weights of the two   @sync none
template <thread_group Group, class First, class Second, class Out>
PULSEINFER_HOST_DEVICE void merge(
  Group const& group, First const* first, Second const* second, merge_weights const& weights, Out* out,
  std::uint32_t count)
{
  for (std::uint32_t i = group.thread_rank(); i < count; i += group.size()) {
    // A part without weight is not read: it may hold anything.
    float sum = 0.0F;
    if (weights.first != 0.0F) { sum += weights.first * widen(first[i]); }
    if (weights.second != 0.0F) { sum += weights.second * widen(second[i]); }
    out[i] = static_cast<Out>(sum);
  }
}

}  // namespace pulseinfer::device
