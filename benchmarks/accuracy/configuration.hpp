/// What the accuracy benchmark varies.
#pragma once

#include <pulseinfer/numeric.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace accuracy {

enum class digest_kind : std::uint8_t { cuboid_mean, min_max, mean_key, log_mass };

/// Who chooses the blocks of a lane. A lane is a group of KV heads that reads the same blocks.
enum class head_rule : std::uint8_t {
  headwise,   ///< each query head the best for itself; all query heads of a KV head read their union
  soft_vote,  ///< shares summed over the query heads of the lane, or of those of its KV heads that are asked
  max_share,  ///< the largest share of any query head of the lane
};

enum class score_source : std::uint8_t {
  digest,
  oracle,  ///< the true softmax mass of each block
};

[[nodiscard]] char const* name_of(digest_kind kind);
[[nodiscard]] char const* name_of(head_rule rule);

/// KV heads that score, as bits. All others follow.
using head_mask = std::uint32_t;
inline constexpr head_mask all_heads = ~head_mask{0};

/// One row of the table.
struct configuration {
  std::string name = {};  // of the comparison to which the row belongs
  std::string rule_name = "soft_vote";
  head_rule rule = head_rule::soft_vote;
  std::uint32_t head_groups = 1;  // lanes of a layer
  digest_kind digest = digest_kind::cuboid_mean;
  pulseinfer::dtype digest_type = pulseinfer::dtype::float16;
  std::uint32_t digest_tokens = 0;  // of which one digest is made; 0: of a block
  score_source scores = score_source::digest;
  std::uint32_t block_tokens = 16;
  std::uint32_t budget_tokens = 1024;
  double budget_blocks = 0.0;  // mean over layers; 0: budget_tokens / block_tokens
  std::uint32_t sink_tokens = 16;
  std::uint32_t recent_tokens = 128;
  std::uint32_t slots_tokens = 0;  // of a lane and layer; 0: three budgets
  float hysteresis = 0.25F;
  double deferred_share = 0.0;  // of each query head's mass, at most so much is skipped instead of awaited
  std::vector<std::uint32_t> dense_layers = {};
  std::vector<double> layer_factors = {};  // [layers] of the budget
  std::vector<head_mask> heads = {};       // [layers]; empty: all
  bool equal_bytes = false;                // the budget is that with which as many bytes are recalled as by soft_vote

  [[nodiscard]] double blocks() const
  {
    return budget_blocks > 0.0 ? budget_blocks : static_cast<double>(budget_tokens) / block_tokens;
  }
  /// Blocks of one layer: whole numbers whose mean over the layers is the budget.
  [[nodiscard]] std::uint32_t layer_blocks(std::uint32_t layer) const
  {
    double const wanted = blocks();
    if (!layer_factors.empty()) { return static_cast<std::uint32_t>(wanted * layer_factors.at(layer)); }
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(wanted * (layer + 1) + 1e-9)) -
      static_cast<std::uint32_t>(static_cast<std::uint64_t>(wanted * layer + 1e-9));
  }
  [[nodiscard]] std::uint32_t slot_blocks() const
  {
    return (slots_tokens != 0 ? slots_tokens : 3 * budget_tokens) / block_tokens;
  }
  [[nodiscard]] bool dense(std::uint32_t layer) const
  {
    for (std::uint32_t const each : dense_layers) {
      if (each == layer) { return true; }
    }
    return false;
  }
  [[nodiscard]] head_mask mask(std::uint32_t layer) const { return heads.empty() ? all_heads : heads.at(layer); }
};

inline char const* name_of(digest_kind kind)
{
  switch (kind) {
    case digest_kind::cuboid_mean: return "cuboid_mean";
    case digest_kind::min_max: return "min_max";
    case digest_kind::mean_key: return "mean_key";
    case digest_kind::log_mass: return "log_mass";
  }
  return "unknown";
}

inline char const* name_of(head_rule rule)
{
  switch (rule) {
    case head_rule::headwise: return "headwise";
    case head_rule::soft_vote: return "soft_vote";
    case head_rule::max_share: return "max_share";
  }
  return "unknown";
}

}  // namespace accuracy
