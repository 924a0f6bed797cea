#pragma once

/// Chooses as many blocks with the most votes as make up a part of all votes.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/device/top_p.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// As select_top_k with the budget, and then the smallest of a few sizes whose blocks have `share` of all votes. The favour of
/// blocks of the previous selection decides who comes first and does not count as votes. One item is one lane.
struct select_top_p {
  static constexpr char const* name = "select_top_p";
  static constexpr operation_kind kind = operation_kind::metadata;

  select_top_k most = {};  ///< the selection where no smaller size is enough
  device::size_steps sizes = {};
  float share = 1.0F;
  float favour = 1.0F;            ///< what votes of the previous selection's blocks were multiplied by
  std::uint32_t most_blocks = 0;  ///< no row has more; known to the host

  [[nodiscard]] launch_shape shape() const { return most.shape(); }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return device::cut_temp_bytes(most.budget_blocks, most_blocks, group_threads);
  }

  [[nodiscard]] operation_cost cost() const { return most.cost(); }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = most.rows[item / most.head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % most.head_groups), most.head_groups);
    selection_ref const& selection = most.selection;
    std::uint32_t const budget =
      most.budget_blocks < selection.max_selected ? most.budget_blocks : selection.max_selected;
    device::kept_blocks const kept =
      device::keep_blocks(most.info[to_index(row)], most.block_tokens, budget, most.sink_blocks, most.recent_blocks);

    auto* const votes = reinterpret_cast<float*>(scratch.data);
    auto* const places = reinterpret_cast<block_id*>(votes + most.budget_blocks);
    auto* const temp_storage = reinterpret_cast<std::uint32_t*>(places + most.budget_blocks);
    auto* const sums = reinterpret_cast<float*>(temp_storage + device::top_k_temp_words(group.size()));
    block_id* const ids = selection.ids_of(lane);
    std::uint32_t* const previous = selection.previous_of(most.layer, lane);
    float const* const all_votes = most.votes + to_index(lane) * most.vote_pitch;
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();

    std::uint32_t chosen = kept.chosen;
    if (chosen != 0U) {
      chosen = device::top_k(
        group, all_votes + kept.head, kept.tail - kept.head, chosen, kept.head, ids + kept.head, temp_storage);
      auto const vote = [&](block_id block) { return all_votes[to_index(block)]; };
      auto const mass = [&](std::uint64_t block) {
        bool const favoured = selection.previous_words != 0U && (previous[block / 32U] >> (block % 32U) & 1U) != 0U;
        return favoured ? all_votes[block] / favour : all_votes[block];
      };
      std::uint32_t const others = kept.head + kept.blocks - kept.tail;
      float const total = device::ordered_sum(group, kept.blocks, mass, sums);
      float const have = device::ordered_sum(
        group, others, [&](std::uint32_t i) { return mass(i < kept.head ? i : kept.tail + i - kept.head); }, sums);
      // Without votes, or with some that are no numbers, nothing is known to be enough.
      if (total > 0.0F) {
        chosen = device::cut_to_share(
          group, ids + kept.head, chosen, others, sizes, vote, [&](block_id block) { return mass(to_index(block)); },
          share * total - have, votes, places, sums, temp_storage);
      }
    }
    for (std::uint32_t i = rank; i < kept.head; i += size) { ids[i] = static_cast<block_id>(i); }
    std::uint32_t count = kept.head + chosen;
    for (std::uint32_t i = kept.tail + rank; i < kept.blocks; i += size) {
      ids[count + i - kept.tail] = static_cast<block_id>(i);
    }
    count += kept.blocks - kept.tail;
    for (std::uint32_t i = count + rank; i < selection.max_selected; i += size) { ids[i] = none<block_id>; }
    if (rank == 0U) { selection.counts[to_index(lane)] = count; }
    group.sync();
    if (most.remember) { device::remember_selection(group, ids, count, previous, selection.previous_words); }
  }
};

static_assert(operation<select_top_p>);

}  // namespace pulseinfer
