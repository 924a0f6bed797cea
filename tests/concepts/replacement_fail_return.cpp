#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A policy that gives a weight and no key.
struct weighing {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] std::uint32_t key(slot_word const&, std::uint32_t) const noexcept { return 0; }
#else
  [[nodiscard]] float key(slot_word const&, std::uint32_t) const noexcept { return 0.0F; }
#endif
};

// expect-error: a replacement policy must return std::uint32_t, noexcept, from key(slot_word, now) const
static_assert(explain_replacement<weighing>());

int main() {}
