#pragma once

/// Any admission policy, with its decisions written down, and its replay.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/decision_record.hpp>

#include <cstddef>

namespace pulseinfer {

/// Decides as `Policy` does. The log must outlive the manager that the policy is given to.
template <admission_policy Policy>
struct recorded_admission {
  Policy policy = {};
  decision_log* log = nullptr;

  void observe(step_sample const& sample) noexcept { policy.observe(sample); }
  admission admit(demand const& request, capacity const& free) noexcept
  {
    admission const said = policy.admit(request, free);
    if (log != nullptr) { log->add({.kind = record_kind::admit, .said = said}); }
    return said;
  }
};

static_assert(admission_policy<recorded_admission<fixed_admission>>);

/// Says what the log says, request by request. Past its end everything is queued.
struct replay_admission {
  decision_log const* log = nullptr;
  std::size_t next = 0;

  void observe(step_sample const&) noexcept {}
  admission admit(demand const&, capacity const&) noexcept
  {
    if (log == nullptr) { return admission::queued; }
    while (next < log->entries().size() && log->entries()[next].kind != record_kind::admit) { ++next; }
    return next < log->entries().size() ? log->entries()[next++].said : admission::queued;
  }
};

static_assert(admission_policy<replay_admission>);

}  // namespace pulseinfer
