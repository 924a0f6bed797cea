#pragma once

/// Thread groups of our own: five lines each, where cooperative groups' header would triple a file's compile time.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// One thread. Runs every formula on a CPU.
struct solo_group {
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t thread_rank() const { return 0; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t size() const { return 1; }
  PULSEINFER_HOST_DEVICE constexpr void sync() const {}
};

static_assert(thread_group<solo_group>);

}  // namespace pulseinfer::device
