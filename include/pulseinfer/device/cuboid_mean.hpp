#pragma once

/// The cuboid-mean digest of a block: a centre and a mean distance for each channel of its keys.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Elements of one head's digest: head_dim centres, head_dim distances, zeros up to whole lanes.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t cuboid_mean_elements(std::uint32_t head_dim)
{
  return round_up(2U * head_dim, float_lanes::size);
}

/// Digests the first `tokens` keys of a block, at least 1; what lies behind them is not read.
/// @param keys row 0 of one head; rows are token_stride bytes apart
/// @param digest [cuboid_mean_elements(head_dim)], written: centre (min + max) / 2, then the mean of |centre - key|
/// @param temp_storage [3 * head_dim] floats, shared by the group   @sync none: each rank has channels of its own
/// @source ArkVale (NeurIPS 2024), cuboid-mean
template <thread_group Group, class Key, class Digest>
PULSEINFER_HOST_DEVICE void cuboid_mean(
  Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
  Digest* digest, float* temp_storage)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  float* const low = temp_storage;
  float* const high = low + head_dim;
  float* const distance = high + head_dim;
  auto const row = [&](std::uint32_t token) {
    return reinterpret_cast<Key const*>(reinterpret_cast<std::byte const*>(keys) + token * token_stride);
  };
  for (std::uint32_t j = rank; j < head_dim; j += size) {
    low[j] = widen(keys[j]);
    high[j] = low[j];
    distance[j] = 0.0F;
  }
  for (std::uint32_t token = 1; token < tokens; ++token) {
    Key const* const key = row(token);
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      float const value = widen(key[j]);
      low[j] = value < low[j] ? value : low[j];
      high[j] = value > high[j] ? value : high[j];
    }
  }
  // Halves first: the sum of two large keys may overflow.
  for (std::uint32_t j = rank; j < head_dim; j += size) { low[j] = 0.5F * low[j] + 0.5F * high[j]; }
  for (std::uint32_t token = 0; token < tokens; ++token) {
    Key const* const key = row(token);
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      float const difference = low[j] - widen(key[j]);
      distance[j] += difference < 0.0F ? -difference : difference;
    }
  }
  float const count = static_cast<float>(tokens);
  for (std::uint32_t j = rank; j < head_dim; j += size) {
    digest[j] = static_cast<Digest>(low[j]);
    digest[head_dim + j] = static_cast<Digest>(distance[j] / count);
  }
  for (std::uint32_t j = 2U * head_dim + rank; j < cuboid_mean_elements(head_dim); j += size) {
    digest[j] = static_cast<Digest>(0.0F);
  }
}

}  // namespace pulseinfer::device
