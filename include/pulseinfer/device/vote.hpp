#pragma once

/// Shares of several heads and queries become one vote for each block.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Adds the shares of `terms` voters, in their order, in float: block b of voter i is shares[i * pitch + b].
/// @param votes [blocks], added to   @sync none: each rank has blocks of its own, the same in every call
template <thread_group Group, class Share>
PULSEINFER_HOST_DEVICE void vote(
  Group const& group, Share const* shares, std::uint64_t pitch, std::uint32_t terms, std::uint32_t blocks, float* votes)
{
  for (std::uint32_t term = 0; term < terms; ++term) {
    Share const* const voter = shares + term * pitch;
    for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) { votes[b] += widen(voter[b]); }
  }
}

/// Adds weight * share to each vote, or takes it in place of a smaller vote.
/// @param shares [blocks] of one voter   @param votes [blocks], not negative   @sync none, blocks as in vote
template <thread_group Group>
PULSEINFER_HOST_DEVICE void combine_share(
  Group const& group, float const* shares, float weight, bool largest, std::uint32_t blocks, float* votes)
{
  for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) {
    float const share = weight * shares[b];
    votes[b] = !largest ? votes[b] + share : share > votes[b] ? share : votes[b];
  }
}

/// Multiplies the votes of blocks whose bit is set: what was selected before stays more readily.
/// @param previous bit i of word w is block 32 * w + i; votes[0] is block `begin`   @sync none, blocks as in vote
template <thread_group Group>
PULSEINFER_HOST_DEVICE void favour_previous(
  Group const& group, std::uint32_t const* previous, std::uint32_t begin, std::uint32_t blocks, float factor,
  float* votes)
{
  for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) {
    std::uint32_t const block = begin + b;
    if ((previous[block / 32U] >> (block % 32U) & 1U) != 0U) { votes[b] *= factor; }
  }
}

}  // namespace pulseinfer::device
