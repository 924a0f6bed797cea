#pragma once

/// The natural logarithm, the same on every machine.

#include <pulseinfer/config.hpp>
#include <pulseinfer/numeric.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// ln(value) of a positive, finite, normal number; NaN stays NaN. Error below 1.2e-7, relative where the result is beyond 1.
/// @source mantissa in [sqrt(1/2), sqrt(2)), polynomial of degree 9: Moshier, Cephes (logf)
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float logarithm(float value)
{
  std::uint32_t const bits = pulseinfer::detail::bit_cast<std::uint32_t>(value);
  // 0x3F3504F3 is sqrt(1/2): what lies between it and its double keeps the exponent 0.
  std::uint32_t const offset = bits - 0x3F3504F3U;
  auto const exponent = static_cast<float>(static_cast<std::int32_t>(offset) >> 23);
  float const mantissa = pulseinfer::detail::bit_cast<float>((offset & 0x7FFFFFU) + 0x3F3504F3U);
  float const x = mantissa - 1.0F;
  float const square = x * x;
  float polynomial = 7.0376836292e-2F * x - 1.1514610310e-1F;
  polynomial = polynomial * x + 1.1676998740e-1F;
  polynomial = polynomial * x - 1.2420140846e-1F;
  polynomial = polynomial * x + 1.4249322787e-1F;
  polynomial = polynomial * x - 1.6668057665e-1F;
  polynomial = polynomial * x + 2.0000714765e-1F;
  polynomial = polynomial * x - 2.4999993993e-1F;
  polynomial = polynomial * x + 3.3333331174e-1F;
  float const rest = polynomial * x * square - 2.12194440e-4F * exponent - 0.5F * square;
  float const result = 0.693359375F * exponent + (x + rest);
  return value == value ? result : value;
}

}  // namespace pulseinfer::device
