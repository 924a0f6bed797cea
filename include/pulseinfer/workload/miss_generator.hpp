#pragma once

/// Draws how many blocks each row misses in each layer of each step, and what is known of them beforehand.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/workload/fixed_point.hpp>
#include <pulseinfer/workload/preset.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

struct workload_options {
  std::uint32_t layers = 32;
  std::uint32_t rows = 1;             ///< rows that run at once
  std::uint32_t budget_blocks = 128;  ///< of a selection, those that never miss (sink, recent, open) not counted
  miss_model misses = misses_of(workload_preset::summary);
  newcomer_model newcomers = {};
  double hot = nominal_hot;  ///< hot slots per selected block, unless a layer has its own
  bool warm = true;          ///< requests begin with a warmed-up hot set
  std::uint64_t seed = 1;
};

/// A block that is selected now and was not one step before.
struct newcomer {
  double share = 0.0;      ///< of the softmax mass of its row and layer
  bool near = false;       ///< it stood just below the cut one step before
  bool estimated = false;  ///< a query estimated one layer ahead finds it
};

/// Everything is drawn from the seed and the place alone: cells of the current step may be asked for in any order, and again.
/// @thread_safety const calls
class miss_generator {
  using fixed = workload_detail::fixed;

 public:
  /// @throws configuration_error with the number that is out of range
  explicit miss_generator(workload_options const& options)
    : options_{checked(options)},
      layer_effect_(options.layers),
      hot_effect_(std::size_t{options.rows} * options.layers),
      rows_(options.rows)
  {
    using namespace workload_detail;
    miss_model const& m = options.misses;
    mean_logit_ = to_fixed(m.mean_logit);
    request_deviation_ = to_fixed(m.request_deviation);
    drift_memory_ = to_fixed(m.drift_memory);
    change_probability_ = to_fixed(m.change_probability);
    change_height_ = to_fixed(m.change_height);
    change_memory_ = to_fixed(m.change_memory);
    noise_deviation_ = to_fixed(m.noise_deviation);
    cold_excess_ = to_fixed(m.cold_excess);
    cold_rate_ = to_fixed(1.0 / m.cold_steps);
    // Keeps the drift's deviation constant.
    drift_push_ =
      multiply(to_fixed(m.drift_deviation), square_root(fixed_one - multiply(drift_memory_, drift_memory_)));
    drift_deviation_ = to_fixed(m.drift_deviation);

    draw_layers();
    for (std::uint32_t layer = 0; layer < options.layers; ++layer) {
      set_hot(static_cast<layer_id>(layer), options.hot);
    }
    for (std::uint32_t row = 0; row < options.rows; ++row) { begin_request(static_cast<row_id>(row), row); }
  }

  [[nodiscard]] workload_options const& options() const noexcept { return options_; }

  /// Gives a layer hot slots of its own, in multiples of the budget.
  void set_hot(layer_id layer, double hot)
  {
    for (std::uint32_t row = 0; row < options_.rows; ++row) { set_hot(static_cast<row_id>(row), layer, hot); }
  }

  /// Likewise, of one row alone, until set_hot is called again.
  void set_hot(row_id row, layer_id layer, double hot)
  {
    using namespace workload_detail;
    auto const parts = [](double value) { return static_cast<std::uint64_t>(std::max(1.0, value * 65536.0)); };
    hot_effect_[to_index(row) * options_.layers + to_index(layer)] =
      multiply(to_fixed(-options_.misses.hot_exponent), logarithm(parts(hot), parts(nominal_hot)));
  }

  /// A new request runs in the row; its steps count from 0. Requests of the same number are alike.
  /// @param extra_logit added to request_i: how much more, or less, it misses than others
  void begin_request(row_id row, std::uint64_t request, double extra_logit = 0.0) noexcept
  {
    using namespace workload_detail;
    row_state& state = rows_[to_index(row)];
    state = {};
    state.request = request;
    state.effect = multiply(request_deviation_, normal(bits_of({options_.seed, 2, request}))) + to_fixed(extra_logit);
    state.drift = multiply(drift_deviation_, normal(bits_of({options_.seed, 3, request})));
    state.bits = bits_of({options_.seed, 4, request, 0});
  }

  /// The row goes on by one step.
  void next_step(row_id row) noexcept
  {
    using namespace workload_detail;
    row_state& state = rows_[to_index(row)];
    ++state.step;
    state.bits = bits_of({options_.seed, 4, state.request, state.step});
    state.drift = multiply(drift_memory_, state.drift) + multiply(drift_push_, normal(state.bits));
    state.change = multiply(change_memory_, state.change) +
      (happens(next_bits(state.bits, 5), change_probability_) ? change_height_ : 0);
  }

  void next_step() noexcept
  {
    for (std::uint32_t row = 0; row < options_.rows; ++row) { next_step(static_cast<row_id>(row)); }
  }

  [[nodiscard]] std::uint32_t step_of(row_id row) const noexcept { return rows_[to_index(row)].step; }

  /// Share of the row's selection that misses in a layer of its current step, in [0, 1].
  [[nodiscard]] double miss_ratio(row_id row, layer_id layer) const noexcept
  {
    return static_cast<double>(ratio(row, layer)) / 4294967296.0;
  }

  /// Blocks that the row misses in a layer of its current step.
  [[nodiscard]] std::uint32_t misses(row_id row, layer_id layer) const noexcept
  {
    std::uint64_t const exact = ratio(row, layer) * options_.budget_blocks;
    return round(exact, workload_detail::next_bits(cell(row, layer), 4));
  }

  /// The blocks that misses() counts, one by one. @param out room for budget_blocks   @return their number
  std::uint32_t newcomers(row_id row, layer_id layer, std::span<newcomer> out) const noexcept
  {
    using namespace workload_detail;
    newcomer_model const& m = options_.newcomers;
    std::uint32_t const count = std::min(misses(row, layer), static_cast<std::uint32_t>(out.size()));
    std::uint64_t const bits = cell(row, layer);
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t const of_block = next_bits(bits, 16 + i);
      fixed const exponent = share_logit_ + multiply(share_deviation_, normal(of_block));
      std::uint64_t const share = exponential(std::min<fixed>(exponent, -fixed_one));
      std::uint64_t const known = next_bits(of_block, 7);
      out[i] = {
        .share = static_cast<double>(share) / 4294967296.0,
        .near = happens(known, to_fixed(m.near_recall)),
        .estimated = happens(known << 16U, to_fixed(m.estimate_recall))};
    }
    return count;
  }

  /// Blocks that the estimate one layer ahead names although they are not missing.
  [[nodiscard]] std::uint32_t wrong_estimates(row_id row, layer_id layer) const noexcept
  {
    auto const missing = static_cast<fixed>(ratio(row, layer) * options_.budget_blocks >> 16U);
    auto const wrong = static_cast<std::uint64_t>(workload_detail::multiply(missing, wrong_share_)) << 16U;
    return round(wrong, workload_detail::next_bits(cell(row, layer), 5));
  }

 private:
  struct row_state {
    std::uint64_t request = 0;
    std::uint32_t step = 0;
    std::uint64_t bits = 0;  ///< of the step
    fixed effect = 0;
    fixed drift = 0;
    fixed change = 0;
  };

  [[nodiscard]] static workload_options const& checked(workload_options const& options)
  {
    auto const refuse = [](char const* name, double value) {
      throw configuration_error{std::string{"workload: "} + name + " is " + std::to_string(value)};
    };
    auto const within = [&](char const* name, double value, double low, double high) {
      if (!(value >= low && value <= high)) { refuse(name, value); }
    };
    if (options.layers == 0) { refuse("layers", 0.0); }
    if (options.rows == 0) { refuse("rows", 0.0); }
    within("budget_blocks", options.budget_blocks, 1.0, 65536.0);
    within("hot", options.hot, 1.0 / 64.0, 1024.0);
    miss_model const& m = options.misses;
    within("misses.mean_logit", m.mean_logit, -20.0, 20.0);
    for (double const deviation : {m.layer_deviation, m.request_deviation, m.drift_deviation, m.noise_deviation}) {
      within("a deviation", deviation, 0.0, 8.0);
    }
    within("misses.drift_memory", m.drift_memory, 0.0, 0.999);
    within("misses.change_memory", m.change_memory, 0.0, 0.999);
    within("misses.change_probability", m.change_probability, 0.0, 1.0);
    within("misses.change_height", m.change_height, -20.0, 20.0);
    within("misses.hot_exponent", m.hot_exponent, 0.0, 8.0);
    within("misses.cold_excess", m.cold_excess, 0.0, 1000.0);
    within("misses.cold_steps", m.cold_steps, 0.01, 1e6);
    newcomer_model const& n = options.newcomers;
    within("newcomers.median_share", n.median_share, 1e-6, 0.3);
    within("newcomers.share_deviation", n.share_deviation, 0.0, 8.0);
    within("newcomers.near_recall", n.near_recall, 0.0, 1.0);
    within("newcomers.estimate_recall", n.estimate_recall, 0.0, 1.0);
    within("newcomers.estimate_precision", n.estimate_precision, 0.01, 1.0);
    return options;
  }

  /// Effects of mean 0 and, with several layers, exactly the deviation asked for: a model's layers are few, and what a run is
  /// about is not that its seed spreads them more or less.
  void draw_layers()
  {
    using namespace workload_detail;
    auto const layers = static_cast<fixed>(options_.layers);
    fixed sum = 0;
    for (std::uint32_t layer = 0; layer < options_.layers; ++layer) {
      layer_effect_[layer] = normal(bits_of({options_.seed, 1, layer}));
      sum += layer_effect_[layer];
    }
    fixed squares = 0;
    for (fixed& effect : layer_effect_) {
      effect -= sum / layers;
      squares += multiply(effect, effect);
    }
    fixed const deviation = square_root(squares / layers);
    fixed const wanted = to_fixed(options_.misses.layer_deviation);
    for (fixed& effect : layer_effect_) { effect = deviation == 0 ? 0 : effect * wanted / deviation; }
  }

  [[nodiscard]] std::uint64_t cell(row_id row, layer_id layer) const noexcept
  {
    return workload_detail::next_bits(rows_[to_index(row)].bits, 8 + 8 * to_index(layer));
  }

  /// In units of 2^-32.
  [[nodiscard]] std::uint64_t ratio(row_id row, layer_id layer) const noexcept
  {
    using namespace workload_detail;
    row_state const& state = rows_[to_index(row)];
    fixed const noise = multiply(noise_deviation_, normal(cell(row, layer)));
    fixed const logit =
      mean_logit_ + layer_effect_[to_index(layer)] + state.effect + state.drift + state.change + noise;
    std::uint64_t share = logistic(logit);
    fixed const hot = hot_effect_[to_index(row) * options_.layers + to_index(layer)];
    if (hot <= 0) {
      share = saturated((share >> 1U) * exponential(hot) >> 31U);
    } else {
      share = saturated((share << 28U) / (exponential(-hot) >> 4U));
    }
    if (!options_.warm) {
      fixed const age = std::min<fixed>(cold_rate_ * state.step, 31 * fixed_one);
      std::uint64_t const excess = (static_cast<std::uint64_t>(cold_excess_) * (exponential(-age) >> 8U)) >> 8U;
      share = saturated(share + (((share >> 8U) * (excess >> 8U)) >> 16U));
    }
    return share;
  }

  [[nodiscard]] static std::uint64_t saturated(std::uint64_t share) noexcept
  {
    return std::min(share, std::uint64_t{1} << 32U);
  }

  /// A number in units of 2^-32 to one of its neighbours among the whole numbers, so that the mean stays.
  [[nodiscard]] static std::uint32_t round(std::uint64_t exact, std::uint64_t bits) noexcept
  {
    return static_cast<std::uint32_t>((exact + (bits >> 32U)) >> 32U);
  }

  workload_options options_;
  fixed mean_logit_ = 0;
  fixed request_deviation_ = 0;
  fixed drift_deviation_ = 0;
  fixed drift_memory_ = 0;
  fixed drift_push_ = 0;
  fixed change_probability_ = 0;
  fixed change_height_ = 0;
  fixed change_memory_ = 0;
  fixed noise_deviation_ = 0;
  fixed cold_excess_ = 0;
  fixed cold_rate_ = 0;
  fixed share_logit_ =
    workload_detail::logarithm(static_cast<std::uint64_t>(options_.newcomers.median_share * 1e9), 1'000'000'000U);
  fixed share_deviation_ = workload_detail::to_fixed(options_.newcomers.share_deviation);
  fixed wrong_share_ = workload_detail::to_fixed(
    options_.newcomers.estimate_recall * (1.0 - options_.newcomers.estimate_precision) /
    options_.newcomers.estimate_precision);
  std::vector<fixed> layer_effect_;  // [layers]
  std::vector<fixed> hot_effect_;    // [rows, layers] added to the logarithm of a ratio
  std::vector<row_state> rows_;
};

}  // namespace pulseinfer
