#pragma once

/// Rows whose blocks travel are parked at their layer while others run, where that gains more than the pass that it costs.

#include <pulseinfer/concepts/layer_scheduler.hpp>
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

/// With a `profile` it predicts: from the misses that rows have posted, when each will have landed; from its own decisions, when
/// the device will be free; from earlier steps, what the next layers will bring. Whenever the device is about to be free it
/// weighs who goes next: all rows of a layer once the last of them has landed, or a part that lands earlier. Those left behind
/// need a pass of their own, which reads the layer's weights once more, but the link goes on meanwhile. For each choice it
/// follows a simple rule for some layers and takes the one that brings all rows through them soonest. Rows that are ready wait
/// until the device needs work: more of them have landed by then. Rows merge where they meet; nobody is more than a layer ahead
/// of others for long, and none is left late.
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
  decode_profile profile = {};
  std::uint32_t layers = 0;  ///< of the model; used with a profile

  static constexpr std::size_t most_rows = 512;  ///< more than these in a step are scheduled without the profile
  static constexpr std::size_t most_layers = 256;

  /// @param chosen [rows.size()], written in the order of `rows`
  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    if (rows.empty()) { return {.kind = decision_kind::end_step}; }
    bool const fits = rows.size() <= most_rows && layers > 0 && layers <= most_layers;
    if (profile.known() && fits && knows(rows)) { return plan(rows, now, chosen); }
    return decide_simply(rows, link, chosen);
  }

  // What it remembers from call to call; nothing to be set.
  struct row_memory {
    nanoseconds entered{-1};  ///< what was predicted is for this entry of a layer
    double lands = 0.0;
    double work = 0.0;    ///< what had been enqueued on the device up to the row's plan
    double weight = 1.0;  ///< its bytes in earlier layers, over those of its layer's mean row
  };

  std::array<row_memory, most_rows> memory_ = {};
  std::array<std::uint32_t, most_rows> fresh_ = {};
  std::array<std::uint32_t, most_rows> sorted_ = {};
  std::array<std::uint32_t, 258> buckets_ = {};
  std::array<double, most_layers> row_time_ = {};  ///< link time of one row, by layer, from earlier steps
  double link_free_ = 0.0;
  double device_free_ = 0.0;
  double enqueued_ = 0.0;

 private:
  static constexpr nanoseconds unknown = nanoseconds::max();
  static constexpr std::uint32_t most_groups = 16;

  // -- without a profile

  [[nodiscard]] decision decide_simply(
    std::span<scheduler_row const> rows, link_state const& link, std::span<row_id> chosen) const noexcept
  {
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

  [[nodiscard]] double per_row() const noexcept { return static_cast<double>(profile.per_row.count()); }
  [[nodiscard]] double per_pass() const noexcept { return static_cast<double>(profile.per_pass.count()); }
  [[nodiscard]] double hits_of(double rows) const noexcept
  {
    return static_cast<double>(profile.per_hits.count()) + static_cast<double>(profile.per_row_hits.count()) * rows;
  }
  [[nodiscard]] double pass_of(double rows) const noexcept { return per_pass() + per_row() * rows; }

  /// Predicts the landings of rows whose plan has come.
  void note_plans(std::span<scheduler_row const> rows, double now) noexcept
  {
    double const planned = now - static_cast<double>(profile.wake.count());
    std::uint32_t fresh = 0;
    double work = 0.0;
    for (std::uint32_t i = 0; i < rows.size(); ++i) {
      scheduler_row const& row = rows[i];
      row_memory& memory = memory_[to_index(row.row)];
      if (row.phase == row_phase::selecting || memory.entered == row.entered) { continue; }
      memory.entered = row.entered;
      memory.lands = planned;
      work = std::max(work, memory.work);
      fresh_[fresh++] = i;
    }
    if (fresh == 0) { return; }
    // What stands behind the plan on the device is still to be done.
    device_free_ = planned + (enqueued_ - work);
    learn(rows, fresh);
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
      at += bytes * 1e9 / profile.link_bytes_per_second;
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
    double const time = bytes * 1e9 / profile.link_bytes_per_second / weights;
    double& known = row_time_[to_index(rows[fresh_[0]].layer)];
    known = known == 0.0 ? time : known + (time - known) * 0.25;
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

  /// Rows at one layer that land at about one time.
  struct group {
    double lands = 0.0;  ///< the last of them
    double rows = 0.0;
    double weight = 0.0;  ///< rows, by what they bring
    std::uint32_t layer = 0;
  };

  /// What the scheduler expects: who stands where, when device and link are free.
  struct outlook {
    std::array<group, most_groups> groups = {};
    std::uint32_t count = 0;
    double free = 0.0;
    double link_free = 0.0;
    double finished = 0.0;  ///< when the last rows went through the last layer that is looked at

    void add(group const& g) noexcept
    {
      if (count < most_groups) {
        groups[count++] = g;
        return;
      }
      // No place: it joins another group of its layer, or the last one.
      group* into = &groups.back();
      for (group& other : groups) { into = other.layer == g.layer ? &other : into; }
      into->rows += g.rows;
      into->weight += g.weight;
      into->lands = std::max(into->lands, g.lands);
    }
  };

  decision plan(std::span<scheduler_row const> rows, nanoseconds now, std::span<row_id> chosen) noexcept
  {
    auto const time = static_cast<double>(now.count());
    note_plans(rows, time);
    outlook const seen = look(rows, time);
    bool all_ready = true;
    for (scheduler_row const& row : rows) { all_ready = all_ready && row.phase == row_phase::ready; }
    double const margin = 2.0 * static_cast<double>(profile.wake.count());
    if (!all_ready && time + margin < seen.free) { return wait_until(seen.free - margin, time); }

    // Each part of each layer that could go next, and what follows from it.
    std::uint32_t lowest = seen.groups[0].layer, highest = lowest;
    for (std::uint32_t i = 0; i < seen.count; ++i) {
      lowest = std::min(lowest, seen.groups[i].layer);
      highest = std::max(highest, seen.groups[i].layer);
    }
    double best = 0.0;
    group choice = {};
    bool whole = false;
    for (std::uint32_t i = 0; i < seen.count; ++i) {
      group part{.lands = seen.groups[i].lands, .rows = 0.0, .layer = seen.groups[i].layer};
      if (part.layer > lowest + most_lead) { continue; }
      double rest = 0.0;
      for (std::uint32_t j = 0; j < seen.count; ++j) {
        group const& g = seen.groups[j];
        if (g.layer != part.layer) { continue; }
        (g.lands <= part.lands ? part.rows : rest) += g.rows;
      }
      if (rest > 0.0 && part.rows < least_part * static_cast<double>(rows.size())) { continue; }
      double const value = worth(seen, part, rest == 0.0, highest);
      if (choice.rows == 0.0 || value < best) {
        best = value;
        choice = part;
        whole = rest == 0.0;
      }
    }
    return carry_out(rows, choice, whole, time, chosen);
  }

  /// When all rows will be through the layers ahead, if this part goes next. Several distances are looked at: what a choice
  /// gains at once, and what it leads to.
  [[nodiscard]] double worth(outlook const& seen, group const& part, bool whole, std::uint32_t highest) const noexcept
  {
    double const delay = static_cast<double>((whole ? profile.resume : profile.wake).count());
    double const begin = std::max(seen.free, part.lands + (part.lands > seen.free ? delay : 0.0));
    double sum = 0.0;
    for (std::uint32_t ahead = 1; ahead <= look_ahead; ++ahead) {
      std::uint32_t const end = std::min(highest + ahead, layers - 1);
      outlook after = seen;
      pass(after, part.layer, begin, part.lands, end);
      sum += finish(after, end);
    }
    return sum;
  }

  [[nodiscard]] static decision wait_until(double when, double now) noexcept
  {
    return {.kind = decision_kind::wait, .until = nanoseconds{static_cast<std::int64_t>(std::max(when, now + 100.0))}};
  }

  /// When the row's blocks have landed, as far as that is known: what has landed has, what has not will.
  [[nodiscard]] double landing(scheduler_row const& row, double now) const noexcept
  {
    double const predicted = memory_[to_index(row.row)].lands;
    return row.phase == row_phase::ready ? std::min(predicted, now) : std::max(predicted, now + 500.0);
  }

  /// The rows by layer and landing; those whose misses are not known yet by what their layer brought before.
  [[nodiscard]] outlook look(std::span<scheduler_row const> rows, double now) noexcept
  {
    outlook seen;
    seen.free = std::max(device_free_, now);
    seen.link_free = link_free_;
    std::uint32_t lowest = static_cast<std::uint32_t>(to_index(rows[0].layer));
    for (scheduler_row const& row : rows) {
      lowest = std::min(lowest, static_cast<std::uint32_t>(to_index(row.layer)));
    }
    // Rows that select: one recall each time, which begins when the device comes to it.
    for (scheduler_row const& row : rows) {
      if (row.phase != row_phase::selecting) { continue; }
      double const planned = device_free_ - (enqueued_ - memory_[to_index(row.row)].work);
      seen.link_free = std::max(seen.link_free, planned) + row_time_[to_index(row.layer)];
      memory_[to_index(row.row)].lands = seen.link_free;
    }
    struct span_of_layer {
      double first = 1e300;
      double last = 0.0;
    };
    std::array<span_of_layer, most_lead + 2> spans = {};
    auto const place = [&](scheduler_row const& row) {
      return std::min<std::size_t>(to_index(row.layer) - lowest, spans.size() - 1);
    };
    auto const lands = [&](scheduler_row const& row) { return landing(row, now); };
    for (scheduler_row const& row : rows) {
      span_of_layer& s = spans[place(row)];
      double const at = std::max(lands(row), seen.free);
      s.first = std::min(s.first, at);
      s.last = std::max(s.last, at);
    }
    std::array<std::array<group, parts>, most_lead + 2> found = {};
    for (scheduler_row const& row : rows) {
      std::size_t const layer = place(row);
      span_of_layer const& s = spans[layer];
      double const at = std::max(lands(row), seen.free);
      // Those that land before the device is free are one part.
      std::size_t const part = at <= seen.free || s.last <= s.first ? 0
                                                                    : 1 +
          std::min<std::size_t>(static_cast<std::size_t>((at - s.first) / (s.last - s.first) * (parts - 1)), parts - 2);
      group& g = found[layer][part];
      g.layer = static_cast<std::uint32_t>(to_index(row.layer));
      g.rows += 1.0;
      g.weight += memory_[to_index(row.row)].weight;
      g.lands = std::max(g.lands, lands(row));
    }
    for (auto const& layer : found) {
      for (group const& g : layer) {
        if (g.rows > 0.0) { seen.add(g); }
      }
    }
    return seen;
  }

  /// The rows of a layer that have landed by `landed` make a pass of it that begins at `begin`.
  void pass(outlook& o, std::uint32_t layer, double begin, double landed, std::uint32_t end) const noexcept
  {
    double rows = 0.0, weight = 0.0;
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < o.count; ++i) {
      group const g = o.groups[i];
      if (g.layer == layer && g.lands <= landed) {
        rows += g.rows;
        weight += g.weight;
      } else {
        o.groups[kept++] = g;
      }
    }
    o.count = kept;
    double const through = begin + pass_of(rows);
    o.free = through;
    if (layer >= end) {
      o.finished = std::max(o.finished, through);
      if (layer + 1 < layers) { o.free += hits_of(rows); }
      return;
    }
    o.free += hits_of(rows);
    double const travel = row_time_[layer + 1] * weight;
    double const first = std::max(through, o.link_free) + static_cast<double>(profile.per_recall.count());
    o.link_free = first + travel;
    if (travel > per_pass() && o.count + 2 < most_groups) {
      o.add(
        {.lands = first + travel * early_bytes,
         .rows = rows * early_rows,
         .weight = weight * early_bytes,
         .layer = layer + 1});
      o.add(
        {.lands = first + travel,
         .rows = rows * (1.0 - early_rows),
         .weight = weight * (1.0 - early_bytes),
         .layer = layer + 1});
    } else {
      o.add({.lands = first + travel, .rows = rows, .weight = weight, .layer = layer + 1});
    }
  }

  /// When all rows will be through layer `end`, with a simple rule for who goes next.
  [[nodiscard]] double finish(outlook& o, std::uint32_t end) const noexcept
  {
    while (o.count > 0) {
      std::uint32_t lowest = ~0U, ahead = ~0U;
      double lowest_lands = 0.0, ahead_lands = 0.0;
      for (std::uint32_t i = 0; i < o.count; ++i) {
        if (o.groups[i].layer < lowest) { lowest = o.groups[i].layer; }
      }
      if (lowest > end) { break; }
      lowest_lands = ahead_lands = 1e300;
      for (std::uint32_t i = 0; i < o.count; ++i) {
        group const& g = o.groups[i];
        if (g.layer == lowest) {
          lowest_lands = std::min(lowest_lands, g.lands);
        } else if (g.layer <= end && g.lands < ahead_lands) {
          ahead = g.layer;
          ahead_lands = g.lands;
        }
      }
      std::uint32_t layer = lowest;
      double begin = std::max(o.free, lowest_lands);
      // Those ahead go on while the device would be idle.
      if (lowest_lands > o.free && ahead != ~0U && std::max(o.free, ahead_lands) + pass_of(1.0) <= lowest_lands) {
        layer = ahead;
        begin = std::max(o.free, ahead_lands);
      }
      // Waiting a little for more rows is cheaper than a pass of their own.
      for (bool more = true; more;) {
        more = false;
        for (std::uint32_t i = 0; i < o.count; ++i) {
          group const& g = o.groups[i];
          if (g.layer == layer && g.lands > begin && g.lands - begin <= per_pass()) {
            begin = g.lands;
            more = true;
          }
        }
      }
      pass(o, layer, begin, begin, end);
    }
    return o.finished;
  }

  /// Runs the layer's rows that land by choice.lands, or waits for them.
  decision carry_out(
    std::span<scheduler_row const> rows, group const& choice, bool whole, double now, std::span<row_id> chosen) noexcept
  {
    auto const layer = static_cast<layer_id>(choice.layer);
    bool missing = false;
    for (scheduler_row const& row : rows) {
      bool const wanted = row.layer == layer && (whole || landing(row, now) <= choice.lands);
      missing = missing || (wanted && row.phase != row_phase::ready);
      if (wanted && row.phase == row_phase::selecting) { return {.kind = decision_kind::wait}; }
    }
    // The stream waits for the last landing of a layer; one that is far off leaves time to think again.
    if (missing && (!whole || choice.lands > now + commit_ahead)) {
      return wait_until(whole ? choice.lands - commit_ahead : choice.lands + 500.0, now);
    }
    decision made{.kind = decision_kind::run, .layer = layer};
    double lands = 0.0;
    for (scheduler_row const& row : rows) {
      bool const travels = row.phase != row_phase::ready;
      if (row.layer != layer || (!whole && (travels || landing(row, now) > choice.lands))) { continue; }
      chosen[made.rows++] = row.row;
      made.enqueue_wait = made.enqueue_wait || travels;
      lands = std::max(lands, travels ? memory_[to_index(row.row)].lands : 0.0);
    }
    double const begin =
      std::max(device_free_, lands > 0.0 ? lands + static_cast<double>(profile.resume.count()) : now);
    double const took = pass_of(made.rows);
    enqueued_ += (begin - device_free_) + took;
    for (std::uint32_t i = 0; i < made.rows; ++i) { memory_[to_index(chosen[i])].work = enqueued_; }
    double const hits = to_index(layer) + 1 < layers ? hits_of(made.rows) : 0.0;
    enqueued_ += hits;
    device_free_ = begin + took + hits;
    return made;
  }

  static constexpr std::uint32_t look_ahead = 3;  ///< layers beyond the highest at which rows stand
  static constexpr std::uint32_t most_lead = 1;   ///< layers that some rows may be ahead of others
  static constexpr std::size_t parts = 6;         ///< landings of a layer that are told apart
  static constexpr double least_part = 0.35;      ///< of all rows, for a pass that leaves others of its layer behind
  static constexpr double early_rows = 0.6;       ///< rows of a recall that travel first, in expectation,
  static constexpr double early_bytes = 0.35;     ///< and their part of its bytes
  static constexpr double weight_gain = 0.1;
  static constexpr double commit_ahead =
    30'000.0;  ///< a landing that is further off is not waited for on the stream yet
};

static_assert(layer_scheduler<interruptible_scheduler<visit_order::whole>>);
static_assert(layer_scheduler<interruptible_scheduler<visit_order::hits_first>>);

}  // namespace pulseinfer
