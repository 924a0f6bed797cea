/// Draws throughput against the number of requests.
#pragma once

#include "capacity.hpp"
#include "step_picture.hpp"

#include <ostream>
#include <span>

namespace plan_capacity {

/// An SVG picture: one line for each plan, a dot at its best point, and below a step at the last plan's best point.
/// @param step null: none is drawn
void draw_curves(
  std::ostream& out, setting const& s, std::span<capacity_plan const> plans, step_timeline const* step = nullptr);

}  // namespace plan_capacity
