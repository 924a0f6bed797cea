#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A transfer engine whose recalls say nothing of their success.
struct silent {
  static constexpr plan_place plans_on = plan_place::device;
  template <class B>
  struct bound {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
    status recall_async(typename B::stream_ref, recall_plan_ref const&, landed_ref) noexcept { return status::ok; }
#else
    void recall_async(typename B::stream_ref, recall_plan_ref const&, landed_ref) noexcept {}
#endif
    status move_async(typename B::stream_ref, copy_list) noexcept { return status::ok; }
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, transfer_limits const&) const
  {
    return {};
  }
};

static_assert(explain_transfer_engine<
              silent, archetype::backend>());  // expect-error: must return status, noexcept, from recall_async

int main() {}
