#pragma once

/// A digest policy: any other one for each of a block's equal pieces.

#include <pulseinfer/selector/block_digest.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Digests of `Pieces` runs of block_tokens / Pieces consecutive tokens, each scored with ln of its own valid tokens; the
/// block's score is ln of the sum of exp(score), so that its share is what its pieces would have as blocks. A digest of 4
/// tokens finds single keys that one of 16 hides, for 4 times the bytes and the scoring, while the block stays what moves.
/// block_tokens must be a multiple of Pieces: `bind` says so with the numbers.
/// @tparam Digest cuboid_mean, min_max, mean_key, log_mass, or a split of one: their pieces multiply
/// @source measured: docs/accuracy.md, "a digest for each 4 tokens"
template <class Digest, std::uint32_t Pieces>
using split = block_digest<typename Digest::form, typename Digest::spread, Digest::pieces * Pieces>;

static_assert(std::is_same_v<split<cuboid_mean, 1>, cuboid_mean>);

}  // namespace pulseinfer
