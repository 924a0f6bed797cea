#pragma once

/// Selections drawn at random for a manager whose host engine chooses the blocks.

#include "rig.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace pulseinfer_test {

/// Lets the rig's engine import, before each layer, some of each row's blocks at random: as many as its budget takes.
class random_choice {
 public:
  random_choice(rig<chosen_manager>& r, std::uint64_t seed) : rig_{&r}, random_{seed}
  {
    r.engine.before_enter = [this](pulseinfer::layer_id layer, pulseinfer::row_list rows) { import(layer, rows); };
  }
  random_choice(random_choice&&) = delete;

 private:
  void import(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    using namespace pulseinfer;
    kv_geometry const& g = rig_->kv.geometry();
    if (g.group_of(layer).kind != layer_kind::selected) { return; }
    for (row_id const row : rows) {
      if (rig_->kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
      auto const& state = rig_->engine.row(row);
      auto const blocks = static_cast<std::uint32_t>(blocks_of(state.begin + state.count, g.block_tokens));
      std::uint32_t const most = rig_->kv.selector().budget_blocks(layer) - rig_->kv.budget().open_blocks;
      std::uint32_t const sealed = state.begin / g.block_tokens;
      for (std::uint32_t group = 0; group < g.head_groups; ++group) {
        ids_.clear();
        for (std::uint32_t b = 0; b < sealed; ++b) { ids_.push_back(static_cast<block_id>(b)); }
        std::shuffle(ids_.begin(), ids_.end(), random_);
        if (ids_.size() > most) { ids_.resize(most); }
        REQUIRE(
          rig_->kv.selector().import_selection(layer, lane_of(row, group, g.head_groups), ids_, blocks) == status::ok);
      }
    }
  }

  rig<chosen_manager>* rig_;
  std::mt19937_64 random_;
  std::vector<pulseinfer::block_id> ids_;
};

}  // namespace pulseinfer_test
