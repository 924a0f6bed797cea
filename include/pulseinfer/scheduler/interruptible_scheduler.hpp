#pragma once

/// Rows whose blocks travel are parked at their layer while others run, where that gains more than the pass that it costs.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/scheduler/cohort_planner.hpp>
#include <pulseinfer/scheduler/decode_profile.hpp>
#include <pulseinfer/scheduler/visit_order.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/decision.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pulseinfer {

/// With a `profile` it follows a plan for the whole step. Three cohorts of rows go through the layers; the plan says which of them
/// make the next pass, together where they stand at one layer. One that goes alone reads the layer's weights once more, but the
/// link goes on meanwhile, and cohorts that are some layers apart bring one's heavy layer beside another's light ones. A
/// cohort_planner looks for the plan, a little in each decision, from what layers and rows brought in earlier steps; each step
/// follows the newest one. Who belongs to which cohort is drawn wherever cohorts that came into a layer together part: those that
/// land first are the first. Where all of a recall's rows go on, the stream waits for it; where a part does, the host. Rows that
/// do not stand where the plan has them (retried, entered apart) make the rest of the step a lockstep. Nobody is left late.
///
/// Without one it is simple. The lowest layer that has ready rows runs, with all of its ready rows: rows behind the others catch
/// up as soon as they can, and merge where they meet. Rows that must finish go first. With nothing ready the step sleeps. Where
/// the predicted wait for all that travels is at most `min_split_gain`, rows that travel are not left behind: they run with the
/// others, and the stream waits for them.
/// @complexity rows   No clock, no allocation. What it remembers depends on earlier arguments only.
template <visit_order Order = visit_order::hits_first>
struct interruptible_scheduler {
  static constexpr bool hits_first = Order == visit_order::hits_first;
  static constexpr bool reads_mailbox = true;

  /// Time that a split must gain: what one more pass over a layer costs. 0: whoever is ready runs, always.
  nanoseconds min_split_gain{0};
  /// With nothing ready and more than this to wait, the step ends and leaves its rows late, unless one of them must finish.
  /// The default never leaves a row late.
  nanoseconds late_after = nanoseconds::max();
  decode_profile profile = {};  ///< with fewer than three rows all go together
  std::uint32_t layers = 0;     ///< of the model; used with a profile

  static constexpr std::size_t most_rows = 512;  ///< more than these in a step are scheduled without the profile
  static constexpr std::size_t most_layers = cohort_plan::most_layers;

  /// @param chosen [rows.size()], written in the order of `rows`
  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    if (rows.empty()) { return {.kind = decision_kind::end_step}; }
    bool const fits = rows.size() <= most_rows && layers > 0 && layers <= most_layers;
    rate_ = profile.link_bytes_per_second > 0.0 ? profile.link_bytes_per_second : link.bytes_per_second;
    if (profile.known() && rate_ > 0.0 && fits && knows(rows)) { return plan(rows, now, chosen); }
    return decide_simply(rows, link, chosen);
  }

  // What it remembers from call to call; nothing to be set.
  struct row_memory {
    nanoseconds entered{-1};  ///< what was predicted is for this entry of a layer
    double lands = 0.0;
    double weight = 1.0;  ///< its bytes in earlier layers, over those of its layer's mean row
    std::uint8_t cohort = 0;
  };
  struct cohort_memory {
    std::uint32_t layer = 1;                   ///< at which its rows stand
    std::uint8_t together = cohort_plan::all;  ///< cohorts that share its recall, who belongs to which is not drawn yet
    std::uint8_t after = 0;                    ///< cohorts of its recall that land later
    double first_part = 0.0;  ///< of a recall's bytes, in the layer where it was drawn; 0: not known yet
    double later_part = 0.0;  ///< in other layers
  };

  std::array<row_memory, most_rows> memory_ = {};
  std::array<cohort_memory, cohort_plan::cohorts> cohorts_ = {};
  std::array<std::uint32_t, most_rows> fresh_ = {};
  std::array<std::uint32_t, most_rows> sorted_ = {};
  std::array<std::uint32_t, 258> buckets_ = {};
  std::array<double, most_layers> row_time_ = {};  ///< link time of one row, by layer, from earlier steps
  double link_free_ = 0.0;
  double rate_ = 0.0;  ///< of the link, bytes a second
  cohort_planner planner_ = {};
  cohort_plan found_ = {};
  cohort_plan plan_ = {};
  std::uint32_t next_ = 0;  ///< of plan_
  std::uint32_t steps_ = 0;
  bool has_found_ = false;
  bool follows_ = false;  ///< the rows of this step stand where the plan has them

 private:
  static constexpr nanoseconds unknown = nanoseconds::max();

  // -- without a profile

  [[nodiscard]] decision decide_simply(
    std::span<scheduler_row const> rows, link_state const& link, std::span<row_id> chosen) const noexcept
  {
    nanoseconds const wait = predicted_wait(link);
    bool const waits_on_stream = min_split_gain.count() > 0 && wait <= min_split_gain && wait != unknown;
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

  // -- with a profile. Times are nanoseconds in double precision: they are predictions.

  [[nodiscard]] bool knows(std::span<scheduler_row const> rows) const noexcept
  {
    return std::ranges::all_of(
      rows, [&](scheduler_row const& row) { return to_index(row.row) < most_rows && to_index(row.layer) < layers; });
  }

  /// Predicts the landings of rows whose plan has come, recall after recall, and learns what their layer brings.
  void note_plans(std::span<scheduler_row const> rows, double now) noexcept
  {
    double const planned = now - static_cast<double>(profile.wake.count());
    for (;;) {
      std::uint32_t fresh = 0;
      nanoseconds first = nanoseconds::max();
      for (scheduler_row const& row : rows) {
        if (is_fresh(row)) { first = std::min(first, row.entered); }
      }
      for (std::uint32_t i = 0; i < rows.size(); ++i) {
        if (is_fresh(rows[i]) && rows[i].entered == first) { fresh_[fresh++] = i; }
      }
      if (fresh == 0) { return; }
      for (std::uint32_t i = 0; i < fresh; ++i) {
        row_memory& memory = memory_[to_index(rows[fresh_[i]].row)];
        memory.entered = first;
        memory.lands = planned;
      }
      learn(rows, fresh);
      predict(rows, fresh, planned);
    }
  }

  [[nodiscard]] bool is_fresh(scheduler_row const& row) const noexcept
  {
    return row.phase != row_phase::selecting && memory_[to_index(row.row)].entered != row.entered;
  }

  void predict(std::span<scheduler_row const> rows, std::uint32_t fresh, double planned) noexcept
  {
    if (profile.smallest_first) { sort_by_misses(rows, fresh); }
    double at = std::max(planned, link_free_) + static_cast<double>(profile.per_recall.count());
    bool moves = false;
    std::uint32_t const together = std::max(profile.rows_per_landing, 1U);
    for (std::uint32_t first = 0; first < fresh; first += together) {
      std::uint32_t const end = std::min(first + together, fresh);
      double bytes = 0.0;
      for (std::uint32_t i = first; i < end; ++i) { bytes += static_cast<double>(rows[fresh_[i]].bytes); }
      if (bytes == 0.0) { continue; }
      if (moves) { at += static_cast<double>(profile.per_landing.count()); }
      at += bytes * 1e9 / rate_;
      moves = true;
      for (std::uint32_t i = first; i < end; ++i) {
        if (rows[fresh_[i]].misses != 0) { memory_[to_index(rows[fresh_[i]].row)].lands = at; }
      }
    }
    if (moves) { link_free_ = at; }
  }

  void learn(std::span<scheduler_row const> rows, std::uint32_t fresh) noexcept
  {
    double bytes = 0.0, weights = 0.0;
    for (std::uint32_t i = 0; i < fresh; ++i) {
      bytes += static_cast<double>(rows[fresh_[i]].bytes);
      weights += memory_[to_index(rows[fresh_[i]].row)].weight;
    }
    double const time = bytes * 1e9 / rate_ / weights;
    double& known = row_time_[to_index(rows[fresh_[0]].layer)];
    known = known == 0.0 ? time : known + (time - known) * layer_gain * fresh / static_cast<double>(rows.size());
    if (fresh < 2 || bytes == 0.0) { return; }
    // Rows of a part are held against one another: what they bring together is what they were expected to.
    for (std::uint32_t i = 0; i < fresh; ++i) {
      double& weight = memory_[to_index(rows[fresh_[i]].row)].weight;
      double const seen = static_cast<double>(rows[fresh_[i]].bytes) / bytes * weights;
      weight += (std::clamp(seen, 0.05, 4.0) - weight) * weight_gain;
    }
  }

  /// Counting sort of fresh_ by misses; rows with more than the last bucket's keep their order in it.
  void sort_by_misses(std::span<scheduler_row const> rows, std::uint32_t fresh) noexcept
  {
    buckets_.fill(0);
    auto const bucket = [&](std::uint32_t i) {
      return std::min<std::size_t>(rows[fresh_[i]].misses, buckets_.size() - 2) + 1;
    };
    for (std::uint32_t i = 0; i < fresh; ++i) { ++buckets_[bucket(i)]; }
    for (std::size_t b = 1; b < buckets_.size(); ++b) { buckets_[b] += buckets_[b - 1]; }
    for (std::uint32_t i = 0; i < fresh; ++i) { sorted_[buckets_[bucket(i) - 1]++] = fresh_[i]; }
    std::copy_n(sorted_.begin(), fresh, fresh_.begin());
  }

  // planning

  /// Rows of a cohort, of `count`.
  [[nodiscard]] static std::uint32_t cohort_rows(std::uint32_t cohort, std::uint32_t count) noexcept
  {
    auto const until = [&](std::uint32_t c) { return (count * cohort_cuts[c] + 50) / 100; };
    return until(cohort + 1) - until(cohort);
  }

  [[nodiscard]] cohort_costs costs(std::uint32_t rows) const noexcept
  {
    auto const us = [](auto time) { return static_cast<float>(static_cast<double>(time.count()) / 1e3); };
    cohort_costs c{
      .layers = layers,
      .per_pass = us(profile.per_pass),
      .per_row = us(profile.per_row),
      .per_hits = us(profile.per_hits),
      .per_row_hits = us(profile.per_row_hits),
      .per_recall = us(profile.per_recall),
      .resume = us(profile.resume),
      .wake = us(profile.wake)};
    if constexpr (!hits_first) {
      c.per_row += c.per_row_hits;
      c.per_row_hits = c.per_hits = 0.0F;
    }
    for (std::uint32_t i = 0; i < cohort_plan::cohorts; ++i) {
      c.rows[i] = static_cast<float>(cohort_rows(i, rows));
      cohort_memory const& cohort = cohorts_[i];
      bool const known = cohort.first_part > 0.0;
      c.first_part[i] = static_cast<float>(known ? cohort.first_part : guessed_first[i]);
      c.later_part[i] = static_cast<float>(known ? cohort.later_part : guessed_later[i]);
    }
    double const landings = profile.per_landing.count() == 0 ? 0.0
                                                             : static_cast<double>(profile.per_landing.count()) *
        (static_cast<double>(rows) / std::max(profile.rows_per_landing, 1U) - 1.0);
    for (std::uint32_t l = 0; l < layers; ++l) {
      c.travel[l] = static_cast<float>((row_time_[l] * rows + std::max(landings, 0.0)) / 1e3);
      double const selected = static_cast<double>(profile.selected_bytes) * 1e9 / rate_;
      c.missing[l] = selected > 0.0 ? static_cast<float>(std::min(row_time_[l] / selected, 1.0)) : 0.0F;
    }
    return c;
  }

  void begin_step(std::span<scheduler_row const> rows) noexcept
  {
    if (has_found_) { plan_ = found_; }
    if (plan_.count == 0) { plan_ = cohort_plan::together(layers); }
    has_found_ = false;
    next_ = 0;
    follows_ = true;
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      cohorts_[c].layer = 0;
      cohorts_[c].together = cohort_plan::all;
      cohorts_[c].after = later_of(cohort_plan::all, c);
    }
    for (scheduler_row const& row : rows) { memory_[to_index(row.row)].cohort = 0; }
    ++steps_;
    if (steps_ > 1 && !planner_.active() && rows.size() >= cohort_plan::cohorts) {
      planner_.begin(costs(static_cast<std::uint32_t>(rows.size())));
    }
  }

  [[nodiscard]] static std::uint8_t later_of(std::uint32_t cohorts, std::uint32_t cohort) noexcept
  {
    return static_cast<std::uint8_t>(cohorts & ~((2U << cohort) - 1U));
  }

  void think() noexcept
  {
    if (!planner_.active() || !planner_.work(states_per_decision)) { return; }
    float time = 0;
    found_ = planner_.take(time);
    has_found_ = true;
  }

  decision plan(std::span<scheduler_row const> rows, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    auto const time = static_cast<double>(now.count());
    note_plans(rows, time);
    think();
    bool starts = std::ranges::all_of(cohorts_, [](cohort_memory const& c) { return c.layer > 0; });
    for (scheduler_row const& row : rows) { starts = starts && to_index(row.layer) == 0; }
    if (starts) { begin_step(rows); }
    for (scheduler_row const& row : rows) {
      follows_ = follows_ && to_index(row.layer) == cohorts_[memory_[to_index(row.row)].cohort].layer;
    }
    while (follows_ && next_ < plan_.count) {
      std::uint32_t const mask = plan_.passes[next_];
      if (splits_undrawn(mask)) {
        std::uint32_t const together = undrawn(mask);
        for (scheduler_row const& row : rows) {
          if (belongs(row, together) && row.phase == row_phase::selecting) { return {.kind = decision_kind::wait}; }
        }
        draw(rows, together);
      }
      bool any = false;
      for (scheduler_row const& row : rows) { any = any || belongs(row, mask); }
      if (any) { return carry_out(rows, mask, time, chosen); }
      advance(mask);
    }
    return lockstep(rows, chosen);
  }

  [[nodiscard]] bool belongs(scheduler_row const& row, std::uint32_t mask) const noexcept
  {
    return (mask >> memory_[to_index(row.row)].cohort & 1U) != 0;
  }

  /// Cohorts that came into their layer together with one of these.
  [[nodiscard]] std::uint32_t undrawn(std::uint32_t mask) const noexcept
  {
    std::uint32_t all = 0;
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      all |= (mask >> c & 1U) != 0 ? cohorts_[c].together : 0U;
    }
    return all;
  }
  [[nodiscard]] bool splits_undrawn(std::uint32_t mask) const noexcept { return (undrawn(mask) & ~mask) != 0; }

  /// Says which rows of a recall belong to which of the cohorts: in the order in which they land.
  void draw(std::span<scheduler_row const> rows, std::uint32_t together) noexcept
  {
    std::uint32_t count = 0;
    double bytes = 0.0, weights = 0.0;
    for (std::uint32_t i = 0; i < rows.size(); ++i) {
      if (!belongs(rows[i], together)) { continue; }
      sorted_[count++] = i;
      bytes += static_cast<double>(rows[i].bytes);
      weights += memory_[to_index(rows[i].row)].weight;
    }
    std::sort(sorted_.begin(), sorted_.begin() + count, [&](std::uint32_t a, std::uint32_t b) {
      double const x = memory_[to_index(rows[a].row)].lands, y = memory_[to_index(rows[b].row)].lands;
      return x != y ? x < y : a < b;
    });
    std::uint32_t shares = 0;
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      if ((together >> c & 1U) != 0) { shares += cohort_cuts[c + 1] - cohort_cuts[c]; }
    }
    std::uint32_t placed = 0, sum = 0;
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      if ((together >> c & 1U) == 0) { continue; }
      sum += cohort_cuts[c + 1] - cohort_cuts[c];
      std::uint32_t const end = (count * sum + shares / 2) / shares;
      double own_bytes = 0.0, own_weight = 0.0;
      for (; placed < end; ++placed) {
        scheduler_row const& row = rows[sorted_[placed]];
        memory_[to_index(row.row)].cohort = static_cast<std::uint8_t>(c);
        own_bytes += static_cast<double>(row.bytes);
        own_weight += memory_[to_index(row.row)].weight;
      }
      cohort_memory& cohort = cohorts_[c];
      cohort.together = static_cast<std::uint8_t>(1U << c);
      cohort.after = later_of(together, c);
      if (together == cohort_plan::all && bytes > 0.0) {
        double const gain = cohort.first_part == 0.0 ? 1.0 : 0.1;
        cohort.first_part += (own_bytes / bytes - cohort.first_part) * gain;
        cohort.later_part += (own_weight / weights - cohort.later_part) * gain;
      }
    }
  }

  /// The cohorts have gone through a layer.
  void advance(std::uint32_t mask) noexcept
  {
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      if ((mask >> c & 1U) == 0) { continue; }
      ++cohorts_[c].layer;
      cohorts_[c].together = static_cast<std::uint8_t>(mask);
      cohorts_[c].after = later_of(mask, c);
    }
    ++next_;
  }

  /// Runs the cohorts' rows, on a wait of the stream where nothing else is behind their recalls, or waits for them.
  decision carry_out(
    std::span<scheduler_row const> rows, std::uint32_t mask, double now, std::span<row_id> chosen) noexcept
  {
    bool by_host = false;
    for (std::uint32_t c = 0; c < cohort_plan::cohorts; ++c) {
      by_host = by_host || ((mask >> c & 1U) != 0 && (cohorts_[c].after & ~mask) != 0);
    }
    decision made{.kind = decision_kind::run};
    double lands = 0.0;
    for (scheduler_row const& row : rows) {
      if (!belongs(row, mask)) { continue; }
      if (row.phase == row_phase::selecting) { return {.kind = decision_kind::wait}; }
      made.layer = row.layer;
      made.enqueue_wait = made.enqueue_wait || row.phase != row_phase::ready;
      if (row.phase != row_phase::ready) { lands = std::max(lands, memory_[to_index(row.row)].lands); }
      chosen[made.rows++] = row.row;
    }
    if (by_host && made.enqueue_wait) {
      double const until = lands + 500.0 > now ? lands + 500.0 : now + 2000.0;
      return {.kind = decision_kind::wait, .until = nanoseconds{static_cast<std::int64_t>(until)}};
    }
    advance(mask);
    return made;
  }

  /// All rows of the lowest layer, once they have landed.
  [[nodiscard]] static decision lockstep(std::span<scheduler_row const> rows, std::span<row_id> chosen) noexcept
  {
    decision made{.kind = decision_kind::run};
    for (scheduler_row const& row : rows) { lower(made.layer, row.layer); }
    for (scheduler_row const& row : rows) {
      if (row.layer != made.layer) { continue; }
      if (row.phase == row_phase::selecting) { return {.kind = decision_kind::wait}; }
      made.enqueue_wait = made.enqueue_wait || row.phase != row_phase::ready;
      chosen[made.rows++] = row.row;
    }
    return made;
  }

  /// Where the rows of cohorts end, in hundredths of all.
  static constexpr std::array<std::uint32_t, cohort_plan::cohorts + 1> cohort_cuts = {0, 40, 70, 100};
  static constexpr std::array<double, cohort_plan::cohorts> guessed_first = {0.18, 0.26, 0.56};
  static constexpr std::array<double, cohort_plan::cohorts> guessed_later = {0.23, 0.29, 0.48};
  static constexpr std::uint32_t states_per_decision = 8;
  static constexpr double layer_gain = 0.1;
  static constexpr double weight_gain = 0.03;
};

static_assert(layer_scheduler<interruptible_scheduler<visit_order::whole>>);
static_assert(layer_scheduler<interruptible_scheduler<visit_order::hits_first>>);

}  // namespace pulseinfer
