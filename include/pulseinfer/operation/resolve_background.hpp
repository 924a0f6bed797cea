#pragma once

/// From a selection that is only expected to slots: which of its blocks come ahead of need, and where to.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/operation/lane_slots.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item per lane of the rows. Takes at most `most_misses` slots of a lane, and only such as hold nothing or a clean block
/// that neither this step nor the one before selected: what is expected drives out nothing that was asked for. Leaves tables
/// and the use of resident blocks as they are. What it brings counts as used in the step before, so that a demand of this step
/// may take its slot again.
template <replacement Replacement>
struct resolve_background {
  static constexpr char const* name = "resolve_background";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  selection_ref selection = {};
  residency_ref residency = {};
  slot_pool_ref pool = {};
  host_block_id const* host_blocks = nullptr;  // [rows, max_blocks], device memory
  lane_plan_ref plan = {};
  std::uint32_t const* step = nullptr;  // the step's number, device memory
  layer_id layer = none<layer_id>;
  std::uint32_t head_groups = 1;
  std::uint32_t most_misses = 0;
  Replacement policy = {};

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 32};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return sizeof(std::uint64_t) * residency.max_lease; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = shape().items * (std::uint64_t{selection.max_selected} * 8 + residency.max_lease * 20ULL)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    if (group.thread_rank() != 0) { return; }
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint64_t const lane_index = to_index(lane);
    block_id const* const wanted = selection.ids_of(lane);
    std::uint32_t const count = selection.counts[lane_index];
    slot_id const* const slot_of = residency.slots_of_lane(layer, lane);
    recall_entry* const entries = plan.entries + lane_index * selection.max_selected;
    std::uint32_t const now = *step;
    auto* const victims = reinterpret_cast<std::uint64_t*>(scratch.data);
    lane_slots const slots{residency, pool, layer, lane};
    host_block_id const* const stored = host_blocks + to_index(row) * residency.max_blocks;
    // No more than come: the worst slots are to leave, and not the first of many.
    std::uint32_t come = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t const block = to_index(wanted[i]);
      come += is_none(slot_of[block]) && !is_none(stored[block]) ? 1U : 0U;
    }
    std::uint32_t const granted = slots.choose_victims(
      come < most_misses ? come : most_misses, now, policy,
      [now](slot_word const& word) { return word.last_used != now && word.last_used + 1U != now; }, victims);

    std::uint32_t planned = 0;
    std::uint32_t resident = 0;
    std::uint32_t wasted = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      block_id const block = wanted[i];
      host_block_id const source = stored[to_index(block)];
      bool const here = !is_none(slot_of[to_index(block)]);
      resident += here ? 1U : 0U;
      if (here || is_none(source) || planned == granted) { continue; }
      auto const slot = static_cast<slot_id>(victims[planned]);
      wasted += slots.take(slot, block, now - 1U, true) ? 1U : 0U;
      entries[planned++] = {.source = source, .target = slot, .lane = lane, .block = block};
    }
    plan.misses[lane_index] = planned;
    plan.flying[lane_index] = 0;
    plan.hits[lane_index] = resident;
    plan.stalled[lane_index] = 0;
    plan.count_ahead(lane_index, 0U, wasted);
  }
};

}  // namespace pulseinfer
