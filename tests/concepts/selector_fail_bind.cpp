#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A selector that is its own state and is never bound.
struct unbound : archetype::selector::bound<archetype::backend> {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] unbound bind(archetype::backend&, selector_limits const&) const { return {}; }
#endif
};

// expect-error: a selector must make its state in bind(backend, selector_limits)
static_assert(explain_selector<unbound, archetype::backend>());

int main() {}
