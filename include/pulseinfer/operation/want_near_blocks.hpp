#pragma once

/// Which blocks stand just below a selection's cut.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Of each lane, the `near_blocks` blocks with the most votes among those that its selection does not name become what the
/// lane wants in the layer, in place of what it wanted before. Ties go to the lowest id, as in the selection. A row that has no
/// more blocks than its budget reads all, and wants none. One item is one lane.
struct want_near_blocks {
  static constexpr char const* name = "want_near_blocks";
  static constexpr operation_kind kind = operation_kind::metadata;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  selection_ref selection = {};    // read: whole, nothing of it left for later
  selection_scores scores = {};    // votes are read
  foresight_ref foresight = {};    // `wanted` is written
  std::uint32_t head_groups = 1;
  std::uint32_t block_tokens = 0;
  std::uint32_t near_blocks = 0;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 256};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return (device::top_k_temp_words(group_threads) + selection.max_selected + near_blocks) * sizeof(std::uint32_t);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t blocks = 0;
    for (row_id const row : rows) { blocks += info[to_index(row)].blocks(block_tokens); }
    return {.device_bytes = head_groups * 10U * sizeof(float) * blocks};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint32_t* const wanted = foresight.wanted_of(layer, lane);
    std::uint32_t const budget =
      scores.budget_blocks < selection.max_selected ? scores.budget_blocks : selection.max_selected;
    device::kept_blocks const kept =
      device::keep_blocks(info[to_index(row)], block_tokens, budget, scores.sink_blocks, scores.recent_blocks);
    if (kept.chosen == 0U) {
      for (std::uint32_t w = group.thread_rank(); w < foresight.words; w += group.size()) { wanted[w] = 0; }
      return;
    }
    auto* const ids = reinterpret_cast<block_id*>(scratch.data);
    auto* const temp_storage = reinterpret_cast<std::uint32_t*>(ids + selection.max_selected + near_blocks);
    block_id const* const selected = selection.ids_of(lane);
    std::uint32_t const count = selection.counts[to_index(lane)];
    std::uint32_t const others = kept.head + kept.blocks - kept.tail;  // selected whatever their votes
    std::uint32_t const chosen = count > others ? count - others : 0U;
    std::uint32_t const found = device::top_k(
      group, scores.votes + to_index(lane) * scores.vote_pitch + kept.head, kept.tail - kept.head, chosen + near_blocks,
      kept.head, ids, temp_storage);
    for (std::uint32_t w = group.thread_rank(); w < foresight.words; w += group.size()) {
      wanted[w] = device::selection_bits(ids, found, w) & ~device::selection_bits(selected, count, w);
    }
  }
};

static_assert(operation<want_near_blocks>);

}  // namespace pulseinfer
