#pragma once

/// The rows that a piece of work is for.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Row ids in memory that host and device read. Owned by the manager; a visit's list stays unchanged until the visit's
/// work has run.
struct row_list {
  row_id const* ids = nullptr;  // [count]
  std::uint32_t count = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t size() const { return count; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr row_id operator[](std::uint64_t place) const { return ids[place]; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr row_id const* begin() const { return ids; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr row_id const* end() const { return ids + count; }
};

static_assert(std::is_trivially_copyable_v<row_list>);

}  // namespace pulseinfer
