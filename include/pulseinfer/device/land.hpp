#pragma once

/// The end of a recall, row by row: slots become clean and the host is told.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/device/checksum.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstdint>

namespace pulseinfer::device {

namespace land_detail {

/// Takes a slot out of a list. Those behind it close up: attention that waits for the recall may read the list before the
/// host knows of the failure.
PULSEINFER_HOST_DEVICE inline void strike(slot_id* list, std::uint32_t& count, slot_id slot)
{
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (list[i] != slot) { list[kept++] = list[i]; }
  }
  for (std::uint32_t i = kept; i < count; ++i) { list[i] = none<slot_id>; }
  if (kept != count) { count = kept; }
}

/// A block that did not arrive is a miss again, its slot empty and in no list.
PULSEINFER_HOST_DEVICE inline void give_up(
  recall_plan_ref const& plan, landed_ref const& landed, recall_entry const& entry)
{
  slot_word& word = landed.residency.slots[plan.pool.word(plan.layer, entry.target)];
  word.state = slot_state::empty;
  word.ahead = 0;
  word.block = none<block_id>;
  landed.residency.slots_of_lane(plan.layer, entry.lane)[to_index(entry.block)] = none<slot_id>;
  lane_table_ref const& table = landed.table;
  if (table.listed == nullptr) { return; }
  std::uint64_t const books = landed.residency.lane_index(plan.layer, entry.lane);
  strike(table.listed + books * table.stride, table.listed_count[books], entry.target);
  strike(
    table.landed + to_index(entry.lane) * table.max_selected, table.landed_count[to_index(entry.lane)], entry.target);
}

PULSEINFER_HOST_DEVICE inline void post_failure(
  landed_ref const& landed, row_mailbox& box, std::uint32_t place, std::uint32_t begin, std::uint32_t blocks)
{
  if (landed.failed != nullptr) {
    landed.failed[place].blocks = blocks;
    landed.failed[place].begin = begin;
    store_release(&landed.failed[place].failed, 1U);
  }
  box.failed_blocks = blocks;
  box.failed_begin = begin;
  store_release(&box.failed, landed.sequence[place]);
}

/// Whether a block in its slot has the checksums that were taken of it before it went to the host.
[[nodiscard]] PULSEINFER_HOST_DEVICE inline bool is_whole(
  recall_plan_ref const& plan, checksum_ref const& checksums, recall_entry const& entry)
{
  auto const group = static_cast<std::uint32_t>(to_index(entry.lane) % plan.head_groups);
  std::uint32_t const* const sums = checksums.of(plan.layer, group, entry.source);
  std::byte const* const block = plan.pool.address(plan.layer, entry.target);
  for (std::uint32_t p = 0; p < checksums.layout.plane_count; ++p) {
    if (checksum_plane(block, checksums.layout, p) != sums[p]) { return false; }
  }
  return true;
}

}  // namespace land_detail

/// Tells the host what a recall moves of a row.
/// @param outcome may be null   @param number of the row's recall
PULSEINFER_HOST_DEVICE inline void post_row(
  row_id row, std::uint32_t head_groups, lane_counts_ref const& counts, std::uint64_t block_bytes, row_mailbox& box,
  recall_failure* outcome, std::uint32_t number)
{
  std::uint32_t planned = 0;
  std::uint32_t hits = 0;
  std::uint32_t flying = 0;
  std::uint32_t stalled = 0;
  for (std::uint32_t g = 0; g < head_groups; ++g) {
    std::uint64_t const lane = to_index(lane_of(row, g, head_groups));
    planned += counts.misses[lane];
    hits += counts.hits[lane];
    flying += counts.flying[lane];
    stalled += counts.stalled[lane];
  }
  box.bytes = planned * block_bytes;
  box.misses = planned;
  box.flying = flying;
  box.hits = hits;
  box.stalled = stalled;
  if (outcome != nullptr) {
    outcome->planned = planned;
    outcome->hits = hits;
    store_release(&outcome->stalled, stalled);
    store_release(&outcome->flying, flying);
  }
  add_relaxed(&box.total_misses, planned);
  add_relaxed(&box.total_hits, hits);
  store_release(&box.posted, number);
}

namespace land_detail {

/// Posts what is to be posted with the landing. One thread.
PULSEINFER_HOST_DEVICE inline void post(recall_plan_ref const& plan, landed_ref const& landed, std::uint32_t place)
{
  if (landed.counts.misses == nullptr) { return; }
  row_id const row = plan.rows[place];
  post_row(
    row, plan.head_groups, landed.counts, plan.block_bytes, landed.mailbox[to_index(row)],
    landed.failed == nullptr ? nullptr : landed.failed + place, landed.sequence[place]);
}

}  // namespace land_detail

/// Ends the recall of the plan's row `place`: blocks that arrived are clean, those that the plan marks as failed are misses
/// again and named in landed.failures. Posts the row as landed, or as failed if any block failed, and before that what was planned where
/// landed.counts say so.
/// @param place index into plan.rows   @sync one before the post; the copies of the row must be visible before the call
template <thread_group Group>
PULSEINFER_HOST_DEVICE void land_row(
  Group const& group, recall_plan_ref const& plan, landed_ref const& landed, std::uint32_t place)
{
  std::uint32_t const begin = plan.row_begin[place];
  std::uint32_t const end = plan.row_begin[place + 1];
  for (std::uint32_t i = begin + group.thread_rank(); i < end; i += group.size()) {
    if (landed.checksums.enabled() && !land_detail::is_whole(plan, landed.checksums, plan.entries[i])) {
      plan.failed[i] = 1;
    }
    if (plan.failed != nullptr && plan.failed[i] != 0) { continue; }
    landed.residency.slots[plan.pool.word(plan.layer, plan.entries[i].target)].state = slot_state::clean;
  }
  group.sync();
  if (group.thread_rank() != 0) { return; }
  land_detail::post(plan, landed, place);
  std::uint32_t failed = 0;
  for (std::uint32_t i = begin; i < end && plan.failed != nullptr; ++i) {
    if (plan.failed[i] == 0) { continue; }
    land_detail::give_up(plan, landed, plan.entries[i]);
    if (landed.failures != nullptr) { landed.failures[begin + failed] = plan.entries[i]; }
    ++failed;
  }
  row_mailbox& box = landed.mailbox[to_index(plan.rows[place])];
  if (failed == 0) {
    store_release(&box.landed, landed.sequence[place]);
  } else {
    land_detail::post_failure(landed, box, place, begin, failed);
  }
}

/// Ends the recall of the plan's row `place` without its blocks: those that still travel are misses again, the row is posted
/// as failed, also where it has no entries. A row that has been posted already, for this recall or a later one, and of which
/// nothing travels is left as it is: blocks that landed may have given their slots to others since.
template <thread_group Group>
PULSEINFER_HOST_DEVICE void fail_row(
  Group const& group, recall_plan_ref const& plan, landed_ref const& landed, std::uint32_t place)
{
  if (group.thread_rank() != 0) { return; }
  land_detail::post(plan, landed, place);
  row_mailbox& box = landed.mailbox[to_index(plan.rows[place])];
  std::uint32_t const number = landed.sequence[place];
  bool const posted = static_cast<std::int32_t>(load_acquire(&box.landed) - number) >= 0 ||
    static_cast<std::int32_t>(load_acquire(&box.failed) - number) >= 0;
  std::uint32_t const begin = plan.row_begin[place];
  std::uint32_t const end = plan.row_begin[place + 1];
  std::uint32_t given_up = 0;
  for (std::uint32_t i = begin; i < end; ++i) {
    recall_entry const& entry = plan.entries[i];
    slot_word const& word = landed.residency.slots[plan.pool.word(plan.layer, entry.target)];
    if (word.state != slot_state::in_flight || word.block != entry.block) { continue; }
    land_detail::give_up(plan, landed, entry);
    if (landed.failures != nullptr) { landed.failures[begin + given_up] = entry; }
    ++given_up;
  }
  if (posted && given_up == 0) { return; }
  land_detail::post_failure(landed, box, place, begin, given_up);
}

}  // namespace pulseinfer::device
