#pragma once

/// Moves runs that the host names, by threads in place of the copy engine.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/copy_bytes.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// The runs travel with the launch, so that nothing of the host's must live until it has run. Addresses of any alignment. The
/// items are a fixed number of groups, whose warps take 4 KiB tiles of all runs in turn; one thread alone takes an equal part
/// of the runs.
struct move_runs {
  static constexpr char const* name = "move_runs";
  static constexpr operation_kind kind = operation_kind::data;
  static constexpr std::uint32_t most_runs = 40;
  static constexpr std::uint64_t tile_bytes = 4096;

  copy_run runs[most_runs] = {};
  std::uint32_t count = 0;
  std::uint32_t groups = 8;
  copy_direction direction = copy_direction::host_to_device;

  [[nodiscard]] launch_shape shape() const { return {.items = count == 0 ? 0U : groups, .group_threads = 512}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < count; ++i) { bytes += runs[i].bytes; }
    if (direction == copy_direction::device_to_device) { return {.device_bytes = 2 * bytes}; }
    return {
      .device_bytes = bytes,
      .link_bytes = bytes,
      .link_runs = count,
      .to_host = direction == copy_direction::device_to_host};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    if (group.size() == 1) {
      std::uint64_t const end = count * (item + 1) / groups;
      for (std::uint64_t i = count * item / groups; i < end; ++i) {
        device::copy_bytes(runs[i].target, runs[i].source, runs[i].bytes, 0, 1);
      }
      return;
    }
    std::uint32_t const lanes = group.size() < 32U ? group.size() : 32U;
    std::uint32_t const warps = group.size() / lanes;
    std::uint32_t const warp = group.thread_rank() / lanes;
    if (warp >= warps) { return; }
    std::uint64_t const stride = std::uint64_t{groups} * warps;
    std::uint64_t tile = item * warps + warp;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t const tiles = (runs[i].bytes + tile_bytes - 1) / tile_bytes;
      for (; tile < tiles; tile += stride) {
        std::uint64_t const offset = tile * tile_bytes;
        std::uint64_t const rest = runs[i].bytes - offset;
        device::copy_bytes(
          runs[i].target + offset, runs[i].source + offset, rest < tile_bytes ? rest : tile_bytes,
          group.thread_rank() % lanes, lanes);
      }
      tile -= tiles;  // counted from the next run's begin
    }
  }
};

static_assert(operation<move_runs>);

}  // namespace pulseinfer
