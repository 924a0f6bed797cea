#pragma once

/// The min-max digest of a block: the box that holds its keys, as a centre and a half-width for each channel.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/key_range.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Sum over channels of max(q * min, q * max) is q . centre + sum |q| * half-width, so these digests score as cuboid-mean
/// ones do. As stored, whatever the type, the box holds every key, so that the score is an upper bound of q . key.
/// @source Quest, arXiv:2406.10774
struct min_max_form {
  static constexpr char const* name = "min_max";
  static constexpr bool holds_keys = true;   ///< the second part is a box around all keys
  static constexpr std::uint32_t parts = 2;  ///< centres, half-widths

  /// As cuboid_mean_form::make. A half-width beyond 65504 is infinite in halves.
  template <thread_group Group, class Key, class Values>
  static PULSEINFER_HOST_DEVICE void make(
    Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
    Values const& digest, float* temp_storage)
  {
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();
    float* const centre = temp_storage;
    float* const high = centre + head_dim;
    float* const low = high + head_dim;
    find_range(group, keys, token_stride, tokens, head_dim, low, high);
    for (std::uint32_t j = rank; j < head_dim; j += size) { centre[j] = 0.5F * low[j] + 0.5F * high[j]; }
    digest.store(group, 0, head_dim, centre);
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      float const above = high[j] - centre[j];
      float const below = centre[j] - low[j];
      // Each difference is rounded.
      float const width = above > below ? above : below;
      high[j] = width > 0.0F ? width * (1.0F + 0x1p-22F) : 0.0F;
    }
    digest.store_from_above(group, 1, head_dim, high);
    digest.pad(group, parts, head_dim);
  }
};

}  // namespace pulseinfer::device
