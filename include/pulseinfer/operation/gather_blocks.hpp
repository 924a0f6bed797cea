#pragma once

/// Brings the blocks of a recall plan from the host store into their slots.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/copy_bytes.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Moves the entries of the plan's rows first_row .. first_row + row_count - 1. The plan is read when the operation runs, so
/// it may be made by earlier work on the stream. Addresses of any alignment.
///
/// The items are a fixed number of groups that share the work out among themselves, whatever the number of entries: more
/// groups than a handful buy nothing on the link and slow their neighbours. Warps take 4 KiB tiles of the output in turn, over
/// all entries. One thread alone takes an equal part of the entries and moves neighbours in host and slot memory as one run.
///
/// A list that join_entries made names each host block once; `further` then says which slots it goes to.
struct gather_blocks {
  static constexpr char const* name = "gather_blocks";
  static constexpr operation_kind kind = operation_kind::data;
  static constexpr std::uint64_t tile_bytes = 4096;

  recall_plan_ref plan = {};
  std::uint32_t first_row = 0;
  std::uint32_t row_count = 0;
  std::uint32_t groups = 8;
  further_targets_ref further = {};

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = row_count == 0 || plan.capacity == 0 ? 0U : groups, .group_threads = 512};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  /// Runs: pieces that are contiguous in host memory and in slots.
  [[nodiscard]] operation_cost cost() const
  {
    std::uint32_t const end = entries_end();
    std::uint64_t runs = 0;
    for (std::uint32_t i = entries_begin(); i < end; i = run_end(i, end)) { ++runs; }
    std::uint64_t const bytes = (end - entries_begin()) * plan.block_bytes;
    std::uint64_t written = 0;
    for (std::uint32_t i = entries_begin(); i < end; ++i) { written += targets(i) * plan.block_bytes; }
    return {.device_bytes = written, .link_bytes = bytes, .link_runs = runs};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint64_t const begin = entries_begin();
    std::uint64_t const count = entries_end() - begin;
    if (group.size() == 1) {
      auto const part = [&](std::uint64_t of) { return static_cast<std::uint32_t>(begin + count * of / groups); };
      std::uint32_t const end = part(item + 1);
      for (std::uint32_t i = part(item); i < end;) {
        std::uint32_t const next = run_end(i, end);
        for (std::uint32_t t = 0; t < targets(i); ++t) {
          device::copy_bytes(target(i, t), source(i), (next - i) * plan.block_bytes, 0, 1);
        }
        i = next;
      }
      return;
    }
    std::uint32_t const lanes = group.size() < 32U ? group.size() : 32U;
    std::uint32_t const warps = group.size() / lanes;
    std::uint32_t const warp = group.thread_rank() / lanes;
    if (warp >= warps) { return; }
    std::uint64_t const tiles_per_block = (plan.block_bytes + tile_bytes - 1) / tile_bytes;
    std::uint64_t const stride = std::uint64_t{groups} * warps;
    for (std::uint64_t tile = item * warps + warp; tile < count * tiles_per_block; tile += stride) {
      std::uint32_t const entry = static_cast<std::uint32_t>(begin + tile / tiles_per_block);
      std::uint64_t const offset = tile % tiles_per_block * tile_bytes;
      std::uint64_t const rest = plan.block_bytes - offset;
      for (std::uint32_t t = 0; t < targets(entry); ++t) {
        device::copy_bytes(
          target(entry, t) + offset, source(entry) + offset, rest < tile_bytes ? rest : tile_bytes,
          group.thread_rank() % lanes, lanes);
      }
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t entries_begin() const { return plan.row_begin[first_row]; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t entries_end() const
  {
    return plan.row_begin[first_row + row_count];
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte const* source(std::uint32_t place) const
  {
    recall_entry const& entry = plan.entries[place];
    std::uint32_t const group = static_cast<std::uint32_t>(to_index(entry.lane) % plan.head_groups);
    return plan.host.address(plan.layer, group, entry.source);
  }
  /// Slots that the block of an entry goes to.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t targets(std::uint32_t place) const
  {
    return is_shared(place) ? further.of[place].count : 1U;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* target(std::uint32_t place, std::uint32_t number = 0) const
  {
    slot_id const slot =
      is_shared(place) ? further.targets[further.of[place].begin + number] : plan.entries[place].target;
    return plan.pool.address(plan.layer, slot);
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE bool is_shared(std::uint32_t place) const
  {
    return further.of != nullptr && further.of[place].count != 0;
  }

  /// End of the run of neighbours that begins at entry `begin`.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t run_end(std::uint32_t begin, std::uint32_t end) const
  {
    std::uint32_t next = begin + 1;
    if (is_shared(begin)) { return next; }
    while (next < end && !is_shared(next) && source(next) == source(next - 1) + plan.block_bytes &&
           target(next) == target(next - 1) + plan.block_bytes) {
      ++next;
    }
    return next;
  }
};

static_assert(operation<gather_blocks>);

}  // namespace pulseinfer
