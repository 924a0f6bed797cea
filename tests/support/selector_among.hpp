#pragma once

/// Selectors of several types behind one: a manager is compiled once for all of them.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstdint>
#include <utility>
#include <variant>

namespace pulseinfer_test {

template <class... Selectors>
struct selector_among {
  std::variant<Selectors...> chosen = {};

  template <class B>
  class bound {
    using any = std::variant<pulseinfer::bound_selector_t<Selectors, B>...>;

   public:
    bound(selector_among const& options, B& backend, pulseinfer::selector_limits const& limits)
      : any_{std::visit([&](auto const& one) { return any{one.bind(backend, limits)}; }, options.chosen)}
    {}

    [[nodiscard]] std::uint32_t budget_blocks(pulseinfer::layer_id layer) const noexcept
    {
      return std::visit([&](auto const& one) { return one.budget_blocks(layer); }, any_);
    }
    [[nodiscard]] std::uint32_t dense_tokens() const noexcept
    {
      return std::visit([](auto const& one) { return one.dense_tokens(); }, any_);
    }
    [[nodiscard]] std::uint64_t digest_bytes(pulseinfer::layer_id layer) const noexcept
    {
      return std::visit([&](auto const& one) { return one.digest_bytes(layer); }, any_);
    }
    pulseinfer::status digest_async(typename B::stream_ref stream, pulseinfer::digest_request const& request) noexcept
    {
      return std::visit([&](auto& one) { return one.digest_async(stream, request); }, any_);
    }
    pulseinfer::status select_async(typename B::stream_ref stream, pulseinfer::select_request const& request) noexcept
    {
      return std::visit([&](auto& one) { return one.select_async(stream, request); }, any_);
    }
    pulseinfer::status keep_shares(typename B::stream_ref stream)
    {
      return std::visit([&](auto& one) { return one.keep_shares(stream); }, any_);
    }
    [[nodiscard]] pulseinfer::selection_scores scores(pulseinfer::layer_id layer) const noexcept
    {
      return std::visit([&](auto const& one) { return one.scores(layer); }, any_);
    }

   private:
    any any_;
  };

  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, pulseinfer::selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

static_assert(
  pulseinfer::selector_for<selector_among<pulseinfer::solo_head_selector<>>, pulseinfer::archetype::backend>);

}  // namespace pulseinfer_test
