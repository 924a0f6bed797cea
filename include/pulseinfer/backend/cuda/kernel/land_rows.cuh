#pragma once

/// land_rows with the flags of a row's entries looked at side by side: the generic body leaves them to one thread.

#include <pulseinfer/backend/cuda/group.cuh>
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/backend/cuda/kernel/plan_box.cuh>
#include <pulseinfer/backend/cuda/kernel_override.cuh>
#include <pulseinfer/device/land.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

inline constexpr std::uint32_t land_threads = 128;

template <class Op>
__global__ void __launch_bounds__(land_threads) land_rows_kernel(Op const op)
{
  device::block_group const group{};
  std::uint32_t const place = op.first_row + blockIdx.x;
  if (op.how == landing::failed) {
    await_kernel_before();
    device::fail_row(group, op.plan, op.landed, place);
    return;
  }
  // Behind a gather all of this is there before the gather ends, and its ways over the link are over by then, those of a post too.
  plan_box box;
  box.find(op.landed.mailbox, op.plan.rows, op.landed.sequence, place);
  bool const posts = threadIdx.x == 0 && op.landed.counts.misses != nullptr;
  std::uint32_t const begin = op.plan.row_begin[place];
  std::uint32_t const end = op.plan.row_begin[place + 1];
  slot_word* const slots = op.landed.residency.slots;
  auto const failed_at = [&](std::uint32_t i) { return op.plan.failed != nullptr && op.plan.failed[i] != 0; };
  std::uint32_t i = begin + threadIdx.x;
  bool const has_first = i < end;
  slot_id const first = has_first ? op.plan.entries[i].target : none<slot_id>;
  bool failed = has_first && failed_at(i);
  if (posts) {
    box.look();
    box.post(
      op.plan.rows[place], op.plan.head_groups, op.landed.counts,
      op.landed.failed == nullptr ? nullptr : op.landed.failed + place, op.plan.block_bytes);
  }
  await_kernel_before();
  if (has_first && !failed) { slots[op.plan.pool.word(op.plan.layer, first)].state = slot_state::clean; }
  for (i += land_threads; i < end; i += land_threads) {
    if (failed_at(i)) {
      failed = true;
    } else {
      slots[op.plan.pool.word(op.plan.layer, op.plan.entries[i].target)].state = slot_state::clean;
    }
  }
  if (__syncthreads_or(failed ? 1 : 0) != 0) {
    landed_ref landed = op.landed;
    landed.counts = {};  // posted
    device::land_row(group, op.plan, landed, place);
  } else if (threadIdx.x == 0) {
    device::store_release(&box.box->landed, box.number);
  }
}

template <>
struct kernel_override<land_rows> {
  /// Checksums are looked at by the generic body.
  [[nodiscard]] static bool takes(land_rows const& op) noexcept { return !op.landed.checksums.enabled(); }

  static cudaError_t launch(land_rows const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<land_rows*>(&op)};
    void const* const kernel = reinterpret_cast<void const*>(&land_rows_kernel<land_rows>);
    return op.behind_gather ? launch_early(kernel, dim3{op.row_count}, dim3{land_threads}, arguments, 0, stream)
                            : cudaLaunchKernel(kernel, dim3{op.row_count}, dim3{land_threads}, arguments, 0, stream);
  }
};

static_assert(has_kernel_override<land_rows>);

}  // namespace pulseinfer::detail
