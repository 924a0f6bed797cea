#pragma once

/// A head rule: every query head votes with its share of the softmax mass.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>

namespace pulseinfer {

/// Sums shares over all query heads of a lane: the most mass in total for a number of blocks.
/// @source TokenSelect, arXiv:2411.02886 (head soft vote)
struct soft_vote {
  void validate(kv_geometry const&) const {}

  [[nodiscard]] scoring_heads of_layer(layer_id, kv_geometry const& geometry) const
  {
    return {.first = 0, .count = geometry.kv_heads};
  }
};

}  // namespace pulseinfer
