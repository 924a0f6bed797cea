#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A group that names its members as other libraries do.
struct other_names : private archetype::thread_group {
  using archetype::thread_group::sync;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  using archetype::thread_group::size;
  using archetype::thread_group::thread_rank;
#else
  [[nodiscard]] std::uint32_t rank() const { return 0; }
  [[nodiscard]] std::uint32_t num_threads() const { return 1; }
#endif
};

/// A group that can be synchronised only where it is not const.
struct mutable_sync : archetype::thread_group {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  void sync() {}
#endif
};

static_assert(explain_thread_group<other_names>());
// expect-error: a thread group must return the thread's number from thread_rank() const
// expect-error: a thread group must return the number of its threads from size() const
static_assert(explain_thread_group<mutable_sync>());  // expect-error: to all of its threads in sync() const

int main() {}
