#pragma once

/// Looks for the order in which cohorts of rows go through the layers of a step, a little at each call.

#include <pulseinfer/scheduler/decode_profile.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pulseinfer {

/// Sets of cohorts that share a pass, one after another: bit c for cohort c. The layer of a pass is the one at which its cohorts
/// stand.
struct cohort_plan {
  static constexpr std::uint32_t cohorts = 3;
  static constexpr std::uint32_t most_layers = 256;
  static constexpr std::uint8_t all = (1U << cohorts) - 1;

  std::array<std::uint8_t, std::size_t{cohorts} * most_layers> passes = {};
  std::uint32_t count = 0;

  /// All go together.
  static cohort_plan together(std::uint32_t layers) noexcept
  {
    cohort_plan plan;
    plan.count = std::min(layers, most_layers);
    std::fill_n(plan.passes.begin(), plan.count, all);
    return plan;
  }
};

/// What a planner is told of a step. Times in microseconds.
struct cohort_costs {
  std::array<float, cohort_plan::cohorts> rows = {};
  /// A cohort's part of a layer's link time where the cohorts of a recall are drawn as its rows land, and in the layers after.
  std::array<float, cohort_plan::cohorts> first_part = {}, later_part = {};
  std::array<float, cohort_plan::most_layers> travel = {};   ///< link time of all rows, by layer
  std::array<float, cohort_plan::most_layers> missing = {};  ///< share of their selections that travels
  std::uint32_t layers = 0;
  float per_pass = 0, per_row = 0, per_hits = 0, per_row_hits = 0, per_recall = 0, resume = 0, wake = 0;
};

namespace detail {

/// Layers by which each cohort is ahead of the last one.
using cohort_offsets = std::array<std::uint8_t, cohort_plan::cohorts>;
inline constexpr std::uint32_t most_cohort_lead = 3;

/// All of them, the least ahead first.
struct cohort_places {
  std::array<cohort_offsets, 64> order = {};
  std::uint32_t count = 0;
};

[[nodiscard]] constexpr cohort_places make_cohort_places() noexcept
{
  cohort_places made;
  for (std::uint32_t sum = 0; sum <= 2 * most_cohort_lead; ++sum) {
    for (std::uint32_t code = 0; code < 64; ++code) {
      cohort_offsets const o = {
        static_cast<std::uint8_t>(code >> 4U), static_cast<std::uint8_t>(code >> 2U & 3U),
        static_cast<std::uint8_t>(code & 3U)};
      bool const one_last = o[0] == 0 || o[1] == 0 || o[2] == 0;
      if (one_last && std::uint32_t{o[0]} + o[1] + o[2] == sum) { made.order[made.count++] = o; }
    }
  }
  return made;
}

}  // namespace detail

/// Three cohorts go through the layers; each pass may hold those that stand at one layer, whose recall into the next layer then
/// begins together. Of all orders in which no cohort is more than `most_lead` layers ahead of another it looks for the one that
/// is through soonest, by dynamic programming over where the cohorts stand. Of each place it keeps the `most_states` best ways
/// to get there that are not worse in every respect (when device and link are free, when each cohort has landed).
/// @source layer-wise pipelining of two resources; the search itself is that of a multi-criteria shortest path
class cohort_planner {
 public:
  static constexpr std::uint32_t cohorts = cohort_plan::cohorts;
  static constexpr std::uint32_t most_lead = detail::most_cohort_lead;
  static constexpr std::uint32_t most_states = 4;

  /// Begins a search; one that was under way is given up.
  void begin(cohort_costs const& costs) noexcept
  {
    costs_ = costs;
    layer_ = 0;
    place_ = 0;
    active_ = costs.layers > 0 && costs.layers <= cohort_plan::most_layers;
    for (auto& layer : cells_) {
      for (cell& c : layer) { c.count = 0; }
    }
    state first{.device = costs_.per_hits, .link = costs_.per_recall};
    for (std::uint32_t c = 0; c < cohorts; ++c) {
      first.device += costs_.per_row_hits * costs_.rows[c] * (1.0F - costs_.missing[0]);
      first.link += costs_.travel[0] * costs_.first_part[c];
      first.lands[c] = first.link;
      first.after[c] = static_cast<std::uint8_t>(cohort_plan::all & ~((2U << c) - 1U));
    }
    cells_[0][0].states[0] = first;
    cells_[0][0].count = 1;
  }

  [[nodiscard]] bool active() const noexcept { return active_; }

  /// Goes on by about `states` states. @return whether the search has come to its end: take() gives the plan
  bool work(std::uint32_t states) noexcept
  {
    if (!active_) { return false; }
    std::uint32_t done = 0;
    while (done < states) {
      if (layer_ == costs_.layers) {
        active_ = false;
        return cells_[layer_ % 2][0].count > 0;
      }
      cell const& from = cells_[layer_ % 2][code_at(place_)];
      if (from.count > 0) { expand(places.order[place_], from); }
      done += from.count + 1U;
      if (++place_ == places.count) {
        for (cell& c : cells_[layer_ % 2]) { c.count = 0; }
        place_ = 0;
        ++layer_;
      }
    }
    return false;
  }

  /// The plan of a search that has come to its end. @param time until all are through, in microseconds
  [[nodiscard]] cohort_plan take(float& time) const noexcept
  {
    cell const& end = cells_[costs_.layers % 2][0];
    std::uint32_t best = 0;
    for (std::uint32_t i = 1; i < end.count; ++i) {
      if (end.states[i].device < end.states[best].device) { best = i; }
    }
    time = end.states[best].device;
    cohort_plan plan;
    std::array<std::uint32_t, cohorts> at = {};
    at.fill(costs_.layers);
    std::uint32_t index = best;
    std::uint8_t step = end.states[best].back;
    for (;;) {
      std::uint32_t const mask = step & cohort_plan::all;
      if (mask == 0) { break; }
      plan.passes[plan.count++] = static_cast<std::uint8_t>(mask);
      for (std::uint32_t c = 0; c < cohorts; ++c) { at[c] -= mask >> c & 1U; }
      index = step >> cohorts;
      std::uint32_t const low = *std::ranges::min_element(at);
      step = back_[low][code_of(at, low)][index];
    }
    std::reverse(plan.passes.begin(), plan.passes.begin() + plan.count);
    return plan;
  }

 private:
  using offsets = detail::cohort_offsets;

  struct state {
    float device = 0;
    float link = 0;
    std::array<float, cohorts> lands = {};
    std::array<std::uint8_t, cohorts> after = {};  ///< cohorts of the same recall that land later
    std::uint8_t back = 0;                         ///< the pass that led here, and the state that it was made in
  };
  struct cell {
    std::array<state, most_states> states = {};
    std::uint8_t count = 0;
  };

  static constexpr detail::cohort_places places = detail::make_cohort_places();

  template <class Positions>
  [[nodiscard]] static constexpr std::size_t code_of(Positions const& at, std::uint32_t low) noexcept
  {
    return (at[0] - low) * 16U + (at[1] - low) * 4U + (at[2] - low);
  }
  [[nodiscard]] static std::size_t code_at(std::uint32_t place) noexcept { return code_of(places.order[place], 0); }

  void expand(offsets const& ahead, cell const& from) noexcept
  {
    std::size_t const code = code_of(ahead, 0);
    for (std::uint32_t i = 0; i < from.count; ++i) { back_[layer_][code][i] = from.states[i].back; }
    for (std::uint32_t mask = 1; mask <= cohort_plan::all; ++mask) {
      std::uint32_t own = ~0U;
      float rows = 0;
      bool level = true;
      offsets to = ahead;
      for (std::uint32_t c = 0; c < cohorts; ++c) {
        if ((mask >> c & 1U) == 0) { continue; }
        level = level && (own == ~0U || own == ahead[c]);
        own = ahead[c];
        rows += costs_.rows[c];
        ++to[c];
      }
      std::uint32_t const layer = layer_ + own;
      if (!level || layer >= costs_.layers) { continue; }
      std::uint32_t const low = std::min({to[0], to[1], to[2]});
      if (std::max({to[0], to[1], to[2]}) - low > most_lead) { continue; }
      cell& into = cells_[(layer_ + low) % 2][code_of(to, low)];
      float const pass = costs_.per_pass + (costs_.per_row + costs_.per_row_hits * costs_.missing[layer]) * rows;
      float const here = layer + 1 < costs_.layers ? 1.0F - costs_.missing[layer + 1] : 0.0F;
      float const hits = costs_.per_hits + costs_.per_row_hits * here * rows;
      bool const one = (mask & (mask - 1U)) == 0;
      for (std::uint32_t i = 0; i < from.count; ++i) {
        state next = from.states[i];
        float begin = next.device;
        for (std::uint32_t c = 0; c < cohorts; ++c) {
          if ((mask >> c & 1U) == 0) { continue; }
          // The stream waits for a recall as a whole; where others of it follow, the host waits and launches.
          bool const by_host = (next.after[c] & ~mask) != 0;
          begin = std::max(begin, next.lands[c] + (by_host ? costs_.wake : costs_.resume));
        }
        next.device = begin + pass;
        if (layer + 1 < costs_.layers) {
          next.link = std::max(next.device, next.link) + costs_.per_recall;
          next.device += hits;
          float whole = 0, first = 0;
          for (std::uint32_t c = 0; c < cohorts; ++c) {
            whole += (mask >> c & 1U) != 0 ? costs_.later_part[c] : 0.0F;
            first += (mask >> c & 1U) != 0 ? costs_.first_part[c] : 0.0F;
          }
          for (std::uint32_t c = 0; c < cohorts; ++c) {
            if ((mask >> c & 1U) == 0) { continue; }
            float const part = one ? costs_.later_part[c] : costs_.first_part[c] / first * whole;
            next.link += costs_.travel[layer + 1] * part;
            next.lands[c] = next.link;
            next.after[c] = static_cast<std::uint8_t>(mask & ~((2U << c) - 1U));
          }
        } else {
          for (std::uint32_t c = 0; c < cohorts; ++c) {
            if ((mask >> c & 1U) != 0) { next.lands[c] = 0, next.after[c] = 0; }
          }
        }
        next.back = static_cast<std::uint8_t>(mask | i << cohorts);
        add(into, next);
      }
    }
  }

  static void add(cell& into, state const& next) noexcept
  {
    auto const no_worse = [](state const& a, state const& b) {
      return a.device <= b.device && a.link <= b.link && a.lands[0] <= b.lands[0] && a.lands[1] <= b.lands[1] &&
        a.lands[2] <= b.lands[2];
    };
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < into.count; ++i) {
      if (no_worse(into.states[i], next)) { return; }
    }
    for (std::uint32_t i = 0; i < into.count; ++i) {
      if (!no_worse(next, into.states[i])) {
        if (kept != i) { into.states[kept] = into.states[i]; }
        ++kept;
      }
    }
    if (kept < most_states) {
      into.states[kept++] = next;
    } else {
      std::uint32_t worst = 0;
      for (std::uint32_t i = 1; i < kept; ++i) {
        if (cost_of(into.states[i]) > cost_of(into.states[worst])) { worst = i; }
      }
      if (cost_of(next) < cost_of(into.states[worst])) { into.states[worst] = next; }
    }
    into.count = static_cast<std::uint8_t>(kept);
  }

  [[nodiscard]] static float cost_of(state const& s) noexcept
  {
    float const first = std::max(s.device, std::min({s.lands[0], s.lands[1], s.lands[2]}));
    float sum = 0;
    for (float const lands : s.lands) { sum += std::max(s.device, lands); }
    return first + 0.3F * s.link + 0.2F * sum;
  }

  cohort_costs costs_ = {};
  std::uint32_t layer_ = 0;  ///< of the cohort that is last
  std::uint32_t place_ = 0;
  bool active_ = false;
  std::array<std::array<cell, 64>, 2> cells_ = {};  ///< [layer % 2][code]
  std::array<std::array<std::array<std::uint8_t, most_states>, 64>, cohort_plan::most_layers + 1> back_ = {};
};

}  // namespace pulseinfer
