#pragma once

/// Which KV heads of a layer choose the blocks, and how their shares become votes.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace pulseinfer {

/// How the shares that the heads and queries of a lane give a block become its vote.
enum class share_combination : std::uint8_t { sum, largest };

/// What a head rule answers for a layer. Digests are kept of these heads alone.
struct head_choice {
  std::vector<std::uint32_t> kv_heads = {};  ///< ascending; the query heads of each score
  std::vector<float> weights = {};           ///< [kv_heads] not negative, of the heads' shares; empty: 1 each
  share_combination combination = share_combination::sum;

  friend bool operator==(head_choice const&, head_choice const&) = default;
};

/// Every KV head of a layer, unweighted.
[[nodiscard]] inline head_choice all_heads(kv_geometry const& geometry, share_combination combination)
{
  head_choice result{.kv_heads = std::vector<std::uint32_t>(geometry.kv_heads), .combination = combination};
  std::iota(result.kv_heads.begin(), result.kv_heads.end(), 0U);
  return result;
}

/// @throws configuration_error for a choice that this geometry cannot follow, with the numbers
inline void validate(head_choice const& choice, layer_id layer, kv_geometry const& geometry)
{
  auto const number = [](auto value) { return std::to_string(value); };
  std::string const where = " in layer " + number(to_number(layer));
  if (choice.kv_heads.empty()) { throw configuration_error{"no head chooses" + where}; }
  for (std::size_t i = 0; i < choice.kv_heads.size(); ++i) {
    if (choice.kv_heads[i] >= geometry.kv_heads) {
      throw configuration_error{
        "head " + number(choice.kv_heads[i]) + " chooses" + where + ", but there are " + number(geometry.kv_heads) +
        " KV heads"};
    }
    if (i > 0 && choice.kv_heads[i] <= choice.kv_heads[i - 1]) {
      throw configuration_error{
        "heads that choose must ascend, but " + number(choice.kv_heads[i]) + " follows " +
        number(choice.kv_heads[i - 1]) + where};
    }
  }
  if (geometry.head_groups != 1 && choice.kv_heads.size() != geometry.kv_heads) {
    throw configuration_error{
      number(choice.kv_heads.size()) + " of " + number(geometry.kv_heads) + " KV heads choose for all" + where +
      ", but the cache has " + number(geometry.head_groups) + " head groups with selections of their own"};
  }
  if (!choice.weights.empty() && choice.weights.size() != choice.kv_heads.size()) {
    throw configuration_error{
      number(choice.weights.size()) + " weights for " + number(choice.kv_heads.size()) + " heads that choose" + where};
  }
  float total = choice.weights.empty() ? 1.0F : 0.0F;
  for (float const weight : choice.weights) {
    if (!(weight >= 0.0F) || !std::isfinite(weight)) {
      throw configuration_error{"a head's weight of " + number(weight) + where + " is negative or no number"};
    }
    total += weight;
  }
  if (!(total > 0.0F)) { throw configuration_error{"all weights of the heads that choose are 0" + where}; }
}

}  // namespace pulseinfer
