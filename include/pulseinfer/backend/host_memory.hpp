#pragma once

/// Host memory that stands for both memory spaces where there is no device.

#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>

#include <cstddef>
#include <new>
#include <string>

namespace pulseinfer::detail {

inline constexpr std::align_val_t host_memory_alignment{256};

/// @return `bytes` of memory, 256-byte aligned, contents undefined; nullptr for 0 bytes
/// @throws resource_error past the ledger's limit or when the system has no memory
[[nodiscard]] inline void* allocate_host_memory(memory_ledger& ledger, memory_space space, std::size_t bytes)
{
  if (bytes == 0) { return nullptr; }
  ledger.take(space, bytes);
  void* const pointer = ::operator new(bytes, host_memory_alignment, std::nothrow);
  if (pointer == nullptr) {
    ledger.give_back(space, bytes);
    throw resource_error{
      std::string{name_of(space)} + " memory: the system has no " + std::to_string(bytes) + " B left beside " +
      std::to_string(ledger.used_bytes(space)) + " B in use"};
  }
  return pointer;
}

inline void deallocate_host_memory(memory_ledger& ledger, memory_space space, void* pointer, std::size_t bytes) noexcept
{
  if (pointer == nullptr) { return; }
  ::operator delete(pointer, host_memory_alignment);
  ledger.give_back(space, bytes);
}

}  // namespace pulseinfer::detail
