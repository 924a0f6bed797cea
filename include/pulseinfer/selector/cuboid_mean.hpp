#pragma once

/// A digest policy: centre and mean distance of each channel.

#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>

#include <cstdint>
#include <string>

namespace pulseinfer {

/// Names the operations that make and score cuboid-mean digests, which lie [scoring heads][centres | distances].
/// @source ArkVale (NeurIPS 2024)
struct cuboid_mean {
  dtype type = dtype::float16;  ///< of the stored digests: float16 or float32

  using update_operation = update_digests;
  using score_operation = score_blocks;

  /// @throws configuration_error
  void validate() const
  {
    if (type != dtype::float16 && type != dtype::float32) {
      throw configuration_error{std::string{"digests of "} + name_of(type) + ", not float16 or float32"};
    }
  }

  /// Bytes of one block's digest for `heads` scoring heads.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t head_dim, std::uint32_t heads) const
  {
    return std::uint64_t{heads} * device::cuboid_mean_elements(head_dim) * size_of(type);
  }
};

}  // namespace pulseinfer
