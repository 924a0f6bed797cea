#pragma once

/// Which missing blocks of a selection matter so little that attention may go on without them.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Takes missing blocks out of each lane's selection, those first whose largest share over query heads and query tokens is
/// smallest (ties to the lowest id), as long as the shares of all that are taken out sum to no more than `most_share` in every
/// query head for every query token. They are what the lane owes in the layer from then on, and wants to come in the
/// background. What it owed before and still lacks is not taken out again: no block is left for later twice in a row. The
/// remembered selection stays whole.
///
/// Shares are those of the digests' softmax over all blocks of the row: the estimate that a certificate gives too. A row that has
/// no more blocks than its budget has no shares, and nothing of it is taken out; nor of a row with more query tokens than
/// shares are kept of. One item is one lane.
struct defer_blocks {
  static constexpr char const* name = "defer_blocks";
  static constexpr operation_kind kind = operation_kind::metadata;

  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  selection_ref selection = {};    // shortened
  selection_scores scores = {};    // shares are read
  residency_ref residency = {};    // slot_of is read
  foresight_ref foresight = {};    // written
  std::uint32_t head_groups = 1;
  std::uint32_t block_tokens = 0;
  float most_share = 0.0F;
  bool wants_others = false;  ///< the lane wants blocks below its cut too: they stay wanted

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{rows.count} * head_groups, .group_threads = 128};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    std::size_t const places = selection.max_selected;
    return 2 * places * sizeof(std::uint64_t) + (places + group_threads) * sizeof(std::uint32_t);
  }

  [[nodiscard]] operation_cost cost() const
  {
    return {
      .device_bytes = shape().items * selection.max_selected * (std::uint64_t{scores.heads / head_groups} * 4 + 16)};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    row_id const row = rows[item / head_groups];
    auto const head_group = static_cast<std::uint32_t>(item % head_groups);
    lane_id const lane = lane_of(row, head_group, head_groups);
    row_info const state = info[to_index(row)];
    auto const queries = static_cast<std::uint32_t>(state.new_tokens);
    std::uint32_t const rank = group.thread_rank();
    std::uint32_t const size = group.size();
    std::uint32_t* const owed = foresight.owed_of(layer, lane);
    std::uint32_t* const wanted = foresight.wanted_of(layer, lane);
    bool const may = state.blocks(block_tokens) > scores.budget_blocks && queries <= scores.queries;
    if (!may) {
      for (std::uint32_t w = rank; w < foresight.words; w += size) {
        owed[w] = 0;
        if (!wants_others) { wanted[w] = 0; }
      }
      return;
    }
    auto* const keys = reinterpret_cast<std::uint64_t*>(scratch.data);
    std::uint64_t* const order = keys + selection.max_selected;
    auto* const stay = reinterpret_cast<block_id*>(order + selection.max_selected);
    auto* const temp_storage = reinterpret_cast<std::uint32_t*>(stay + selection.max_selected);
    block_id* const ids = selection.ids_of(lane);
    std::uint32_t const count = selection.counts[to_index(lane)];
    std::uint32_t const heads = scores.heads / head_groups;
    std::uint32_t const voters = queries * heads;
    auto const shares_of = [&](std::uint32_t voter) {
      return scores.shares_of(row, voter / heads, head_group * heads + voter % heads);
    };

    // Missing blocks, the least first.
    constexpr std::uint64_t stays = ~std::uint64_t{0};
    slot_id const* const slot_of = residency.slots_of_lane(layer, lane);
    for (std::uint32_t i = rank; i < count; i += size) {
      std::uint64_t const block = to_index(ids[i]);
      order[i] = keys[i] = stays;
      if (!is_none(slot_of[block]) || (owed[block / 32U] >> (block % 32U) & 1U) != 0U) { continue; }
      float largest = 0.0F;
      for (std::uint32_t v = 0; v < voters; ++v) {
        float const share = shares_of(v)[block];
        largest = share > largest ? share : largest;
      }
      keys[i] = std::uint64_t{device::order_key(largest)} << 32U | i;
    }
    group.sync();
    for (std::uint32_t i = rank; i < count; i += size) {
      if (keys[i] == stays) { continue; }
      std::uint32_t place = 0;
      for (std::uint32_t j = 0; j < count; ++j) { place += keys[j] < keys[i] ? 1U : 0U; }
      order[place] = keys[i];
    }
    group.sync();
    auto const block_at = [&](std::uint32_t place) { return to_index(ids[order[place] & 0xFFFFFFFFU]); };

    // As many as no head minds.
    std::uint32_t taken = count;
    for (std::uint32_t v = rank; v < voters; v += size) {
      float const* const shares = shares_of(v);
      float sum = 0.0F;
      std::uint32_t fits = 0;
      for (; fits < taken && order[fits] != stays; ++fits) {
        sum += shares[block_at(fits)];
        // A share that is no number fits nowhere.
        if (!(sum <= most_share)) { break; }
      }
      taken = fits;
    }
    taken = device::reduce(group, taken, temp_storage, [](std::uint32_t a, std::uint32_t b) { return a < b ? a : b; });
    float skipped = 0.0F;
    for (std::uint32_t v = rank; v < voters; v += size) {
      float const* const shares = shares_of(v);
      float sum = 0.0F;
      for (std::uint32_t i = 0; i < taken; ++i) { sum += shares[block_at(i)]; }
      skipped = sum > skipped ? sum : skipped;
    }
    skipped = device::reduce(group, skipped, reinterpret_cast<float*>(temp_storage), device::maximum{});

    for (std::uint32_t w = rank; w < foresight.words; w += size) {
      std::uint32_t bits = 0;
      for (std::uint32_t i = 0; i < taken; ++i) {
        std::uint64_t const block = block_at(i);
        bits |= block / 32U == w ? 1U << (block % 32U) : 0U;
      }
      owed[w] = bits;
      wanted[w] = wants_others ? wanted[w] | bits : bits;
    }
    if (taken != 0U) {
      for (std::uint32_t i = rank; i < count; i += size) {
        std::uint32_t before = 0;
        bool leaves = false;
        for (std::uint32_t j = 0; j < taken; ++j) {
          auto const place = static_cast<std::uint32_t>(order[j] & 0xFFFFFFFFU);
          before += place < i ? 1U : 0U;
          leaves = leaves || place == i;
        }
        if (!leaves) { stay[i - before] = ids[i]; }
      }
      group.sync();
      for (std::uint32_t i = rank; i < count; i += size) { ids[i] = i < count - taken ? stay[i] : none<block_id>; }
    }
    if (rank != 0U) { return; }
    selection.counts[to_index(lane)] = count - taken;
    lane_foresight& totals = foresight.totals[to_index(lane)];
    // Rounded up: what is told is never less than what was skipped.
    auto const share = static_cast<std::uint64_t>(static_cast<double>(skipped) * 4294967296.0 + 1.0);
    std::uint64_t const units = taken == 0U ? 0U : share > 0xFFFFFFFFU ? 0xFFFFFFFFU : share;
    device::add_relaxed(&totals.plans, 1U);
    device::add_relaxed(&totals.deferred, taken);
    device::add_relaxed(&totals.skipped, units);
    if (units > totals.most_skipped) { device::store_release(&totals.most_skipped, static_cast<std::uint32_t>(units)); }
  }
};

static_assert(operation<defer_blocks>);

}  // namespace pulseinfer
