#pragma once

/// What it costs to move bytes between host and device, and who has the link when.

#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pulseinfer {

/// Cost of one way to use the link: per_operation + runs * per_run + bytes / rate of the direction.
struct link_cost {
  nanoseconds per_operation{0};
  nanoseconds per_run{0};
  double to_device_bytes_per_s = 0.0;
  double to_host_bytes_per_s = 0.0;

  /// @return time that the link is held, rounded up to a nanosecond
  [[nodiscard]] nanoseconds duration(std::uint64_t runs, std::uint64_t bytes, bool to_host) const noexcept
  {
    double const rate = to_host ? to_host_bytes_per_s : to_device_bytes_per_s;
    auto const moving = static_cast<std::int64_t>(std::ceil(static_cast<double>(bytes) * 1e9 / rate));
    return per_operation + per_run * static_cast<std::int64_t>(runs) + nanoseconds{moving};
  }
};

/// A copy engine over PCIe 5.0 x16, in calls of some tens of runs. Measured with cudaMemcpyBatchAsync.
inline constexpr link_cost pcie5_copy_engine{std::chrono::microseconds{3}, nanoseconds{600}, 55.3e9, 55.2e9};

/// Kernels that read and write mapped host memory over PCIe 5.0 x16. Measured with a gather of 16-byte loads; the cost of a run
/// is that of address translation.
inline constexpr link_cost pcie5_kernel{std::chrono::microseconds{4}, nanoseconds{24}, 51.0e9, 52.3e9};

/// One full-duplex link: in each direction operations follow one another in the order in which they reach it.
class link_model {
 public:
  /// Holds the direction for `duration` as soon as it is free. @return the end
  nanoseconds reserve(nanoseconds now, bool to_host, nanoseconds duration) noexcept
  {
    nanoseconds& free_at = free_at_[to_host ? 1 : 0];
    free_at = std::max(now, free_at) + duration;
    busy_[to_host ? 1 : 0] += duration;
    return free_at;
  }

  /// Time that the direction was held or will be, over all reservations.
  [[nodiscard]] nanoseconds busy(bool to_host) const noexcept { return busy_[to_host ? 1 : 0]; }

 private:
  nanoseconds free_at_[2] = {};
  nanoseconds busy_[2] = {};
};

}  // namespace pulseinfer
