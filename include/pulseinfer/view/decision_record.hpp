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

enum class record_kind : std::uint8_t { run, end_step, admit };

/// One decision. Waits are no decisions: they only say that nothing was ready.
struct decision_entry {
  record_kind kind = record_kind::run;
  bool enqueue_wait = false;             ///< run
  admission said = admission::admitted;  ///< admit
  layer_id layer = none<layer_id>;       ///< run
  std::uint32_t first = 0;               ///< run: place of its rows in the log
  std::uint32_t rows = 0;                ///< run
};

/// A bounded log. Nothing allocates after construction; what does not fit is dropped and makes the log incomplete.
class decision_log {
 public:
  /// @throws configuration_error
  decision_log(std::size_t max_entries, std::size_t max_rows)
  {
    if (max_entries == 0 || max_rows == 0) {
      throw configuration_error{
        "a decision log of " + std::to_string(max_entries) + " entries and " + std::to_string(max_rows) + " rows"};
    }
    entries_.reserve(max_entries);
    rows_.reserve(max_rows);
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

  [[nodiscard]] std::span<decision_entry const> entries() const noexcept { return entries_; }
  [[nodiscard]] std::span<row_id const> rows_of(decision_entry const& entry) const noexcept
  {
    return std::span<row_id const>{rows_}.subspan(entry.first, entry.rows);
  }
  /// False once something was dropped: such a log replays its beginning only.
  [[nodiscard]] bool complete() const noexcept { return complete_; }

  friend bool operator==(decision_log const& a, decision_log const& b)
  {
    auto const same = [](decision_entry const& x, decision_entry const& y) {
      return x.kind == y.kind && x.enqueue_wait == y.enqueue_wait && x.said == y.said && x.layer == y.layer &&
        x.first == y.first && x.rows == y.rows;
    };
    if (a.entries_.size() != b.entries_.size() || a.rows_ != b.rows_) { return false; }
    for (std::size_t i = 0; i < a.entries_.size(); ++i) {
      if (!same(a.entries_[i], b.entries_[i])) { return false; }
    }
    return true;
  }

 private:
  std::vector<decision_entry> entries_;
  std::vector<row_id> rows_;
  bool complete_ = true;
};

}  // namespace pulseinfer
