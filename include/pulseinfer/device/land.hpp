#pragma once

/// The end of a recall, row by row: slots become clean and the host is told.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Marks the blocks of the plan's row `place` as arrived and posts the row as landed.
/// @param place index into plan.rows   @sync one before the post; the copies of the row must be visible before the call
template <thread_group Group>
PULSEINFER_HOST_DEVICE void land_row(
  Group const& group, recall_plan_ref const& plan, landed_ref const& landed, std::uint32_t place)
{
  std::uint32_t const begin = plan.row_begin[place];
  std::uint32_t const end = plan.row_begin[place + 1];
  for (std::uint32_t i = begin + group.thread_rank(); i < end; i += group.size()) {
    landed.residency.slots[plan.pool.word(plan.layer, plan.entries[i].target)].state = slot_state::clean;
  }
  group.sync();
  if (group.thread_rank() == 0) {
    store_release(&landed.mailbox[to_index(plan.rows[place])].landed, landed.sequence[place]);
  }
}

/// Gives the slots of the plan's row `place` back and posts the row as failed: its blocks are misses again.
template <thread_group Group>
PULSEINFER_HOST_DEVICE void fail_row(
  Group const& group, recall_plan_ref const& plan, landed_ref const& landed, std::uint32_t place)
{
  std::uint32_t const begin = plan.row_begin[place];
  std::uint32_t const end = plan.row_begin[place + 1];
  for (std::uint32_t i = begin + group.thread_rank(); i < end; i += group.size()) {
    recall_entry const& entry = plan.entries[i];
    slot_word& word = landed.residency.slots[plan.pool.word(plan.layer, entry.target)];
    word.state = slot_state::empty;
    word.block = none<block_id>;
    landed.residency.slots_of_lane(plan.layer, entry.lane)[to_index(entry.block)] = none<slot_id>;
  }
  group.sync();
  if (group.thread_rank() == 0) {
    store_release(&landed.mailbox[to_index(plan.rows[place])].failed, landed.sequence[place]);
  }
}

}  // namespace pulseinfer::device
