#pragma once

/// A head rule: every query head votes with its share of the softmax mass.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

namespace pulseinfer {

/// Sums shares over all query heads of a lane: the most mass in total for a number of blocks.
/// @source TokenSelect, arXiv:2411.02886 (head soft vote)
struct soft_vote {
  void validate(kv_geometry const&) const {}

  [[nodiscard]] head_choice of_layer(layer_id, kv_geometry const& geometry) const
  {
    return all_heads(geometry, share_combination::sum);
  }
};

}  // namespace pulseinfer
