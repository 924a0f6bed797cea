#pragma once

/// Tells the host what a recall moves.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/land.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// What plan_recall posts of its rows, behind it on the stream. Where the host needs to know only later, the copies need not wait
/// for words to reach it. One item is one row.
struct post_plan {
  static constexpr char const* name = "post_plan";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  lane_plan_ref lanes = {};                 // read
  row_mailbox* mailbox = nullptr;           // [max_rows], mapped
  std::uint32_t const* sequence = nullptr;  // [rows.count] number of each row's recall
  recall_failure* outcome = nullptr;        // [rows.count], mapped; may be null
  std::uint64_t block_bytes = 0;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = rows.count, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = rows.count * sizeof(row_mailbox)}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.thread_rank() != 0) { return; }
    row_id const row = rows[item];
    device::post_row(
      row, head_groups, lanes.counts(), block_bytes, mailbox[to_index(row)],
      outcome == nullptr ? nullptr : outcome + item, sequence[item]);
  }
};

static_assert(operation<post_plan>);

}  // namespace pulseinfer
