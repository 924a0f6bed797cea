#pragma once

/// The log-mass digest of a block: mean and variance of each channel of its keys.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/key_range.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// ln of the sum of exp(s q . key) is about ln(tokens) + s q . mean + the sum over channels of (s q)^2 variance / 2, where
/// channels vary independently and the block's logits lie within about 2 of one another (to second order; the error is of
/// third order in their spread, and grows fast beyond).
struct log_mass_form {
  static constexpr char const* name = "log_mass";
  static constexpr bool holds_keys = false;  ///< the second part is a box around all keys
  static constexpr std::uint32_t parts = 2;  ///< means, variances around the stored mean

  /// As cuboid_mean_form::make. A variance beyond 65504 is stored as 65504, but for floats.
  template <thread_group Group, class Key, class Values>
  static PULSEINFER_HOST_DEVICE void make(
    Group const& group, Key const* keys, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t head_dim,
    Values const& digest, float* temp_storage)
  {
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();
    float* const mean = temp_storage;
    float* const variance = mean + head_dim;
    find_mean(group, keys, token_stride, tokens, head_dim, mean);
    digest.store(group, 0, head_dim, mean);
    for (std::uint32_t j = rank; j < head_dim; j += size) { variance[j] = 0.0F; }
    for (std::uint32_t token = 0; token < tokens; ++token) {
      Key const* const key = key_row(keys, token_stride, token);
      for (std::uint32_t j = rank; j < head_dim; j += size) {
        float const difference = widen(key[j]) - mean[j];
        variance[j] += difference * difference;
      }
    }
    float const count = static_cast<float>(tokens);
    for (std::uint32_t j = rank; j < head_dim; j += size) {
      float const value = variance[j] / count;
      variance[j] = value > Values::limit ? Values::limit : value;
    }
    digest.store(group, 1, head_dim, variance);
    digest.pad(group, parts, head_dim);
  }
};

}  // namespace pulseinfer::device
