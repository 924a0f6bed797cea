#pragma once

/// Where an operation gets a kernel of its own instead of its generic body.

#include <pulseinfer/concepts/operation.hpp>

#include <cuda_runtime_api.h>

#include <concepts>

namespace pulseinfer::detail {

/// Specialise it for an operation in backend/cuda/kernel/<operation>.cuh, include that file in cuda_backend.cuh, and every
/// launch of the operation goes there. It must leave in memory exactly what the generic body leaves, which a test compares:
///
///   static bool takes(Op const& op) noexcept;                                 // false: the generic body runs
///   static cudaError_t launch(Op const& op, cudaStream_t stream) noexcept;    // one kernel; may be captured
///
/// Both see the value of the operation only: what its pointers name may not exist before the kernel runs.
template <class Op>
struct kernel_override {};

template <class Op>
concept has_kernel_override = requires(Op const& op, cudaStream_t stream) {
  { kernel_override<Op>::takes(op) } noexcept -> std::same_as<bool>;
  { kernel_override<Op>::launch(op, stream) } noexcept -> std::same_as<cudaError_t>;
};

}  // namespace pulseinfer::detail
