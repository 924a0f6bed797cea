#pragma once

/// A head rule: a block's vote is the largest share that any query head gives it.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/types.hpp>

namespace pulseinfer {

/// Keeps what a single head needs badly, whatever the others need: less mass in total than soft_vote, more of the worst head's.
/// @source OmniKV (ICLR 2025), its filter layers
struct max_share {
  void validate(kv_geometry const&) const {}

  [[nodiscard]] head_choice of_layer(layer_id, kv_geometry const& geometry) const
  {
    return all_heads(geometry, share_combination::largest);
  }
};

}  // namespace pulseinfer
