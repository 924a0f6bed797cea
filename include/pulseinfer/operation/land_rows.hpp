#pragma once

/// Ends recalls, row by row: as landed, or as failed.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/land.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

enum class landing : std::uint8_t { landed, failed };

/// One item per row of the plan's rows first_row .. first_row + row_count - 1: device::land_row, or device::fail_row. Comes
/// after the rows' copies in stream order.
struct land_rows {
  static constexpr char const* name = "land_rows";
  static constexpr operation_kind kind = operation_kind::metadata;

  recall_plan_ref plan = {};
  landed_ref landed = {};
  std::uint32_t first_row = 0;
  std::uint32_t row_count = 0;
  landing how = landing::landed;
  bool behind_gather = false;  ///< the work before it on the stream is a gather that began with the plan complete

  [[nodiscard]] launch_shape shape() const { return {.items = row_count, .group_threads = 32}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t const entries = plan.row_begin[first_row + row_count] - plan.row_begin[first_row];
    return {.device_bytes = entries * (sizeof(recall_entry) + sizeof(slot_word)) + row_count * sizeof(row_mailbox)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint32_t const place = first_row + static_cast<std::uint32_t>(item);
    if (how == landing::landed) {
      device::land_row(group, plan, landed, place);
    } else {
      device::fail_row(group, plan, landed, place);
    }
  }
};

static_assert(operation<land_rows>);

}  // namespace pulseinfer
