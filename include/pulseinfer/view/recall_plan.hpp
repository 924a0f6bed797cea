#pragma once

/// The copies of one recall, made on the device by `resolve`.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/checksums.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One block to bring.
struct recall_entry {
  host_block_id source = none<host_block_id>;
  slot_id target = none<slot_id>;
  lane_id lane = none<lane_id>;
  block_id block = none<block_id>;
};

static_assert(std::is_trivially_copyable_v<recall_entry> && sizeof(recall_entry) == 16);

/// Demand recalls block a row; background recalls do not, and give way.
enum class recall_priority : std::uint8_t { demand, background };

/// Where a plan is read. `device`: the transfer engine launches before the plan exists and reads it in stream order.
/// `host`: the engine is called once the plan is known to the host.
enum class plan_place : std::uint8_t { device, host };

/// Misses of all rows of a recall in one list, in the order of `rows`, within a row by lane and ascending block.
struct recall_plan_ref {
  recall_entry const* entries = nullptr;  // [row_begin[rows.count]], at most `capacity`; readable where plans_on says
  std::uint32_t const* row_begin = nullptr;  // [rows.count + 1]
  std::uint32_t* failed = nullptr;           // [capacity] 1: the entry's copy was refused or did not arrive whole
  row_list rows = {};
  host_store_ref host = {};
  slot_pool_ref pool = {};
  layer_id layer = none<layer_id>;
  std::uint32_t head_groups = 1;
  std::uint64_t block_bytes = 0;
  std::uint32_t capacity = 0;  ///< host-known bound of the entries
  recall_priority priority = recall_priority::demand;
  bool may_share = false;    ///< rows of it hold host blocks together: entries of theirs may have the same source
  bool behind_plan = false;  ///< the work before on the stream is the plan_recall that makes it
};

static_assert(std::is_trivially_copyable_v<recall_plan_ref>);

/// Where the targets of an entry lie that stands for several.
struct target_span {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;  ///< 0: the entry stands for itself alone
};

/// The slots that a list's blocks go to, where one entry stands for all that have its source.
struct further_targets_ref {
  target_span const* of = nullptr;   // [entries of the list]; null: every entry stands for itself
  slot_id const* targets = nullptr;  // all targets of an entry that stands for several, its own among them
};

static_assert(std::is_trivially_copyable_v<further_targets_ref>);

/// Lists that attention reads, by lane.
struct lane_table_ref {
  slot_id* listed = nullptr;              // [layers, lanes, stride] all selected blocks, or the hits alone
  std::uint32_t* listed_count = nullptr;  // [layers, lanes]
  slot_id* landed = nullptr;              // [lanes, max_selected] the blocks that travel
  std::uint32_t* landed_count = nullptr;  // [lanes]
  std::uint32_t stride = 0;
  std::uint32_t max_selected = 0;
};

static_assert(std::is_trivially_copyable_v<lane_table_ref>);

/// What is known of one row's recall, in mapped memory. The mailbox speaks of a row's latest recall, these words of the recall
/// that they belong to, until its place is given out again. The plan writes `stalled`, `flying`, `planned` and `hits`, the landing
/// the others.
struct recall_failure {
  std::uint32_t blocks = 0;   ///< that did not arrive
  std::uint32_t begin = 0;    ///< place of the first of them in landed_ref::failures
  std::uint32_t failed = 0;   ///< 1: the counts above are there
  std::uint32_t stalled = 0;  ///< selected blocks that found no slot
  std::uint32_t flying = 0;   ///< selected blocks that another recall brings
  std::uint32_t planned = 0;  ///< blocks that the recall moves
  std::uint32_t hits = 0;     ///< selected blocks that were resident
};

static_assert(std::is_trivially_copyable_v<recall_failure>);

/// What resolving a row's selection came to, by lane.
struct lane_counts_ref {
  std::uint32_t const* misses = nullptr;  // [lanes] that got a slot
  std::uint32_t const* hits = nullptr;
  std::uint32_t const* flying = nullptr;   // selected blocks that an earlier recall still brings
  std::uint32_t const* stalled = nullptr;  // selected blocks for which no slot could be freed
};

static_assert(std::is_trivially_copyable_v<lane_counts_ref>);

/// What an engine does once the blocks of a row are in their slots: `device::land_row`.
struct landed_ref {
  row_mailbox* mailbox = nullptr;           // [max_rows], mapped
  std::uint32_t const* sequence = nullptr;  // [rows.count] number of each row's recall, in the plan's row order
  residency_ref residency = {};
  lane_table_ref table = {};         // entries of blocks that did not arrive are taken out; may be empty
  checksum_ref checksums = {};       // verify mode: blocks whose planes differ from these did not arrive
  recall_entry* failures = nullptr;  // [capacity], mapped: the entries that failed, each row's from its row_begin on
  recall_failure* failed = nullptr;  // [rows.count], mapped, in the plan's row order; may be null
  lane_counts_ref counts = {};       // a plan that is posted with the landing; null: it has been posted
};

static_assert(std::is_trivially_copyable_v<landed_ref>);

}  // namespace pulseinfer
