#pragma once

/// What admission is asked, and answers, when memory is dealt out between rows and between layers.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/step_sample.hpp>

#include <cstdint>
#include <span>
#include <type_traits>

namespace pulseinfer {

/// A running row that admission may place: one whose request said `place_freely`, and that stands in no step.
struct row_figures {
  row_id row = none<row_id>;
  bool recalls = false;           ///< it offloads: blocks of it travel; else every block has a slot
  bool measured = false;          ///< it has offloaded, so that recalled_blocks means something
  double recalled_blocks = 0.0;   ///< of a step, over layers and lanes; steps of 32 steps ago count half
  std::uint32_t tokens = 0;       ///< committed
  std::uint32_t max_tokens = 0;   ///< that it may become
  std::uint64_t slots_now = 0;    ///< kept back for it, over layers and lanes
  std::uint64_t slots_all = 0;    ///< with a slot for every block of its full length
  std::uint64_t slots_lease = 0;  ///< where it offloads; before it selects, those that its prompt keeps
};

static_assert(std::is_trivially_copyable_v<row_figures>);

/// A layer, over the rows that recalled in it since admission was asked last.
struct layer_figures {
  bool selects = false;              ///< its slots can be dealt out
  double selected_blocks = 0.0;      ///< since new leases had other slots last
  double missed_blocks = 0.0;        ///< of them
  double slots = 0.0;                ///< of a lane, in the mean over the rows that offload now
  double missed_share_before = 0.0;  ///< of the selected blocks, with `slots_before`; 0: not known
  double slots_before = 0.0;
  std::uint32_t next_slots = 0;  ///< of a lane whose lease begins next
};

static_assert(std::is_trivially_copyable_v<layer_figures>);

struct balance_question {
  std::span<row_figures const> rows = {};
  std::span<layer_figures const> layers = {};
  demand const* waiting =
    nullptr;  ///< the request that stands first in the queue, as it would offload; null: nobody waits
  capacity free = {};
  std::uint32_t least_slots = 0;  ///< that a lane may have in a layer that selects
  std::uint32_t most_slots = 0;   ///< equal to it where leases cannot differ
  std::uint32_t mean_slots = 0;   ///< what the layers' may come to in the mean
};

struct balance_answer {
  row_id demote = none<row_id>;   ///< give the slots of this row back but for a lease; done first
  row_id promote = none<row_id>;  ///< bring every block of this row back
  bool spread = false;            ///< leases that begin from here on have the slots that were written
};

}  // namespace pulseinfer
