#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A tensor that the library was never told of.
struct unknown_tensor {};

#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
template <>
struct pulseinfer::tensor_traits<unknown_tensor> : tensor_traits<tensor_view> {
  [[nodiscard]] static tensor_view view(unknown_tensor const&) noexcept { return {}; }
};
#endif

// expect-error: a host tensor needs a specialisation of pulseinfer::tensor_traits<T>
static_assert(explain_host_tensor<unknown_tensor>());

int main() {}
