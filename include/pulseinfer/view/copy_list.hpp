#pragma once

/// Bulk moves whose addresses the host knows: write-back, warm-up, resume.

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

struct copy_run {
  std::byte* target = nullptr;
  std::byte const* source = nullptr;
  std::uint64_t bytes = 0;
};

static_assert(std::is_trivially_copyable_v<copy_run>);

enum class copy_direction : std::uint8_t { host_to_device, device_to_host, device_to_device };

/// Runs in host memory, read before the call that takes them returns.
struct copy_list {
  copy_run const* runs = nullptr;  // [count]
  std::uint32_t count = 0;
  copy_direction direction = copy_direction::host_to_device;
};

static_assert(std::is_trivially_copyable_v<copy_list>);

}  // namespace pulseinfer
