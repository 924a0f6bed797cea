#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A tensor whose view may throw in the middle of a step.
struct checking_tensor {};

template <>
struct pulseinfer::tensor_traits<checking_tensor> {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] static tensor_view view(checking_tensor const&) noexcept { return {}; }
#else
  [[nodiscard]] static tensor_view view(checking_tensor const&) { return {}; }
#endif
};

// expect-error: a host tensor must return tensor_view, noexcept, from tensor_traits<T>::view(tensor)
static_assert(explain_host_tensor<checking_tensor>());

int main() {}
