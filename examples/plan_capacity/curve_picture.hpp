/// Draws throughput against the number of requests.
#pragma once

#include "capacity.hpp"

#include <ostream>
#include <span>

namespace plan_capacity {

/// An SVG picture: one line for each plan, a dot at its best point.
void draw_curves(std::ostream& out, setting const& s, std::span<capacity_plan const> plans);

}  // namespace plan_capacity
