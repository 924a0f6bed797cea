#include <pulseinfer/concepts/archetypes.hpp>

using namespace pulseinfer;

/// A selector without a budget.
struct boundless {
  template <class B>
  struct bound : private archetype::selector::bound<B> {
    using base = archetype::selector::bound<B>;
#if defined(PULSEINFER_COMPILE_FAIL_CONTROL)
    using base::budget_blocks;
#endif
    using base::dense_tokens;
    using base::digest_async;
    using base::digest_bytes;
    using base::select_async;
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, selector_limits const&) const
  {
    return {};
  }
};

/// A selector whose sizes are of other types, and one of them not to be asked of a const state.
struct other_sizes {
  template <class B>
  struct bound : archetype::selector::bound<B> {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
    [[nodiscard]] std::uint32_t dense_tokens() noexcept { return 0; }
    [[nodiscard]] std::uint32_t digest_bytes(layer_id) const noexcept { return 0; }
#endif
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, selector_limits const&) const
  {
    return {};
  }
};

/// A selector whose digests may throw and whose selections say nothing of their success.
struct throwing_and_silent {
  template <class B>
  struct bound : archetype::selector::bound<B> {
#if !defined(PULSEINFER_COMPILE_FAIL_CONTROL)
    status digest_async(typename B::stream_ref, digest_request const&) { return status::ok; }
    void select_async(typename B::stream_ref, select_request const&) noexcept {}
#endif
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, selector_limits const&) const
  {
    return {};
  }
};

using on = archetype::backend;

static_assert(explain_selector<boundless, on>());  // expect-error: noexcept, from budget_blocks(layer) const
static_assert(explain_selector<other_sizes, on>());
// expect-error: a selector must return std::uint32_t, noexcept, from dense_tokens() const
// expect-error: a selector must return std::uint64_t, noexcept, from digest_bytes(layer) const
static_assert(explain_selector<throwing_and_silent, on>());
// expect-error: a selector must return status, noexcept, from digest_async(stream, request)
// expect-error: a selector must return status, noexcept, from select_async(stream, request)

int main() {}
