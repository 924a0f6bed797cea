#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// An operation that says nothing of what it moves.
struct costless {
  static constexpr char const* name = "costless";
  static constexpr operation_kind kind = operation_kind::metadata;
  [[nodiscard]] launch_shape shape() const { return {}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
  [[nodiscard]] operation_cost cost() const { return {}; }
#endif
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {}
};

static_assert(explain_operation<costless>());  // expect-error: an operation must return operation_cost from cost()

int main() {}
