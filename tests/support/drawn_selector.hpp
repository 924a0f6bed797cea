#pragma once

/// Selection, votes and shares as a test draws them: what simulations, which score nothing, need to look below the cut and to
/// leave blocks for later.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/foresight.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace pulseinfer_test {

/// One head chooses, and a lane is a row. What is drawn for a row and layer stays until the next draw, which may come once the
/// selection of the one before has run.
struct drawn_selector {
  std::uint32_t budget_tokens = 2048;

  template <class B>
  class bound : public pulseinfer::external_selector::bound<B> {
    using base = pulseinfer::external_selector::bound<B>;

   public:
    bound(drawn_selector const& options, B& backend, pulseinfer::selector_limits const& limits)
      : base{{.budget_tokens = options.budget_tokens}, backend, limits},
        rows_{limits.max_rows},
        blocks_{limits.max_blocks},
        scores_{
          backend, pulseinfer::memory_space::pinned,
          std::uint64_t{2} * limits.geometry.layers * limits.max_rows * limits.max_blocks * sizeof(float)}
    {
      std::fill_n(scores_.template as<float>(), scores_.bytes() / sizeof(float), 0.0F);
    }

    /// Of each block of a row in a layer; a selection is imported besides.
    [[nodiscard]] std::span<float> votes(pulseinfer::layer_id layer, pulseinfer::row_id row) noexcept
    {
      return {table(layer, 0) + to_index(row) * blocks_, blocks_};
    }
    [[nodiscard]] std::span<float> shares(pulseinfer::layer_id layer, pulseinfer::row_id row) noexcept
    {
      return {table(layer, 1) + to_index(row) * blocks_, blocks_};
    }

    pulseinfer::status keep_shares(typename B::stream_ref) noexcept { return pulseinfer::status::ok; }
    [[nodiscard]] pulseinfer::selection_scores scores(pulseinfer::layer_id layer) const noexcept
    {
      return {
        .votes = table(layer, 0),
        .shares = table(layer, 1),
        .vote_pitch = blocks_,
        .share_pitch = blocks_,
        .heads = 1,
        .every_head = true,
        .budget_blocks = this->budget_blocks(layer)};
    }

   private:
    [[nodiscard]] float* table(pulseinfer::layer_id layer, std::uint32_t which) const noexcept
    {
      return scores_.template as<float>() + (to_index(layer) * 2 + which) * rows_ * blocks_;
    }

    std::uint64_t rows_;
    std::uint32_t blocks_;
    pulseinfer::slab<B> scores_;  // [layers, votes and shares, max_rows, max_blocks]
  };

  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, pulseinfer::selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

static_assert(pulseinfer::selector_for<drawn_selector, pulseinfer::archetype::backend>);
static_assert(pulseinfer::selector_tells_scores<drawn_selector, pulseinfer::archetype::backend>);

}  // namespace pulseinfer_test
