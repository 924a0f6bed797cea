#pragma once

/// A digest policy: the mean key, for half of the bytes.

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/mean_key.hpp>
#include <pulseinfer/selector/block_digest.hpp>

namespace pulseinfer {

/// scale * q . mean: a lower bound of the block's log-mass, which misses single keys that stand out.
/// @source ShadowKV, arXiv:2410.21465
using mean_key = block_digest<device::mean_key_form, device::plain_spread>;

}  // namespace pulseinfer
