#pragma once

/// What it costs to move bytes between host and device.

#include <pulseinfer/types.hpp>

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

/// Who moves bytes.
enum class mover : std::uint8_t { copy_engine, kernel };

/// What is left of a rate while something else is under way; 1: undisturbed.
struct link_sharing {
  struct rates {
    double to_device = 1.0;
    double to_host = 1.0;
  };
  /// [who moves to the device][who moves to the host at the same time], by `mover`.
  rates both_ways[2][2] = {};
  double link_beside_compute[2] = {1.0, 1.0};  ///< [mover] to the device, while the device computes
  double compute_beside_link[2] = {1.0, 1.0};  ///< [mover] the device's rate, while bytes move to it
};

/// One H200 on PCIe 5.0 x16: rates of both directions at once; a gather of 64 KiB blocks by 8 thread groups and a decode GEMM, each
/// without a pause.
inline constexpr link_sharing h200_sharing{
  .both_ways =
    {{{50.1 / 55.4, 50.9 / 55.3}, {27.5 / 55.4, 50.9 / 52.4}},
     {{31.6 / 51.0, 47.7 / 55.3}, {28.0 / 51.0, 45.1 / 52.4}}},
  .link_beside_compute = {54.5 / 55.2, 46.8 / 51.0},
  .compute_beside_link = {1.0 / 1.055, 1.0 / 1.156}};

}  // namespace pulseinfer
