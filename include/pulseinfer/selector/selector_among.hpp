#pragma once

/// Selectors of several types behind one: what of them is used is said at set-up, and a manager is compiled once for all of them.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstdint>
#include <utility>
#include <variant>

namespace pulseinfer {

/// One of some selectors. Each call costs the host a look at which it is, and the step's work is that of the one.
/// @tparam Selectors each once
template <class... Selectors>
struct selector_among {
  std::variant<Selectors...> chosen = {};

  template <class B>
  class bound;

  /// @throws what binding the chosen one throws
  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

/// The chosen selector on a backend.
template <class... Selectors>
template <class B>
class selector_among<Selectors...>::bound {
  using any = std::variant<bound_selector_t<Selectors, B>...>;

 public:
  bound(selector_among const& options, B& backend, selector_limits const& limits)
    : any_{std::visit([&](auto const& one) { return any{one.bind(backend, limits)}; }, options.chosen)}
  {}

  [[nodiscard]] std::uint32_t budget_blocks(layer_id layer) const noexcept
  {
    return std::visit([&](auto const& one) { return one.budget_blocks(layer); }, any_);
  }
  [[nodiscard]] std::uint32_t dense_tokens() const noexcept
  {
    return std::visit([](auto const& one) { return one.dense_tokens(); }, any_);
  }
  [[nodiscard]] std::uint64_t digest_bytes(layer_id layer) const noexcept
  {
    return std::visit([&](auto const& one) { return one.digest_bytes(layer); }, any_);
  }
  status digest_async(typename B::stream_ref stream, digest_request const& request) noexcept
  {
    return std::visit([&](auto& one) { return one.digest_async(stream, request); }, any_);
  }
  status select_async(typename B::stream_ref stream, select_request const& request) noexcept
  {
    return std::visit([&](auto& one) { return one.select_async(stream, request); }, any_);
  }
  /// Where each of them tells its scores, so does the chosen one.
  /// @status what the chosen one's says
  status keep_shares(typename B::stream_ref stream)
    requires(selector_tells_scores<Selectors, B> && ...)
  {
    return std::visit([&](auto& one) { return one.keep_shares(stream); }, any_);
  }
  [[nodiscard]] selection_scores scores(layer_id layer) const noexcept
    requires(selector_tells_scores<Selectors, B> && ...)
  {
    return std::visit([&](auto const& one) { return one.scores(layer); }, any_);
  }

 private:
  any any_;
};

static_assert(selector_for<selector_among<solo_head_selector<>>, archetype::backend>);
static_assert(selector_tells_scores<selector_among<solo_head_selector<>>, archetype::backend>);

}  // namespace pulseinfer
