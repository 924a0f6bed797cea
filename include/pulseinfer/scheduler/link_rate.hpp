#pragma once

/// The rate of the link, from recalls that were seen to land.

#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cstdint>

namespace pulseinfer {

/// Told, whenever someone looks, what travels and what has landed since the last look, it keeps bytes over time of those
/// stretches in which the link was busy throughout: something travelled at both ends, or the look came with the landing that
/// was slept for. With every b bytes that land after
/// them, older stretches count b / (2 half_life_bytes) less of what they did.
struct link_rate {
  double half_life_bytes = 256e6;

  /// @param landed bytes of recalls that travelled at the last look and have landed by now
  /// @param flying bytes that travel now
  /// @param woken the host slept until one of them landed
  void look(nanoseconds now, std::uint64_t landed, std::uint64_t flying, bool woken) noexcept
  {
    bool const busy = flying_ > 0 && (flying > 0 || woken);
    auto const passed = static_cast<double>((now - since_).count());
    flying_ = flying;
    since_ = now;
    if (!busy || passed <= 0.0) { return; }
    auto const bytes = static_cast<double>(landed);
    double const kept = std::max(0.0, 1.0 - bytes / half_life_bytes * 0.5);
    bytes_ = bytes_ * kept + bytes;
    time_ = time_ * kept + passed;
  }

  /// @return 0 while nothing has landed
  [[nodiscard]] double bytes_per_second() const noexcept { return time_ > 0.0 ? bytes_ * 1e9 / time_ : 0.0; }

  std::uint64_t flying_ = 0;
  nanoseconds since_{0};
  double bytes_ = 0.0;
  double time_ = 0.0;
};

}  // namespace pulseinfer
