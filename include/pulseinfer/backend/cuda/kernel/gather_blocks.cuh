#pragma once

/// gather_blocks for the link: reads of mapped host memory that keep many requests in flight from few multiprocessors.

#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/entry_list.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pulseinfer::detail {

/// Threads of a block of the gather. @source transfer study: 512 threads with eight 16-byte loads each reach the link's limit for
/// reads by multiprocessors with 4 blocks; more threads or blocks add nothing
inline constexpr std::uint32_t gather_threads = 512;
/// More blocks slow the kernels beside them and bring nothing.
inline constexpr std::uint32_t most_gather_blocks = 12;
inline constexpr std::uint32_t gather_loads = 8;

/// A lane of `Width` bytes.
template <std::uint32_t Width>
struct gather_lane;
template <>
struct gather_lane<16> {
  std::uint32_t x, y, z, w;
  __device__ void load(std::byte const* from)
  {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "l"(from));
  }
  __device__ void store(std::byte* to) const
  {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
  }
};
template <>
struct gather_lane<8> {
  std::uint64_t x;
  __device__ void load(std::byte const* from)
  {
    asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(x) : "l"(from));
  }
  __device__ void store(std::byte* to) const
  {
    asm volatile("st.global.L1::no_allocate.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
  }
};
template <>
struct gather_lane<4> {
  std::uint32_t x;
  __device__ void load(std::byte const* from)
  {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from));
  }
  __device__ void store(std::byte* to) const
  {
    asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
  }
};
template <>
struct gather_lane<1> {
  std::uint32_t x;
  __device__ void load(std::byte const* from)
  {
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(from));
  }
  __device__ void store(std::byte* to) const
  {
    asm volatile("st.global.L1::no_allocate.u8 [%0], %1;" ::"l"(to), "r"(x) : "memory");
  }
};

/// What all blocks of the gather know of its plan.
struct gather_scene {
  recall_entry const* entries;    // of the first row on
  std::byte const* const* slabs;  // [head_groups] of the layer
  std::byte* slots;
  std::uint64_t block_stride;
  std::uint64_t slot_stride;
  std::uint32_t block_bytes;
  std::uint32_t head_groups;
  std::uint32_t count;
  further_targets_ref further;  // of the first row on
  recall_entry first;           // of the warp, for lanes of 16 bytes
  bool has_first;
};

struct gather_ends {
  std::byte const* source;
  std::byte* target;
};

[[nodiscard]] __device__ inline gather_ends ends_of(gather_scene const& scene, recall_entry const& entry)
{
  std::uint32_t const group =
    scene.head_groups == 1 ? 0U : static_cast<std::uint32_t>(to_number(entry.lane)) % scene.head_groups;
  return {
    scene.slabs[group] + to_index(entry.source) * scene.block_stride,
    scene.slots + to_index(entry.target) * scene.slot_stride};
}

[[nodiscard]] __device__ inline target_span load_span(gather_scene const& scene, std::uint32_t place)
{
  uint2 const words = __ldg(reinterpret_cast<uint2 const*>(scene.further.of + place));
  return {words.x, words.y};
}

/// Calls store(slot) for each of a span's slots, by all lanes of a warp together.
template <class Store>
__device__ inline void for_each_target(gather_scene const& scene, target_span span, Store store)
{
  std::uint32_t const lane = threadIdx.x % 32U;
  for (std::uint32_t first = 0; first < span.count; first += 32U) {
    std::uint32_t const rest = span.count - first;
    auto const* const slots = reinterpret_cast<std::int32_t const*>(scene.further.targets + span.begin + first);
    std::int32_t const own = lane < rest ? __ldg(slots + lane) : 0;
    for (std::uint32_t i = 0; i < (rest < 32U ? rest : 32U); ++i) {
      store(static_cast<slot_id>(__shfl_sync(0xFFFFFFFFU, own, static_cast<int>(i))));
    }
  }
}

/// Blocks of a tile or more: a warp takes pieces of one block, and reads the next piece's entry while its loads fly.
template <std::uint32_t Width, bool Shared>
__device__ void gather_tiles(gather_scene const& scene, std::uint32_t warp, std::uint32_t warps)
{
  using lane_type = gather_lane<Width>;
  constexpr std::uint32_t tile_bytes = 32 * gather_loads * Width;
  std::uint32_t const lane = threadIdx.x % 32U;
  std::uint32_t const tiles_per_block = divide_up(scene.block_bytes, tile_bytes);
  std::uint32_t const entry_step = warps / tiles_per_block;
  std::uint32_t const tile_step = warps % tiles_per_block;
  std::uint32_t place = warp / tiles_per_block;
  std::uint32_t tile = warp % tiles_per_block;
  recall_entry entry{};
  target_span span{};
  auto const look = [&] {
    if (place >= scene.count) { return; }
    entry = load_entry(scene.entries + place);
    if constexpr (Shared) { span = load_span(scene, place); }
  };
  if (!Shared && Width == 16U && scene.has_first) {
    entry = scene.first;
  } else {
    look();
  }
  while (place < scene.count) {
    gather_ends const ends = ends_of(scene, entry);
    target_span const together = span;
    std::uint32_t const begin = tile * tile_bytes;
    std::uint32_t const rest = scene.block_bytes - begin;
    lane_type values[gather_loads];
    bool const whole = rest >= tile_bytes;
    std::uint32_t const lanes = whole ? 32 * gather_loads : rest / Width;
    std::byte const* const source = ends.source + begin + lane * Width;
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      if (whole || lane + i * 32U < lanes) { values[i].load(source + i * 32U * Width); }
    }
    place += entry_step;
    tile += tile_step;
    if (tile >= tiles_per_block) {
      tile -= tiles_per_block;
      ++place;
    }
    if (place < scene.count) {
      look();
    } else {
      let_next_kernel_begin();  // only what flies is left
    }
    auto const put = [&](std::byte* block) {
      std::byte* const target = block + begin + lane * Width;
#pragma unroll
      for (std::uint32_t i = 0; i < gather_loads; ++i) {
        if (whole || lane + i * 32U < lanes) { values[i].store(target + i * 32U * Width); }
      }
    };
    if (!Shared || together.count == 0) {
      put(ends.target);
    } else {
      for_each_target(scene, together, [&](slot_id slot) { put(scene.slots + to_index(slot) * scene.slot_stride); });
    }
  }
}

/// Where the lanes of a tile of small blocks lie: lane i of a thread in the block of entries[i], `offsets[i]` bytes from its
/// begin. Lanes past the last block have no entry.
struct small_tile {
  host_block_id sources[gather_loads];
  slot_id targets[gather_loads];
  std::uint32_t groups[gather_loads];
  std::uint32_t offsets[gather_loads];
  std::uint32_t places[gather_loads];  // of the entry in the list

  template <std::uint32_t Width>
  __device__ void find(gather_scene const& scene, std::uint64_t first, std::uint32_t per_block)
  {
    std::uint64_t const first_entry = first / per_block;
    // 32 bits hold a place in the tile's own blocks, and divide fast.
    auto const skipped = static_cast<std::uint32_t>(first - first_entry * per_block) + threadIdx.x % 32U;
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      std::uint32_t const place = skipped + i * 32U;
      std::uint32_t const entry = place / per_block;
      offsets[i] = (place - entry * per_block) * Width;
      targets[i] = none<slot_id>;
      if (first_entry + entry < scene.count) {
        recall_entry const found = load_entry(scene.entries + first_entry + entry);
        places[i] = static_cast<std::uint32_t>(first_entry) + entry;
        sources[i] = found.source;
        targets[i] = found.target;
        groups[i] = scene.head_groups == 1 ? 0U : static_cast<std::uint32_t>(to_number(found.lane)) % scene.head_groups;
      }
    }
  }
};

/// Blocks of less than a tile: a warp takes a tile of all blocks laid end to end, so that as many loads fly, and reads the
/// next tile's entries meanwhile.
template <std::uint32_t Width, bool Shared>
__device__ void gather_small(gather_scene const& scene, std::uint32_t warp, std::uint32_t warps)
{
  using lane_type = gather_lane<Width>;
  std::uint32_t const per_block = scene.block_bytes / Width;
  std::uint64_t const all = std::uint64_t{scene.count} * per_block;
  std::uint64_t const step = std::uint64_t{warps} * 32U * gather_loads;
  std::uint64_t first = std::uint64_t{warp} * 32U * gather_loads;
  small_tile tile;
  if (first < all) { tile.find<Width>(scene, first, per_block); }
  while (first < all) {
    lane_type values[gather_loads];
    std::byte* targets[gather_loads];
    target_span spans[gather_loads];
    std::uint32_t offsets[gather_loads];
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      targets[i] = nullptr;
      if constexpr (Shared) {
        spans[i] = is_none(tile.targets[i]) ? target_span{} : load_span(scene, tile.places[i]);
        offsets[i] = tile.offsets[i];
      }
      if (!is_none(tile.targets[i])) {
        targets[i] = scene.slots + to_index(tile.targets[i]) * scene.slot_stride + tile.offsets[i];
        values[i].load(scene.slabs[tile.groups[i]] + to_index(tile.sources[i]) * scene.block_stride + tile.offsets[i]);
      }
    }
    first += step;
    if (first < all) { tile.find<Width>(scene, first, per_block); }
#pragma unroll
    for (std::uint32_t i = 0; i < gather_loads; ++i) {
      if (targets[i] != nullptr) { values[i].store(targets[i]); }
    }
    if constexpr (Shared) {
#pragma unroll
      for (std::uint32_t i = 0; i < gather_loads; ++i) {
        // The entry's own target is among them, and is written to twice.
        for (std::uint32_t t = 0; t < spans[i].count; ++t) {
          slot_id const slot = scene.further.targets[spans[i].begin + t];
          values[i].store(scene.slots + to_index(slot) * scene.slot_stride + offsets[i]);
        }
      }
    }
  }
}

template <std::uint32_t Width, bool Shared>
__device__ void gather_as(gather_scene const& scene, std::uint32_t warp, std::uint32_t warps)
{
  if (scene.block_bytes >= 32U * gather_loads * Width) {
    gather_tiles<Width, Shared>(scene, warp, warps);
  } else {
    gather_small<Width, Shared>(scene, warp, warps);
  }
}

/// Slabs that a block of threads keeps at hand: where the table lies on the host, each look at it takes a way over the link.
inline constexpr std::uint32_t gather_slabs = 64;

/// @tparam Shared entries may stand for several
template <class Op, bool Shared>
__global__ void __launch_bounds__(gather_threads) gather_blocks_kernel(Op const op)
{
  __shared__ std::byte const* slabs[gather_slabs];
  recall_plan_ref const& plan = op.plan;
  std::byte* const* const table = plan.host.slabs(plan.layer);
  bool const at_hand = plan.head_groups <= gather_slabs;
  for (std::uint32_t group = threadIdx.x; at_hand && group < plan.head_groups; group += blockDim.x) {
    slabs[group] = table[group];
  }
  gather_scene scene;
  scene.slots = plan.pool.base(plan.layer);
  await_kernel_before();
  std::uint32_t const begin = plan.row_begin[op.first_row];
  scene.count = plan.row_begin[op.first_row + op.row_count] - begin;
  scene.entries = plan.entries + begin;
  if constexpr (Shared) { scene.further = {op.further.of + begin, op.further.targets}; }
  scene.block_stride = plan.host.block_stride;
  scene.slot_stride = plan.pool.slot_stride;
  scene.block_bytes = static_cast<std::uint32_t>(plan.block_bytes);
  scene.head_groups = plan.head_groups;
  // Warps of all blocks in turn, so that a short plan is spread over the blocks.
  std::uint32_t const warp = threadIdx.x / 32U * gridDim.x + blockIdx.x;
  std::uint32_t const warps = gridDim.x * (gather_threads / 32U);
  // Asked for before it is known whether it counts.
  std::uint32_t const place = warp / divide_up(scene.block_bytes, 32U * gather_loads * 16U);
  bool const may_be_first = op.first_row == 0 && place < plan.capacity;
  if (may_be_first) { scene.first = load_entry(plan.entries + place); }
  scene.has_first = may_be_first && begin == 0;
  // Where no warp has more than a tile or two, what comes next need not wait for the last one to begin.
  if (std::uint64_t{scene.count} * scene.block_bytes <= std::uint64_t{warps} * 64U * gather_loads * 16U) {
    let_next_kernel_begin();
  }
  __syncthreads();
  scene.slabs = at_hand ? slabs : table;
  std::uint64_t low =
    reinterpret_cast<std::uintptr_t>(scene.slots) | scene.block_stride | scene.slot_stride | scene.block_bytes;
  for (std::uint32_t group = 0; group < plan.head_groups; ++group) {
    low |= reinterpret_cast<std::uintptr_t>(scene.slabs[group]);
  }
  if (low % 16U == 0) {
    gather_as<16, Shared>(scene, warp, warps);
  } else if (low % 8U == 0) {
    gather_as<8, Shared>(scene, warp, warps);
  } else if (low % 4U == 0) {
    gather_as<4, Shared>(scene, warp, warps);
  } else {
    gather_as<1, Shared>(scene, warp, warps);
  }
}

template <>
struct kernel_override<gather_blocks> {
  [[nodiscard]] static bool takes(gather_blocks const& op) noexcept { return op.plan.block_bytes < 0x80000000U; }

  static cudaError_t launch(gather_blocks const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<gather_blocks*>(&op)};
    void const* const kernel = op.further.of == nullptr
      ? reinterpret_cast<void const*>(&gather_blocks_kernel<gather_blocks, false>)
      : reinterpret_cast<void const*>(&gather_blocks_kernel<gather_blocks, true>);
    dim3 const blocks{std::min(op.groups, most_gather_blocks)};
    // Elsewhere it would hold its places while whatever is before it runs.
    return op.plan.behind_plan ? launch_early(kernel, blocks, dim3{gather_threads}, arguments, 0, stream)
                               : cudaLaunchKernel(kernel, blocks, dim3{gather_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<gather_blocks>);

}  // namespace pulseinfer::detail
