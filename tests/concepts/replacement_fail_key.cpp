#include <pulseinfer/concepts/archetypes.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;

/// A policy whose key may throw.
struct throwing {
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] std::uint32_t key(slot_word const&, std::uint32_t) const noexcept { return 0; }
#else
  [[nodiscard]] std::uint32_t key(slot_word const&, std::uint32_t) const { return 0; }
#endif
};

/// A policy that remembers on the host what it has seen.
struct remembering : archetype::replacement {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  std::vector<std::uint32_t> seen;
#endif
};

// expect-error: a replacement policy must return std::uint32_t, noexcept, from key(slot_word, now) const
static_assert(explain_replacement<throwing>());
// expect-error: a replacement policy must be trivially copyable: it runs on the device
static_assert(explain_replacement<remembering>());

int main() {}
