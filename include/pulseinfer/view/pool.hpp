#pragma once

/// Where slots, host blocks and digests lie.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Slots on the device. One pool for all layers repeats its base in `layer_base`; pools lent per layer have their own.
struct slot_pool_ref {
  std::byte* const* layer_base = nullptr;         // [layers], readable by host and device
  std::byte* const* device_layer_base = nullptr;  // the same in device memory, for kernels; null: they read the former
  std::uint64_t slot_stride = 0;                  ///< bytes from slot to slot
  std::uint32_t slots = 0;                        ///< slots that ids of one layer may name
  bool per_layer = false;                         ///< each layer numbers slots of its own

  /// The layer's first slot.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* base(layer_id layer) const
  {
#if defined(__CUDA_ARCH__)
    if (device_layer_base != nullptr) { return device_layer_base[to_index(layer)]; }
#endif
    return layer_base[to_index(layer)];
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* address(layer_id layer, slot_id slot) const
  {
    return base(layer) + to_index(slot) * slot_stride;
  }

  /// Place of a slot's words in arrays that hold the words of all slots of all layers.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint64_t word(layer_id layer, slot_id slot) const
  {
    return (per_layer ? to_index(layer) * slots : 0) + to_index(slot);
  }
};

static_assert(std::is_trivially_copyable_v<slot_pool_ref>);

/// Host blocks. One id names the same place in the slab of every (layer, head group), so neighbours in id are
/// neighbours in memory and a block of all layers is one allocation.
struct host_store_ref {
  std::byte* const* slab_base = nullptr;         // [layers, head_groups], readable by host and device
  std::byte* const* device_slab_base = nullptr;  // the same in device memory, for kernels; null: they read the former
  std::uint64_t block_stride = 0;                ///< bytes from block to block in a slab
  std::uint32_t head_groups = 1;
  std::uint32_t blocks = 0;

  /// The begins of a layer's slabs, by head group.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* const* slabs(layer_id layer) const
  {
#if defined(__CUDA_ARCH__)
    if (device_slab_base != nullptr) { return device_slab_base + to_index(layer) * head_groups; }
#endif
    return slab_base + to_index(layer) * head_groups;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* address(
    layer_id layer, std::uint32_t group, host_block_id block) const
  {
    return slabs(layer)[group] + to_index(block) * block_stride;
  }
};

static_assert(std::is_trivially_copyable_v<host_store_ref>);

/// Digests of a row, in extents of `extent_blocks` blocks that hold all layers.
struct digest_store_ref {
  std::byte* base = nullptr;                    // [extents, extent_bytes], device memory
  std::int32_t const* extent_of = nullptr;      // [rows, max_extents], device memory; -1 where none
  std::uint64_t const* layer_offset = nullptr;  // [layers] bytes from an extent's begin, device memory
  std::uint64_t const* block_bytes = nullptr;   // [layers] bytes of one block's digest, device memory
  std::uint64_t extent_bytes = 0;
  std::uint32_t extent_blocks = 0;
  std::uint32_t max_extents = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::byte* address(layer_id layer, row_id row, std::uint32_t block) const
  {
    std::int32_t const extent = extent_of[to_index(row) * max_extents + block / extent_blocks];
    return base + static_cast<std::uint64_t>(extent) * extent_bytes + layer_offset[to_index(layer)] +
      std::uint64_t{block % extent_blocks} * block_bytes[to_index(layer)];
  }
};

static_assert(std::is_trivially_copyable_v<digest_store_ref>);

}  // namespace pulseinfer
