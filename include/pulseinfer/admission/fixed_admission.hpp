#pragma once

/// Baseline: a fixed number of rows, each with memory for its full length.

#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// Admits while a row is free and the request's whole need fits what is free: host blocks for its full length, slots for its
/// prompt and for decoding, digest extents. So a row that runs never lacks memory. Measurements change nothing.
struct fixed_admission {
  std::uint32_t max_rows = 0;  ///< rows that run together; 0: as many as there are

  void observe(step_sample const&) noexcept {}

  /// @return rejected where the request could not run on an idle system either
  admission admit(demand const& request, capacity const& free) noexcept
  {
    std::uint32_t const rows = max_rows == 0 ? free.rows_total : std::min(max_rows, free.rows_total);
    std::uint64_t const slots = std::max(request.slots_prefill, request.slots_decode);
    bool const could_fit = rows > 0 && request.host_blocks <= free.host_blocks_total && slots <= free.slots_total &&
      request.digest_extents <= free.digest_extents_total;
    if (!could_fit) { return admission::rejected; }
    bool const fits = free.rows_running < rows && request.host_blocks <= free.host_blocks_free &&
      slots <= free.slots_free && request.digest_extents <= free.digest_extents_free;
    return fits ? admission::admitted : admission::queued;
  }

  [[nodiscard]] std::string explain(demand const&, capacity const& free) const
  {
    if (max_rows == 0 || free.rows_running < max_rows) { return {}; }
    return "the policy lets " + std::to_string(max_rows) + " rows run at most";
  }
};

static_assert(explaining_admission<fixed_admission>);

}  // namespace pulseinfer
