#pragma once

/// What comes in the background without being asked for, and what has come of it.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Sums of one lane since construction, in mapped pinned memory: the device adds, the host reads at any time.
struct alignas(64) lane_foresight {
  std::uint64_t used = 0;  ///< blocks that came in the background and were selected afterwards, each counted once
  std::uint64_t wasted =
    0;  ///< blocks that came in the background and whose slot a recall took before they were selected
  std::uint64_t plans = 0;         ///< selections of which blocks could have been deferred: one for each layer and step
  std::uint64_t deferred = 0;      ///< selected blocks that were left for later
  std::uint64_t skipped = 0;       ///< share not attended for that, in units of 2^-32: of the query head that lost most
  std::uint32_t most_skipped = 0;  ///< the largest of those shares, in the same units
  std::uint32_t left = 0;          ///< blocks that the last listing for the background had no room for
};

static_assert(std::is_trivially_copyable_v<lane_foresight> && sizeof(lane_foresight) == 64);

/// Blocks that may come in the background, a bit for each. Device memory.
struct foresight_ref {
  std::uint32_t* owed =
    nullptr;  // [layers, lanes, words] left for later by the lane's last selection; null: none ever are
  std::uint32_t* wanted = nullptr;   // [layers, lanes, words] not listed yet: of those, and of the blocks below the cut
  lane_foresight* totals = nullptr;  // [lanes]
  std::uint32_t lanes = 0;
  std::uint32_t words = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t* owed_of(layer_id layer, lane_id lane) const
  {
    return owed == nullptr ? nullptr : owed + (to_index(layer) * lanes + to_index(lane)) * words;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t* wanted_of(layer_id layer, lane_id lane) const
  {
    return wanted + (to_index(layer) * lanes + to_index(lane)) * words;
  }
};

static_assert(std::is_trivially_copyable_v<foresight_ref>);

/// What a selector leaves behind of the last selection that it enqueued on a stream, for what is enqueued next.
struct selection_scores {
  float const* votes =
    nullptr;  // [lanes, vote_pitch] by which blocks were chosen, of rows with more blocks than the budget
  float const* shares =
    nullptr;  // [max_rows, queries, heads, share_pitch] softmax shares, likewise; null: none are kept
  std::uint64_t vote_pitch = 0;   ///< floats
  std::uint64_t share_pitch = 0;  ///< floats
  std::uint32_t queries = 1;      ///< query tokens of a row whose shares are kept
  std::uint32_t heads = 0;        ///< query heads, of the KV heads that choose
  bool every_head = false;        ///< those are all of the layer's
  std::uint32_t budget_blocks = 0;
  std::uint32_t sink_blocks = 0;
  std::uint32_t recent_blocks = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE float const* shares_of(row_id row, std::uint32_t query, std::uint32_t head) const
  {
    return shares + ((to_index(row) * queries + query) * heads + head) * share_pitch;
  }
};

static_assert(std::is_trivially_copyable_v<selection_scores>);

}  // namespace pulseinfer
