#pragma once

/// The cuboid-mean digest of a block: a centre and a mean distance for each channel of its keys.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/key_range.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Elements of one head's digest in floats or halves: head_dim centres, head_dim distances, zeros up to whole lanes.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t cuboid_mean_elements(std::uint32_t head_dim)
{
  return digest_values<half>::elements(2, head_dim);
}

/// The form of digest that `make` writes, for operations on any of them.
struct cuboid_mean_form {
  static constexpr char const* name = "cuboid_mean";
  static constexpr bool holds_keys = false;  ///< the second part is a box around all keys
  static constexpr std::uint32_t parts = 2;  ///< centres, distances

  /// Digests the first `tokens` keys of a block, at least 1; what lies behind them is not read.
  /// @param keys row 0 of one head; rows are token_stride bytes apart
  /// @param digest written: centre (min + max) / 2, then the mean of |centre - key|, the centre as it is stored
  /// @param temp_storage [3 * head_dim] floats, shared by the group; the first head_dim are the stored centres at the end
  /// @sync that of digest.store   @source ArkVale (NeurIPS 2024), cuboid-mean
  template <thread_group Group, class Key, class Values>
  static PULSEINFER_HOST_DEVICE void make(
    Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
    Values const& digest, float* temp_storage)
  {
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();
    float* const centre = temp_storage;
    float* const distance = centre + 2U * head_dim;
    find_range(group, keys, token_stride, tokens, head_dim, centre, centre + head_dim);
    // Halves first: the sum of two large keys may overflow.
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      centre[j] = 0.5F * centre[j] + 0.5F * centre[head_dim + j];
      distance[j] = 0.0F;
    }
    digest.store(group, 0, head_dim, centre);
    for (std::uint32_t token = 0; token < tokens; ++token) {
      Key const* const key = key_row(keys, token_stride, token);
      for (std::uint32_t j = rank; j < head_dim; j += size) {
        float const difference = centre[j] - widen(key[j]);
        distance[j] += difference < 0.0F ? -difference : difference;
      }
    }
    float const count = static_cast<float>(tokens);
    for (std::uint32_t j = rank; j < head_dim; j += size) { distance[j] /= count; }
    digest.store(group, 1, head_dim, distance);
    digest.pad(group, parts, head_dim);
  }
};

/// cuboid_mean_form::make to floats or halves.
/// @param digest [cuboid_mean_elements(head_dim)], written   @sync none: each rank has channels of its own
template <thread_group Group, class Key, class Digest>
PULSEINFER_HOST_DEVICE void cuboid_mean(
  Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
  Digest* digest, float* temp_storage)
{
  cuboid_mean_form::make(
    group, keys, token_stride, tokens, head_dim, digest_values<Digest>{digest, cuboid_mean_elements(head_dim)},
    temp_storage);
}

}  // namespace pulseinfer::device
