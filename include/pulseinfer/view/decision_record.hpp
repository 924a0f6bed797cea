#pragma once

/// Decisions as data: what a scheduler or an admission policy said, in order, so that a run can be repeated.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

enum class record_kind : std::uint8_t { run, end_step, admit, keep, balance };

/// One decision. Waits are no decisions: they only say that nothing was ready.
struct decision_entry {
  record_kind kind = record_kind::run;
  bool enqueue_wait = false;             ///< run
  admission said = admission::admitted;  ///< admit
  layer_id layer = none<layer_id>;       ///< run
  std::uint32_t first = 0;               ///< run: place of its rows in the log
  std::uint32_t rows = 0;                ///< run
  bool keeps = false;                    ///< keep: a request begins with a slot for every block
  bool spread = false;                   ///< balance: leases that begin later have other slots
  row_id demote = none<row_id>;          ///< balance
  row_id promote = none<row_id>;         ///< balance
  std::uint32_t first_slots = 0;         ///< balance that spreads: place of what its layers get
  std::uint32_t layers = 0;              ///< balance that spreads: their number

  friend bool operator==(decision_entry const&, decision_entry const&) = default;
};

/// A bounded log. Nothing allocates after construction; what does not fit is dropped and makes the log incomplete.
class decision_log {
 public:
  /// @param max_slots numbers of slots: as many as the model has layers for each change of what leases get
  /// @throws configuration_error
  decision_log(std::size_t max_entries, std::size_t max_rows, std::size_t max_slots = 0)
  {
    if (max_entries == 0 || max_rows == 0) {
      throw configuration_error{
        "a decision log of " + std::to_string(max_entries) + " entries and " + std::to_string(max_rows) + " rows"};
    }
    entries_.reserve(max_entries);
    rows_.reserve(max_rows);
    slots_.reserve(max_slots);
  }

  void add(decision_entry entry, std::span<row_id const> rows = {}) noexcept
  {
    if (entries_.size() == entries_.capacity() || rows_.capacity() - rows_.size() < rows.size()) {
      complete_ = false;
      return;
    }
    entry.first = static_cast<std::uint32_t>(rows_.size());
    entry.rows = static_cast<std::uint32_t>(rows.size());
    entries_.push_back(entry);
    for (row_id const row : rows) { rows_.push_back(row); }
  }

  /// An entry of kind `balance` that spreads. @param slots by layer
  void add_spread(decision_entry entry, std::span<std::uint32_t const> slots) noexcept
  {
    if (slots_.capacity() - slots_.size() < slots.size()) {
      complete_ = false;
      return;
    }
    entry.first_slots = static_cast<std::uint32_t>(slots_.size());
    entry.layers = static_cast<std::uint32_t>(slots.size());
    std::size_t const before = entries_.size();
    add(entry);
    if (entries_.size() == before) { return; }
    for (std::uint32_t const count : slots) { slots_.push_back(count); }
  }

  [[nodiscard]] std::span<decision_entry const> entries() const noexcept { return entries_; }
  [[nodiscard]] std::span<row_id const> rows_of(decision_entry const& entry) const noexcept
  {
    return std::span<row_id const>{rows_}.subspan(entry.first, entry.rows);
  }
  [[nodiscard]] std::span<std::uint32_t const> slots_of(decision_entry const& entry) const noexcept
  {
    return std::span<std::uint32_t const>{slots_}.subspan(entry.first_slots, entry.layers);
  }
  /// False once something was dropped: such a log replays its beginning only.
  [[nodiscard]] bool complete() const noexcept { return complete_; }

  friend bool operator==(decision_log const& a, decision_log const& b)
  {
    return a.entries_ == b.entries_ && a.rows_ == b.rows_ && a.slots_ == b.slots_;
  }

 private:
  std::vector<decision_entry> entries_;
  std::vector<row_id> rows_;
  std::vector<std::uint32_t> slots_;
  bool complete_ = true;
};

}  // namespace pulseinfer
