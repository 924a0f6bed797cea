#pragma once

/// What it costs to get on: the paths between host and device that move no data.

#include <pulseinfer/types.hpp>

namespace pulseinfer {

struct control_cost {
  nanoseconds resume{0};            ///< from the end of what a stream waited for to the start of its next task
  nanoseconds wake{0};              ///< from the event that a sleeping host waits for until it goes on
  nanoseconds host_per_segment{0};  ///< host time to launch a segment (a captured graph, or what stands for one)
};

/// One H200 and its host: 1.9 us from a recall to a kernel whose wait was enqueued before, 8.5 to 10 us where the host polls and
/// then launches; a captured graph costs the host 1.2 to 2 us.
inline constexpr control_cost h200_control{
  std::chrono::microseconds{2}, std::chrono::microseconds{8}, std::chrono::microseconds{2}};

}  // namespace pulseinfer
