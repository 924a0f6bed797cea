#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A policy whose calls may throw.
struct throwing {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  void observe(step_sample const&) noexcept {}
  admission admit(demand const&, capacity const&) noexcept { return admission::admitted; }
#else
  void observe(step_sample const&) {}
  admission admit(demand const&, capacity const&) { return admission::admitted; }
#endif
};

// expect-error: an admission policy must return admission, noexcept, from admit(request, free)
// expect-error: an admission policy must take step samples in observe(sample), noexcept
static_assert(explain_admission_policy<throwing>());

int main() {}
