#pragma once

/// A digest policy: smallest and largest key of each channel, as centre and half-width.

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/min_max.hpp>
#include <pulseinfer/selector/block_digest.hpp>

namespace pulseinfer {

/// An upper bound of every key's score, whatever the type: no block that holds a matching key scores below it.
/// @source Quest, arXiv:2406.10774
using min_max = block_digest<device::min_max_form, device::absolute_spread>;

}  // namespace pulseinfer
