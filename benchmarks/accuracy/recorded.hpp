/// What a model's selections say of recalls: how many, how steady, how predictable. For one document.
#pragma once

#include "evaluation.hpp"
#include <pulseinfer/observe/selection_trace.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace accuracy {

/// Of the blocks that a step has to recall, how many a prediction had named, and how many it named.
struct prediction {
  std::uint64_t recalled = 0, found = 0, named = 0;

  void add(prediction const& other)
  {
    recalled += other.recalled;
    found += other.found;
    named += other.named;
  }
};

/// Watches the choices of one document under a configuration with one lane.
class recall_record {
 public:
  recall_record(std::uint32_t layers, std::uint32_t steps, double budget_blocks)
    : layers_{layers}, steps_{steps}, budget_{budget_blocks}, misses_(std::size_t{layers} * steps, -1.0F)
  {}

  void see(choice_event const& event)
  {
    auto const chosen = event.choice.chosen(0), missing = event.choice.missing(0);
    misses_[std::size_t{event.layer} * steps_ + event.index] =
      static_cast<float>(static_cast<double>(missing.size()) / budget_);
    if (keep_) {
      records.push_back(
        {.lane = static_cast<pulseinfer::lane_id>(0),
         .layer = static_cast<pulseinfer::layer_id>(event.layer),
         .tokens = event.position + 1,
         .selected = {chosen.begin(), chosen.end()}});
    }
    if (event.layer != layer_) {
      layer_ = event.layer;
      near_.clear();
    } else if (event.index >= warm_up) {
      count(near_, missing, nearly_chosen);
      std::uint64_t shared = 0;
      for (auto const block : chosen) { shared += std::binary_search(before_.begin(), before_.end(), block) ? 1U : 0U; }
      kept_of_selection += static_cast<double>(shared) / static_cast<double>(chosen.size());
      ++compared;
      for (auto const block : missing) {
        missing_share += double{event.choice.votes()[static_cast<std::size_t>(pulseinfer::to_number(block))]};
      }
      for (std::uint32_t b = 0; b < event.choice.votes().size(); ++b) {
        whole_share += double{event.choice.votes()[b]};
      }
    }
    if (event.guessed != nullptr && event.index >= warm_up) {
      std::vector<float> votes(event.choice.votes().size());
      std::uint32_t const heads = static_cast<std::uint32_t>(
        event.guessed->values.size() / (std::size_t{event.guessed->tokens} * event.guessed->pitch));
      for (std::uint32_t head = 0; head < heads; ++head) {
        float const* const row = event.guessed->row(head, event.index);
        for (std::size_t b = 0; b < votes.size(); ++b) { votes[b] += row[b]; }
      }
      // Blocks that were there before this step's choice: those that it chose and did not miss, and the other slots.
      auto const there = [&](pulseinfer::block_id block) {
        return event.choice.slots(0).holds(block) && !std::binary_search(missing.begin(), missing.end(), block);
      };
      auto const first = static_cast<std::size_t>(budget_);
      for (std::size_t i = 0; i < 2; ++i) {
        count(best(votes, there, i == 0 ? first : first + first / 4), missing, i == 0 ? guessed : guessed_wide);
      }
    }
    // The best of those that are not there now: ranks just below the cut.
    auto const there = [&](pulseinfer::block_id block) { return event.choice.slots(0).holds(block); };
    std::vector<float> const votes(event.choice.votes().begin(), event.choice.votes().end());
    near_ = best(votes, there, static_cast<std::size_t>(1.25 * budget_));
    before_.assign(chosen.begin(), chosen.end());
  }

  [[nodiscard]] float miss(std::uint32_t layer, std::uint32_t step) const
  {
    return misses_[std::size_t{layer} * steps_ + step];
  }

  static constexpr std::uint32_t warm_up = 64;
  std::vector<pulseinfer::selection_record> records = {};
  prediction nearly_chosen = {}, guessed = {}, guessed_wide = {};
  double kept_of_selection = 0.0, missing_share = 0.0, whole_share = 0.0;
  std::uint64_t compared = 0;
  void keep_records() { keep_ = true; }

 private:
  using blocks = std::vector<pulseinfer::block_id>;

  static void count(blocks const& named, std::span<pulseinfer::block_id const> missing, prediction& to)
  {
    to.named += named.size();
    to.recalled += missing.size();
    for (auto const block : missing) { to.found += std::binary_search(named.begin(), named.end(), block) ? 1U : 0U; }
  }

  // Of the `count` blocks with the most votes those that are not there, ascending.
  template <class There>
  [[nodiscard]] static blocks best(std::vector<float> const& votes, There const& there, std::size_t count)
  {
    std::vector<std::uint32_t> order(votes.size());
    std::iota(order.begin(), order.end(), 0U);
    count = std::min(count, order.size());
    std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
      [&](std::uint32_t a, std::uint32_t b) { return votes[a] != votes[b] ? votes[a] > votes[b] : a < b; });
    blocks result;
    for (std::size_t i = 0; i < count; ++i) {
      auto const block = static_cast<pulseinfer::block_id>(order[i]);
      if (!there(block)) { result.push_back(block); }
    }
    std::sort(result.begin(), result.end());
    return result;
  }

  std::uint32_t layers_, steps_;
  double budget_;
  std::vector<float> misses_;  // [layers, steps] of the budget; negative where the layer is dense
  std::uint32_t layer_ = ~0U;
  blocks near_, before_;
  bool keep_ = false;
};

/// Parameters of the generator of miss ratios, include/pulseinfer/workload/miss_generator.hpp, fitted to records.
struct fitted_misses {
  double mean = 0.0;             // ratio
  double mu = 0.0;               // mean logit
  double layer_deviation = 0.0;  // of logits, between layers
  double request_deviation = 0.0;
  double drift_deviation = 0.0;  // of a request's steps around its mean
  double drift_correlation = 0.0;
  double cell_deviation = 0.0;  // of what is left
  double jump_part = 0.0;       // of steps that stand out by three deviations
  double cell_variation = 0.0;  // coefficient of variation of the ratio over cells, and of whole steps
  double step_variation = 0.0;
  double p99_of_mean = 0.0;
  std::vector<double> layer_means = {};
};

[[nodiscard]] inline fitted_misses fit(
  std::vector<recall_record> const& records, std::uint32_t layers, std::uint32_t steps, double budget_blocks)
{
  fitted_misses result;
  std::uint32_t const first = recall_record::warm_up;
  std::vector<std::uint32_t> sparse;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    if (records.front().miss(layer, first) >= 0.0F) { sparse.push_back(layer); }
  }
  // Half a block is added where none was missed, so that every cell has a logit.
  auto const logit = [&](double ratio) {
    double const p = (ratio * budget_blocks + 0.5) / (budget_blocks + 1.0);
    return std::log(p / (1.0 - p));
  };
  auto const deviation = [](std::vector<double> const& values) {
    double const centre = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
    double sum = 0.0;
    for (double const value : values) { sum += (value - centre) * (value - centre); }
    return std::sqrt(sum / static_cast<double>(values.size()));
  };
  std::vector<double> of_layer(layers), of_request(records.size()), ratios, step_ratios;
  double const cells = static_cast<double>(sparse.size()) * (steps - first);
  for (std::size_t r = 0; r < records.size(); ++r) {
    for (std::uint32_t const layer : sparse) {
      for (std::uint32_t step = first; step < steps; ++step) {
        double const ratio = double{records[r].miss(layer, step)}, value = logit(ratio);
        of_layer[layer] += value / (static_cast<double>(records.size()) * (steps - first));
        of_request[r] += value / cells;
        ratios.push_back(ratio);
      }
    }
  }
  result.mu = std::accumulate(of_request.begin(), of_request.end(), 0.0) / static_cast<double>(of_request.size());
  result.mean = std::accumulate(ratios.begin(), ratios.end(), 0.0) / static_cast<double>(ratios.size());
  std::vector<double> layer_effects, drift, left;
  for (std::uint32_t const layer : sparse) { layer_effects.push_back(of_layer[layer] - result.mu); }
  result.layer_deviation = deviation(layer_effects);
  result.request_deviation = deviation(of_request);
  double together = 0.0, squares = 0.0;
  for (std::size_t r = 0; r < records.size(); ++r) {
    double before = 0.0;
    for (std::uint32_t step = first; step < steps; ++step) {
      double sum = 0.0, ratio = 0.0;
      for (std::uint32_t const layer : sparse) {
        sum += logit(double{records[r].miss(layer, step)}) - of_layer[layer] - (of_request[r] - result.mu);
        ratio += double{records[r].miss(layer, step)};
      }
      double const x = sum / static_cast<double>(sparse.size());
      step_ratios.push_back(ratio / static_cast<double>(sparse.size()));
      for (std::uint32_t const layer : sparse) {
        left.push_back(logit(double{records[r].miss(layer, step)}) - of_layer[layer] - (of_request[r] - result.mu) - x);
      }
      if (step > first) {
        together += x * before;
        squares += before * before;
      }
      before = x;
      drift.push_back(x);
    }
  }
  result.drift_deviation = deviation(drift);
  result.drift_correlation = squares > 0.0 ? together / squares : 0.0;
  result.cell_deviation = deviation(left);
  std::size_t jumps = 0;
  for (double const x : drift) { jumps += x > 3.0 * result.drift_deviation ? 1U : 0U; }
  result.jump_part = static_cast<double>(jumps) / static_cast<double>(drift.size());
  result.cell_variation = deviation(ratios) / result.mean;
  result.step_variation = deviation(step_ratios) / result.mean;
  std::sort(ratios.begin(), ratios.end());
  result.p99_of_mean = ratios[ratios.size() - 1 - ratios.size() / 100] / result.mean;
  for (std::uint32_t const layer : sparse) {
    double sum = 0.0;
    for (recall_record const& record : records) {
      for (std::uint32_t step = first; step < steps; ++step) { sum += double{record.miss(layer, step)}; }
    }
    result.layer_means.push_back(sum / (static_cast<double>(records.size()) * (steps - first)));
  }
  return result;
}

}  // namespace accuracy
