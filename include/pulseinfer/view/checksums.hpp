#pragma once

/// Where the checksums of host blocks lie, in `verify` mode.

#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One word per plane of each host block in each (layer, head group), in memory that host and device read.
struct checksum_ref {
  std::uint32_t* sums = nullptr;  // [layers, head_groups, blocks, layout.plane_count]; null: nothing is verified
  std::uint32_t head_groups = 1;
  std::uint32_t blocks = 0;
  block_layout layout = {};

  [[nodiscard]] PULSEINFER_HOST_DEVICE bool enabled() const { return sums != nullptr; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t* of(layer_id layer, std::uint32_t group, host_block_id block) const
  {
    std::uint64_t const slab = to_index(layer) * head_groups + group;
    return sums + (slab * blocks + to_index(block)) * layout.plane_count;
  }
};

static_assert(std::is_trivially_copyable_v<checksum_ref>);

}  // namespace pulseinfer
