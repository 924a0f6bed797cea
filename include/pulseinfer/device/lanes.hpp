#pragma once

/// Sixteen floats as one value: a CPU's vector registers, sixteen registers of a GPU thread.

#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

#if defined(__GNUC__) && !defined(__CUDACC__)
#  define PULSEINFER_HAS_VECTORS 1
#else
#  define PULSEINFER_HAS_VECTORS 0
#endif

namespace pulseinfer::device {

// The two forms have different names, so that a program may link sources that nvcc compiled with others.
#if PULSEINFER_HAS_VECTORS
inline namespace vector_form {
#else
inline namespace array_form {
#endif

/// Every operation treats each of the sixteen alike, in a fixed order, so results depend on no launch shape. Passed by
/// reference only: how vectors are passed by value depends on compiler flags.
class float_lanes {
 public:
  static constexpr std::uint32_t size = 16;

#if PULSEINFER_HAS_VECTORS
  float_lanes() : at_{} {}
  explicit float_lanes(float value) : at_{value - vector{}} {}

  void load(float const* source) { __builtin_memcpy(&at_, source, sizeof(at_)); }
  template <class T>
  void load(T const* source)
  {
    float wide[size];
    for (std::uint32_t i = 0; i < size; ++i) { wide[i] = widen(source[i]); }
    load(wide);
  }
  void load(half const* source)
  {
    narrow stored;
    __builtin_memcpy(&stored, source, sizeof(stored));
    words const bits = __builtin_convertvector(stored, words);
    vector const magnitude = reinterpret_cast<vector>((bits & 0x7FFFU) << 13U) * 0x1p112F;
    words const not_finite = reinterpret_cast<words>((bits & 0x7C00U) == 0x7C00U) & 0x7F800000U;
    at_ = reinterpret_cast<vector>(reinterpret_cast<words>(magnitude) | not_finite | ((bits & 0x8000U) << 16U));
  }
  void store(float* target) const { __builtin_memcpy(target, &at_, sizeof(at_)); }

  void add(float_lanes const& other) { at_ += other.at_; }
  void subtract(float_lanes const& other) { at_ -= other.at_; }
  void scale(float factor) { at_ *= factor; }
  void add_scaled(float factor, float_lanes const& other) { at_ += factor * other.at_; }
  void add_product(float_lanes const& a, float_lanes const& b) { at_ += a.at_ * b.at_; }
  void take_larger(float_lanes const& other) { at_ = other.at_ > at_ ? other.at_ : at_; }
  void exponential_below(float top)
  {
    at_ -= top;
    exponential<vector, words>(at_);
  }

 private:
  using vector = float __attribute__((vector_size(64)));
  using words = std::uint32_t __attribute__((vector_size(64)));
  using narrow = std::uint16_t __attribute__((vector_size(32)));

  vector at_;
#else
  PULSEINFER_HOST_DEVICE float_lanes() : float_lanes{0.0F} {}
  PULSEINFER_HOST_DEVICE explicit float_lanes(float value)
  {
    for (float& x : at_) { x = value; }
  }

  template <class T>
  PULSEINFER_HOST_DEVICE void load(T const* source)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] = widen(source[i]); }
  }
  PULSEINFER_HOST_DEVICE void store(float* target) const
  {
    for (std::uint32_t i = 0; i < size; ++i) { target[i] = at_[i]; }
  }

  PULSEINFER_HOST_DEVICE void add(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] += other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void subtract(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] -= other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void scale(float factor)
  {
    for (float& x : at_) { x *= factor; }
  }
  PULSEINFER_HOST_DEVICE void add_scaled(float factor, float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] += factor * other.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void add_product(float_lanes const& a, float_lanes const& b)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] += a.at_[i] * b.at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void take_larger(float_lanes const& other)
  {
    for (std::uint32_t i = 0; i < size; ++i) { at_[i] = other.at_[i] > at_[i] ? other.at_[i] : at_[i]; }
  }
  PULSEINFER_HOST_DEVICE void exponential_below(float top)
  {
    for (float& x : at_) {
      x -= top;
      exponential<float, std::uint32_t>(x);
    }
  }

 private:
  float at_[size];
#endif

 public:
  /// Sum of the sixteen, as a binary tree.
  [[nodiscard]] PULSEINFER_HOST_DEVICE float sum() const
  {
    float x[size];
    store(x);
    float const a = ((x[0] + x[8]) + (x[4] + x[12])) + ((x[2] + x[10]) + (x[6] + x[14]));
    float const b = ((x[1] + x[9]) + (x[5] + x[13])) + ((x[3] + x[11]) + (x[7] + x[15]));
    return a + b;
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE float largest() const
  {
    float x[size];
    store(x);
    float top = x[0];
    for (std::uint32_t i = 1; i < size; ++i) { top = x[i] > top ? x[i] : top; }
    return top;
  }
};

}  // inline namespace

}  // namespace pulseinfer::device
