#pragma once

/// A bound and an estimate of what attention over a part of the blocks leaves out.

#include <pulseinfer/config.hpp>
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/logarithm.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Of one query and query head: what its blocks' digests say of those that attention reads and of those that it does not.
struct certificate_sums {
  float log_bound = device::minus_infinity;     ///< never below ln of the sum of exp(logit) over the blocks not read
  float log_skipped = device::minus_infinity;   ///< ln of that sum by scores
  float log_attended = device::minus_infinity;  ///< ln of the sum over the blocks read, by scores
  float value_norm = 0.0F;                      ///< largest norm of a value of any block
};

static_assert(std::is_trivially_copyable_v<certificate_sums> && sizeof(certificate_sums) == 16);

/// What attention over the blocks read leaves out.
struct skip_certificate {
  float share_bound = 0.0F;     ///< the softmax mass left out is no more
  float share_estimate = 0.0F;  ///< and about this much
  float error_bound = 0.0F;     ///< the result is no farther from that of all blocks, as a norm
};

namespace device {

/// ln(e^a + e^b).
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float add_logarithms(float a, float b)
{
  float const larger = a > b ? a : b;
  float const apart = (a > b ? b : a) - larger;
  return apart > -87.0F ? larger + logarithm(1.0F + exponential(apart)) : larger;
}

/// Upper bound of every logit of a block. One rank alone.
/// @param spread [elements] the query in the form of a digest, scaled   @param query_norm never below the scaled query's norm
/// @param stride values from part to part   @param is_box the second part holds half-widths of a box around all keys
/// @source Quest's bound and Cauchy-Schwarz, whichever is lower: q . c + min(sum |q| w, |q| r)
template <class T>
[[nodiscard]] PULSEINFER_HOST_DEVICE float bound_logits(
  float const* spread, digest_values<T> const& digest, std::uint32_t elements, std::uint32_t stride,
  block_bounds const& bounds, float query_norm, bool is_box)
{
  float centre = 0.0F;
  float box = 0.0F;
  float size = 0.0F;
  for (std::uint32_t first = 0; first < elements; first += float_lanes::size) {
    float_lanes lanes;
    digest.load(first, lanes);
    float values[float_lanes::size];
    lanes.store(values);
    for (std::uint32_t i = 0; i < float_lanes::size; ++i) {
      float const term = spread[first + i] * values[i];
      if (first + i < stride) {
        centre += term;
      } else {
        box += term;
      }
      size += term < 0.0F ? -term : term;
    }
  }
  float const sphere = query_norm * bounds.key_radius * (1.0F + 0x1p-20F);
  // Each of `elements` sums is off by 2^-24 of what is summed at most, and each term by two roundings.
  float const slack = size * static_cast<float>(elements + 8U) * 0x1p-23F;
  return centre + (is_box && box < sphere ? box : sphere) + slack;
}

/// @param log_sum ln of the sum of exp(logit) over the blocks read, as attention gives it
/// @source E / (Z + E) with E the bound of what is not read; |o - o'| <= 2 (share left out) (largest value)
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr skip_certificate certify(certificate_sums const& sums, float log_sum)
{
  auto const part = [](float out, float in) {
    if (out == minus_infinity) { return 0.0F; }
    float const apart = in - out;
    return apart > 80.0F ? exponential(-80.0F) : apart < -80.0F ? 1.0F : 1.0F / (1.0F + exponential(apart));
  };
  skip_certificate result;
  // What log_sum may be off by, as a result of sums of floats.
  result.share_bound = part(sums.log_bound, log_sum - 1e-4F);
  result.share_estimate = part(sums.log_skipped, sums.log_attended);
  result.error_bound = 2.0F * result.share_bound * sums.value_norm;
  return result;
}

}  // namespace device

}  // namespace pulseinfer
