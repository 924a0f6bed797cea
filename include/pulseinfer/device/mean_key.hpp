#pragma once

/// The mean-key digest of a block.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/key_range.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// q . mean + ln(tokens) is a lower bound of the block's log-mass: the mean of exponentials is at least the exponential of
/// the mean. Half of the bytes of the other digests.
/// @source ShadowKV, arXiv:2410.21465; MoBA, arXiv:2502.13189
struct mean_key_form {
  static constexpr char const* name = "mean_key";
  static constexpr bool holds_keys = false;  ///< the second part is a box around all keys
  static constexpr std::uint32_t parts = 1;

  /// As cuboid_mean_form::make.
  template <thread_group Group, class Key, class Values>
  static PULSEINFER_HOST_DEVICE void make(
    Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
    Values const& digest, float* temp_storage)
  {
    find_mean(group, keys, token_stride, tokens, head_dim, temp_storage);
    digest.store(group, 0, head_dim, temp_storage);
    digest.pad(group, parts, head_dim);
  }
};

}  // namespace pulseinfer::device
