#pragma once

/// Admits as many rows as pay, from what steps were measured to cost.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/admission/step_history.hpp>
#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/view/balance.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

namespace pulseinfer {

/// The time of a step is followed as T(B) = a + b B (step_history); a step of B rows takes at least what their recalls take on
/// the link. A further row is let in while memory for its whole length is free (as fixed_admission counts it), fewer rows run
/// than `limit()`, and the round has room: rows are let in by rounds of half as many as run, or as what would do is away if that is
/// fewer, then `settle_steps` steps show what they cost.
///
/// The limit is the largest B for which one more row still brings `least_gain` of its fair share of tokens a second and, where
/// there is a target, T(B) with its spread stays within it. How many standard deviations that takes is learnt: each step that
/// misses the target raises the margin, each that keeps it lowers it, so that `missed_share` of them miss. The limit is moved
/// only where it is off by more than `band`: what is noise moves nothing.
struct adaptive_admission {
  static constexpr std::uint64_t least_hold = 4096, most_hold = 16384;
  static constexpr std::uint32_t unlimited = 0xFFFFFFFFU;

  nanoseconds tpot_target{0};           ///< longest step that a further row may make; 0: none
  double link_bytes_per_second = 50e9;  ///< of recalls, as measured on the machine
  double least_gain = 0.01;             ///< of a row's fair share of the throughput
  double missed_share = 0.004;          ///< of the steps that may take longer than the target
  double margin = 3.0;                  ///< standard deviations that are kept free below the target, to begin with
  double band = 0.15;                   ///< of the limit
  std::uint32_t max_rows = 0;           ///< rows that run together; 0: as many as there are
  std::uint32_t horizon_steps = 512;    ///< steps in which what is brought back must have paid
  double bring_back_gain = 4.0;         ///< times what is brought: all rows wait for that, and few for recalls
  std::uint32_t crowded_steps = 128;    ///< after somebody waited for slots, in which no row begins with all of them
  double outlier = 4.0;                 ///< times what others recall: brought back if another can make room
  double miss_exponent = 0.9;           ///< of a layer's misses over its slots, until it was measured
  std::uint32_t settle_steps = 4;       ///< steps that show what further rows cost, before the next are let in
  step_history measured = {};
  std::uint32_t limit_rows = unlimited;
  std::uint32_t prompt_steps = 0;   ///< in a row that brought prompts in
  std::uint64_t cut_at = 0;         ///< step of the last cut of a limit that was reached; 0: there was none
  double recall_at_cut = 0.0;       ///< seconds of the link for a row's recalls then, or since then if that is more
  double ceiling = 0.0;             ///< the limit that was cut
  std::uint64_t window_at = 0;      ///< step at which the last window without a raise began
  double least_since = 0.0;         ///< what would have done in every step of it
  std::uint32_t fewer_steps = 0;    ///< in a row in which rows recalled much less than then
  std::uint64_t hold = least_hold;  ///< steps after it without a raise: twice as many with each raise that was cut
  bool raised = false;              ///< the last move of such a limit
  bool was_reached = false;         ///< by as many rows as the limit was then; before that it is a forecast
  std::uint64_t crowded_at = 0;     ///< step in which somebody last waited for slots; 0: nobody has
  std::uint64_t round_begin = 0;    ///< step in which the first of the last rows was let in
  std::uint32_t round_rows = 0;     ///< rows that ran before them
  std::uint32_t round_let_in = 0;   ///< of them

  void observe(step_sample const& sample) noexcept
  {
    if (sample.rows == 0 || sample.end <= sample.begin || brings_prompts(sample)) { return; }
    learn_margin(sample);
    measured.add(sample, link_bytes_per_second);
    move_limit(sample.rows);
  }

  /// @return rejected where the request could not run on an idle system either; an idle system takes what fits
  admission admit(demand const& request, capacity const& free) noexcept
  {
    fixed_admission memory{.max_rows = max_rows};
    admission const said = memory.admit(request, free);
    if (said != admission::admitted) { return said; }
    if (measured.steps() >= round_begin + settle_steps || free.rows_running == 0) {
      round_begin = measured.steps();
      round_rows = free.rows_running;
      round_let_in = 0;
    }
    bool const room = round_let_in < round_room();
    if (free.rows_running != 0 && !(room && free.rows_running < limit())) { return admission::queued; }
    ++round_let_in;
    return admission::admitted;
  }

  /// Asks as admit does. Of a request that waits it says why: the limit, or the round.
  [[nodiscard]] std::string explain(demand const& request, capacity const& free) const
  {
    std::string memory = fixed_admission{.max_rows = max_rows}.explain(request, free);
    if (!memory.empty() || free.rows_running == 0) { return memory; }
    auto const number = [](auto value) { return std::to_string(value); };
    auto const us = [&](double s) { return number(static_cast<std::uint64_t>(s * 1e6)) + " us"; };
    if (free.rows_running >= limit()) {
      std::string said = "the policy lets " + number(limit()) + " rows run; a step of " + number(free.rows_running) +
        " is expected to take " + us(measured.expected(free.rows_running)) + " and differs by " +
        us(measured.deviation());
      return tpot_target == nanoseconds{0} ? said
                                           : said + ", with " + us(step_history::seconds(tpot_target)) + " allowed";
    }
    if (measured.steps() >= round_begin + settle_steps || round_let_in < round_room()) { return {}; }
    return number(round_let_in) + " rows have been let in, and " + number(settle_steps) +
      " steps show first what they cost";
  }

  /// Rows that are to run at most, as far as traffic says; memory may say fewer.
  [[nodiscard]] std::uint32_t limit() const noexcept { return limit_rows; }

  /// The limit without the band.
  /// @param errors of the level's that are counted against further rows
  [[nodiscard]] double rows_that_pay(double errors = 1.0) const noexcept
  {
    if (measured.steps() == 0) { return std::numeric_limits<double>::infinity(); }
    double const rows = measured.rows();
    double const time = measured.expected(rows);
    // Where it is not known what a row costs, the throughput is taken to grow, and the target to be used up in proportion.
    // Where traffic changed while rows did, the fit takes one for the other: what is over is over by more than that.
    double const least_slope = (errors < 0.0 ? 0.75 : 1.0) * measured.slope() - measured.slope_error();
    double const fixed_part = time - least_slope * rows;
    double const by_gain =
      least_slope > 0.0 ? fixed_part * (1.0 / least_gain - 1.0) / least_slope : std::numeric_limits<double>::infinity();
    if (tpot_target == nanoseconds{0}) { return by_gain; }
    double const target = step_history::seconds(tpot_target);
    double const left = target - margin * measured.deviation() - errors * measured.level_error() - time;
    // Once the link is the narrow side a row costs more than steps have shown so far; a step of twice the rows takes at most
    // twice the time.
    bool const link_counts = measured.recall_per_row() * rows > 0.5 * time;
    double const seen = measured.slope() + measured.slope_error();
    double const most_slope =
      std::min(time / rows, link_counts ? 1.25 * std::max(seen, measured.recall_per_row()) : seen);
    // What is over the target is not taken for a row's small cost: a step of half the rows takes at least a quarter less.
    double const by_target = rows + left / (left < 0.0 ? std::max(most_slope, 0.5 * time / rows) : most_slope);
    double const by_link = target / std::max(measured.recall_per_row(), 1e-12);
    // Nothing is known of a row's cost before their number has varied.
    if (measured.slope() == 0.0 && left > 0.0) { return std::min({by_gain, by_link, std::max(by_target, rows + 1.0)}); }
    return std::min({by_gain, by_target, by_link});
  }

  /// Whether a row that admission may place begins with a slot for every block: nothing is offloaded while everything fits.
  /// Where others waited for slots a while ago, it would have to give its own up at once.
  [[nodiscard]] bool keeps_resident(demand const& request, capacity const& free) const noexcept
  {
    bool const crowded = crowded_at != 0 && measured.steps() < crowded_at + crowded_steps;
    return !crowded && std::max(request.slots_prefill, request.slots_decode) <= free.slots_free;
  }

  /// Which row gives its slots up, which gets them all, and how many each layer has.
  ///
  /// Where somebody waits for slots and a further row pays, the row offloads that recalls the least for each slot it frees. Rows
  /// that have never offloaded are taken to recall what the others do in the mean. Where slots are free and nobody waits for
  /// them, the row that recalls the most for each slot it needs comes back, if what it recalls until its end, but not for longer
  /// than `horizon_steps`, is `bring_back_gain` times what must be brought. A row that recalls more than `outlier` times as much as the others
  /// comes back in any case, if another can make room.
  [[nodiscard]] balance_answer plan(balance_question const& asked, std::span<std::uint32_t> slots) noexcept
  {
    balance_answer answer;
    answer.spread = spreads(asked, slots);
    row_choice const chosen = look(asked);
    std::uint64_t const free = asked.free.slots_free;
    bool const wanted = asked.waiting != nullptr && asked.free.rows_running < std::min(limit(), asked.free.rows_total);
    bool const lacking = wanted && std::max(asked.waiting->slots_prefill, asked.waiting->slots_decode) > free;
    if (lacking) { crowded_at = std::max<std::uint64_t>(measured.steps(), 1); }
    bool const outlies = chosen.worst != nullptr && chosen.worst_recalls > outlier * chosen.others;
    if (outlies) {
      std::uint64_t const more = chosen.worst->slots_all - chosen.worst->slots_now;
      bool const room =
        chosen.cheapest != nullptr && more <= free + chosen.cheapest->slots_now - chosen.cheapest->slots_lease;
      if (more > free && room) { answer.demote = chosen.cheapest->row; }
      if (more <= free || room) { answer.promote = chosen.worst->row; }
      return answer;
    }
    if (lacking && chosen.cheapest != nullptr) {
      answer.demote = chosen.cheapest->row;
    } else if (asked.waiting == nullptr && chosen.dearest != nullptr) {
      answer.promote = chosen.dearest->row;
    }
    return answer;
  }

 private:
  /// Rows that a round lets in, by halves of the way to what would do now: what the next ones cost is known better then. The limit
  /// stays where noise alone says otherwise; that nobody comes in meanwhile for whom there is no room keeps the target.
  [[nodiscard]] std::uint32_t round_room() const noexcept
  {
    double const way = std::min(static_cast<double>(limit_rows), rows_that_pay()) - round_rows;
    if (way < 0.5) { return 0; }
    return static_cast<std::uint32_t>(std::max(std::min(std::floor(round_rows / 2.0), std::floor(way / 2.0)), 1.0));
  }

  struct row_choice {
    row_figures const* cheapest = nullptr;  ///< of the resident rows, to offload
    row_figures const* dearest = nullptr;   ///< of the offloaded ones that fit, to bring back
    row_figures const* worst = nullptr;     ///< recalls most
    double worst_recalls = 0.0;
    double others = 0.0;  ///< mean of what the other offloaded rows recall
  };

  [[nodiscard]] row_choice look(balance_question const& asked) const noexcept
  {
    row_choice chosen;
    double sum = 0.0, count = 0.0;
    for (row_figures const& row : asked.rows) {
      if (!row.measured) { continue; }
      sum += row.recalled_blocks;
      count += 1.0;
      if (row.recalls && row.recalled_blocks > chosen.worst_recalls) {
        chosen.worst = &row;
        chosen.worst_recalls = row.recalled_blocks;
      }
    }
    chosen.others = count > 1.0 ? (sum - chosen.worst_recalls) / (count - 1.0) : chosen.worst_recalls;
    double least = std::numeric_limits<double>::infinity(), most = 0.0;
    for (row_figures const& row : asked.rows) {
      double const recalls = row.measured ? row.recalled_blocks : std::max(chosen.others, 1.0);
      if (!row.recalls) {
        auto const frees = static_cast<double>(row.slots_now - std::min(row.slots_now, row.slots_lease));
        if (frees > 0.0 && recalls / frees < least) {
          least = recalls / frees;
          chosen.cheapest = &row;
        }
        continue;
      }
      if (!row.measured || row.slots_all < row.slots_now) { continue; }
      auto const needs = static_cast<double>(row.slots_all - row.slots_now);
      double const steps =
        std::min(static_cast<double>(horizon_steps), static_cast<double>(row.max_tokens) - row.tokens);
      bool const pays =
        recalls * steps > bring_back_gain * needs && needs <= static_cast<double>(asked.free.slots_free);
      if (pays && recalls / std::max(needs, 1.0) > most) {
        most = recalls / std::max(needs, 1.0);
        chosen.dearest = &row;
      }
    }
    return chosen;
  }

  /// Deals out a lane's slots so that one more would save as much in each layer: with misses of m (h / h0)^-t, where m of the
  /// selection missed with h0 slots, h goes with (m h0^t)^(1 / (1 + t)). The exponent is fitted to what layers missed before and
  /// after their slots were changed. @return whether they are to be changed
  [[nodiscard]] bool spreads(balance_question const& asked, std::span<std::uint32_t> slots) noexcept
  {
    if (asked.least_slots == asked.most_slots) { return false; }
    double missed = 0.0, layers = 0.0;
    double fit = fit_weight * miss_exponent, weight = fit_weight;
    for (layer_figures const& layer : asked.layers) {
      if (!layer.selects) { continue; }
      missed += layer.missed_blocks;
      layers += 1.0;
      bool const known = layer.missed_share_before > 0.0 && layer.missed_blocks > 0.0 && layer.slots > 0.0;
      if (!known) { continue; }
      double const moved = std::log(layer.slots / layer.slots_before);
      fit -= moved * std::log(layer.missed_blocks / layer.selected_blocks / layer.missed_share_before);
      weight += moved * moved;
    }
    if (missed < blocks_to_spread * layers) { return false; }
    double const exponent = std::clamp(fit / std::max(weight, 1e-9), 0.3, 2.0);
    auto const pull = [exponent](layer_figures const& layer) {
      double const share = (layer.missed_blocks + 0.5) / (layer.selected_blocks + 1.0);
      return std::pow(share * std::pow(layer.slots, exponent), 1.0 / (1.0 + exponent));
    };
    double const all = layers * asked.mean_slots;
    // The height of the water: by halves, since lanes have a least and a most.
    double low = 0.0, high = 1e12;
    auto const slots_at = [&](layer_figures const& layer, double height) {
      return std::clamp(std::floor(pull(layer) * height), 1.0 * asked.least_slots, 1.0 * asked.most_slots);
    };
    for (int i = 0; i < 80; ++i) {
      double const middle = (low + high) / 2.0;
      double sum = 0.0;
      for (layer_figures const& layer : asked.layers) { sum += layer.selects ? slots_at(layer, middle) : 0.0; }
      (sum <= all ? low : high) = middle;
    }
    bool changed = false;
    for (std::size_t l = 0; l < asked.layers.size(); ++l) {
      layer_figures const& layer = asked.layers[l];
      double const wanted = layer.selects ? slots_at(layer, low) : 0.0;
      slots[l] = static_cast<std::uint32_t>(wanted);
      changed = changed || (layer.selects && std::abs(wanted - layer.next_slots) > 0.1 * layer.next_slots);
    }
    return changed;
  }

  static constexpr double blocks_to_spread = 200.0;  // misses of a layer that say how much it misses
  static constexpr double fit_weight = 0.5;          // of miss_exponent, against what is measured

  /// Whether a step says nothing of decoding: prompts came in with it, and other steps are not long ago.
  [[nodiscard]] bool brings_prompts(step_sample const& sample) noexcept
  {
    prompt_steps = sample.prompt_tokens == 0 ? 0 : prompt_steps + 1;
    return prompt_steps != 0 && prompt_steps < most_prompt_steps;
  }

  static constexpr std::uint32_t most_prompt_steps = 64;
  static constexpr std::uint32_t changed_steps = 256;
  static constexpr double near = 0.7;

  /// Where the limit stands between what would do at worst and at best, it stays. Below it is cut at once. Above it is raised
  /// where nobody has found its end, and else by a search: no further than half of the way to the limit that was cut last, and
  /// than what would have done in every step since then.
  void move_limit(std::uint32_t rows) noexcept
  {
    auto const whole = [](double wanted) { return std::max(std::floor(wanted), 1.0); };
    double const now = limit_rows;
    double const least = whole(rows_that_pay(1.0));
    double const most = std::max(whole(rows_that_pay(-1.0)), least);
    note_traffic(least);
    double const noise = std::max(band * now, 2.0);
    bool const lower = most < now - noise;
    double wanted = lower ? std::min(std::max(most, whole(rows_in_proportion())), now) : least;
    // Of a limit that nobody comes near nothing is learnt, and it keeps nobody out.
    bool const reached = rows >= near * now;
    was_reached = was_reached || reached;
    if (was_reached && !reached && rows < (lower ? 0.9 : near) * wanted) { return; }
    if (lower) {
      if (reached) { note_cut(now); }
    } else {
      if (cut_at != 0) {
        if (measured.steps() < window_at + held()) { return; }
        wanted = whole(std::min({wanted, least_since, (now + ceiling) / 2.0}));
        begin_window();
      }
      if (wanted <= now + (cut_at == 0 ? 0.03 * now : noise)) { return; }
    }
    raised = !lower;
    limit_rows = static_cast<std::uint32_t>(std::min(wanted, double{unlimited}));
  }

  /// Rows that keep the target if a step's time goes with their number, which is the least that a cut can help; 0 without one.
  [[nodiscard]] double rows_in_proportion() const noexcept
  {
    double const left = step_history::seconds(tpot_target) - margin * measured.deviation();
    return left <= 0.0 ? 0.0 : left * measured.rows() / measured.expected(measured.rows());
  }

  /// A limit that was reached had to be cut. Cuts that follow one another at once are one.
  void note_cut(double limit) noexcept
  {
    if (raised || measured.steps() >= cut_at + changed_steps) { ceiling = limit; }
    hold = raised ? std::min(2 * hold, most_hold) : hold;
    cut_at = measured.steps();
    recall_at_cut = measured.recall_per_row();
    begin_window();
  }

  void begin_window() noexcept
  {
    window_at = measured.steps();
    least_since = std::numeric_limits<double>::infinity();
  }

  /// What would have done since the last cut, and whether what was learnt of it does not hold any more: recalls are fewer for
  /// good, or it is long ago.
  void note_traffic(double least) noexcept
  {
    if (cut_at == 0) { return; }
    // The first quarter of a window still shows the steps of before.
    if (measured.steps() > window_at + held() / 4) { least_since = std::min(least_since, least); }
    recall_at_cut = std::max(recall_at_cut, measured.recall_per_row());
    fewer_steps = measured.recall_per_row() < 0.5 * recall_at_cut ? fewer_steps + 1 : 0;
    if (fewer_steps >= changed_steps) {
      cut_at = 0;
      hold = least_hold;
    }
    if (measured.steps() >= cut_at + most_hold) { ceiling = std::numeric_limits<double>::infinity(); }
  }

  /// Steps without a raise. Much of the target that is not used is no noise.
  [[nodiscard]] std::uint64_t held() const noexcept { return unused_share() > 0.1 ? hold / 4 : hold; }

  /// Share of the target that steps and their margin leave free; 0 without one.
  [[nodiscard]] double unused_share() const noexcept
  {
    if (tpot_target == nanoseconds{0}) { return 0.0; }
    double const used = measured.expected(measured.rows()) + margin * measured.deviation();
    return 1.0 - used / step_history::seconds(tpot_target);
  }

  /// Moves the margin so that in the long run `missed_share` of the steps miss the target.
  void learn_margin(step_sample const& sample) noexcept
  {
    // Where more rows run than the limit says, that they miss it is known already.
    if (tpot_target == nanoseconds{0} || measured.steps() < settle_steps || sample.rows > limit_rows) { return; }
    bool const missed = sample.end - sample.begin > tpot_target;
    // That traffic has changed is no matter of the margin.
    double const off = step_history::seconds(sample.end - sample.begin) - measured.expected(sample.rows);
    if (off > 6.0 * measured.deviation()) { return; }
    constexpr double rate = 0.15;
    margin = std::clamp(margin + rate * ((missed ? 1.0 : 0.0) - missed_share), 2.4, 5.0);
  }
};

static_assert(balancing_admission<adaptive_admission>);
static_assert(explaining_admission<adaptive_admission>);

}  // namespace pulseinfer
