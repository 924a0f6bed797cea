#pragma once

/// Random numbers and the few functions that a workload needs, in integers: the same on every machine, whatever its compiler
/// makes of floating point.

#include <array>
#include <cstdint>
#include <initializer_list>

namespace pulseinfer::workload_detail {

/// A number in units of 2^-16.
using fixed = std::int64_t;

inline constexpr fixed fixed_one = fixed{1} << 16U;

/// Rounded to the nearest unit.
[[nodiscard]] constexpr fixed to_fixed(double value) noexcept
{
  double const scaled = value * static_cast<double>(fixed_one);
  return static_cast<fixed>(scaled < 0.0 ? scaled - 0.5 : scaled + 0.5);
}

/// a * b, rounded towards minus infinity.
[[nodiscard]] constexpr fixed multiply(fixed a, fixed b) noexcept { return (a * b) >> 16U; }

/// Rounded down. 0 for what is not positive.
[[nodiscard]] constexpr fixed square_root(fixed value) noexcept
{
  fixed low = 0;
  fixed high = fixed{1} << 24U;  // 256
  while (value > 0 && low < high) {
    fixed const middle = (low + high + 1) / 2;
    if (multiply(middle, middle) <= value) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// 64 random bits that belong to a place, given by numbers: any place can be drawn alone and in any order.
[[nodiscard]] constexpr std::uint64_t bits_of(std::initializer_list<std::uint64_t> place) noexcept
{
  std::uint64_t state = 0x243F6A8885A308D3U;
  for (std::uint64_t const part : place) {
    state += part + 0x9E3779B97F4A7C15U;
    state = (state ^ (state >> 30U)) * 0xBF58476D1CE4E5B9U;
    state = (state ^ (state >> 27U)) * 0x94D049BB133111EBU;
    state ^= state >> 31U;
  }
  return state;
}

/// The `count`-th word that follows from 64 random bits.
[[nodiscard]] constexpr std::uint64_t next_bits(std::uint64_t bits, std::uint64_t count) noexcept
{
  std::uint64_t state = bits + count * 0x9E3779B97F4A7C15U;
  state = (state ^ (state >> 30U)) * 0xBF58476D1CE4E5B9U;
  state = (state ^ (state >> 27U)) * 0x94D049BB133111EBU;
  return state ^ (state >> 31U);
}

/// Normally distributed with mean 0 and deviation 1 but for tails beyond six deviations: the sum of twelve uniform numbers.
[[nodiscard]] constexpr fixed normal(std::uint64_t bits) noexcept
{
  std::int64_t sum = 0;
  for (std::uint64_t word = 1; word <= 3; ++word) {
    std::uint64_t const pieces = next_bits(bits, word);
    for (unsigned shift = 0; shift < 64; shift += 16) { sum += static_cast<std::int64_t>((pieces >> shift) & 0xFFFFU); }
  }
  return sum - 6 * 65535;
}

/// Whether an event of probability `chance` happens.
[[nodiscard]] constexpr bool happens(std::uint64_t bits, fixed chance) noexcept
{
  return static_cast<fixed>(bits >> 48U) < chance;
}

/// e^(-i / 32) in units of 2^-32.
inline constexpr auto exponentials = [] {
  std::array<std::uint64_t, 1025> table{};
  constexpr std::uint64_t factor = 4162825044U;  // e^(-1/32) * 2^32
  table[0] = std::uint64_t{1} << 32U;
  for (std::size_t i = 1; i < table.size(); ++i) { table[i] = (table[i - 1] * factor + (1ULL << 31U)) >> 32U; }
  return table;
}();

/// e^value for value <= 0, in units of 2^-32. Relative error below 2e-4 down to e^-11.
[[nodiscard]] constexpr std::uint64_t exponential(fixed value) noexcept
{
  auto const steps = static_cast<std::uint64_t>(-value);  // 2^-16; an entry of the table is 2^11 of them
  std::uint64_t const entry = steps >> 11U;
  if (entry + 1 >= exponentials.size()) { return 0; }
  std::uint64_t const rest = steps & 0x7FFU;
  return exponentials[entry] - (((exponentials[entry] - exponentials[entry + 1]) * rest) >> 11U);
}

/// 1 / (1 + e^-value) in units of 2^-32; at most 1.
[[nodiscard]] constexpr std::uint64_t logistic(fixed value) noexcept
{
  constexpr std::uint64_t one = std::uint64_t{1} << 32U;
  std::uint64_t const e = exponential(value < 0 ? value : -value);
  // e / (1 + e), with e below 2^32 but for value 0.
  std::uint64_t const below = e >= one ? one / 2 : (e << 32U) / (one + e);
  return value < 0 ? below : one - below;
}

/// The natural logarithm of a ratio of positive numbers below 2^31.
[[nodiscard]] constexpr fixed logarithm(std::uint64_t numerator, std::uint64_t denominator) noexcept
{
  if (numerator > denominator) { return -logarithm(denominator, numerator); }
  // e^-x falls with x: the least x whose power is not above the ratio.
  fixed low = 0;
  fixed high = 31 * fixed_one;
  while (low < high) {
    fixed const middle = (low + high) / 2;
    if (exponential(-middle) * denominator > (numerator << 32U)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return -low;
}

}  // namespace pulseinfer::workload_detail
