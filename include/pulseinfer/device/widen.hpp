#pragma once

/// Rows of elements between their stored type and float, by code without branches, so that a CPU's compiler makes vector
/// instructions of it.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/numeric.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer::device {

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float widen(float value) { return value; }

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float widen(bfloat16 value) { return static_cast<float>(value); }

/// As the conversion of `half`, bit for bit. The product with 2^112 moves the exponent and normalises subnormals at once;
/// an exponent of all ones has to be set again.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float widen(half value)
{
  std::uint32_t const bits = value.bits;
  float const magnitude = pulseinfer::detail::bit_cast<float>((bits & 0x7FFFU) << 13U) * 0x1p112F;
  std::uint32_t const not_finite = (bits & 0x7C00U) == 0x7C00U ? 0x7F800000U : 0U;
  std::uint32_t const sign = (bits & 0x8000U) << 16U;
  return pulseinfer::detail::bit_cast<float>(
    pulseinfer::detail::bit_cast<std::uint32_t>(magnitude) | not_finite | sign);
}

/// As the conversion of `fp8_e4m3`, bit for bit.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float widen(fp8_e4m3 value)
{
  std::uint32_t const bits = value.bits;
  float const magnitude = pulseinfer::detail::bit_cast<float>((bits & 0x7FU) << 20U) * 0x1p120F;
  std::uint32_t const sign = (bits & 0x80U) << 24U;
  std::uint32_t const finite = pulseinfer::detail::bit_cast<std::uint32_t>(magnitude);
  return pulseinfer::detail::bit_cast<float>(((bits & 0x7FU) == 0x7FU ? 0x7FC00000U : finite) | sign);
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr float widen(std::int8_t value) { return static_cast<float>(value); }

/// The type that a `dtype` names, as a value.
template <class T>
struct element {
  using type = T;
};

/// Calls `body(element<T>{})` with the type that `type` names, so that one switch stands before a loop and none in it.
/// `bytes` has no element type, and `int8` is no number without its scale: nothing is called.
template <class Body>
PULSEINFER_HOST_DEVICE void visit_elements(dtype type, Body const& body)
{
  switch (type) {
    case dtype::float32: body(element<float>{}); break;
    case dtype::float16: body(element<half>{}); break;
    case dtype::bfloat16: body(element<bfloat16>{}); break;
    case dtype::float8_e4m3: body(element<fp8_e4m3>{}); break;
    case dtype::bytes:
    case dtype::int8: break;
  }
}

/// Converts a row. Same types copy bits.
/// @param source, target [count]   @sync none
template <thread_group Group, class From, class To>
PULSEINFER_HOST_DEVICE void convert_row(Group const& group, From const* source, To* target, std::uint32_t count)
{
  for (std::uint32_t i = group.thread_rank(); i < count; i += group.size()) {
    if constexpr (std::is_same_v<From, To>) {
      target[i] = source[i];
    } else {
      target[i] = static_cast<To>(widen(source[i]));
    }
  }
}

/// Reads a row of run-time type.
/// @param source [count] of `type`   @param target [count]   @sync none
template <thread_group Group>
PULSEINFER_HOST_DEVICE void widen_row(
  Group const& group, void const* source, dtype type, float* target, std::uint32_t count)
{
  visit_elements(type, [&](auto stored) {
    convert_row(group, static_cast<typename decltype(stored)::type const*>(source), target, count);
  });
}

/// Writes a row of run-time type.
/// @param source [count]   @param target [count] of `type`   @sync none
template <thread_group Group>
PULSEINFER_HOST_DEVICE void narrow_row(
  Group const& group, float const* source, void* target, dtype type, std::uint32_t count)
{
  visit_elements(type, [&](auto stored) {
    convert_row(group, source, static_cast<typename decltype(stored)::type*>(target), count);
  });
}

/// Converts a row whose types are known at run time.
/// @param source, target [count] of the named types   @sync none
template <thread_group Group>
PULSEINFER_HOST_DEVICE void convert_row(
  Group const& group, void const* source, dtype from, void* target, dtype to, std::uint32_t count)
{
  visit_elements(from, [&](auto source_element) {
    visit_elements(to, [&](auto target_element) {
      using source_type = typename decltype(source_element)::type;
      using target_type = typename decltype(target_element)::type;
      convert_row(group, static_cast<source_type const*>(source), static_cast<target_type*>(target), count);
    });
  });
}

}  // namespace pulseinfer::device
