#pragma once

/// A head rule: one KV head of each layer chooses for all.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// The query heads of one KV head score, their shares summed, and all heads follow. Digests hold that head alone: 1/kv_heads
/// of the bytes and of the scoring. Which head may lead is found by calibration. Needs one selection for all heads.
struct designated_head {
  std::vector<std::uint32_t> head_of_layer = {};  ///< [layers] KV heads

  /// @throws configuration_error
  void validate(kv_geometry const& geometry) const
  {
    if (geometry.head_groups != 1) {
      throw configuration_error{
        "a designated head chooses for all heads, but the cache has " + std::to_string(geometry.head_groups) +
        " head groups with selections of their own"};
    }
    if (head_of_layer.size() != geometry.layers) {
      throw configuration_error{
        std::to_string(head_of_layer.size()) + " designated heads for " + std::to_string(geometry.layers) + " layers"};
    }
    for (std::size_t layer = 0; layer < head_of_layer.size(); ++layer) {
      if (head_of_layer[layer] >= geometry.kv_heads) {
        throw configuration_error{
          "designated head " + std::to_string(head_of_layer[layer]) + " of layer " + std::to_string(layer) +
          ", but there are " + std::to_string(geometry.kv_heads) + " KV heads"};
      }
    }
  }

  [[nodiscard]] head_choice of_layer(layer_id layer, kv_geometry const&) const
  {
    return {.kv_heads = {head_of_layer[to_index(layer)]}};
  }
};

}  // namespace pulseinfer
