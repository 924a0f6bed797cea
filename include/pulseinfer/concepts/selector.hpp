#pragma once

/// Chooses the blocks that attention reads. Meanings: docs/concepts.md#selector.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/selection.hpp>

#include <concepts>
#include <cstdint>
#include <utility>

namespace pulseinfer {

/// What the manager tells a selector at set-up.
struct selector_limits {
  kv_geometry geometry = {};
  block_layout layout = {};
  std::uint32_t max_rows = 0;
  std::uint32_t max_blocks = 0;       ///< most blocks of a sequence
  std::uint32_t max_step_tokens = 1;  ///< most tokens that a decoding row appends in one step
};

template <class T, class B>
using bound_selector_t =
  decltype(std::declval<T const&>().bind(std::declval<B&>(), std::declval<selector_limits const&>()));

template <class T, class B>
concept selector_binds = requires { typename bound_selector_t<T, B>; };

/// Blocks that a layer's selection holds at most.
template <class T, class B>
concept selector_has_budget = selector_binds<T, B> && requires(bound_selector_t<T, B> const& self, layer_id layer) {
  { self.budget_blocks(layer) } noexcept -> std::same_as<std::uint32_t>;
};

/// Tokens up to which a row stays dense.
template <class T, class B>
concept selector_has_dense_tokens = selector_binds<T, B> && requires(bound_selector_t<T, B> const& self) {
  { self.dense_tokens() } noexcept -> std::same_as<std::uint32_t>;
};

/// Bytes of a block's digest in a layer, 0 where the selector has none.
template <class T, class B>
concept selector_has_digest_size =
  selector_binds<T, B> && requires(bound_selector_t<T, B> const& self, layer_id layer) {
    { self.digest_bytes(layer) } noexcept -> std::same_as<std::uint64_t>;
  };

template <class T, class B>
concept selector_digests = selector_binds<T, B> &&
  requires(bound_selector_t<T, B>& self, typename B::stream_ref stream, digest_request const& request) {
    { self.digest_async(stream, request) } noexcept -> std::same_as<status>;
  };

template <class T, class B>
concept selector_selects = selector_binds<T, B> &&
  requires(bound_selector_t<T, B>& self, typename B::stream_ref stream, select_request const& request) {
    { self.select_async(stream, request) } noexcept -> std::same_as<status>;
  };

/// Tells what it chose by, so that the manager can look below the cut, and leave missing blocks of little share for later. Optional.
template <class T, class B>
concept selector_tells_scores =
  selector_binds<T, B> && requires(bound_selector_t<T, B>& self, typename B::stream_ref stream, layer_id layer) {
    { self.keep_shares(stream) } -> std::same_as<status>;
    { self.scores(layer) } noexcept -> std::same_as<selection_scores>;
  };

template <class T, class B>
concept selector_for = backend<B> && selector_has_budget<T, B> && selector_has_dense_tokens<T, B> &&
  selector_has_digest_size<T, B> && selector_digests<T, B> && selector_selects<T, B>;

/// One sentence for each requirement that `T` misses on `B`.
template <class T, class B>
consteval bool explain_selector()
{
  static_assert(selector_binds<T, B>, "a selector must make its state in bind(backend, selector_limits)");
  if constexpr (selector_binds<T, B>) {
    static_assert(
      selector_has_budget<T, B>, "a selector must return std::uint32_t, noexcept, from budget_blocks(layer) const");
    static_assert(
      selector_has_dense_tokens<T, B>, "a selector must return std::uint32_t, noexcept, from dense_tokens() const");
    static_assert(
      selector_has_digest_size<T, B>, "a selector must return std::uint64_t, noexcept, from digest_bytes(layer) const");
    static_assert(
      selector_digests<T, B>, "a selector must return status, noexcept, from digest_async(stream, request)");
    static_assert(
      selector_selects<T, B>, "a selector must return status, noexcept, from select_async(stream, request)");
  }
  return selector_for<T, B>;
}

}  // namespace pulseinfer
