#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A scheduler whose decision may throw.
struct throwing {
  static constexpr bool hits_first = false;
  static constexpr bool reads_mailbox = true;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  decision decide(std::span<scheduler_row const>, link_state const&, nanoseconds, std::span<row_id>) noexcept
#else
  decision decide(std::span<scheduler_row const>, link_state const&, nanoseconds, std::span<row_id>)
#endif
  {
    return {};
  }
};

static_assert(explain_layer_scheduler<throwing>());  // expect-error: must return decision, noexcept, from decide

int main() {}
