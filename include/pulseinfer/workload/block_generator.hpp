#pragma once

/// Draws which blocks each row selects in each layer, as many of them new as a miss_generator says.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/workload/fixed_point.hpp>
#include <pulseinfer/workload/miss_generator.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// Where new blocks of a selection come from, in shares of them; the rest is uniform over the sequence.
struct newcomer_mixture {
  double neighbours = 0.5;  ///< one or two blocks beside one that is selected
  double returning = 0.3;  ///< selected before and since then replaced, the more recent the likelier (Zipf, exponent 1)
};

/// Each step of a lane keeps its selection but for misses() of them, which new blocks take the places of. New blocks are such
/// as are not among the `hot_blocks` most recently selected ones: where a lane has so many slots and replaces the least
/// recently used, every new block misses and no other does.
class block_generator {
 public:
  /// @param blocks that each sequence can select from   @throws configuration_error
  block_generator(
    miss_generator const& misses, std::uint32_t blocks, std::uint32_t hot_blocks, newcomer_mixture const& mixture = {})
    : misses_{&misses},
      budget_{misses.options().budget_blocks},
      hot_blocks_{hot_blocks},
      neighbours_{workload_detail::to_fixed(mixture.neighbours)},
      returning_{workload_detail::to_fixed(mixture.returning)},
      seed_{misses.options().seed}
  {
    if (
      hot_blocks < budget_ || blocks < hot_blocks + 2 * std::uint64_t{budget_} || hot_blocks + budget_ > 0x7FFFFFFFU) {
      throw configuration_error{
        "block_generator: selections of " + std::to_string(budget_) + " blocks, " + std::to_string(hot_blocks) +
        " of them hot, out of " + std::to_string(blocks)};
    }
    lanes_.resize(std::size_t{misses.options().rows} * misses.options().layers);
    for (lane& l : lanes_) {
      l.rank.assign(blocks, cold);
      l.recent.reserve(std::size_t{hot_blocks} + std::size_t{2} * budget_);
      l.past.reserve(most_past);
    }
    selection_.reserve(budget_);
  }

  /// The row's selection in its current step, ascending. Ask once for each layer and step. Valid until the next call.
  [[nodiscard]] std::span<block_id const> select(row_id row, layer_id layer)
  {
    lane& l = lanes_[to_index(row) * misses_->options().layers + to_index(layer)];
    std::uint64_t bits =
      workload_detail::bits_of({seed_, 6, to_index(row), misses_->step_of(row), to_index(layer), ++l.steps});
    if (l.recent.empty()) {
      begin(l, bits);
    } else {
      replace(l, misses_->misses(row, layer), bits);
    }
    selection_.clear();
    for (std::uint32_t i = 0; i < budget_; ++i) { selection_.push_back(static_cast<block_id>(l.recent[i].block)); }
    std::ranges::sort(selection_);
    return selection_;
  }

  /// A new sequence runs in the row.
  void begin_request(row_id row)
  {
    for (std::uint32_t layer = 0; layer < misses_->options().layers; ++layer) {
      lane& l = lanes_[to_index(row) * misses_->options().layers + layer];
      std::ranges::fill(l.rank, cold);
      l.recent.clear();
      l.past.clear();
    }
  }

 private:
  static constexpr std::uint8_t cold = 0;
  static constexpr std::uint8_t hot = 1;
  static constexpr std::size_t most_past = 4096;

  struct used {
    std::uint32_t block = 0;
    std::uint64_t left = 0;  ///< last step that selected it; meaningful once it is not selected
  };

  struct lane {
    std::uint64_t steps = 0;
    std::vector<std::uint8_t> rank;   // [blocks] whether it is hot
    std::vector<used> recent;         // the selection, then what was selected before, latest first
    std::vector<std::uint32_t> past;  // [<= most_past] what is hot no more, latest last
  };

  [[nodiscard]] static std::uint32_t below(std::uint64_t bits, std::uint64_t bound) noexcept
  {
    return static_cast<std::uint32_t>(((bits >> 32U) * bound) >> 32U);
  }

  void begin(lane& l, std::uint64_t bits)
  {
    auto const blocks = static_cast<std::uint32_t>(l.rank.size());
    for (std::uint64_t draw = 1; l.recent.size() < budget_; ++draw) {
      std::uint32_t const block = below(workload_detail::next_bits(bits, draw), blocks);
      if (l.rank[block] == hot) { continue; }
      l.rank[block] = hot;
      l.recent.push_back({.block = block});
    }
  }

  void replace(lane& l, std::uint32_t wanted, std::uint64_t bits)
  {
    // Those that leave the selection go behind those that stay.
    std::uint64_t draw = 0;
    for (std::uint32_t i = 0; i < wanted; ++i) {
      std::uint32_t const place = i + below(workload_detail::next_bits(bits, ++draw), budget_ - i);
      std::swap(l.recent[i], l.recent[place]);
    }
    for (std::uint32_t i = 0; i < wanted; ++i) { l.recent[i].left = l.steps - 1; }
    std::rotate(l.recent.begin(), l.recent.begin() + wanted, l.recent.begin() + budget_);
    std::uint32_t const stay = budget_ - wanted;
    std::vector<used>& came = came_;
    came.clear();
    while (came.size() < wanted) {
      std::uint32_t const block = draw_block(l, stay, workload_detail::next_bits(bits, ++draw));
      if (l.rank[block] == hot) { continue; }
      l.rank[block] = hot;
      came.push_back({.block = block});
    }
    l.recent.insert(l.recent.begin() + stay, came.begin(), came.end());
    // Of blocks that were left in one step, a cache may keep any: none of them is certain to be gone.
    while (l.recent.size() > hot_blocks_ && l.recent.back().left < l.recent[hot_blocks_ - 1].left) {
      std::uint32_t const gone = l.recent.back().block;
      l.rank[gone] = cold;
      if (l.past.size() == most_past) { l.past.erase(l.past.begin(), l.past.begin() + most_past / 2); }
      l.past.push_back(gone);
      l.recent.pop_back();
    }
  }

  [[nodiscard]] std::uint32_t draw_block(lane const& l, std::uint32_t stay, std::uint64_t bits) const
  {
    using namespace workload_detail;
    auto const blocks = static_cast<std::uint32_t>(l.rank.size());
    std::uint64_t const where = next_bits(bits, 1);
    std::uint64_t const how = next_bits(bits, 2);
    auto const kind = static_cast<fixed>(bits >> 48U);
    if (kind < neighbours_ && stay > 0) {
      std::uint32_t const beside = l.recent[below(where, stay)].block;
      std::uint32_t const distance = 1 + static_cast<std::uint32_t>(how & 1U);
      bool const after = (how & 2U) != 0;
      if (after) { return beside + distance < blocks ? beside + distance : beside; }
      return beside >= distance ? beside - distance : beside;
    }
    if (kind < neighbours_ + returning_ && !l.past.empty()) {
      // A power of the size between 0 and 1, uniform in its exponent, is distributed like 1 / rank.
      fixed const exponent = multiply(static_cast<fixed>(how >> 48U), logarithm(1, l.past.size()));
      std::uint64_t const rank = std::max<std::uint64_t>((l.past.size() * exponential(exponent)) >> 32U, 1);
      return l.past[l.past.size() - rank];
    }
    return below(where, blocks);
  }

  miss_generator const* misses_;
  std::uint32_t budget_;
  std::uint32_t hot_blocks_;
  workload_detail::fixed neighbours_;
  workload_detail::fixed returning_;
  std::uint64_t seed_;
  std::vector<lane> lanes_;  // [rows, layers]
  std::vector<block_id> selection_;
  std::vector<used> came_;
};

}  // namespace pulseinfer
