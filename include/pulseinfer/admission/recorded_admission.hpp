#pragma once

/// Any admission policy, with its decisions written down, and its replay.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/decision_record.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pulseinfer {

/// Decides as `Policy` does: who is let in, and where the policy places rows, that too. The log must outlive the manager that the
/// policy is given to.
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

  bool keeps_resident(demand const& request, capacity const& free) noexcept
    requires balancing_admission<Policy>
  {
    bool const keeps = policy.keeps_resident(request, free);
    if (log != nullptr) { log->add({.kind = record_kind::keep, .keeps = keeps}); }
    return keeps;
  }

  balance_answer plan(balance_question const& asked, std::span<std::uint32_t> slots) noexcept
    requires balancing_admission<Policy>
  {
    balance_answer const answer = policy.plan(asked, slots);
    if (log == nullptr) { return answer; }
    decision_entry const entry{
      .kind = record_kind::balance, .spread = answer.spread, .demote = answer.demote, .promote = answer.promote};
    if (answer.spread) {
      log->add_spread(entry, slots);
    } else {
      log->add(entry);
    }
    return answer;
  }

  [[nodiscard]] std::string explain(demand const& request, capacity const& free) const
    requires explaining_admission<Policy>
  {
    return policy.explain(request, free);
  }
};

static_assert(admission_policy<recorded_admission<fixed_admission>>);

/// Says what the log says, call by call: requests as they were let in and placed, slots as they were dealt out. It answers a run
/// that asks the same in the same order, which one of the same requests and schedule does. Past the log's end everything is queued,
/// and nothing placed.
struct replay_admission {
  decision_log const* log = nullptr;
  std::size_t next = 0;          ///< of admissions
  std::size_t next_keep = 0;     ///< of places
  std::size_t next_balance = 0;  ///< of what is dealt out

  void observe(step_sample const&) noexcept {}
  admission admit(demand const&, capacity const&) noexcept
  {
    decision_entry const* const entry = find(next, record_kind::admit);
    return entry != nullptr ? entry->said : admission::queued;
  }
  bool keeps_resident(demand const&, capacity const&) noexcept
  {
    decision_entry const* const entry = find(next_keep, record_kind::keep);
    return entry != nullptr && entry->keeps;
  }
  balance_answer plan(balance_question const&, std::span<std::uint32_t> slots) noexcept
  {
    decision_entry const* const entry = find(next_balance, record_kind::balance);
    if (entry == nullptr) { return {}; }
    std::span<std::uint32_t const> const said = log->slots_of(*entry);
    std::copy_n(said.begin(), std::min(said.size(), slots.size()), slots.begin());
    return {.demote = entry->demote, .promote = entry->promote, .spread = entry->spread};
  }

 private:
  /// The next entry of a kind; nullptr past the last.
  [[nodiscard]] decision_entry const* find(std::size_t& place, record_kind kind) const noexcept
  {
    if (log == nullptr) { return nullptr; }
    std::span<decision_entry const> const entries = log->entries();
    while (place < entries.size() && entries[place].kind != kind) { ++place; }
    return place < entries.size() ? &entries[place++] : nullptr;
  }
};

static_assert(balancing_admission<replay_admission>);

}  // namespace pulseinfer
