#pragma once

/// Channel by channel over the keys of a block.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Row `token` of a head; rows are token_stride bytes apart.
template <class Key>
[[nodiscard]] PULSEINFER_HOST_DEVICE Key const* key_row(
  Key const* keys, std::uint64_t token_stride, std::uint32_t token)
{
  return reinterpret_cast<Key const*>(reinterpret_cast<std::byte const*>(keys) + token * token_stride);
}

/// Smallest and largest key of each channel.
/// @param tokens at least 1   @param low, high [head_dim], written   @sync none: each rank has channels of its own
template <thread_group Group, class Key>
PULSEINFER_HOST_DEVICE void find_range(
  Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
  float* low, float* high)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  for (std::uint32_t j = rank; j < head_dim; j += size) {
    low[j] = widen(keys[j]);
    high[j] = low[j];
  }
  for (std::uint32_t token = 1; token < tokens; ++token) {
    Key const* const key = key_row(keys, token_stride, token);
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      float const value = widen(key[j]);
      low[j] = value < low[j] ? value : low[j];
      high[j] = value > high[j] ? value : high[j];
    }
  }
}

/// Mean key of each channel.
/// @param tokens at least 1   @param mean [head_dim], written   @sync none: each rank has channels of its own
template <thread_group Group, class Key>
PULSEINFER_HOST_DEVICE void find_mean(
  Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
  float* mean)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  float const share = 1.0F / static_cast<float>(tokens);
  for (std::uint32_t j = rank; j < head_dim; j += size) { mean[j] = 0.0F; }
  for (std::uint32_t token = 0; token < tokens; ++token) {
    Key const* const key = key_row(keys, token_stride, token);
    // Parts first: the sum of large keys may overflow.
    for (std::uint32_t j = rank; j < head_dim; j += size) { mean[j] += share * widen(key[j]); }
  }
}

}  // namespace pulseinfer::device
