#pragma once

/// From a selection to slots: which selected blocks are resident, who leaves for those that are not, and the table.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/operation/lane_slots.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// What `resolve_blocks` leaves for the plan, by lane.
struct lane_plan_ref {
  recall_entry* entries = nullptr;      // [lanes, max_selected] misses, ascending by block
  std::uint32_t* misses = nullptr;      // [lanes]
  std::uint32_t* hits = nullptr;        // [lanes]
  std::uint32_t* flying = nullptr;      // [lanes] selected blocks that an earlier recall still brings
  std::uint32_t* stalled = nullptr;     // [lanes] selected blocks for which no slot could be freed
  lane_foresight* foresight = nullptr;  // [lanes] what came of blocks that were brought ahead of need; may be null

  [[nodiscard]] PULSEINFER_HOST_DEVICE lane_counts_ref counts() const
  {
    return {.misses = misses, .hits = hits, .flying = flying, .stalled = stalled};
  }

  /// One thread of the lane's adds.
  PULSEINFER_HOST_DEVICE void count_ahead(std::uint64_t lane, std::uint32_t used, std::uint32_t wasted) const
  {
    if (foresight == nullptr) { return; }
    if (used != 0U) { device::add_relaxed(&foresight[lane].used, used); }
    if (wasted != 0U) { device::add_relaxed(&foresight[lane].wasted, wasted); }
  }
};

/// One item per lane of the rows. A lane touches its own leases and words only, so items never contend.
/// Misses take empty slots of the lane's lease first, then the clean ones that this step does not use, worst first by the
/// replacement policy; a slot without a host copy is never taken. Deterministic: ties go to the lower slot id.
template <replacement Replacement>
struct resolve_blocks {
  static constexpr char const* name = "resolve_blocks";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  selection_ref selection = {};
  residency_ref residency = {};
  slot_pool_ref pool = {};
  host_block_id const* host_blocks = nullptr;  // [rows, max_blocks], device memory
  lane_plan_ref plan = {};
  lane_table_ref table = {};
  std::uint32_t const* step = nullptr;  // the step's number, device memory
  layer_id layer = none<layer_id>;
  std::uint32_t head_groups = 1;
  bool list_hits_only = false;  ///< the table lists hits, the misses go into `landed`; else the table lists both
  Replacement policy = {};

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 128};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return sizeof(std::uint64_t) * residency.max_lease; }
  [[nodiscard]] operation_cost cost() const
  {
    return {.device_bytes = shape().items * (std::uint64_t{selection.max_selected} * 40 + residency.max_lease * 20ULL)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    if (group.thread_rank() != 0) { return; }
    row_id const row = rows[item / head_groups];
    lane_id const lane = lane_of(row, static_cast<std::uint32_t>(item % head_groups), head_groups);
    std::uint64_t const lane_index = to_index(lane);
    std::uint64_t const books = residency.lane_index(layer, lane);
    block_id const* const wanted = selection.ids_of(lane);
    std::uint32_t const count = selection.counts[lane_index];
    slot_id* const slot_of = residency.slots_of_lane(layer, lane);
    std::uint32_t const now = *step;

    std::uint32_t misses = 0;
    std::uint32_t used = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      slot_id const slot = slot_of[to_index(wanted[i])];
      if (is_none(slot)) {
        ++misses;
      } else {
        slot_word& word = residency.slots[pool.word(layer, slot)];
        used += word.ahead;
        word.last_used = now;
        word.ahead = 0;
      }
    }
    lane_slots const slots{residency, pool, layer, lane};
    auto* const victims = reinterpret_cast<std::uint64_t*>(scratch.data);
    std::uint32_t const granted = misses == 0
      ? 0
      : slots.choose_victims(
          misses, now, policy, [now](slot_word const& word) { return word.last_used != now; }, victims);

    slot_id* const listed = table.listed + books * table.stride;
    slot_id* const landed = table.landed + lane_index * selection.max_selected;
    recall_entry* const entries = plan.entries + lane_index * selection.max_selected;
    std::uint32_t listed_count = 0;
    std::uint32_t landed_count = 0;
    std::uint32_t planned = 0;
    std::uint32_t flying = 0;
    std::uint32_t wasted = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      block_id const block = wanted[i];
      slot_id slot = slot_of[to_index(block)];
      bool travels = false;
      if (is_none(slot)) {
        if (planned == granted) { continue; }
        slot = static_cast<slot_id>(victims[planned]);
        wasted += slots.take(slot, block, now, false) ? 1U : 0U;
        entries[planned++] = {
          .source = host_blocks[to_index(row) * residency.max_blocks + to_index(block)],
          .target = slot,
          .lane = lane,
          .block = block};
        travels = true;
      } else if (residency.slots[pool.word(layer, slot)].state == slot_state::in_flight) {
        ++flying;
        travels = true;
      }
      if (travels) { landed[landed_count++] = slot; }
      if (!travels || !list_hits_only) { listed[listed_count++] = slot; }
    }
    for (std::uint32_t i = listed_count; i < table.stride && !is_none(listed[i]); ++i) { listed[i] = none<slot_id>; }
    for (std::uint32_t i = landed_count; i < selection.max_selected; ++i) { landed[i] = none<slot_id>; }
    table.listed_count[books] = listed_count;
    table.landed_count[lane_index] = landed_count;
    plan.misses[lane_index] = planned;
    plan.flying[lane_index] = flying;
    plan.hits[lane_index] = count - misses - flying;
    plan.stalled[lane_index] = misses - granted;
    plan.count_ahead(lane_index, used, wasted);
  }
};

}  // namespace pulseinfer
