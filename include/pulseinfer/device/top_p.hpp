#pragma once

/// How many of the chosen blocks are enough for a part of all votes.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Values that are summed in one piece. The pieces are the same for every launch shape.
inline constexpr std::uint32_t sum_segment = 64;

/// Sum of value(0) to value(count - 1) in a fixed order.
/// @param sums [divide_up(count, sum_segment)], shared by the group   @return in every rank   @sync three
template <thread_group Group, class Value>
[[nodiscard]] PULSEINFER_HOST_DEVICE float ordered_sum(
  Group const& group, std::uint32_t count, Value const& value, float* sums)
{
  std::uint32_t const segments = divide_up(count, sum_segment);
  group.sync();
  for (std::uint32_t segment = group.thread_rank(); segment < segments; segment += group.size()) {
    std::uint32_t const begin = segment * sum_segment;
    std::uint32_t const end = begin + sum_segment < count ? begin + sum_segment : count;
    float sum = 0.0F;
    for (std::uint32_t i = begin; i < end; ++i) { sum += value(i); }
    sums[segment] = sum;
  }
  group.sync();
  float total = 0.0F;
  for (std::uint32_t segment = 0; segment < segments; ++segment) { total += sums[segment]; }
  group.sync();
  return total;
}

/// Sizes that a selection may have: `least`, then steps of `step`, and `most`.
struct size_steps {
  std::uint32_t least = 0;
  std::uint32_t step = 1;
};

/// Bytes of shared scratch that `cut_to_share` needs.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::size_t cut_temp_bytes(
  std::uint32_t most_chosen, std::uint32_t most_blocks, std::uint32_t group_threads)
{
  std::size_t const sums = divide_up(most_blocks > most_chosen ? most_blocks : most_chosen, sum_segment);
  return (2U * std::size_t{most_chosen} + sums + top_k_temp_words(group_threads)) * sizeof(std::uint32_t);
}

/// Keeps of the chosen blocks those with the most votes, as many as the smallest size takes whose votes make up `wanted`.
/// @param ids [chosen] ascending, rewritten: the kept ones ascending
/// @param fixed blocks that belong to the size beside the chosen ones
/// @param vote of a block, by which blocks are ordered   @param mass of a block, which counts towards `wanted`
/// @param votes, places [chosen] shared by the group
/// @param sums [divide_up(chosen, sum_segment)]   @param temp_storage [top_k_temp_words(group.size())]
/// @return blocks kept, in every rank: all of them where no size is enough   @sync several; one at the end
template <thread_group Group, class Vote, class Mass>
[[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t cut_to_share(
  Group const& group, block_id* ids, std::uint32_t chosen, std::uint32_t fixed, size_steps const& sizes,
  Vote const& vote, Mass const& mass, float wanted, float* votes, block_id* places, float* sums,
  std::uint32_t* temp_storage)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  for (std::uint32_t i = rank; i < chosen; i += size) { votes[i] = vote(ids[i]); }
  group.sync();
  for (std::uint32_t of_size = sizes.least; of_size < fixed + chosen; of_size += sizes.step) {
    std::uint32_t const count = of_size > fixed ? of_size - fixed : 0U;
    std::uint32_t const found = top_k(group, votes, chosen, count, 0U, places, temp_storage);
    float const sum = ordered_sum(group, found, [&](std::uint32_t i) { return mass(ids[to_index(places[i])]); }, sums);
    if (!(sum >= wanted)) { continue; }
    for (std::uint32_t i = rank; i < found; i += size) { places[i] = ids[to_index(places[i])]; }
    group.sync();
    for (std::uint32_t i = rank; i < found; i += size) { ids[i] = places[i]; }
    group.sync();
    return found;
  }
  return chosen;
}

}  // namespace pulseinfer::device
