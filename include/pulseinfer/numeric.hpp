#pragma once

/// The element types of a KV cache, bit-compatible with CUDA's __half, __nv_bfloat16 and __nv_fp8_e4m3.
/// Conversions to a narrower type round to nearest, ties to even; fp8_e4m3 saturates to +-448 as CUDA's default does.

#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer {

namespace detail {

/// std::bit_cast, callable on the device too.
template <class To, class From>
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr To bit_cast(From const& from)
{
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float float_of_half_bits(std::uint16_t bits)
{
  std::uint32_t const sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16U;
  std::uint32_t const exponent = (bits >> 10U) & 0x1FU;
  std::uint32_t const mantissa = bits & 0x3FFU;
  if (exponent == 0x1FU) { return detail::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13U)); }
  if (exponent == 0U) {
    float const magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0U ? -magnitude : magnitude;
  }
  return detail::bit_cast<float>(sign | ((exponent + 112U) << 23U) | (mantissa << 13U));
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint16_t half_bits_of_float(float value)
{
  std::uint32_t const bits = detail::bit_cast<std::uint32_t>(value);
  std::uint32_t const sign = (bits >> 16U) & 0x8000U;
  std::uint32_t const magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) { return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13U) & 0x3FFU)); }
  if (magnitude >= 0x477FF000U) { return static_cast<std::uint16_t>(sign | 0x7C00U); }  // rounds past 65504
  if (magnitude < 0x33000001U) { return static_cast<std::uint16_t>(sign); }             // at most half of 2^-24
  std::uint32_t mantissa = magnitude & 0x7FFFFFU;
  std::uint32_t const exponent = magnitude >> 23U;
  std::uint32_t shift = 13U;
  std::uint32_t base = 0U;
  if (exponent >= 113U) {
    base = (exponent - 112U) << 10U;
  } else {
    mantissa |= 0x800000U;
    shift = 126U - exponent;
  }
  std::uint32_t const kept = mantissa >> shift;
  std::uint32_t const rest = mantissa & ((1U << shift) - 1U);
  std::uint32_t const tie = 1U << (shift - 1U);
  std::uint32_t const up = (rest > tie || (rest == tie && (kept & 1U) != 0U)) ? 1U : 0U;
  return static_cast<std::uint16_t>(sign | (base + kept + up));
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint16_t bfloat16_bits_of_float(float value)
{
  std::uint32_t const bits = detail::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) { return 0x7FFFU; }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U);
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float float_of_e4m3_bits(std::uint8_t bits)
{
  std::uint32_t const sign = static_cast<std::uint32_t>(bits & 0x80U) << 24U;
  std::uint32_t const exponent = (bits >> 3U) & 0xFU;
  std::uint32_t const mantissa = bits & 0x7U;
  if (exponent == 0xFU && mantissa == 0x7U) { return detail::bit_cast<float>(sign | 0x7FC00000U); }
  if (exponent == 0U) {
    float const magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return sign != 0U ? -magnitude : magnitude;
  }
  return detail::bit_cast<float>(sign | ((exponent + 120U) << 23U) | (mantissa << 20U));
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint8_t e4m3_bits_of_float(float value)
{
  std::uint32_t const bits = detail::bit_cast<std::uint32_t>(value);
  std::uint32_t const sign = (bits >> 24U) & 0x80U;
  std::uint32_t const magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) { return static_cast<std::uint8_t>(sign | 0x7FU); }
  if (magnitude >= 0x43E00000U) { return static_cast<std::uint8_t>(sign | 0x7EU); }  // 448 and above saturate
  if (magnitude <= 0x3A800000U) { return static_cast<std::uint8_t>(sign); }          // at most half of 2^-9
  std::uint32_t mantissa = magnitude & 0x7FFFFFU;
  std::uint32_t const exponent = magnitude >> 23U;
  std::uint32_t shift = 20U;
  std::uint32_t base = 0U;
  if (exponent >= 121U) {
    base = (exponent - 120U) << 3U;
  } else {
    mantissa |= 0x800000U;
    shift = 141U - exponent;
  }
  std::uint32_t const kept = mantissa >> shift;
  std::uint32_t const rest = mantissa & ((1U << shift) - 1U);
  std::uint32_t const tie = 1U << (shift - 1U);
  std::uint32_t const up = (rest > tie || (rest == tie && (kept & 1U) != 0U)) ? 1U : 0U;
  std::uint32_t const result = base + kept + up;
  return static_cast<std::uint8_t>(sign | (result > 0x7EU ? 0x7EU : result));
}

}  // namespace detail

/// IEEE 754 binary16.
struct half {
  std::uint16_t bits = 0;

  half() = default;
  PULSEINFER_HOST_DEVICE constexpr explicit half(float value) : bits{detail::half_bits_of_float(value)} {}
  PULSEINFER_HOST_DEVICE constexpr explicit operator float() const { return detail::float_of_half_bits(bits); }
};

/// The upper half of a binary32.
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  PULSEINFER_HOST_DEVICE constexpr explicit bfloat16(float value) : bits{detail::bfloat16_bits_of_float(value)} {}
  PULSEINFER_HOST_DEVICE constexpr explicit operator float() const
  {
    return detail::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
};

/// Eight bits, four of exponent, no infinity; 0x7F is NaN.
struct fp8_e4m3 {
  std::uint8_t bits = 0;

  fp8_e4m3() = default;
  PULSEINFER_HOST_DEVICE constexpr explicit fp8_e4m3(float value) : bits{detail::e4m3_bits_of_float(value)} {}
  PULSEINFER_HOST_DEVICE constexpr explicit operator float() const { return detail::float_of_e4m3_bits(bits); }
};

static_assert(sizeof(half) == 2 && sizeof(bfloat16) == 2 && sizeof(fp8_e4m3) == 1);

/// Run-time name of an element type. `bytes` is opaque: moved, never computed with. `int8` needs scales beside it: digests
/// have them, keys and values don't.
enum class dtype : std::uint8_t { float32, float16, bfloat16, float8_e4m3, bytes, int8 };

/// Whether elements of the type are numbers by themselves, as keys, values and queries must be.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr bool is_floating(dtype type)
{
  return type != dtype::bytes && type != dtype::int8;
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t size_of(dtype type)
{
  switch (type) {
    case dtype::float32: return 4;
    case dtype::float16:
    case dtype::bfloat16: return 2;
    case dtype::float8_e4m3:
    case dtype::bytes:
    case dtype::int8: return 1;
  }
  return 0;
}

[[nodiscard]] constexpr char const* name_of(dtype type)
{
  switch (type) {
    case dtype::float32: return "float32";
    case dtype::float16: return "float16";
    case dtype::bfloat16: return "bfloat16";
    case dtype::float8_e4m3: return "float8_e4m3";
    case dtype::bytes: return "bytes";
    case dtype::int8: return "int8";
  }
  return "unknown";
}

/// Element `index` of an array whose type is known at run time. `bytes` and `int8` read as 0.
[[nodiscard]] PULSEINFER_HOST_DEVICE inline float load_as_float(void const* data, dtype type, std::uint64_t index)
{
  switch (type) {
    case dtype::float32: return static_cast<float const*>(data)[index];
    case dtype::float16: return static_cast<float>(static_cast<half const*>(data)[index]);
    case dtype::bfloat16: return static_cast<float>(static_cast<bfloat16 const*>(data)[index]);
    case dtype::float8_e4m3: return static_cast<float>(static_cast<fp8_e4m3 const*>(data)[index]);
    case dtype::bytes:
    case dtype::int8: return 0.0F;
  }
  return 0.0F;
}

/// Stores `value`, rounded to `type`, as element `index`. `bytes` and `int8` store nothing.
PULSEINFER_HOST_DEVICE inline void store_from_float(void* data, dtype type, std::uint64_t index, float value)
{
  switch (type) {
    case dtype::float32: static_cast<float*>(data)[index] = value; break;
    case dtype::float16: static_cast<half*>(data)[index] = half{value}; break;
    case dtype::bfloat16: static_cast<bfloat16*>(data)[index] = bfloat16{value}; break;
    case dtype::float8_e4m3: static_cast<fp8_e4m3*>(data)[index] = fp8_e4m3{value}; break;
    case dtype::bytes:
    case dtype::int8: break;
  }
}

}  // namespace pulseinfer
