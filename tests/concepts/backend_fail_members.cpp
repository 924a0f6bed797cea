#include <pulseinfer/concepts/archetypes.hpp>

#include <string>

using namespace pulseinfer;

/// A backend whose calls may throw, as they do by default.
struct throwing : archetype::backend {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  template <pulseinfer::operation Op>
  status launch(stream_ref, Op const&)
  {
    return status::ok;
  }
  void destroy_event(event_ref) {}
  void deallocate(memory_space, void*, std::size_t) {}
#endif
};

/// A backend that says nothing of its calls' success, or in other types.
struct other_types : archetype::backend {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  void copy(stream_ref, copy_list) noexcept {}
  void record(stream_ref, event_ref) noexcept {}
  [[nodiscard]] bool done(event_ref) noexcept { return true; }
  [[nodiscard]] std::byte* allocate(memory_space, std::size_t) { return nullptr; }
  [[nodiscard]] double now() const noexcept { return 0.0; }
#endif
};

/// A backend that gives out no events and cannot wait on the host.
struct eventless : private archetype::backend {
  using base = archetype::backend;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  using base::create_event;
  using base::wait_any;
#endif
  using base::allocate;
  using base::copy;
  using base::create_stream;
  using base::deallocate;
  using base::destroy_event;
  using base::destroy_stream;
  using base::done;
  using base::event_ref;
  using base::launch;
  using base::now;
  using base::record;
  using base::stream_ref;
  using base::wait;
};

/// A backend whose streams cannot wait.
struct waitless : private archetype::backend {
  using base = archetype::backend;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  using base::wait;
#endif
  using base::allocate;
  using base::copy;
  using base::create_event;
  using base::create_stream;
  using base::deallocate;
  using base::destroy_event;
  using base::destroy_stream;
  using base::done;
  using base::event_ref;
  using base::launch;
  using base::now;
  using base::record;
  using base::stream_ref;
  using base::wait_any;
};

static_assert(explain_backend<throwing>());
// expect-error: a backend must return status, noexcept, from launch(stream, op)
// expect-error: a backend must take events back, noexcept, in destroy_event(event)
// expect-error: a backend must take memory back, noexcept, in deallocate(space, pointer, bytes)
static_assert(explain_backend<other_types>());
// expect-error: a backend must return status, noexcept, from copy(stream, copy_list)
// expect-error: a backend must return status, noexcept, from record(stream, event)
// expect-error: a backend must return event_state, noexcept, from done(event)
// expect-error: a backend must return void* from allocate(space, bytes)
// expect-error: a backend must return nanoseconds, noexcept, from now() const
static_assert(explain_backend<eventless>());
// expect-error: a backend must return event_ref from create_event()
// expect-error: a backend must return status, noexcept, from wait_any(events, deadline)
static_assert(explain_backend<waitless>());  // expect-error: must return status, noexcept, from wait(stream, event)

int main() {}
