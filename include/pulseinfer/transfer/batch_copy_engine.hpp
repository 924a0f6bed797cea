#pragma once

/// Baseline: all fragments of a recall in one call to the copy engine, planned on the host.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cstdint>

namespace pulseinfer {

/// What systems do that have found out about batched copies: the host waits for the plan and hands over the fragments of
/// all blocks together. Fewer calls than fragment_copy_engine, but each fragment still costs the host its entry, and the
/// copying begins when the last one has been written. Not for captured streams.
struct batch_copy_engine {
  static constexpr plan_place plans_on = plan_place::host;

  std::uint32_t fragments_per_copy = 4096;  ///< of one call

  /// @throws configuration_error for a batch of 0 fragments
  template <class B>
  [[nodiscard]] auto bind(B& backend, transfer_limits const& limits) const
  {
    return fragment_copy_engine{.fragments_per_copy = fragments_per_copy, .rows_per_landing = 0}.bind(backend, limits);
  }
};

static_assert(transfer_engine_for<batch_copy_engine, archetype::backend>);

}  // namespace pulseinfer
