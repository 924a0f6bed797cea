#pragma once

/// Lists the slots of a half that attention reads next, for the one row whose blocks are in it.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item per head group: the lane's list becomes `count` neighbouring slots, the places behind them none.
struct list_stream {
  static constexpr char const* name = "list_stream";
  static constexpr operation_kind kind = operation_kind::metadata;

  slot_id* slots = nullptr;         // [lanes, stride]
  std::uint32_t* counts = nullptr;  // [lanes]
  row_id row = none<row_id>;
  slot_id first =
    none<slot_id>;  ///< the half's first slot; head group g has the `stride` slots from first + g * stride on
  std::uint32_t count = 0;
  std::uint32_t stride = 0;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = head_groups, .group_threads = 128}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = std::uint64_t{head_groups} * (stride + 1) * 4}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint64_t const lane = to_index(lane_of(row, static_cast<std::uint32_t>(item), head_groups));
    auto const begin = static_cast<std::uint32_t>(to_index(first) + item * stride);
    for (std::uint32_t i = group.thread_rank(); i < stride; i += group.size()) {
      slots[lane * stride + i] = i < count ? static_cast<slot_id>(begin + i) : none<slot_id>;
    }
    if (group.thread_rank() == 0) { counts[lane] = count; }
  }
};

static_assert(operation<list_stream>);

}  // namespace pulseinfer
