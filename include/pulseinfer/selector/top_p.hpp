#pragma once

/// A budget policy: as many blocks as carry a part of the mass, up to the budget.

#include <pulseinfer/device/top_p.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace pulseinfer {

/// Each lane and step takes the smallest of a few sizes whose blocks, sink, recent and open ones included, have `share` of all
/// votes; where none has, the selector's budget. Slots, lists and launches have the budget's size at all times.
/// @source Twilight, arXiv:2502.02770 (top-p over attention weights)
struct top_p {
  double share = 0.95;                             ///< of the votes of all blocks, in (0, 1]
  std::optional<std::uint32_t> least_tokens = {};  ///< absent: an eighth of the budget
  std::uint32_t buckets = 8;                       ///< sizes that a selection may have, at least 2

  /// The selector's budget, in every layer.
  /// @throws configuration_error where the smallest size is larger
  [[nodiscard]] token_budget of_layer(token_budget const& budget, layer_id) const
  {
    if (least_tokens && *least_tokens > budget.budget_tokens) {
      throw configuration_error{
        "selections of at least " + std::to_string(*least_tokens) + " tokens exceed the budget of " +
        std::to_string(budget.budget_tokens)};
    }
    return budget;
  }

  /// The sizes in blocks, evenly apart.
  [[nodiscard]] device::size_steps sizes(std::uint32_t budget_blocks, std::uint32_t block_tokens) const
  {
    std::uint32_t const least = least_tokens ? *least_tokens / block_tokens : budget_blocks / 8U;
    return {.least = least, .step = divide_up(budget_blocks > least ? budget_blocks - least : 1U, buckets - 1U)};
  }

  /// @throws configuration_error
  void validate(kv_geometry const&) const
  {
    if (!(share > 0.0) || share > 1.0) {
      throw configuration_error{"a share of votes of " + std::to_string(share) + " is not within 0 to 1"};
    }
    if (buckets < 2) {
      throw configuration_error{std::to_string(buckets) + " sizes of selections, at least 2 are needed"};
    }
  }
};

}  // namespace pulseinfer
