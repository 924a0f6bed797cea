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

/// A block's digest holds those of its scoring heads one after the other, each of its pieces by ascending token, then their
/// block_bounds in the same order where they are kept.
/// @tparam Form what a digest is, device/cuboid_mean.hpp and its neighbours
/// @tparam Spread how a query meets it, device/block_score.hpp
/// @tparam Pieces equal pieces of a block, each with a digest of its own, selector/split.hpp
template <class Form, class Spread, std::uint32_t Pieces = 1>
struct block_digest {
  static_assert(Pieces >= 1, "a block has at least one piece");
  static constexpr std::uint32_t pieces = Pieces;
  static constexpr std::uint64_t head_bounds_bytes = Pieces * sizeof(block_bounds);

  dtype type = dtype::float16;  ///< of the stored digests: float16, float32, or int8 with a scale for 16 channels
  bool bounds = false;  ///< keep block_bounds, 8 bytes a piece and head: certificates need them, selection does not

  using form = Form;
  using spread = Spread;
  using update_operation = make_digests<Form, Pieces>;
  using score_operation = score_digests<Spread, Pieces>;

  /// @throws configuration_error
  void validate() const
  {
    if (!device::is_digest_type(type)) {
      throw configuration_error{std::string{"digests of "} + name_of(type) + ", not float16, float32 or int8"};
    }
  }

  /// Whether blocks of so many tokens can be digested.
  /// @throws configuration_error
  void validate(std::uint32_t block_tokens) const
  {
    validate();
    if (block_tokens % Pieces != 0) {
      throw configuration_error{
        "digests of " + std::to_string(Pieces) + " pieces of a block: block_tokens " + std::to_string(block_tokens) +
        " is no multiple of " + std::to_string(Pieces)};
    }
  }

  /// Bytes of one head's digest, of all pieces.
  [[nodiscard]] std::uint64_t head_bytes(std::uint32_t head_dim) const
  {
    return Pieces * device::digest_bytes(type, Form::parts, head_dim);
  }

  /// Bytes of one block's digest for `heads` scoring heads, a multiple of 16.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t head_dim, std::uint32_t heads) const
  {
    std::uint64_t const kept = bounds ? round_up(heads * head_bounds_bytes, 16) : 0;
    return heads * head_bytes(head_dim) + kept;
  }

  /// Bytes from a block's digest to the bounds of its heads; 0 where none are kept.
  [[nodiscard]] std::uint64_t bounds_offset(std::uint32_t head_dim, std::uint32_t heads) const
  {
    return bounds ? heads * head_bytes(head_dim) : 0;
  }
};

}  // namespace pulseinfer
