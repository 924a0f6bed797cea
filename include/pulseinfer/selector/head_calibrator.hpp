#pragma once

/// Finds which heads of a layer choose nearly as well as all of them, from dense attention.

#include <pulseinfer/error.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/head_choice.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

struct calibration_goal {
  double coverage = 0.985;       ///< part of the vote's coverage that fewer heads must reach to choose alone
  std::uint32_t most_heads = 2;  ///< KV heads of a choice that is not all of them
};

/// Takes samples of one layer, then answers. cover(choice) is the mean mass of all heads in the blocks that the choice takes,
/// over that in the best ones. Slow and exact; keeps its samples.
class head_calibrator {
 public:
  /// @param chosen blocks that votes decide on: the budget without those that are always selected
  /// @throws configuration_error
  head_calibrator(std::uint32_t kv_heads, std::uint32_t chosen) : kv_heads_{kv_heads}, chosen_{chosen}
  {
    if (kv_heads == 0 || chosen == 0) {
      throw configuration_error{
        "calibration of " + std::to_string(kv_heads) + " KV heads that choose " + std::to_string(chosen) + " blocks"};
    }
  }

  /// One query position. Blocks that are always selected are left out; where no more are there than are chosen, it says nothing
  /// and is not kept.
  /// @param target [blocks] mean over all query heads of the exact shares
  /// @param shares [kv_heads, blocks] shares by digests, summed over the query heads of a KV head
  /// @throws argument_error for other sizes
  void add(std::span<float const> target, std::span<float const> shares)
  {
    if (shares.size() != target.size() * kv_heads_) {
      throw argument_error{
        status::invalid_argument,
        std::to_string(shares.size()) + " shares for " + std::to_string(kv_heads_) + " heads and " +
          std::to_string(target.size()) + " blocks"};
    }
    if (target.size() <= chosen_) { return; }
    sample& kept = samples_.emplace_back();
    kept.target.assign(target.begin(), target.end());
    kept.shares.assign(shares.begin(), shares.end());
  }

  [[nodiscard]] std::size_t samples() const noexcept { return samples_.size(); }

  /// Part of the best choice's mass that these heads cover.
  /// @throws argument_error without samples
  [[nodiscard]] double cover(head_choice const& choice) const
  {
    expect_samples();
    double covered = 0.0;
    double best = 0.0;
    std::vector<double> votes;
    for (sample const& one : samples_) {
      std::size_t const blocks = one.target.size();
      votes.assign(blocks, 0.0);
      for (std::size_t i = 0; i < choice.kv_heads.size(); ++i) {
        double const weight = choice.weights.empty() ? 1.0 : static_cast<double>(choice.weights[i]);
        float const* const shares = one.shares.data() + choice.kv_heads[i] * blocks;
        for (std::size_t b = 0; b < blocks; ++b) {
          double const share = weight * static_cast<double>(shares[b]);
          votes[b] = choice.combination == share_combination::sum ? votes[b] + share : std::max(votes[b], share);
        }
      }
      covered += mass_of_most(one.target, votes);
      votes.assign(one.target.begin(), one.target.end());
      best += mass_of_most(one.target, votes);
    }
    return best > 0.0 ? std::min(1.0, covered / best) : 1.0;
  }

  /// Non-negative weights with which the heads' shares come closest to the target, least squares; the largest is 1.
  [[nodiscard]] std::vector<float> weights_of(std::vector<std::uint32_t> const& heads) const
  {
    std::size_t const n = heads.size();
    std::vector<double> products(n * n, 0.0);
    std::vector<double> with_target(n, 0.0);
    for (sample const& one : samples_) {
      std::size_t const blocks = one.target.size();
      for (std::size_t b = 0; b < blocks; ++b) {
        for (std::size_t i = 0; i < n; ++i) {
          double const share = static_cast<double>(one.shares[heads[i] * blocks + b]);
          with_target[i] += share * static_cast<double>(one.target[b]);
          for (std::size_t j = 0; j < n; ++j) {
            products[i * n + j] += share * static_cast<double>(one.shares[heads[j] * blocks + b]);
          }
        }
      }
    }
    // One weight after the other at its best, as long as it is not negative: converges, for the problem is convex.
    std::vector<double> weights(n, 0.0);
    for (int round = 0; round < 500; ++round) {
      for (std::size_t i = 0; i < n; ++i) {
        double rest = with_target[i];
        for (std::size_t j = 0; j < n; ++j) { rest -= j == i ? 0.0 : products[i * n + j] * weights[j]; }
        weights[i] = products[i * n + i] > 0.0 ? std::max(0.0, rest / products[i * n + i]) : 0.0;
      }
    }
    double const largest = *std::max_element(weights.begin(), weights.end());
    std::vector<float> result;
    for (double const weight : weights) {
      result.push_back(static_cast<float>(largest > 0.0 ? weight / largest : 1.0));
    }
    return result;
  }

  /// The fewest heads that cover `goal.coverage` of what the vote of all does: the best one; else the best, and greedily those
  /// that add most, with weights; else all.
  /// @throws argument_error without samples
  [[nodiscard]] calibrated_layer result(calibration_goal const& goal = {}) const
  {
    expect_samples();
    head_choice all;
    all.kv_heads.resize(kv_heads_);
    std::iota(all.kv_heads.begin(), all.kv_heads.end(), 0U);
    double const vote = cover(all);
    head_choice choice;
    while (choice.kv_heads.size() < std::min<std::size_t>(goal.most_heads, kv_heads_ - 1U)) {
      head_choice best;
      double best_cover = -1.0;
      for (std::uint32_t head = 0; head < kv_heads_; ++head) {
        head_choice more{.kv_heads = choice.kv_heads};
        auto const place = std::lower_bound(more.kv_heads.begin(), more.kv_heads.end(), head);
        if (place != more.kv_heads.end() && *place == head) { continue; }
        more.kv_heads.insert(place, head);
        if (more.kv_heads.size() > 1) { more.weights = weights_of(more.kv_heads); }
        double const covered = cover(more);
        if (covered > best_cover) {
          best = more;
          best_cover = covered;
        }
      }
      choice = best;
      if (best_cover >= goal.coverage * vote) {
        return {.heads = choice, .coverage = best_cover, .vote_coverage = vote};
      }
    }
    return {.heads = all, .coverage = vote, .vote_coverage = vote};
  }

 private:
  struct sample {
    std::vector<float> target;  // [blocks]
    std::vector<float> shares;  // [kv_heads, blocks]
  };

  /// Mass of the blocks with the most votes, ties to the lowest id.
  [[nodiscard]] double mass_of_most(std::vector<float> const& mass, std::vector<double> const& votes) const
  {
    std::vector<std::size_t> order(votes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::nth_element(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(chosen_), order.end(),
      [&](std::size_t a, std::size_t b) { return votes[a] != votes[b] ? votes[a] > votes[b] : a < b; });
    double sum = 0.0;
    for (std::size_t i = 0; i < chosen_; ++i) { sum += static_cast<double>(mass[order[i]]); }
    return sum;
  }

  void expect_samples() const
  {
    if (samples_.empty()) {
      throw argument_error{
        status::invalid_argument,
        "no sample has more blocks than the " + std::to_string(chosen_) + " that are chosen: nothing is measured"};
    }
  }

  std::uint32_t kv_heads_;
  std::uint32_t chosen_;
  std::vector<sample> samples_;
};

}  // namespace pulseinfer
