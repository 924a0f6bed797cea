#pragma once

/// Rows that go through layers under a scheduler, with recalls that take turns on one link: all that a scheduler can see, and
/// nothing else. Time is a number.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace pulseinfer_test {

struct pass {
  std::uint32_t step = 0;
  pulseinfer::layer_id layer = pulseinfer::none<pulseinfer::layer_id>;
  std::vector<std::int32_t> rows;
  bool waited = false;  ///< the stream waited for recalls
};

template <pulseinfer::layer_scheduler Scheduler>
class step_model {
 public:
  /// Bytes that a row's recall brings at a layer of a step.
  using bytes_of_type = std::function<std::uint64_t(std::uint32_t step, std::int32_t row, std::int32_t layer)>;

  step_model(Scheduler scheduler, std::uint32_t rows, std::int32_t layers, bytes_of_type bytes_of)
    : scheduler_{scheduler}, layers_{layers}, bytes_of_{std::move(bytes_of)}
  {
    for (std::uint32_t row = 0; row < rows; ++row) { all_.push_back({static_cast<std::int32_t>(row)}); }
  }

  /// Runs one step. @throws std::runtime_error where a decision is not a legal one
  void run_step()
  {
    ++step_;
    for (row_state& row : all_) {
      row.since_late = std::min(row.since_late + 1, 100U);
      if (row.late) { continue; }
      row.layer = 0;
      row.done = false;
      enter(row);
    }
    for (row_state& row : all_) { row.late = false; }
    for (std::uint32_t turn = 0; one_turn(); ++turn) {
      if (turn > 100'000) { throw std::runtime_error{"the step does not end"}; }
    }
    for (row_state& row : all_) {
      row.late = !row.done;
      if (row.late) {
        if (row.since_late < 8) { throw std::runtime_error{"row " + std::to_string(row.number) + " is late again"}; }
        row.since_late = 0;
        ++late_rows;
      }
    }
  }

  std::vector<pass> passes;
  std::uint32_t waits = 0;
  std::uint32_t late_rows = 0;
  std::int64_t now = 0;  ///< nanoseconds
  std::int64_t pass_time = 20'000;
  double bytes_per_second = 50e9;

 private:
  struct row_state {
    std::int32_t number = 0;
    std::int32_t layer = 0;
    std::int64_t landed_at = 0;
    std::int64_t entered_at = 0;
    std::uint64_t bytes = 0;
    bool done = true;
    bool late = false;
    std::uint32_t since_late = 100;
  };

  void enter(row_state& row)
  {
    row.entered_at = now;
    row.bytes = bytes_of_(step_, row.number, row.layer);
    link_free_ = std::max(link_free_, now);
    if (row.bytes > 0) {
      link_free_ += static_cast<std::int64_t>(static_cast<double>(row.bytes) * 1e9 / bytes_per_second);
    }
    row.landed_at = row.bytes > 0 ? link_free_ : now;
  }

  bool one_turn()
  {
    std::vector<pulseinfer::scheduler_row> rows;
    for (row_state const& row : all_) {
      if (row.done) { continue; }
      rows.push_back(
        {.row = static_cast<pulseinfer::row_id>(row.number),
         .layer = static_cast<pulseinfer::layer_id>(row.layer),
         .phase = row.landed_at <= now ? pulseinfer::row_phase::ready : pulseinfer::row_phase::in_flight,
         .must_finish = row.since_late < 8,
         .misses = row.bytes > 0 ? 1U : 0U,
         .bytes = row.bytes,
         .entered = pulseinfer::nanoseconds{row.entered_at}});
    }
    pulseinfer::link_state const link{
      .bytes_in_flight = static_cast<std::uint64_t>(
        static_cast<double>(std::max<std::int64_t>(link_free_ - now, 0)) * bytes_per_second / 1e9),
      .bytes_per_second = bytes_per_second};
    std::vector<pulseinfer::row_id> chosen(rows.size(), pulseinfer::none<pulseinfer::row_id>);
    pulseinfer::decision const made = scheduler_.decide(rows, link, pulseinfer::nanoseconds{now}, chosen);
    if (made.kind == pulseinfer::decision_kind::end_step) {
      for (auto const& row : rows) {
        if (row.must_finish) { throw std::runtime_error{"a row that must finish was left"}; }
      }
      return false;
    }
    if (made.kind == pulseinfer::decision_kind::wait) {
      wait_for_a_landing();
      return true;
    }
    run(made, chosen);
    return true;
  }

  void wait_for_a_landing()
  {
    ++waits;
    std::int64_t next = 0;
    for (row_state const& row : all_) {
      if (!row.done && row.landed_at > now && (next == 0 || row.landed_at < next)) { next = row.landed_at; }
    }
    if (next == 0) { throw std::runtime_error{"a wait with nothing in flight"}; }
    now = next;
  }

  void run(pulseinfer::decision const& made, std::vector<pulseinfer::row_id> const& chosen)
  {
    if (made.rows == 0) { throw std::runtime_error{"a run of no rows"}; }
    pass record;
    record.step = step_;
    record.layer = made.layer;
    std::vector<row_state*> taken;
    for (std::uint32_t i = 0; i < made.rows; ++i) {
      row_state& row = all_.at(pulseinfer::to_index(chosen[i]));
      if (row.done || row.layer != pulseinfer::to_number(made.layer)) { throw std::runtime_error{"a row not there"}; }
      if (std::find(taken.begin(), taken.end(), &row) != taken.end()) { throw std::runtime_error{"a row twice"}; }
      if (row.landed_at > now) {
        if (!made.enqueue_wait) { throw std::runtime_error{"a row ran before its blocks had landed"}; }
        record.waited = true;
        now = row.landed_at;
      }
      record.rows.push_back(row.number);
      taken.push_back(&row);
    }
    now += pass_time;
    for (row_state* const row : taken) {
      if (++row->layer == layers_) {
        row->done = true;
      } else {
        enter(*row);
      }
    }
    passes.push_back(record);
  }

  Scheduler scheduler_;
  std::int32_t layers_;
  bytes_of_type bytes_of_;
  std::vector<row_state> all_;
  std::uint32_t step_ = 0;
  std::int64_t link_free_ = 0;
};

}  // namespace pulseinfer_test
