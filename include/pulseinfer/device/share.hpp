#pragma once

/// Scores of blocks become shares of the softmax mass.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Blocks whose shares are summed in one piece. The pieces are the same for every launch shape.
inline constexpr std::uint32_t share_segment = 256;

[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::size_t share_temp_floats(
  std::uint32_t blocks, std::uint32_t group_threads)
{
  return std::size_t{group_threads} + divide_up(blocks, share_segment);
}

/// Replaces scores by softmax shares, which sum to 1. The same bits for every group size.
/// @param scores [round_up(blocks, 16)]; the places from `blocks` on are overwritten
/// @param temp_storage [share_temp_floats(blocks, group.size())], shared by the group   @sync several; one at the end
template <thread_group Group>
PULSEINFER_HOST_DEVICE void share(Group const& group, float* scores, std::uint32_t blocks, float* temp_storage)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  std::uint32_t const padded = round_up(blocks, float_lanes::size);
  float* const sums = temp_storage + size;
  for (std::uint32_t i = blocks + rank; i < padded; i += size) { scores[i] = minus_infinity; }
  group.sync();

  float_lanes largest{minus_infinity};
  for (std::uint32_t i = rank * float_lanes::size; i < padded; i += size * float_lanes::size) {
    float_lanes score;
    score.load(scores + i);
    largest.take_larger(score);
  }
  float const top = reduce(group, largest.largest(), temp_storage, maximum{});

  std::uint32_t const segments = divide_up(blocks, share_segment);
  for (std::uint32_t segment = rank; segment < segments; segment += size) {
    std::uint32_t const begin = segment * share_segment;
    std::uint32_t const end = begin + share_segment < padded ? begin + share_segment : padded;
    float_lanes sum;
    for (std::uint32_t i = begin; i < end; i += float_lanes::size) {
      float_lanes score;
      score.load(scores + i);
      score.exponential_below(top);
      sum.add(score);
      score.store(scores + i);
    }
    sums[segment] = sum.sum();
  }
  group.sync();
  float total = 0.0F;
  for (std::uint32_t segment = 0; segment < segments; ++segment) { total += sums[segment]; }
  float const factor = 1.0F / total;
  for (std::uint32_t i = rank * float_lanes::size; i < padded; i += size * float_lanes::size) {
    float_lanes mass;
    mass.load(scores + i);
    mass.scale(factor);
    mass.store(scores + i);
  }
  group.sync();
}

/// What turns scores into shares: share = e^(score - top) * factor.
struct share_scale {
  float top;
  float factor;
};

/// The scale by which `share` replaces these scores, bit by bit; the scores stay as they are.
/// @param scores [blocks]   @param temp_storage [share_temp_floats(blocks, group.size())], shared by the group
/// @return in every rank   @sync several; one at the end
template <thread_group Group>
[[nodiscard]] PULSEINFER_HOST_DEVICE share_scale
find_share_scale(Group const& group, float const* scores, std::uint32_t blocks, float* temp_storage)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  float* const sums = temp_storage + size;
  auto const load = [&](std::uint32_t begin) {
    float_lanes score{minus_infinity};
    if (begin + float_lanes::size <= blocks) {
      score.load(scores + begin);
    } else {
      float last[float_lanes::size];
      for (std::uint32_t i = 0; i < float_lanes::size; ++i) {
        last[i] = begin + i < blocks ? scores[begin + i] : minus_infinity;
      }
      score.load(last);
    }
    return score;
  };

  float_lanes largest{minus_infinity};
  for (std::uint32_t i = rank * float_lanes::size; i < blocks; i += size * float_lanes::size) {
    largest.take_larger(load(i));
  }
  float const top = reduce(group, largest.largest(), temp_storage, maximum{});

  std::uint32_t const segments = divide_up(blocks, share_segment);
  for (std::uint32_t segment = rank; segment < segments; segment += size) {
    std::uint32_t const begin = segment * share_segment;
    std::uint32_t const end = begin + share_segment < blocks ? begin + share_segment : blocks;
    float_lanes sum;
    for (std::uint32_t i = begin; i < end; i += float_lanes::size) {
      float_lanes score = load(i);
      score.exponential_below(top);
      sum.add(score);
    }
    sums[segment] = sum.sum();
  }
  group.sync();
  float total = 0.0F;
  for (std::uint32_t segment = 0; segment < segments; ++segment) { total += sums[segment]; }
  group.sync();
  return {.top = top, .factor = 1.0F / total};
}

}  // namespace pulseinfer::device
