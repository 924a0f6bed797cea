#pragma once

/// What the digest policies have in common: a form of digest, how queries meet it, and how it is stored.

#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <string>

namespace pulseinfer {

/// A block's digest holds those of its scoring heads one after the other, then their block_bounds where they are kept.
/// @tparam Form what a digest is, device/cuboid_mean.hpp and its neighbours
/// @tparam Spread how a query meets it, device/block_score.hpp
template <class Form, class Spread>
struct block_digest {
  dtype type = dtype::float16;  ///< of the stored digests: float16, float32, or int8 with a scale for 16 channels
  bool bounds = false;          ///< keep block_bounds, 8 bytes a head: certificates need them, selection does not

  using form = Form;
  using spread = Spread;
  using update_operation = make_digests<Form>;
  using score_operation = score_digests<Spread>;

  /// @throws configuration_error
  void validate() const
  {
    if (!device::is_digest_type(type)) {
      throw configuration_error{std::string{"digests of "} + name_of(type) + ", not float16, float32 or int8"};
    }
  }

  /// Bytes of one head's digest.
  [[nodiscard]] std::uint64_t head_bytes(std::uint32_t head_dim) const
  {
    return device::digest_bytes(type, Form::parts, head_dim);
  }

  /// Bytes of one block's digest for `heads` scoring heads, a multiple of 16.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t head_dim, std::uint32_t heads) const
  {
    std::uint64_t const kept = bounds ? round_up(std::uint64_t{heads} * sizeof(block_bounds), 16) : 0;
    return heads * head_bytes(head_dim) + kept;
  }

  /// Bytes from a block's digest to the bounds of its heads; 0 where none are kept.
  [[nodiscard]] std::uint64_t bounds_offset(std::uint32_t head_dim, std::uint32_t heads) const
  {
    return bounds ? heads * head_bytes(head_dim) : 0;
  }
};

}  // namespace pulseinfer
