#pragma once

/// How a host engine's own tensor and row types enter the manager.

#include <pulseinfer/view/tensor_view.hpp>

#include <concepts>

namespace pulseinfer {

/// Specialise for a tensor type T: `static tensor_view view(T const&)`, [tokens, heads, dim], device memory.
template <class T>
struct tensor_traits;

template <>
struct tensor_traits<tensor_view> {
  [[nodiscard]] static tensor_view view(tensor_view const& tensor) noexcept { return tensor; }
};

template <class T>
concept host_tensor = requires(T const& tensor) {
  { tensor_traits<T>::view(tensor) } -> std::same_as<tensor_view>;
};

}  // namespace pulseinfer
