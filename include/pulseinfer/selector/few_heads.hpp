#pragma once

/// A head rule: some KV heads of each layer choose for all, by a weighted vote.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// Shares of the query heads of some KV heads, times their weights, summed. Digests hold these heads alone. With one head it is
/// designated_head, with all and equal weights soft_vote. Needs one selection for all heads.
struct few_heads {
  std::vector<head_choice> layers = {};  ///< [layers]

  /// @throws configuration_error
  void validate(kv_geometry const& geometry) const
  {
    if (layers.size() != geometry.layers) {
      throw configuration_error{
        "heads are named for " + std::to_string(layers.size()) + " layers, there are " +
        std::to_string(geometry.layers)};
    }
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      pulseinfer::validate(layers[layer], static_cast<layer_id>(layer), geometry);
    }
  }

  [[nodiscard]] head_choice of_layer(layer_id layer, kv_geometry const&) const { return layers[to_index(layer)]; }
};

}  // namespace pulseinfer
