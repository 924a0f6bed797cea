#pragma once

/// The entries of a plan's rows as kernels read them: 16 bytes in one access.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

[[nodiscard]] __device__ inline recall_entry as_entry(uint4 words)
{
  recall_entry entry;
  entry.source = static_cast<host_block_id>(words.x);
  entry.target = static_cast<slot_id>(words.y);
  entry.lane = static_cast<lane_id>(words.z);
  entry.block = static_cast<block_id>(words.w);
  return entry;
}

/// @pre no kernel writes the entry while this one runs
[[nodiscard]] __device__ inline recall_entry load_entry(recall_entry const* from)
{
  return as_entry(__ldg(reinterpret_cast<uint4 const*>(from)));
}

/// Entries of some of a plan's rows.
struct entry_list {
  recall_entry const* entries = nullptr;
  std::uint32_t count = 0;

  [[nodiscard]] static __device__ entry_list
  of_rows(recall_plan_ref const& plan, std::uint32_t first_row, std::uint32_t row_count)
  {
    std::uint32_t const begin = plan.row_begin[first_row];
    return {plan.entries + begin, plan.row_begin[first_row + row_count] - begin};
  }
  [[nodiscard]] __device__ recall_entry operator[](std::uint32_t place) const { return load_entry(entries + place); }
};

}  // namespace pulseinfer::detail
