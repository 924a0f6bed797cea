#pragma once

/// Whether a host engine's tensors have the shapes that a geometry asks for.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstdint>

namespace pulseinfer {

/// Whether every row of a tensor begins where an element may.
[[nodiscard]] inline bool is_aligned(tensor_view const& t) noexcept
{
  std::uint64_t const bytes = size_of(t.type);
  return reinterpret_cast<std::uintptr_t>(t.data) % bytes == 0 && t.token_stride % bytes == 0 &&
    t.head_stride % bytes == 0;
}

/// Queries: [tokens, query_heads, head_dim].
[[nodiscard]] inline bool fits_queries(kv_geometry const& geometry, tensor_view const& q) noexcept
{
  return !q.empty() && q.heads == geometry.query_heads && q.dim == geometry.head_dim && is_floating(q.type) &&
    is_aligned(q);
}

/// Keys and values: [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim]; both empty where the host engine writes
/// its cache itself, values empty where they are a prefix of the keys.
[[nodiscard]] inline bool fits_keys(kv_geometry const& geometry, tensor_view const& k, tensor_view const& v) noexcept
{
  if (k.empty() && v.empty()) { return true; }
  bool const keys =
    !k.empty() && k.heads == geometry.kv_heads && k.dim == geometry.head_dim && is_floating(k.type) && is_aligned(k);
  bool const values = geometry.value_is_key_prefix ? v.empty()
                                                   : !v.empty() && v.heads == geometry.kv_heads &&
      v.dim == geometry.value_elements() && is_floating(v.type) && is_aligned(v);
  return keys && values;
}

}  // namespace pulseinfer
