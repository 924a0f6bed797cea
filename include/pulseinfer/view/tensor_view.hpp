#pragma once

/// A host engine's keys, values or queries, as the library sees them.

#include <pulseinfer/config.hpp>
#include <pulseinfer/numeric.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// [tokens, heads, dim], the last dimension contiguous, strides in bytes. Device memory, owned by the host engine, which
/// keeps it alive and unchanged until the work that was enqueued on it has run. An empty view has data == nullptr.
struct tensor_view {
  std::byte* data = nullptr;
  std::uint64_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t dim = 0;
  std::uint64_t token_stride = 0;  ///< bytes
  std::uint64_t head_stride = 0;   ///< bytes
  dtype type = dtype::float32;

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr bool empty() const { return data == nullptr; }

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::byte* row(std::uint64_t token, std::uint32_t head) const
  {
    return data + token * token_stride + std::uint64_t{head} * head_stride;
  }
};

static_assert(std::is_trivially_copyable_v<tensor_view>);

/// A contiguous [tokens, heads, dim] tensor.
template <class T>
[[nodiscard]] tensor_view contiguous_tensor(
  T* data, dtype type, std::uint64_t tokens, std::uint32_t heads, std::uint32_t dim)
{
  std::uint64_t const head_stride = std::uint64_t{dim} * size_of(type);
  return tensor_view{
    .data = reinterpret_cast<std::byte*>(data),
    .tokens = tokens,
    .heads = heads,
    .dim = dim,
    .token_stride = head_stride * heads,
    .head_stride = head_stride,
    .type = type};
}

}  // namespace pulseinfer
