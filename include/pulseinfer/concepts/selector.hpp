#pragma once

/// Chooses the blocks that attention reads. Meanings: docs/concepts.md#selector.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
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

/// Sizes that the manager needs: blocks that a layer's selection holds at most, tokens up to which a row stays dense, and
/// bytes of a block's digest in a layer (0 where the selector has none).
template <class T, class B>
concept selector_has_sizes = selector_binds<T, B> && requires(bound_selector_t<T, B> const& self, layer_id layer) {
  { self.budget_blocks(layer) } noexcept -> std::same_as<std::uint32_t>;
  { self.dense_tokens() } noexcept -> std::same_as<std::uint32_t>;
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

template <class T, class B>
concept selector_for = backend<B> && selector_has_sizes<T, B> && selector_digests<T, B> && selector_selects<T, B>;

template <class T, class B>
consteval bool explain_selector()
{
  static_assert(selector_binds<T, B>, "a selector must make its state in bind(backend, selector_limits)");
  static_assert(
    selector_has_sizes<T, B>,
    "a selector must return, noexcept, budget_blocks(layer), dense_tokens() and digest_bytes(layer)");
  static_assert(selector_digests<T, B>, "a selector must return status, noexcept, from digest_async(stream, request)");
  static_assert(selector_selects<T, B>, "a selector must return status, noexcept, from select_async(stream, request)");
  return selector_for<T, B>;
}

}  // namespace pulseinfer
