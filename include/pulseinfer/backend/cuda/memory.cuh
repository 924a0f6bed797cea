#pragma once

/// Device memory, and host memory that the device reads and writes by the same address.

#include <pulseinfer/backend/cuda/error.cuh>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/pinned_pages.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace pulseinfer::detail {

/// Pinned memory from so many bytes on is mapped from the system and then registered, which is many times faster than what the
/// runtime allocates itself.
inline constexpr std::size_t mapped_pinned_bytes = std::size_t{16} << 20U;

/// Registers pages with the CUDA runtime, for all of its contexts.
struct cuda_page_registrar {
  [[nodiscard]] static std::string add(std::byte* memory, std::size_t bytes)
  {
    cudaError_t const code = cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (code == cudaSuccess) { return {}; }
    static_cast<void>(cudaGetLastError());
    std::string const limit = locked_memory_limit();
    return std::string{"cudaHostRegister: "} + cudaGetErrorName(code) + ", " + cudaGetErrorString(code) +
      (limit.empty() ? "" : "; " + limit);
  }
  static void remove(std::byte* memory) noexcept
  {
    if (cudaHostUnregister(memory) != cudaSuccess) { static_cast<void>(cudaGetLastError()); }
  }
};

static_assert(page_registrar<cuda_page_registrar>);

/// The memory node nearest to the current device; unknown_node where the machine has one or does not say.
[[nodiscard]] inline int node_of_current_device()
{
  int device = 0;
  char address[32] = {};
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetPCIBusId(address, sizeof(address), device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return unknown_node;
  }
  return node_of_device(address);
}

inline void unmap_pinned_memory(void* memory, std::size_t bytes, std::size_t chunk_bytes) noexcept
{
  cuda_page_registrar registrar;
  remove_chunks(registrar, static_cast<std::byte*>(memory), mapped_bytes(bytes), chunk_bytes);
  unmap_pages(static_cast<std::byte*>(memory), bytes);
}

/// Large pinned memory is mapped near the current device and registered; where that is refused, the runtime allocates it.
/// @param chunk_bytes of one registration of pinned memory   @param placed written for large pinned memory
/// @param mapped written: whether the memory was mapped here, and so in chunks
/// @return 256-byte aligned, contents undefined; nullptr for 0 bytes
/// @throws resource_error past the ledger's limit or when CUDA has no memory; cuda_error when pinned memory has two addresses
[[nodiscard]] inline void* allocate_cuda_memory(
  memory_ledger& ledger, cuda_error_log& errors, memory_space space, std::size_t bytes, std::size_t chunk_bytes,
  bool may_spill, page_placement& placed, bool& mapped)
{
  mapped = false;
  if (bytes == 0) { return nullptr; }
  ledger.take(space, bytes);
  void* pointer = nullptr;
  if (space == memory_space::pinned && bytes >= mapped_pinned_bytes) {
    try {
      cuda_page_registrar registrar;
      system_page_placer placer;
      auto const runtime = [bytes] {
        void* own = nullptr;
        if (cudaHostAlloc(&own, bytes, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess) { return own; }
        static_cast<void>(cudaGetLastError());
        return static_cast<void*>(nullptr);
      };
      pinned_memory const taken =
        take_pinned(registrar, placer, bytes, chunk_bytes, node_of_current_device(), may_spill, placed, [&] {
          return static_cast<std::byte*>(runtime());
        });
      pointer = taken.begin;
      mapped = taken.mapped;
    } catch (...) {
      ledger.give_back(space, bytes);
      throw;
    }
  } else {
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
  }
  if (space == memory_space::pinned) {
    void* seen_by_device = nullptr;
    cudaError_t const code = cudaHostGetDevicePointer(&seen_by_device, pointer, 0);
    if (code != cudaSuccess || seen_by_device != pointer) {
      if (mapped) {
        unmap_pinned_memory(pointer, bytes, chunk_bytes);
      } else {
        static_cast<void>(cudaFreeHost(pointer));
      }
      ledger.give_back(space, bytes);
      errors.require("cudaHostGetDevicePointer", code);
      throw cuda_error{
        status::resource_exhausted, cudaErrorNotSupported,
        "pinned memory has another address on the device: unified addressing is needed"};
    }
  }
  return pointer;
}

/// Tolerates a runtime that is already unloaded. @param mapped as allocate_cuda_memory wrote it
inline void deallocate_cuda_memory(
  memory_ledger& ledger, cuda_error_log& errors, memory_space space, void* pointer, std::size_t bytes,
  std::size_t chunk_bytes, bool mapped) noexcept
{
  if (pointer == nullptr) { return; }
  if (space == memory_space::device) {
    static_cast<void>(errors.note("cudaFree", cudaFree(pointer)));
  } else if (mapped) {
    unmap_pinned_memory(pointer, bytes, chunk_bytes);
  } else {
    static_cast<void>(errors.note("cudaFreeHost", cudaFreeHost(pointer)));
  }
  ledger.give_back(space, bytes);
}

}  // namespace pulseinfer::detail
