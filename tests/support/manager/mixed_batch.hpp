#pragma once

/// A hundred steps of a batch in which rows are in every mode: prompts come in, short rows stay dense, long ones decode
/// sparse and others cross the threshold.

#include "rig.hpp"

#include <cstdint>
#include <vector>

namespace pulseinfer_test {

struct mixed_batch {
  static constexpr std::uint32_t steps = 100;
  static constexpr std::uint32_t rows = 6;

  /// Prompts: in one or several chunks, below and above the threshold of 24 tokens. Row 3 never becomes sparse, row 5 begins
  /// its prompt late.
  static constexpr std::uint32_t prompt[rows] = {60, 10, 20, 4, 90, 70};
  static constexpr std::uint32_t length[rows] = {200, 130, 140, 20, 200, 200};
  static constexpr std::uint32_t first_step[rows] = {0, 0, 0, 90, 0, 40};

  [[nodiscard]] static rig_options options(pulseinfer::cpu_options const& cpu, std::uint32_t quota_tokens = 32)
  {
    return {
      .geometry = {.layers = 3, .query_heads = 4, .kv_heads = 2, .head_dim = 8, .block_tokens = 4, .head_groups = 2},
      .manager =
        {.max_rows = rows,
         .max_tokens = 200,
         .max_prefill_tokens = 8,
         .quota_tokens = quota_tokens,
         .warm_up_queries = 4,
         .slots = 20000},
      .cpu = cpu,
      .per_row = 8};
  }
  [[nodiscard]] static solo_head_selector<> selector()
  {
    return {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};
  }

  template <class Rig>
  explicit mixed_batch(Rig& r)
  {
    for (std::uint32_t i = 0; i < rows; ++i) { ids.push_back(r.open(i + 1, prompt[i], length[i])); }
    batch.reserve(rows);
    r.engine.warm_up = true;
  }

  /// @return the status of begin_step. Allocates nothing
  template <class Rig>
  pulseinfer::status step(Rig& r, std::uint32_t number)
  {
    batch.clear();
    for (std::uint32_t i = 0; i < rows; ++i) {
      std::uint32_t const now = r.kv.tokens_of(ids[i]);
      if (number < first_step[i] || now == length[i]) { continue; }
      batch.push_back({.row = ids[i], .tokens = now < prompt[i] ? std::min(8U, prompt[i] - now) : 1});
    }
    return r.engine.step(std::span<pulseinfer::step_row const>{batch});
  }

  std::vector<pulseinfer::row_id> ids = {};
  std::vector<pulseinfer::step_row> batch = {};
};

}  // namespace pulseinfer_test
