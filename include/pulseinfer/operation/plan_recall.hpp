#pragma once

/// Gathers the misses of all lanes into one plan and tells the host what travels.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/operation/post_plan.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// One item: the lists are short and their order is the plan's meaning.
struct plan_recall {
  static constexpr char const* name = "plan_recall";
  static constexpr operation_kind kind = operation_kind::metadata;

  row_list rows = {};
  lane_plan_ref lanes = {};
  recall_entry* entries = nullptr;          // written, [rows.count * head_groups * max_selected]
  std::uint32_t* row_begin = nullptr;       // written, [rows.count + 1]
  std::uint32_t* failed = nullptr;          // written 0 for each entry
  row_mailbox* mailbox = nullptr;           // [max_rows], mapped
  std::uint32_t const* sequence = nullptr;  // [rows.count] number of each row's recall
  recall_failure* outcome = nullptr;        // [rows.count], mapped; may be null
  std::uint64_t block_bytes = 0;
  std::uint32_t head_groups = 1;
  std::uint32_t max_selected = 0;
  bool posts = true;  ///< else post_plan does

  [[nodiscard]] launch_shape shape() const { return {.items = rows.count == 0 ? 0U : 1U, .group_threads = 256}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t planned = 0;
    for (std::uint32_t place = 0; place < rows.count; ++place) {
      for (std::uint32_t g = 0; g < head_groups; ++g) { planned += lanes.misses[lane_index(place, g)]; }
    }
    return {.device_bytes = planned * 32};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t, scratch_ref) const
  {
    if (group.thread_rank() == 0) {
      std::uint32_t begin = 0;
      for (std::uint32_t place = 0; place < rows.count; ++place) {
        row_begin[place] = begin;
        for (std::uint32_t g = 0; g < head_groups; ++g) { begin += lanes.misses[lane_index(place, g)]; }
      }
      row_begin[rows.count] = begin;
    }
    group.sync();
    for (std::uint32_t place = 0; place < rows.count; ++place) {
      std::uint32_t target = row_begin[place];
      for (std::uint32_t g = 0; g < head_groups; ++g) {
        std::uint64_t const lane = lane_index(place, g);
        for (std::uint32_t i = group.thread_rank(); i < lanes.misses[lane]; i += group.size()) {
          entries[target + i] = lanes.entries[lane * max_selected + i];
          failed[target + i] = 0;
        }
        target += lanes.misses[lane];
      }
    }
    if (!posts) { return; }
    group.sync();
    device::solo_group const alone{};
    post_plan const post = posting();
    for (std::uint32_t place = group.thread_rank(); place < rows.count; place += group.size()) {
      post(alone, place, {});
    }
  }

  /// What the plan posts, as an operation of its own.
  [[nodiscard]] PULSEINFER_HOST_DEVICE post_plan posting() const
  {
    return {
      .rows = rows,
      .lanes = lanes,
      .mailbox = mailbox,
      .sequence = sequence,
      .outcome = outcome,
      .block_bytes = block_bytes,
      .head_groups = head_groups};
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint64_t lane_index(std::uint32_t place, std::uint32_t g) const
  {
    return to_index(lane_of(rows[place], g, head_groups));
  }
};

static_assert(operation<plan_recall>);

}  // namespace pulseinfer
