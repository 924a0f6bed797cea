#pragma once

/// A selector bound to a cache, and what its selections must be.

#include "support/cache.hpp"
#include "support/immediate_backend.hpp"
#include "support/selection.hpp"
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/types.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

namespace pulseinfer_test {

using numbers = std::vector<std::uint32_t>;

inline pulseinfer::selector_limits limits_of(cache const& c, std::uint32_t step_tokens)
{
  return {
    .geometry = c.geometry,
    .layout = c.layout,
    .max_rows = static_cast<std::uint32_t>(c.info.size()),
    .max_blocks = c.max_blocks,
    .max_step_tokens = step_tokens};
}

/// A selector bound to a cache, with digests of all blocks of one layer.
template <class Selector, class B = immediate_backend>
struct harness {
  harness(Selector const& options, cache& c, std::uint32_t layer, std::uint32_t step_tokens)
    : of{c},
      bound{options.bind(on, limits_of(c, step_tokens))},
      at{layer},
      queries{pulseinfer::dtype::float32, c.tensor_tokens, c.geometry.query_heads, c.geometry.head_dim},
      arrays{c, most_budget(), digest_bytes()}
  {
    queries.randomise(c.random, 2.0F);
    with_all_tokens_new(c, [&] {
      REQUIRE(bound.digest_async({}, arrays.digest_request(layer, c.max_blocks)) == pulseinfer::status::ok);
    });
  }

  [[nodiscard]] std::uint32_t most_budget() const
  {
    std::uint32_t most = 0;
    for (std::uint32_t i = 0; i < of.geometry.layers; ++i) {
      most = std::max(most, bound.budget_blocks(static_cast<pulseinfer::layer_id>(i)));
    }
    return most;
  }
  [[nodiscard]] std::vector<std::uint64_t> digest_bytes() const
  {
    std::vector<std::uint64_t> bytes;
    for (std::uint32_t i = 0; i < of.geometry.layers; ++i) {
      bytes.push_back(bound.digest_bytes(static_cast<pulseinfer::layer_id>(i)));
    }
    return bytes;
  }
  void select() { REQUIRE(bound.select_async({}, arrays.select_request(at, queries.view)) == pulseinfer::status::ok); }

  cache& of;
  B on;
  typename Selector::template bound<B> bound;
  std::uint32_t at;
  tensor queries;
  selection_arrays arrays;
};

/// The votes of float and double may order blocks differently where they are nearly equal: a selection is right if no
/// block it leaves out has clearly more votes than one it takes.
inline void check_choice(numbers const& selected, numbers const& right, std::vector<double> const& votes)
{
  REQUIRE(selected.size() == right.size());
  numbers extra;
  numbers lacking;
  std::set_difference(selected.begin(), selected.end(), right.begin(), right.end(), std::back_inserter(extra));
  std::set_difference(right.begin(), right.end(), selected.begin(), selected.end(), std::back_inserter(lacking));
  for (std::uint32_t const in : extra) {
    for (std::uint32_t const out : lacking) { CHECK(votes[out] - votes[in] <= 1e-3 * votes[in]); }
  }
}

}  // namespace pulseinfer_test
