#pragma once

/// What operations cost on the device, and who has its multiprocessors when.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pulseinfer {

/// Cost of an operation on the device: per_launch + the longer of its bytes and its arithmetic.
struct compute_cost {
  nanoseconds per_launch{0};
  double device_bytes_per_s = 0.0;
  double flops_per_s = 0.0;

  /// @return rounded up to a nanosecond
  [[nodiscard]] nanoseconds duration(operation_cost const& cost) const noexcept
  {
    double const moving = static_cast<double>(cost.device_bytes) / device_bytes_per_s;
    double const computing = static_cast<double>(cost.flops) / flops_per_s;
    return per_launch + nanoseconds{static_cast<std::int64_t>(std::ceil(std::max(moving, computing) * 1e9))};
  }
};

/// One H200: a copy in its memory was measured at 3.9 TB/s; dense 16-bit arithmetic at seven tenths of the data sheet.
inline constexpr compute_cost h200_compute{std::chrono::microseconds{2}, 3.9e12, 690e12};

/// Operations on data take the whole device and follow one another in the order in which they reach it. Those on metadata are
/// small and run beside them.
class compute_model {
 public:
  /// Holds the device for `duration` as soon as it is free. @return the end
  nanoseconds reserve(nanoseconds now, nanoseconds duration) noexcept
  {
    free_at_ = std::max(now, free_at_) + duration;
    busy_ += duration;
    return free_at_;
  }

  /// Time that the device was held or will be, over all reservations.
  [[nodiscard]] nanoseconds busy() const noexcept { return busy_; }

 private:
  nanoseconds free_at_{0};
  nanoseconds busy_{0};
};

}  // namespace pulseinfer
