#pragma once

/// Whoever is ready runs: rows whose blocks travel are parked at their layer, and rejoin the others when they have landed.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <cstdint>
#include <span>

namespace pulseinfer {

/// Simple form. The lowest layer that has ready rows runs, with all of its ready rows: rows behind the others catch up as
/// soon as they can, and merge where they meet. Rows that must finish go first. With nothing ready the step sleeps.
///
/// Each split costs another pass over the layer later on. Where the predicted wait for all that travels is at most
/// `min_split_gain`, rows that travel are not left behind: they run with the others, and the stream waits for them.
/// @complexity rows; no state, no clock, no allocation
template <visit_order Order = visit_order::hits_first>
struct interruptible_scheduler {
  static constexpr bool hits_first = Order == visit_order::hits_first;
  static constexpr bool reads_mailbox = true;

  /// Time that a split must gain: what one more pass over a layer costs. 0: whoever is ready runs, always.
  nanoseconds min_split_gain{0};
  /// With nothing ready and more than this to wait, the step ends and leaves its rows late, unless one of them must finish.
  /// The default never leaves a row late.
  nanoseconds late_after = nanoseconds::max();

  /// @param chosen [rows.size()], written in the order of `rows`
  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds, std::span<row_id> chosen) noexcept
  {
    if (rows.empty()) { return {.kind = decision_kind::end_step}; }
    nanoseconds const wait = predicted_wait(link);
    bool const waits_on_stream = wait <= min_split_gain && wait != unknown;

    layer_id ready = none<layer_id>;       // lowest layer with a ready row
    layer_id urgent = none<layer_id>;      // lowest layer with a ready row that must finish
    layer_id travelling = none<layer_id>;  // lowest layer with a row whose blocks travel
    bool must_finish = false;
    for (scheduler_row const& row : rows) {
      must_finish = must_finish || row.must_finish;
      if (row.phase == row_phase::ready) {
        lower(ready, row.layer);
        if (row.must_finish) { lower(urgent, row.layer); }
      } else if (row.phase == row_phase::in_flight) {
        lower(travelling, row.layer);
      }
    }
    if (!is_none(urgent)) { return run(rows, urgent, waits_on_stream, chosen); }
    if (!is_none(ready)) { return run(rows, ready, waits_on_stream, chosen); }
    if (!is_none(travelling) && waits_on_stream) { return run(rows, travelling, true, chosen); }
    bool const too_long = wait != unknown && wait > late_after;
    return {.kind = too_long && !must_finish ? decision_kind::end_step : decision_kind::wait};
  }

 private:
  static constexpr nanoseconds unknown = nanoseconds::max();

  /// Time until everything that is in flight has landed; `unknown` while no rate has been measured.
  [[nodiscard]] static nanoseconds predicted_wait(link_state const& link) noexcept
  {
    if (!(link.bytes_per_second > 0.0)) { return unknown; }
    double const time = static_cast<double>(link.bytes_in_flight) * 1e9 / link.bytes_per_second;
    constexpr double longest = 1e18;  // 31 years, well inside what nanoseconds count
    return nanoseconds{static_cast<std::int64_t>(time < longest ? time : longest)};
  }

  static void lower(layer_id& lowest, layer_id layer) noexcept
  {
    if (is_none(lowest) || layer < lowest) { lowest = layer; }
  }

  /// The layer's ready rows, with those that travel where the stream is to wait for them.
  [[nodiscard]] static decision run(
    std::span<scheduler_row const> rows, layer_id layer, bool with_travelling, std::span<row_id> chosen) noexcept
  {
    decision made{.kind = decision_kind::run, .layer = layer};
    for (scheduler_row const& row : rows) {
      bool const travels = row.phase == row_phase::in_flight && with_travelling;
      if (row.layer != layer || (row.phase != row_phase::ready && !travels)) { continue; }
      chosen[made.rows++] = row.row;
      made.enqueue_wait = made.enqueue_wait || travels;
    }
    return made;
  }
};

static_assert(layer_scheduler<interruptible_scheduler<visit_order::whole>>);
static_assert(layer_scheduler<interruptible_scheduler<visit_order::hits_first>>);

}  // namespace pulseinfer
