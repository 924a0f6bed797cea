#pragma once

/// How decoding requests miss: the numbers of a workload, and named sets of them.

#include <pulseinfer/workload/fixed_point.hpp>

#include <cstdint>

namespace pulseinfer {

/// Share of a selection that is not resident, for request i, layer l and step t, where nothing is predicted and the hot slots
/// are `nominal_hot` times the budget:
///   logit m(i, l, t) = mean_logit + layer_l + request_i + drift_it + change_it + noise
/// with layer_l, request_i and noise normal, drift an autoregression, and change_it a jump that comes with
/// `change_probability` and decays.
/// The default misses 8 % in the mean; hit rates of 0.92, layers from 1 % to 30 %, and spreads of cells, requests and steps are
/// those that have been published (ESS, RetroInfer, InfLLM-V2, SparseServe); tests/workload/ compares them.
struct miss_model {
  double mean_logit = -2.97;
  double layer_deviation = 0.8;     ///< persistent, the same for all requests; centred over the layers
  double request_deviation = 0.45;  ///< persistent
  double drift_deviation = 0.35;
  double drift_memory = 0.9;  ///< share of the drift that stays from step to step
  double change_probability = 1.0 / 64.0;
  double change_height = 1.6;
  double change_memory = 0.35;
  double noise_deviation = 0.35;
  double hot_exponent = 0.9;  ///< misses go with (hot slots / budget)^-hot_exponent
  double cold_excess = 3.0;   ///< without warm-up, misses are 1 + cold_excess * e^(-t / cold_steps) times as many
  double cold_steps = 16.0;
};

/// Hot slots per selected block at which a miss_model holds as it stands.
inline constexpr double nominal_hot = 3.0;

/// What is known of a block that was not selected one step before. Assumptions, to be fitted to recorded selections: most
/// newcomers rank just above the cut, where a block carries some 10^-4 of the softmax mass.
struct newcomer_model {
  double median_share = 2.2e-4;     ///< of the mass of one row in one layer; log-normal
  double share_deviation = 1.3;     ///< of its logarithm
  double near_recall = 0.35;        ///< share of the newcomers that stood in ranks K + 1 to 1.25 K one step before
  double estimate_recall = 0.6;     ///< share that a query estimated one layer ahead finds
  double estimate_precision = 0.7;  ///< share of what the estimate names that is then missing
};

enum class workload_preset : std::uint8_t { retrieval, summary, reasoning, trained_sparse, adversarial };

inline constexpr workload_preset workload_presets[] = {
  workload_preset::retrieval, workload_preset::summary, workload_preset::reasoning, workload_preset::trained_sparse,
  workload_preset::adversarial};

[[nodiscard]] constexpr char const* name_of(workload_preset preset)
{
  switch (preset) {
    case workload_preset::retrieval: return "retrieval";
    case workload_preset::summary: return "summary";
    case workload_preset::reasoning: return "reasoning";
    case workload_preset::trained_sparse: return "trained-sparse";
    case workload_preset::adversarial: return "adversarial";
  }
  return "unknown";
}

[[nodiscard]] constexpr miss_model misses_of(workload_preset preset)
{
  switch (preset) {
    case workload_preset::retrieval: return {.mean_logit = -2.33, .change_probability = 1.0 / 16.0};
    case workload_preset::summary: return {.mean_logit = -2.93};
    case workload_preset::reasoning:
      return {.mean_logit = -3.33, .change_probability = 1.0 / 128.0, .change_height = 2.2};
    case workload_preset::trained_sparse: return {.mean_logit = -3.53, .layer_deviation = 0.57};
    // Selections that have nothing to do with one another.
    case workload_preset::adversarial:
      return {
        .mean_logit = -0.8, .drift_memory = 0.0, .change_probability = 0.0, .change_height = 0.0, .change_memory = 0.0};
  }
  return {};
}

}  // namespace pulseinfer
