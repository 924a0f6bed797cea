#pragma once

/// A digest policy: centre and mean distance of each channel.

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/selector/block_digest.hpp>

namespace pulseinfer {

/// scale * (q . centre + sum |q| distance): between the mean key's score and the bound, and the best ordering of blocks for its
/// bytes in the measurements of its authors.
/// @source ArkVale (NeurIPS 2024)
using cuboid_mean = block_digest<device::cuboid_mean_form, device::absolute_spread>;

}  // namespace pulseinfer
