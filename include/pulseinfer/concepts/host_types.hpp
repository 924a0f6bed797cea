#pragma once

/// How a host engine's own tensor type enters the manager. Meanings: docs/concepts.md#host-tensor.

#include <pulseinfer/view/tensor_view.hpp>

#include <concepts>

namespace pulseinfer {

/// Specialise for a tensor type T: `static tensor_view view(T const&) noexcept`, [tokens, heads, dim], device memory.
template <class T>
struct tensor_traits;

template <>
struct tensor_traits<tensor_view> {
  [[nodiscard]] static tensor_view view(tensor_view const& tensor) noexcept { return tensor; }
};

/// Called in the step, which does not throw.
template <class T>
concept host_tensor = requires(T const& tensor) {
  { tensor_traits<T>::view(tensor) } noexcept -> std::same_as<tensor_view>;
};

/// One sentence for each requirement that `T` misses.
template <class T>
consteval bool explain_host_tensor()
{
  constexpr bool specialised = requires { sizeof(tensor_traits<T>); };
  static_assert(specialised, "a host tensor needs a specialisation of pulseinfer::tensor_traits<T>");
  if constexpr (specialised) {
    static_assert(
      host_tensor<T>, "a host tensor must return tensor_view, noexcept, from tensor_traits<T>::view(tensor)");
  }
  return host_tensor<T>;
}

}  // namespace pulseinfer
