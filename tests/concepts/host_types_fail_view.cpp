#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A tensor whose traits give its address alone.
struct addressed_tensor {};

template <>
struct pulseinfer::tensor_traits<addressed_tensor> {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] static tensor_view view(addressed_tensor const&) noexcept { return {}; }
#else
  [[nodiscard]] static std::byte* view(addressed_tensor const&) noexcept { return nullptr; }
#endif
};

// expect-error: a host tensor must return tensor_view, noexcept, from tensor_traits<T>::view(tensor)
static_assert(explain_host_tensor<addressed_tensor>());

int main() {}
