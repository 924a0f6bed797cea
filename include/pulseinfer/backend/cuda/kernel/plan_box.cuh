#pragma once

/// Posts of a plan whose ways over the link are taken side by side: device::post_row takes them one after the other.

#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/row_list.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

/// What a thread knows of its row's words on the host before it has something to post.
struct plan_box {
  row_mailbox* box = nullptr;
  std::uint32_t number = 0;
  std::uint64_t misses_before = 0;
  std::uint64_t hits_before = 0;

  /// Words of a list that was written before the launch.
  __device__ void find(row_mailbox* mailbox, row_list const& rows, std::uint32_t const* sequence, std::uint32_t place)
  {
    number = sequence[place];
    box = mailbox + to_index(rows[place]);
  }
  /// Words that plans before this one wrote.
  __device__ void look()
  {
    misses_before = static_cast<std::uint64_t const volatile&>(box->total_misses);
    hits_before = static_cast<std::uint64_t const volatile&>(box->total_hits);
  }
  __device__ void post(
    recall_failure* outcome, std::uint64_t block_bytes, std::uint32_t planned, std::uint32_t hits, std::uint32_t flying,
    std::uint32_t stalled) const
  {
    box->bytes = planned * block_bytes;
    box->misses = planned;
    box->flying = flying;
    box->hits = hits;
    box->stalled = stalled;
    if (outcome != nullptr) {
      outcome->planned = planned;
      outcome->hits = hits;
      device::store_release(&outcome->stalled, stalled);
      device::store_release(&outcome->flying, flying);
    }
    static_cast<std::uint64_t volatile&>(box->total_misses) = misses_before + planned;
    static_cast<std::uint64_t volatile&>(box->total_hits) = hits_before + hits;
    device::store_release(&box->posted, number);
  }
  /// What the row's lanes came to.
  __device__ void post(
    row_id row, std::uint32_t head_groups, lane_counts_ref const& counts, recall_failure* outcome,
    std::uint64_t block_bytes) const
  {
    std::uint32_t planned = 0;
    std::uint32_t hits = 0;
    std::uint32_t flying = 0;
    std::uint32_t stalled = 0;
    for (std::uint32_t g = 0; g < head_groups; ++g) {
      std::uint64_t const lane = to_index(lane_of(row, g, head_groups));
      planned += counts.misses[lane];
      hits += counts.hits[lane];
      flying += counts.flying[lane];
      stalled += counts.stalled[lane];
    }
    post(outcome, block_bytes, planned, hits, flying, stalled);
  }
};

}  // namespace pulseinfer::detail
