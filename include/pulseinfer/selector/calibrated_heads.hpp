#pragma once

/// A head rule: for each layer what calibration found to be enough.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

#include <string>
#include <string_view>

namespace pulseinfer {

/// One head, some with weights, or all: each layer has its own, from a file that read_calibration read. Never decided at run
/// time. Where a layer needs fewer heads than all, one selection for all heads is needed.
struct calibrated_heads {
  calibration measured = {};

  /// @throws configuration_error where it was measured for another cache
  void validate(kv_geometry const& geometry) const { pulseinfer::validate(measured, geometry); }

  /// @throws configuration_error where it was measured with another form of digest: how well a head chooses depends on it
  void validate_digest(std::string_view name) const
  {
    if (measured.digest != name) {
      throw configuration_error{
        "calibrated with digests '" + measured.digest + "', the selector has '" + std::string{name} + "'"};
    }
  }

  [[nodiscard]] head_choice of_layer(layer_id layer, kv_geometry const&) const
  {
    return measured.layers[to_index(layer)].heads;
  }
};

}  // namespace pulseinfer
