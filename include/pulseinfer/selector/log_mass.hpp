#pragma once

/// A digest policy: mean and variance of each channel.

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/log_mass.hpp>
#include <pulseinfer/selector/block_digest.hpp>

namespace pulseinfer {

/// An estimate of the block's log-mass to second order, for channels that vary independently.
/// @source second-order expansion of the log-mass, with the variances of channels alone
using log_mass = block_digest<device::log_mass_form, device::square_spread>;

}  // namespace pulseinfer
