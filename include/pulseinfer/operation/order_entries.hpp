#pragma once

/// Puts a plan's entries in the order of their host addresses, coarsely: small blocks all over the host's memory come faster
/// when neighbours in memory come together.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Writes the entries of the plan's rows first_row .. first_row + row_count - 1 into a list of one row, by stretches of host
/// memory. Within a stretch they have any order. One item.
/// @source measured: multiprocessors read blocks of less than 2 KiB that lie in random order at a rate that address translation
/// bounds, by a 2 MiB stretch after the other at that of the link (benchmarks/results/h200/recall.json)
struct order_entries {
  static constexpr char const* name = "order_entries";
  static constexpr operation_kind kind = operation_kind::metadata;
  /// Blocks of so many bytes and more are as fast in any order.
  static constexpr std::uint64_t ordered_below_bytes = 2048;
  static constexpr std::uint64_t stretch_bytes = std::uint64_t{2} << 20U;
  /// Stretches are longer in stores that would have more.
  static constexpr std::uint32_t most_stretches = 8192;

  recall_plan_ref plan = {};
  std::uint32_t first_row = 0;
  std::uint32_t row_count = 0;
  recall_entry* ordered = nullptr;     // [plan.capacity] written
  std::uint32_t* row_begin = nullptr;  // [2] written: 0, and how many there are

  [[nodiscard]] launch_shape shape() const { return {.items = row_count == 0 ? 0U : 1U, .group_threads = 1024}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const
  {
    return std::size_t{stretches()} * sizeof(std::uint32_t);
  }
  [[nodiscard]] operation_cost cost() const
  {
    return {
      .device_bytes =
        3ULL * sizeof(recall_entry) * (plan.row_begin[first_row + row_count] - plan.row_begin[first_row])};
  }

  /// Host blocks of a stretch.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t stretch_blocks() const
  {
    std::uint64_t const stride = plan.host.block_stride == 0 ? 1 : plan.host.block_stride;
    std::uint64_t const of_bytes = stride >= stretch_bytes ? 1 : stretch_bytes / stride;
    std::uint32_t const of_group = most_stretches / plan.head_groups == 0 ? 1 : most_stretches / plan.head_groups;
    std::uint64_t const least = divide_up(plan.host.blocks, of_group);
    return static_cast<std::uint32_t>(of_bytes > least ? of_bytes : least);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t group_stretches() const
  {
    return divide_up(plan.host.blocks, stretch_blocks());
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t stretches() const { return plan.head_groups * group_stretches(); }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t stretch_of(
    recall_entry const& entry, std::uint32_t blocks, std::uint32_t of_group) const
  {
    // 32 bits divide several times as fast.
    std::uint32_t const group =
      plan.head_groups == 1 ? 0U : static_cast<std::uint32_t>(to_number(entry.lane)) % plan.head_groups;
    return group * of_group + static_cast<std::uint32_t>(to_index(entry.source)) / blocks;
  }

  /// A counting sort by one thread.
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t, scratch_ref scratch) const
  {
    if (group.thread_rank() != 0) { return; }
    auto* const places = reinterpret_cast<std::uint32_t*>(scratch.data);
    std::uint32_t const blocks = stretch_blocks();
    std::uint32_t const of_group = group_stretches();
    std::uint32_t const begin = plan.row_begin[first_row];
    std::uint32_t const end = plan.row_begin[first_row + row_count];
    for (std::uint32_t i = 0; i < stretches(); ++i) { places[i] = 0; }
    for (std::uint32_t i = begin; i < end; ++i) { ++places[stretch_of(plan.entries[i], blocks, of_group)]; }
    std::uint32_t next = 0;
    for (std::uint32_t i = 0; i < stretches(); ++i) {
      std::uint32_t const count = places[i];
      places[i] = next;
      next += count;
    }
    for (std::uint32_t i = begin; i < end; ++i) {
      ordered[places[stretch_of(plan.entries[i], blocks, of_group)]++] = plan.entries[i];
    }
    row_begin[0] = 0;
    row_begin[1] = end - begin;
  }
};

static_assert(operation<order_entries>);

}  // namespace pulseinfer
