#pragma once

/// Whether a host engine's tensors have the shapes that a geometry asks for.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/view/tensor_view.hpp>

namespace pulseinfer {

/// Queries: [tokens, query_heads, head_dim].
[[nodiscard]] inline bool fits_queries(kv_geometry const& geometry, tensor_view const& q) noexcept
{
  return !q.empty() && q.heads == geometry.query_heads && q.dim == geometry.head_dim && q.type != dtype::bytes;
}

/// Keys and values: [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim]; both empty where the host engine writes
/// its cache itself, values empty where they are a prefix of the keys.
[[nodiscard]] inline bool fits_keys(kv_geometry const& geometry, tensor_view const& k, tensor_view const& v) noexcept
{
  if (k.empty() && v.empty()) { return true; }
  bool const keys = !k.empty() && k.heads == geometry.kv_heads && k.dim == geometry.head_dim && k.type != dtype::bytes;
  bool const values = geometry.value_is_key_prefix
    ? v.empty()
    : !v.empty() && v.heads == geometry.kv_heads && v.dim == geometry.value_elements() && v.type != dtype::bytes;
  return keys && values;
}

}  // namespace pulseinfer
