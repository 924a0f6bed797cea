#include <pulseinfer/concepts/archetypes.hpp>

#include <string>

using namespace pulseinfer;

/// A backend whose streams and events own something.
struct owning : archetype::backend {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  struct stream_ref {
    std::string name;
  };
  struct event_ref {
    std::string name;
  };
#endif
};

/// A backend whose streams are all equally urgent.
struct flat : archetype::backend {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] stream_ref create_stream() { return {}; }
#endif
};

/// A backend whose streams may throw when they go.
struct throwing : archetype::backend {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  void destroy_stream(stream_ref) {}
#endif
};

static_assert(explain_backend<owning>());
// expect-error: a backend must name its streams by a trivially copyable stream_ref
// expect-error: a backend must name its events by a trivially copyable event_ref
static_assert(explain_backend<flat>());
// expect-error: a backend must return stream_ref from create_stream(priority)
static_assert(explain_backend<throwing>());
// expect-error: a backend must take streams back, noexcept, in destroy_stream(stream)

int main() {}
