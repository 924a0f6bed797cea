#pragma once

/// Takes the checksums of blocks before they are written back.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/checksum.hpp>
#include <pulseinfer/layout/block_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

struct checksum_job {
  std::byte const* block = nullptr;  ///< device memory
  std::uint32_t* sums = nullptr;     // [layout.plane_count], written
};

static_assert(std::is_trivially_copyable_v<checksum_job>);

/// One item per block.
struct checksum_blocks {
  static constexpr char const* name = "checksum_blocks";
  static constexpr operation_kind kind = operation_kind::data;

  checksum_job const* jobs = nullptr;  // [count], readable by the device until the launch has run
  std::uint32_t count = 0;
  block_layout layout = {};

  [[nodiscard]] launch_shape shape() const { return {.items = count, .group_threads = 32}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = count * layout.block_bytes}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    checksum_job const job = jobs[item];
    for (std::uint32_t p = group.thread_rank(); p < layout.plane_count; p += group.size()) {
      job.sums[p] = device::checksum_plane(job.block, layout, p);
    }
  }
};

static_assert(operation<checksum_blocks>);

}  // namespace pulseinfer
