#pragma once

/// One entry for each host block of a plan: what several rows hold together is read once and goes to a slot of each.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Writes the entries of the plan's rows first_row .. first_row + row_count - 1 into a list of one row in which no two have the
/// same source, and all targets of those that stood for one. Entries have the same source where host block and head group are
/// the same. The list has any order. One item.
struct join_entries {
  static constexpr char const* name = "join_entries";
  static constexpr operation_kind kind = operation_kind::metadata;
  static constexpr std::uint32_t nothing = 0xFFFFFFFFU;

  /// What is known of the entries that share a place of the table.
  struct found {
    std::uint32_t entry = nothing;  // the first of them
    std::uint32_t count = 0;
    std::uint32_t begin = 0;  // of their targets
  };
  /// Where an entry stands in the table, and which of its place's entries it is.
  struct standing {
    std::uint32_t place = 0;
    std::uint32_t number = 0;
  };

  recall_plan_ref plan = {};
  std::uint32_t first_row = 0;
  std::uint32_t row_count = 0;
  recall_entry* joined = nullptr;      // [plan.capacity] written
  target_span* of = nullptr;           // [plan.capacity] written
  slot_id* targets = nullptr;          // [plan.capacity] written
  std::uint32_t* row_begin = nullptr;  // [3] written: 0, how many there are, and how many targets
  found* table = nullptr;              // [table_places(plan.capacity)] used
  standing* stands = nullptr;          // [plan.capacity] used

  /// Places of the table for so many entries.
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr std::uint32_t table_places(std::uint32_t entries)
  {
    std::uint32_t places = 1;
    while (places < 2 * entries && places < 0x80000000U) { places *= 2; }
    return places;
  }

  [[nodiscard]] launch_shape shape() const { return {.items = row_count == 0 ? 0U : 1U, .group_threads = 1024}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t const count = plan.row_begin[first_row + row_count] - plan.row_begin[first_row];
    return {.device_bytes = count * (3 * sizeof(recall_entry) + 4 * sizeof(found))};
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t group_of(recall_entry const& entry) const
  {
    return plan.head_groups == 1 ? 0U : static_cast<std::uint32_t>(to_index(entry.lane) % plan.head_groups);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE bool same_source(recall_entry const& a, recall_entry const& b) const
  {
    return a.source == b.source && group_of(a) == group_of(b);
  }
  /// Where the search for an entry's place begins. Host blocks of a sequence are neighbours: the product spreads them.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t hash_of(recall_entry const& entry) const
  {
    std::uint32_t const mixed =
      (static_cast<std::uint32_t>(to_index(entry.source)) * plan.head_groups + group_of(entry)) * 0x9E3779B1U;
    return mixed ^ (mixed >> 16U);
  }

  /// A search for each entry by one thread.
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    std::uint32_t const begin = plan.row_begin[first_row];
    std::uint32_t const count = plan.row_begin[first_row + row_count] - begin;
    std::uint32_t const places = table_places(count);
    for (std::uint32_t i = 0; i < places; ++i) { table[i] = found{}; }
    recall_entry const* const entries = plan.entries + begin;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint32_t place = hash_of(entries[i]) & (places - 1);
      while (table[place].entry != nothing && !same_source(entries[table[place].entry], entries[i])) {
        place = (place + 1) & (places - 1);
      }
      if (table[place].entry == nothing) { table[place].entry = i; }
      stands[i] = {.place = place, .number = table[place].count++};
    }
    std::uint32_t listed = 0;
    std::uint32_t next = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      found& own = table[stands[i].place];
      if (own.entry != i) { continue; }
      own.begin = next;
      of[listed] = {.begin = next, .count = own.count == 1 ? 0U : own.count};
      joined[listed++] = entries[i];
      next += own.count == 1 ? 0U : own.count;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      found const& own = table[stands[i].place];
      if (own.count > 1) { targets[own.begin + stands[i].number] = entries[i].target; }
    }
    row_begin[0] = 0;
    row_begin[1] = listed;
    row_begin[2] = next;
  }
};

static_assert(operation<join_entries>);

}  // namespace pulseinfer
