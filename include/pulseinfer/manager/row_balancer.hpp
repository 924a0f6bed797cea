#pragma once

/// Measures what rows and layers recall, for admission to deal out memory by.

#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/balance.hpp>
#include <pulseinfer/view/mailbox.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pulseinfer {

/// Plain host state; nothing allocates after construction.
class row_balancer {
 public:
  row_balancer(std::uint32_t rows, std::uint32_t layers) : seen_(rows), layers_(layers), slots_(layers, 0)
  {
    figures_.reserve(rows);
  }

  /// The row begins a sequence; what was known of it is another's.
  void begin(row_id row, row_mailbox const& box) noexcept
  {
    seen_[to_index(row)] = {.total = device::load_relaxed(&box.total_misses)};
  }

  /// A step of the row has ended. @param recalled whether it offloaded in it
  void note_step(row_id row, row_mailbox const& box, bool recalled) noexcept
  {
    seen& s = seen_[to_index(row)];
    std::uint64_t const total = device::load_relaxed(&box.total_misses);
    auto const blocks = static_cast<double>(total - s.total);
    s.total = total;
    if (!recalled) { return; }
    static double const forget = 1.0 - std::exp2(-1.0 / 32.0);
    ++s.steps;
    s.mean += (blocks - s.mean) * std::max(forget, 1.0 / s.steps);
  }

  /// Takes in what a layer's recalls have moved and found.
  void note_layer(layer_id layer, std::uint64_t missed, std::uint64_t hits) noexcept
  {
    layers_[to_index(layer)].missed_blocks += static_cast<double>(missed);
    layers_[to_index(layer)].selected_blocks += static_cast<double>(missed + hits);
  }

  /// What was missed so far belongs to the slots that the layers had.
  void spread() noexcept
  {
    for (layer_figures& layer : layers_) {
      if (layer.selected_blocks > 0.0) {
        layer.missed_share_before = layer.missed_blocks / layer.selected_blocks;
        layer.slots_before = layer.slots;
      }
      layer.missed_blocks = layer.selected_blocks = 0.0;
    }
  }

  void clear_rows() noexcept { figures_.clear(); }
  void add_row(row_figures figures) noexcept
  {
    seen const& s = seen_[to_index(figures.row)];
    figures.measured = s.steps != 0;
    figures.recalled_blocks = s.mean;
    figures_.push_back(figures);
  }

  [[nodiscard]] std::span<row_figures const> rows() const noexcept { return figures_; }
  [[nodiscard]] std::span<layer_figures> layers() noexcept { return layers_; }
  /// Where admission writes what lanes are to have in each layer.
  [[nodiscard]] std::span<std::uint32_t> slots() noexcept { return slots_; }

 private:
  struct seen {
    std::uint64_t total = 0;
    std::uint32_t steps = 0;
    double mean = 0.0;
  };

  std::vector<seen> seen_;  // [rows]
  std::vector<row_figures> figures_;
  std::vector<layer_figures> layers_;
  std::vector<std::uint32_t> slots_;  // [layers]
};

}  // namespace pulseinfer
