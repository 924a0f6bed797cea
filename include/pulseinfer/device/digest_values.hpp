#pragma once

/// How the values of one head's digest are stored: as floats or halves, or as bytes with a scale for sixteen channels.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// The least half that is not below `value`, which is not negative; infinity beyond 65504.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr half half_from_above(float value)
{
  half result{value};
  if (static_cast<float>(result) < value) { ++result.bits; }
  return result;
}

/// One or two parts of head_dim channels each, one behind the other: channel j of part p is value p * stride(head_dim) + j.
/// Zeros up to whole lanes. @tparam T float or half
template <class T>
class digest_values {
 public:
  /// The largest value that is stored as a number.
  static constexpr float limit = sizeof(T) == sizeof(half) ? 65504.0F : 3.402823466e38F;

  PULSEINFER_HOST_DEVICE explicit digest_values(T* values, std::uint32_t) : values_{values} {}

  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint32_t stride(std::uint32_t head_dim)
  {
    return head_dim;
  }
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint32_t elements(
    std::uint32_t parts, std::uint32_t head_dim)
  {
    return round_up(parts * head_dim, float_lanes::size);
  }
  /// Bytes of one head's digest, a multiple of 16.
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint64_t bytes(std::uint32_t parts, std::uint32_t head_dim)
  {
    return std::uint64_t{elements(parts, head_dim)} * sizeof(T);
  }

  /// Sixteen values from `first` on, a multiple of 16.
  PULSEINFER_HOST_DEVICE void load(std::uint32_t first, float_lanes& lanes) const { lanes.load(values_ + first); }

  /// Stores a part, rounded to the nearest, and replaces `channels` by what was stored.
  /// @param channels [head_dim] shared by the group   @sync none: each rank has channels of its own
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void store(
    Group const& group, std::uint32_t part, std::uint32_t head_dim, float* channels) const
  {
    T* const values = values_ + std::size_t{part} * head_dim;
    for (std::uint32_t j = group.thread_rank(); j < head_dim; j += group.size()) {
      values[j] = static_cast<T>(channels[j]);
      channels[j] = widen(values[j]);
    }
  }

  /// As `store`, for channels that are not negative, rounded so that none is stored smaller than it is.
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void store_from_above(
    Group const& group, std::uint32_t part, std::uint32_t head_dim, float* channels) const
  {
    T* const values = values_ + std::size_t{part} * head_dim;
    for (std::uint32_t j = group.thread_rank(); j < head_dim; j += group.size()) {
      if constexpr (sizeof(T) == sizeof(half)) {
        values[j] = half_from_above(channels[j]);
      } else {
        values[j] = channels[j];
      }
      channels[j] = widen(values[j]);
    }
  }

  /// Zeros behind the last part.   @sync none
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void pad(Group const& group, std::uint32_t parts, std::uint32_t head_dim) const
  {
    for (std::uint32_t j = parts * head_dim + group.thread_rank(); j < elements(parts, head_dim); j += group.size()) {
      values_[j] = static_cast<T>(0.0F);
    }
  }

 private:
  T* values_;
};

/// Bytes, then a half for every sixteen of them that they are multiplied by. Parts begin at multiples of sixteen, so that no
/// scale serves two. The largest of sixteen channels is 127 at most, so that a channel is off by half of its scale at most:
/// 1/254 of the largest, and what rounding the scale up to a half adds.
template <>
class digest_values<std::int8_t> {
 public:
  static constexpr float limit = 127.0F * 65504.0F;

  PULSEINFER_HOST_DEVICE explicit digest_values(std::int8_t* values, std::uint32_t elements)
    : values_{values}, scales_{reinterpret_cast<half*>(values + elements)}
  {}

  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint32_t stride(std::uint32_t head_dim)
  {
    return round_up(head_dim, float_lanes::size);
  }
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint32_t elements(
    std::uint32_t parts, std::uint32_t head_dim)
  {
    return parts * stride(head_dim);
  }
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint64_t bytes(std::uint32_t parts, std::uint32_t head_dim)
  {
    std::uint64_t const values = elements(parts, head_dim);
    return round_up(values + values / float_lanes::size * sizeof(half), 16);
  }

  PULSEINFER_HOST_DEVICE void load(std::uint32_t first, float_lanes& lanes) const
  {
    lanes.load(values_ + first);
    lanes.scale(widen(scales_[first / float_lanes::size]));
  }

  /// @sync one before, one after: a rank stores sixteen channels that others may have written
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void store(
    Group const& group, std::uint32_t part, std::uint32_t head_dim, float* channels) const
  {
    store_rounded(group, part, head_dim, channels, [](float value, float scale) {
      float const steps = value / scale;
      return static_cast<std::int32_t>(steps < 0.0F ? steps - 0.5F : steps + 0.5F);
    });
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void store_from_above(
    Group const& group, std::uint32_t part, std::uint32_t head_dim, float* channels) const
  {
    store_rounded(group, part, head_dim, channels, [](float value, float scale) {
      auto const steps = static_cast<std::int32_t>(value / scale);
      return static_cast<float>(steps) * scale < value ? steps + 1 : steps;  // the product is exact
    });
  }

  /// Every value of a part is written by `store` already.
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void pad(Group const&, std::uint32_t, std::uint32_t) const
  {}

 private:
  template <thread_group Group, class Round>
  PULSEINFER_HOST_DEVICE void store_rounded(
    Group const& group, std::uint32_t part, std::uint32_t head_dim, float* channels, Round const& round) const
  {
    constexpr std::uint32_t together = float_lanes::size;
    group.sync();
    for (std::uint32_t i = group.thread_rank(); i < stride(head_dim) / together; i += group.size()) {
      std::uint32_t const begin = i * together;
      std::uint32_t const end = begin + together < head_dim ? begin + together : head_dim;
      float largest = 0.0F;
      for (std::uint32_t j = begin; j < end; ++j) {
        float const size = channels[j] < 0.0F ? -channels[j] : channels[j];
        largest = size > largest ? size : largest;
      }
      half stored_scale{largest / 127.0F};
      if (127.0F * widen(stored_scale) < largest) { ++stored_scale.bits; }
      if (stored_scale.bits > 0x7BFFU) { stored_scale.bits = 0x7BFFU; }
      float const scale = widen(stored_scale);
      scales_[(part * stride(head_dim) + begin) / together] = stored_scale;
      for (std::uint32_t j = begin; j < begin + together; ++j) {
        std::int32_t rounded = 0;
        if (j < end && scale > 0.0F) {
          // What is no number, and what is larger than any scale, must not reach the conversion.
          float const value = !(channels[j] > -largest) ? -largest : channels[j] > largest ? largest : channels[j];
          rounded = round(value, scale);
          rounded = rounded > 127 ? 127 : rounded < -127 ? -127 : rounded;
        }
        values_[part * stride(head_dim) + j] = static_cast<std::int8_t>(rounded);
        if (j < end) { channels[j] = static_cast<float>(rounded) * scale; }
      }
    }
    group.sync();
  }

  std::int8_t* values_;
  half* scales_;
};

/// Calls `body(element<T>{})` with the type of stored digests that `type` names: float32, float16 or int8.
template <class Body>
PULSEINFER_HOST_DEVICE void visit_digests(dtype type, Body const& body)
{
  switch (type) {
    case dtype::float32: body(element<float>{}); break;
    case dtype::float16: body(element<half>{}); break;
    case dtype::int8: body(element<std::int8_t>{}); break;
    default: break;
  }
}

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr bool is_digest_type(dtype type)
{
  return type == dtype::float32 || type == dtype::float16 || type == dtype::int8;
}

/// Values from one part of a digest to the next.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t digest_stride(dtype type, std::uint32_t head_dim)
{
  return type == dtype::int8 ? digest_values<std::int8_t>::stride(head_dim) : digest_values<float>::stride(head_dim);
}

/// Values of one head's digest, a multiple of 16.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t digest_elements(
  dtype type, std::uint32_t parts, std::uint32_t head_dim)
{
  return type == dtype::int8 ? digest_values<std::int8_t>::elements(parts, head_dim)
                             : digest_values<float>::elements(parts, head_dim);
}

/// Bytes of one head's digest, a multiple of 16.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t digest_bytes(
  dtype type, std::uint32_t parts, std::uint32_t head_dim)
{
  return type == dtype::int8 ? digest_values<std::int8_t>::bytes(parts, head_dim)
                             : std::uint64_t{digest_elements(type, parts, head_dim)} * size_of(type);
}

}  // namespace pulseinfer::device
