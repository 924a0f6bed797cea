#pragma once

/// Kernels that are launched while the one before them on the stream still runs, and wait on the device for its end: the way
/// from one kernel to the next without the time that a launch takes.

#include <cuda_runtime_api.h>

#include <cstddef>

namespace pulseinfer::detail {

/// Lets a kernel that was launched early begin once every block of this one has called it or has ended.
__device__ inline void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Returns once the kernel before on the stream has ended and all that it wrote can be read. Every thread of a kernel that is
/// launched early calls it before it reads or writes memory: who waits for this kernel waits for those before it too.
__device__ inline void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// As cudaLaunchKernel, but the kernel may begin when the one before it lets it. Can be captured.
/// @pre the kernel calls await_kernel_before
[[nodiscard]] inline cudaError_t launch_early(
  void const* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes, cudaStream_t stream) noexcept
{
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace pulseinfer::detail
