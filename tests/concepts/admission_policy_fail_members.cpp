#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A policy that answers yes or no, and cannot say "later".
struct yes_or_no : archetype::admission_policy {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  bool admit(demand const&, capacity const&) noexcept { return true; }
#endif
};

/// A policy that looks at no samples.
struct blind : private archetype::admission_policy {
  using archetype::admission_policy::admit;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  using archetype::admission_policy::observe;
#endif
};

// expect-error: an admission policy must return admission, noexcept, from admit(request, free)
static_assert(explain_admission_policy<yes_or_no>());
// expect-error: an admission policy must take step samples in observe(sample), noexcept
static_assert(explain_admission_policy<blind>());

int main() {}
