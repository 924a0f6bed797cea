/// How rows of hits-first compositions go through the layers: in lockstep, or parked where their blocks travel if that was measured
/// to gain something.
#pragma once

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/decode_profile.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace decode_text {

/// The scheduler's profile comes of the first decode steps, which go in lockstep: a pass costs what such a step took, over its
/// layers. Then rows are parked for some steps; the faster of the two ways is kept. With fewer than three rows an interruptible
/// scheduler keeps all together, so that these stay in lockstep, where the host waits for nothing.
class pace {
 public:
  using lockstep = pulseinfer::lockstep_scheduler<pulseinfer::visit_order::hits_first>;
  using interruptible = pulseinfer::interruptible_scheduler<pulseinfer::visit_order::hits_first>;
  enum class way : std::uint8_t { lockstep, interruptible };

  static constexpr std::uint32_t fewest_parked = 3;  // rows
  static constexpr std::uint32_t first_steps = 2;    // not timed: what is made at first use
  static constexpr std::uint32_t timed_steps = 3;
  static constexpr std::uint32_t planned_steps = 8;  // not timed: until the scheduler has found a plan

  /// @param may_park false: lockstep always   @param selected_bytes of a row's selection in a layer
  /// @param link_bytes_per_second of a recall; 0: as the manager fits it, which in lockstep sees landings late
  pace(
    bool may_park, std::uint32_t rows, std::uint32_t layers, std::uint64_t selected_bytes, double link_bytes_per_second)
    : parks_{may_park && rows >= fewest_parked},
      rows_{rows},
      selected_bytes_{selected_bytes},
      link_bytes_per_second_{link_bytes_per_second}
  {
    interruptible_.layers = layers;
  }

  /// A step of one row alone, as a prompt's last one.
  void note_single(pulseinfer::nanoseconds time) { single_ = single_.count() == 0 ? time : std::min(single_, time); }
  /// A decode step of all rows.
  void note_step(pulseinfer::nanoseconds time)
  {
    std::uint32_t const step = steps_++;
    if (!parks_ || step < first_steps) return;
    std::uint32_t const measured = first_steps + timed_steps, parked = measured + planned_steps;
    if (step < measured) {
      in_lockstep_.push_back(time);
      if (step + 1 == measured) park();
    } else if (step >= parked && step < parked + timed_steps) {
      parked_.push_back(time);
      if (step + 1 == parked + timed_steps && middle(parked_) > middle(in_lockstep_)) way_ = way::lockstep;
    }
  }

  [[nodiscard]] way chosen() const noexcept { return way_; }
  /// per_pass is 0 until it has been measured.
  [[nodiscard]] pulseinfer::decode_profile const& profile() const noexcept { return interruptible_.profile; }

  [[nodiscard]] std::string description() const
  {
    std::string said = way_ == way::lockstep ? "lockstep, hits first" : "rows parked where their blocks travel";
    if (interruptible_.profile.known()) {
      auto const microseconds = [](pulseinfer::nanoseconds time) {
        return std::to_string(time.count() / 1000) + " us";
      };
      said += "; a pass over a layer was taken to be " + microseconds(interruptible_.profile.per_pass) + " and " +
        microseconds(interruptible_.profile.per_row) + " a row";
    }
    return said;
  }

  pulseinfer::decision decide(
    std::span<pulseinfer::scheduler_row const> rows, pulseinfer::link_state const& link, pulseinfer::nanoseconds now,
    std::span<pulseinfer::row_id> chosen) noexcept
  {
    return way_ == way::lockstep ? lockstep_.decide(rows, link, now, chosen)
                                 : interruptible_.decide(rows, link, now, chosen);
  }

 private:
  [[nodiscard]] static pulseinfer::nanoseconds middle(std::vector<pulseinfer::nanoseconds> times)
  {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void park()
  {
    pulseinfer::nanoseconds const all = middle(in_lockstep_) / interruptible_.layers;
    pulseinfer::nanoseconds const one = single_ / interruptible_.layers;
    pulseinfer::nanoseconds const per_row =
      one.count() > 0 && all > one ? (all - one) / (rows_ - 1) : pulseinfer::nanoseconds{0};
    interruptible_.profile = {
      .per_pass = std::max(all - per_row * rows_, pulseinfer::nanoseconds{1}),
      .per_row = per_row,
      .link_bytes_per_second = link_bytes_per_second_,
      .resume = std::chrono::microseconds{2},
      .wake = std::chrono::microseconds{10},
      .rows_per_landing = rows_,
      .selected_bytes = selected_bytes_,
      .smallest_first = false};
    interruptible_.min_split_gain = interruptible_.profile.per_pass;  // until the link's rate is known
    way_ = way::interruptible;
  }

  bool parks_;
  std::uint32_t rows_;
  std::uint64_t selected_bytes_;
  double link_bytes_per_second_;
  way way_ = way::lockstep;
  std::uint32_t steps_ = 0;
  pulseinfer::nanoseconds single_{0};
  std::vector<pulseinfer::nanoseconds> in_lockstep_, parked_;
  lockstep lockstep_;
  interruptible interruptible_;
};

/// What a manager is given: it asks a pace, which its owner keeps.
struct paced_scheduler {
  static constexpr bool hits_first = true;
  static constexpr bool reads_mailbox = true;

  pace* keeps = nullptr;  // borrowed

  pulseinfer::decision decide(
    std::span<pulseinfer::scheduler_row const> rows, pulseinfer::link_state const& link, pulseinfer::nanoseconds now,
    std::span<pulseinfer::row_id> chosen) noexcept
  {
    return keeps->decide(rows, link, now, chosen);
  }
};
static_assert(pulseinfer::layer_scheduler<paced_scheduler>);

}  // namespace decode_text
