#pragma once

/// How many slots and host blocks a row needs, by mode and layer: pure arithmetic on the configuration.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/operation/select_window.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// Resolved once at construction; every size that the manager uses comes from here.
struct slot_budget {
  std::uint32_t block_tokens = 1;
  std::uint32_t max_blocks = 0;     ///< of a sequence
  std::uint32_t budget_blocks = 0;  ///< largest selection over the selected layers
  std::uint32_t max_selected = 0;   ///< largest list that resolve handles: selections and windows
  std::uint32_t open_blocks = 1;    ///< most blocks that one step's tokens of a decoding row touch
  std::uint32_t ring = 1;           ///< slots of a lane that the host keeps: open blocks and those being written back
  std::uint32_t quota = 0;          ///< slots of a lane in a selected layer
  std::uint32_t lease = 0;          ///< of them, those that resolve refills
  std::uint32_t least_lease = 0;    ///< of a layer, where they are dealt out by what layers miss
  std::uint32_t max_lease = 0;      ///< likewise
  std::uint32_t dense_tokens = 0;   ///< rows up to this length keep every block resident
  std::uint32_t max_step_tokens = 1;
  std::uint32_t max_prefill_tokens = 1;
  std::uint32_t stream_blocks = 0;  ///< of one half of the slots that prompts stream through, for each head group
  bool has_selected_layers = false;

  /// Whether a row of that length will ever leave blocks on the host alone.
  [[nodiscard]] bool offloads(std::uint32_t max_tokens) const
  {
    return has_selected_layers && max_tokens > dense_tokens;
  }

  [[nodiscard]] std::uint32_t blocks(std::uint32_t tokens) const
  {
    return static_cast<std::uint32_t>(blocks_of(tokens, block_tokens));
  }

  /// Slots of one lane in a layer while every block of a selected layer is resident.
  [[nodiscard]] std::uint32_t resident_slots(
    layer_group const& group, std::uint32_t prompt_tokens, std::uint32_t max_tokens) const
  {
    if (group.kind == layer_kind::windowed) { return window_slots(group, max_tokens, max_prefill_tokens); }
    if (group.kind == layer_kind::dense || !offloads(max_tokens)) { return blocks(max_tokens); }
    std::uint64_t const longest =
      std::uint64_t{std::max(prompt_tokens, std::min(dense_tokens, max_tokens))} + max_step_tokens;
    return std::min<std::uint32_t>(blocks(max_tokens), blocks(static_cast<std::uint32_t>(longest)));
  }

  /// Slots of one lane in a layer while a prompt streams in: a selected layer has those blocks that one step opens.
  [[nodiscard]] std::uint32_t step_slots(layer_group const& group, std::uint32_t max_tokens) const
  {
    if (group.kind != layer_kind::selected) { return resident_slots(group, 0, max_tokens); }
    return std::min(blocks(max_tokens), static_cast<std::uint32_t>(window_blocks(max_prefill_tokens, block_tokens)));
  }

  /// Slots of each pool that prompts stream through.
  [[nodiscard]] std::uint64_t stream_slots(std::uint32_t head_groups) const
  {
    return std::uint64_t{2} * stream_blocks * head_groups;
  }

  /// Slots of one lane in a layer once the row decodes.
  [[nodiscard]] std::uint32_t decode_slots(layer_group const& group, std::uint32_t max_tokens) const
  {
    if (group.kind == layer_kind::windowed) { return window_slots(group, max_tokens, max_step_tokens); }
    if (group.kind == layer_kind::dense || !offloads(max_tokens)) { return blocks(max_tokens); }
    return quota;
  }

 private:
  [[nodiscard]] std::uint32_t window_slots(
    layer_group const& group, std::uint32_t max_tokens, std::uint32_t step_tokens) const
  {
    std::uint64_t const window = window_blocks(std::uint64_t{group.window_tokens} + step_tokens - 1, block_tokens);
    return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(blocks(max_tokens), window + sink_blocks(group.sink_tokens, block_tokens)));
  }
};

/// @param budget_of (layer) -> blocks of the selector's largest selection in that layer
/// @throws configuration_error with the numbers
template <class BudgetOf>
[[nodiscard]] slot_budget make_slot_budget(
  kv_geometry const& geometry, manager_options const& options, std::uint32_t dense_tokens, BudgetOf budget_of)
{
  auto const number = [](std::uint64_t value) { return std::to_string(value); };
  auto const positive = [&](std::uint64_t value, char const* name) {
    if (value == 0) { throw configuration_error{std::string{name} + " is 0"}; }
  };
  positive(options.max_rows, "max_rows");
  positive(options.max_tokens, "max_tokens");
  positive(options.max_step_tokens, "max_step_tokens");
  positive(options.max_prefill_tokens, "max_prefill_tokens");
  positive(options.max_tries, "max_tries");
  positive(options.warm_up_queries, "warm_up_queries");
  if (options.max_tries > 255) {
    throw configuration_error{"max_tries is " + number(options.max_tries) + "; 255 at most are counted"};
  }
  if (options.wait_limit <= nanoseconds{0}) {
    throw configuration_error{"wait_limit is " + std::to_string(options.wait_limit.count()) + " ns"};
  }
  validate_extent(blocks_of(options.max_tokens, geometry.block_tokens), 4);
  slot_budget budget;
  budget.block_tokens = geometry.block_tokens;
  budget.max_blocks = static_cast<std::uint32_t>(blocks_of(options.max_tokens, geometry.block_tokens));
  budget.dense_tokens = dense_tokens;
  budget.max_step_tokens = options.max_step_tokens;
  budget.max_prefill_tokens =
    std::max(std::min(options.max_prefill_tokens, options.max_tokens), options.max_step_tokens);
  budget.stream_blocks = budget.blocks(options.stream_tokens);
  budget.open_blocks = static_cast<std::uint32_t>(window_blocks(options.max_step_tokens, geometry.block_tokens));
  validate_extent(std::uint64_t{budget.open_blocks} + options.write_back_depth, 1);
  budget.ring = budget.open_blocks + options.write_back_depth;
  for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
    auto const id = static_cast<layer_id>(layer);
    layer_group const group = geometry.group_of(id);
    if (group.kind == layer_kind::selected) {
      budget.has_selected_layers = true;
      budget.budget_blocks = std::max(budget.budget_blocks, budget_of(id));
    } else if (group.kind == layer_kind::windowed) {
      budget.max_selected =
        std::max(budget.max_selected, budget.resident_slots(group, options.max_tokens, options.max_tokens));
    }
  }
  budget.budget_blocks = std::min(budget.budget_blocks, budget.max_blocks);
  budget.max_selected = std::max({budget.max_selected, budget.budget_blocks, 1U});
  validate_extent(std::uint64_t{options.max_rows} * geometry.head_groups, budget.max_selected);
  validate_extent(std::uint64_t{options.max_rows} * geometry.head_groups * budget.max_selected, 1);
  std::uint32_t const wanted = options.quota_tokens == 0
    ? 3 * budget.budget_blocks
    : static_cast<std::uint32_t>(options.quota_tokens / geometry.block_tokens);
  validate_extent(std::uint64_t{budget.budget_blocks} + budget.ring, 1);
  std::uint32_t const floor = budget.budget_blocks + (budget.open_blocks - 1) + options.write_back_depth;
  budget.quota = options.quota_tokens == 0 ? std::max(wanted, floor) : wanted;
  if (budget.has_selected_layers && budget.quota < floor) {
    throw configuration_error{
      "hot cache has " + number(budget.quota) + " slots, one step can pin " + number(floor) + ": a selection of " +
      number(budget.budget_blocks) + " blocks, " + number(budget.open_blocks - 1) + " that drafts may open and " +
      number(options.write_back_depth) + " being written back; quota_tokens is " + number(options.quota_tokens) +
      " and must be at least " + number(std::uint64_t{floor} * geometry.block_tokens)};
  }
  budget.lease = budget.has_selected_layers ? budget.quota - budget.ring : 0;
  budget.least_lease = budget.max_lease = budget.lease;
  if (options.max_quota_tokens != 0 && budget.has_selected_layers) {
    std::uint32_t const most = options.max_quota_tokens / geometry.block_tokens;
    if (most < budget.quota || options.lent_slots.size() > 1) {
      throw configuration_error{
        "max_quota_tokens is " + number(options.max_quota_tokens) + ", " + number(most) + " slots; each layer has " +
        number(budget.quota) + " in the mean, and " + number(options.lent_slots.size()) +
        " pools are lent: it needs at least so many, and one pool for all layers"};
    }
    validate_extent(std::uint64_t{most} + budget.ring, 1);
    budget.max_lease = most - budget.ring;
    budget.least_lease = floor - budget.ring;
  }
  return budget;
}

}  // namespace pulseinfer
