#pragma once

/// land_rows with the flags of a row's entries looked at side by side: the generic body leaves them to one thread.

#include <pulseinfer/backend/cuda/group.cuh>
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
    device::fail_row(group, op.plan, op.landed, place);
    return;
  }
  // Words on the host are asked for before anything needs them.
  std::uint32_t const number = op.landed.sequence[place];
  row_mailbox* const box = op.landed.mailbox + to_index(op.plan.rows[place]);
  std::uint32_t const begin = op.plan.row_begin[place];
  std::uint32_t const end = op.plan.row_begin[place + 1];
  bool failed = false;
  for (std::uint32_t i = begin + threadIdx.x; i < end; i += land_threads) {
    slot_id const slot = op.plan.entries[i].target;
    if (op.plan.failed != nullptr && op.plan.failed[i] != 0) {
      failed = true;
    } else {
      op.landed.residency.slots[op.plan.pool.word(op.plan.layer, slot)].state = slot_state::clean;
    }
  }
  if (__syncthreads_or(failed ? 1 : 0) != 0) {
    device::land_row(group, op.plan, op.landed, place);
  } else if (threadIdx.x == 0) {
    device::store_release(&box->landed, number);
  }
}

template <>
struct kernel_override<land_rows> {
  /// Checksums are looked at by the generic body.
  [[nodiscard]] static bool takes(land_rows const& op) noexcept { return !op.landed.checksums.enabled(); }

  static cudaError_t launch(land_rows const& op, cudaStream_t stream) noexcept
  {
    void* arguments[] = {const_cast<land_rows*>(&op)};
    return cudaLaunchKernel(
      reinterpret_cast<void const*>(&land_rows_kernel<land_rows>), dim3{op.row_count}, dim3{land_threads}, arguments, 0,
      stream);
  }
};

static_assert(has_kernel_override<land_rows>);

}  // namespace pulseinfer::detail
