#pragma once

/// Sixteen floats as one value: a CPU's vector registers, sixteen registers of a GPU thread.

#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

// Bytes of the registers that the compiler may use; 0 where vectors are left to it.
#if !defined(__GNUC__) || defined(__CUDACC__)
#  define PULSEINFER_VECTOR_BYTES 0
#elif defined(__AVX512F__)
#  define PULSEINFER_VECTOR_BYTES 64
#elif defined(__AVX__)
#  define PULSEINFER_VECTOR_BYTES 32
#else
#  define PULSEINFER_VECTOR_BYTES 16
#endif

namespace pulseinfer::device {

// The forms have different names, so that a program may link sources that were compiled for different machines.
#if PULSEINFER_VECTOR_BYTES == 0
inline namespace array_form {
#elif PULSEINFER_VECTOR_BYTES == 64
inline namespace vector_64_form {
#elif PULSEINFER_VECTOR_BYTES == 32
inline namespace vector_32_form {
#else
inline namespace vector_16_form {
#endif

/// Every operation treats each of the sixteen alike, in a fixed order, so results depend on no launch shape.
class float_lanes {
 public:
  static constexpr std::uint32_t size = 16;

#if PULSEINFER_VECTOR_BYTES == 0
  using vector = float;
  using words = std::uint32_t;
#else
  using vector = float __attribute__((vector_size(PULSEINFER_VECTOR_BYTES)));
  using words = std::uint32_t __attribute__((vector_size(PULSEINFER_VECTOR_BYTES)));
#endif

  PULSEINFER_HOST_DEVICE float_lanes() : float_lanes{0.0F} {}
  PULSEINFER_HOST_DEVICE explicit float_lanes(float value)
  {
    for (vector& x : at_) { x = value - vector{}; }
  }

  PULSEINFER_HOST_DEVICE void load(float const* source)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { __builtin_memcpy(&at_[i], source + i * part_size, sizeof(vector)); }
  }
  template <class T>
  PULSEINFER_HOST_DEVICE void load(T const* source)
  {
    float wide[size];
    for (std::uint32_t i = 0; i < size; ++i) { wide[i] = widen(source[i]); }
    load(wide);
  }
#if PULSEINFER_VECTOR_BYTES != 0
  void load(half const* source)
  {
    using narrow = std::uint16_t __attribute__((vector_size(PULSEINFER_VECTOR_BYTES / 2)));
    for (std::uint32_t i = 0; i < parts; ++i) {
      narrow stored;
      __builtin_memcpy(&stored, source + i * part_size, sizeof(stored));
      words const bits = __builtin_convertvector(stored, words);
      vector const magnitude = reinterpret_cast<vector>((bits & 0x7FFFU) << 13U) * 0x1p112F;
      words const not_finite = reinterpret_cast<words>((bits & 0x7C00U) == 0x7C00U) & 0x7F800000U;
      at_[i] = reinterpret_cast<vector>(reinterpret_cast<words>(magnitude) | not_finite | ((bits & 0x8000U) << 16U));
    }
  }
#endif
  PULSEINFER_HOST_DEVICE void store(float* target) const
  {
    for (std::uint32_t i = 0; i < parts; ++i) { __builtin_memcpy(target + i * part_size, &at_[i], sizeof(vector)); }
  }

  PULSEINFER_HOST_DEVICE void add(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { at_[i] += other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void subtract(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { at_[i] -= other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void scale(float factor)
  {
    for (vector& x : at_) { x *= factor; }
  }
  PULSEINFER_HOST_DEVICE void add_scaled(float factor, float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { at_[i] += factor * other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void add_product(float_lanes const& a, float_lanes const& b)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { at_[i] += a.at_[i] * b.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void take_larger(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < parts; ++i) { at_[i] = other.at_[i] > at_[i] ? other.at_[i] : at_[i]; }
  }
  /// Replaces each x by e^(x - top).
  PULSEINFER_HOST_DEVICE void exponential_below(float top)
  {
    for (vector& x : at_) {
      x -= top;
      exponential<vector, words>(x);
    }
  }

  /// Sum of the sixteen, as a binary tree of halves.
  [[nodiscard]] PULSEINFER_HOST_DEVICE float sum() const
  {
    float x[4];
    fold(x, [](auto& a, auto const& b) { a += b; });
    return (x[0] + x[2]) + (x[1] + x[3]);
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE float largest() const
  {
    float x[4];
    fold(x, [](auto& a, auto const& b) { a = b > a ? b : a; });
    float const low = x[1] > x[0] ? x[1] : x[0];
    float const high = x[3] > x[2] ? x[3] : x[2];
    return high > low ? high : low;
  }

 private:
  static constexpr std::uint32_t part_size = sizeof(vector) / sizeof(float);
  static constexpr std::uint32_t parts = size / part_size;

  /// Combines the upper half with the lower one until four are left.
  template <class Combine>
  PULSEINFER_HOST_DEVICE void fold(float (&result)[4], Combine const& combine) const
  {
#if PULSEINFER_VECTOR_BYTES == 0
    float x[size];
    store(x);
    for (std::uint32_t width = size / 2U; width >= 4U; width /= 2U) {
      for (std::uint32_t i = 0; i < width; ++i) { combine(x[i], x[i + width]); }
    }
    for (std::uint32_t i = 0; i < 4U; ++i) { result[i] = x[i]; }
#else
    using quarter = float __attribute__((vector_size(16)));
    quarter x[4];
    __builtin_memcpy(x, at_, sizeof(at_));
    combine(x[0], x[2]);
    combine(x[1], x[3]);
    combine(x[0], x[1]);
    __builtin_memcpy(result, x, sizeof(result));
#endif
  }

  vector at_[parts];
};

}  // inline namespace

}  // namespace pulseinfer::device
