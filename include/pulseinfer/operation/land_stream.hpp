#pragma once

/// The end of a streamed chunk: the row's words say that it was reached, and what did not arrive.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/device/checksum.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/checksums.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/stream_box.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Stands behind the chunk's copies, in the order of a row's chunks. Where copies fail, so that what stands behind them does
/// not run, the row's next chunk finds that one is missing. With checksums the blocks are looked at too.
struct land_stream {
  static constexpr char const* name = "land_stream";
  static constexpr operation_kind kind = operation_kind::metadata;

  stream_box* box = nullptr;
  stream_chunk chunk = {};
  stream_chunk before = {};  ///< the row's chunk before this one; number 0 where there is none
  checksum_ref checksums = {};
  slot_pool_ref pool = {};
  host_block_id const* host_blocks =
    nullptr;                      // [block_count] of the chunk's blocks, device memory; read with checksums
  slot_id first = none<slot_id>;  ///< head group g has the slots from first + g * stride on
  std::uint32_t stride = 0;
  std::uint32_t head_groups = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = 1, .group_threads = 128}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    return group_threads * sizeof(std::uint32_t);
  }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = sizeof(stream_box)}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t, scratch_ref scratch) const
  {
    // The first damaged block has the most blocks from itself on.
    std::uint32_t behind = 0;
    if (checksums.enabled()) {
      for (std::uint32_t i = group.thread_rank(); i < chunk.block_count; i += group.size()) {
        if (behind == 0 && !is_whole(i)) { behind = chunk.block_count - i; }
      }
      behind = device::reduce(group, behind, reinterpret_cast<std::uint32_t*>(scratch.data), device::maximum{});
    }
    if (group.thread_rank() != 0) { return; }
    bool const missing = box->seen != before.number;
    if (box->failed == 0 && (missing || behind != 0)) {
      box->lost = missing ? before : chunk;
      if (!missing) {
        box->lost.first_block += chunk.block_count - behind;
        box->lost.block_count = 1;
      }
      device::store_release(&box->failed, 1U);
    }
    device::store_release(&box->seen, chunk.number);
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE bool is_whole(std::uint32_t block) const
  {
    for (std::uint32_t g = 0; g < head_groups; ++g) {
      auto const slot = static_cast<slot_id>(to_index(first) + std::uint64_t{g} * stride + block);
      std::byte const* const bytes = pool.address(chunk.layer, slot);
      std::uint32_t const* const sums = checksums.of(chunk.layer, g, host_blocks[block]);
      for (std::uint32_t p = 0; p < checksums.layout.plane_count; ++p) {
        if (device::checksum_plane(bytes, checksums.layout, p) != sums[p]) { return false; }
      }
    }
    return true;
  }
};

static_assert(operation<land_stream>);

}  // namespace pulseinfer
