/// A decode step at an operating point, simulated, and its picture.
#pragma once

#include "capacity.hpp"

#include <ostream>
#include <string>
#include <vector>

namespace plan_capacity {

/// Something that takes from `begin` to `end`, in seconds since the step began.
struct busy_span {
  double begin = 0.0;
  double end = 0.0;
  bool hits = false;  ///< on the GPU: attention of what is resident while the rest travels
};

struct step_timeline {
  std::uint32_t rows = 0;  ///< that were simulated
  double step = 0.0;       ///< seconds
  std::vector<busy_span> gpu = {};
  std::vector<busy_span> link = {};
};

/// Runs some steps of the library's manager and interruptible scheduler in virtual time, with the passes, misses and rates that
/// the formulas take for `p`, and gives the last one. Of more than 128 rows it runs 128 that weigh as much.
[[nodiscard]] step_timeline simulate_step(setting const& s, operating_point const& p);

/// Draws it at a height of 150 below `top`, 720 wide.
void draw_step(std::ostream& out, step_timeline const& t, char const* title, double top);

}  // namespace plan_capacity
