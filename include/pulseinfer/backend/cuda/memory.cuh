#pragma once

/// Device memory, and host memory that the device reads and writes by the same address.

#include <pulseinfer/backend/cuda/error.cuh>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace pulseinfer::detail {

/// @return 256-byte aligned, contents undefined; nullptr for 0 bytes
/// @throws resource_error past the ledger's limit or when CUDA has no memory; cuda_error when pinned memory has two addresses
[[nodiscard]] inline void* allocate_cuda_memory(
  memory_ledger& ledger, cuda_error_log& errors, memory_space space, std::size_t bytes)
{
  if (bytes == 0) { return nullptr; }
  ledger.take(space, bytes);
  void* pointer = nullptr;
  cudaError_t const code = space == memory_space::device
    ? cudaMalloc(&pointer, bytes)
    : cudaHostAlloc(&pointer, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (code != cudaSuccess) {
    ledger.give_back(space, bytes);
    status const result =
      errors.note(space == memory_space::device ? "cudaMalloc" : "cudaHostAlloc", code, status::resource_exhausted);
    std::string const text = errors.last_error() + "; " + name_of(space) + " memory: " + std::to_string(bytes) +
      " B asked for beside " + std::to_string(ledger.used_bytes(space)) + " B in use";
    if (result == status::resource_exhausted) { throw resource_error{text}; }
    throw cuda_error{result, code, text};
  }
  if (space == memory_space::pinned) {
    void* seen_by_device = nullptr;
    cudaError_t const mapped = cudaHostGetDevicePointer(&seen_by_device, pointer, 0);
    if (mapped != cudaSuccess || seen_by_device != pointer) {
      static_cast<void>(cudaFreeHost(pointer));
      ledger.give_back(space, bytes);
      errors.require("cudaHostGetDevicePointer", mapped);
      throw cuda_error{
        status::resource_exhausted, cudaErrorNotSupported,
        "pinned memory has another address on the device: unified addressing is needed"};
    }
  }
  return pointer;
}

/// Tolerates a runtime that is already unloaded.
inline void deallocate_cuda_memory(
  memory_ledger& ledger, cuda_error_log& errors, memory_space space, void* pointer, std::size_t bytes) noexcept
{
  if (pointer == nullptr) { return; }
  bool const is_device = space == memory_space::device;
  static_cast<void>(
    errors.note(is_device ? "cudaFree" : "cudaFreeHost", is_device ? cudaFree(pointer) : cudaFreeHost(pointer)));
  ledger.give_back(space, bytes);
}

}  // namespace pulseinfer::detail
