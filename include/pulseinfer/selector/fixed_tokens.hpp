#pragma once

/// A budget policy: so many tokens a layer, whatever the scores.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pulseinfer {

/// The selector's budget in every layer, or a multiple of it where factors are given.
struct fixed_tokens {
  std::vector<double> layer_factors = {};  ///< [layers] positive; empty: 1 everywhere

  /// The token budget of one layer, rounded down. Sink, recent and dense tokens are those of the whole selector.
  /// @throws configuration_error for a factor that isn't positive, or too large
  [[nodiscard]] token_budget of_layer(token_budget budget, layer_id layer) const
  {
    if (layer_factors.empty()) { return budget; }
    double const factor = layer_factors.at(to_index(layer));
    double const tokens = factor * budget.budget_tokens;
    if (!(factor > 0.0) || tokens > std::numeric_limits<std::int32_t>::max()) {
      throw configuration_error{
        "factor " + std::to_string(factor) + " of layer " + std::to_string(to_number(layer)) + " makes no budget of " +
        std::to_string(budget.budget_tokens) + " tokens"};
    }
    budget.recent_tokens = budget.recent_or_default();
    budget.dense_tokens = budget.dense_or_default();
    budget.budget_tokens = static_cast<std::uint32_t>(tokens);
    return budget;
  }

  /// @throws configuration_error
  void validate(kv_geometry const& geometry) const
  {
    if (!layer_factors.empty() && layer_factors.size() != geometry.layers) {
      throw configuration_error{
        std::to_string(layer_factors.size()) + " budget factors for " + std::to_string(geometry.layers) + " layers"};
    }
  }
};

}  // namespace pulseinfer
