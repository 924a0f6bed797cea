#pragma once

/// What operations cost on the device.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pulseinfer {

/// Cost of an operation on the device: per_launch + its known time + the longer of its bytes and its arithmetic.
struct compute_cost {
  nanoseconds per_launch{0};
  double device_bytes_per_s = 0.0;
  double flops_per_s = 0.0;

  /// @return rounded up to a nanosecond
  [[nodiscard]] nanoseconds duration(operation_cost const& cost) const noexcept
  {
    double const moving = static_cast<double>(cost.device_bytes) / device_bytes_per_s;
    double const computing = static_cast<double>(cost.flops) / flops_per_s;
    auto const working = static_cast<std::int64_t>(std::ceil(std::max(moving, computing) * 1e9));
    return per_launch + nanoseconds{cost.device_ns + working};
  }
};

/// One H200: a copy in its memory was measured at 3.9 TB/s; dense 16-bit arithmetic at seven tenths of the data sheet.
inline constexpr compute_cost h200_compute{std::chrono::microseconds{2}, 3.9e12, 690e12};

/// What a decode step's layers take on the device, however many rows go through them together: each pass reads the layer's
/// weights, and each row adds its part. A row's attention is `attention_share` of its part, spread evenly over the blocks that
/// it selects; the attention of a part of them takes so much less.
struct pass_cost {
  nanoseconds per_pass{0};  ///< W: weights, and what is launched with them
  nanoseconds per_row{0};   ///< c
  double attention_share = 0.5;

  /// The attention of rows over `share` of their selected blocks (summed over the rows).
  [[nodiscard]] nanoseconds attention(double shares) const noexcept
  {
    return nanoseconds{std::llround(static_cast<double>(per_row.count()) * attention_share * shares)};
  }
  /// All else of a pass.
  [[nodiscard]] nanoseconds rest(std::uint32_t rows) const noexcept
  {
    return per_pass + nanoseconds{std::llround(static_cast<double>(per_row.count()) * (1.0 - attention_share) * rows)};
  }
};

}  // namespace pulseinfer
