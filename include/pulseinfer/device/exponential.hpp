#pragma once

/// The exponential function, the same on every machine: no mathematics library decides which blocks are selected.

#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// The logarithm of nothing.
inline constexpr float minus_infinity = -__builtin_huge_valf();

/// Replaces `value`, at most 88, by e^value; 0 below -87, where e^value leaves the normal numbers. NaN stays NaN.
/// Relative error below 1.2e-7. `Float` and `Words` are float and std::uint32_t, or vectors of as many of them.
/// @source range reduction by ln 2 in two parts, polynomial of degree 7: Moshier, Cephes (expf)
template <class Float, class Words>
PULSEINFER_HOST_DEVICE constexpr void exponential(Float& value)
{
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  Float const shifted = value * 1.44269504F + 12582912.0F;
  Float const power = shifted - 12582912.0F;
  Float const x = value - power * 0.693359375F + power * 2.12194440e-4F;
  Float polynomial = x * 1.9875691500e-4F + 1.3981999507e-3F;
  polynomial = polynomial * x + 8.3334519073e-3F;
  polynomial = polynomial * x + 4.1665795894e-2F;
  polynomial = polynomial * x + 1.6666665459e-1F;
  polynomial = polynomial * x + 5.0000001201e-1F;
  polynomial = polynomial * x * x + x + 1.0F;
  Words const scaled = __builtin_bit_cast(Words, polynomial) + (__builtin_bit_cast(Words, shifted) << 23U);
  Float const zero{};
  Float const result = value < -87.0F ? zero : __builtin_bit_cast(Float, scaled);
  value = value == value ? result : value;
}

/// e^value for a single float.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float exponential(float value)
{
  exponential<float, std::uint32_t>(value);
  return value;
}

}  // namespace pulseinfer::device
