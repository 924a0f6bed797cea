#pragma once

/// Sizes of a manager, checked at construction.

#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pulseinfer {

struct manager_options {
  std::uint32_t max_rows = 1;              ///< sequences that run at once
  std::uint32_t max_tokens = 0;            ///< tokens of the longest sequence, prompt and output
  std::uint32_t max_step_tokens = 1;       ///< most tokens that a decoding row appends in a step (1 + drafts)
  std::uint32_t max_prefill_tokens = 256;  ///< most prompt tokens that a row appends in a step
  std::uint32_t max_total_tokens = 0;      ///< most tokens of all rows in a step; 0: as many as the rows append
  std::uint32_t quota_tokens = 0;          ///< hot slots of a lane in a selected layer, in tokens; 0: three budgets
  /// Most hot slots of a lane in one layer, in tokens, where `balance` deals them out by what layers miss: as many in the mean as
  /// quota_tokens say. 0: every layer has those. Not for pools that are lent per layer.
  std::uint32_t max_quota_tokens = 0;
  std::uint32_t write_back_depth = 2;  ///< sealed blocks of a row whose write-back may be under way
  std::uint32_t stream_tokens = 0;     ///< one half of the slots that prompts stream through, in tokens; 0: none do
  std::uint32_t warm_up_queries = 16;  ///< last prompt queries that choose the blocks which stay resident
  std::uint64_t slots = 0;  ///< in all (per layer where pools are lent per layer); 0: all rows decode, one prefills
  std::vector<std::byte*> lent_slots = {};  ///< a host engine's pool: one base for all layers, or one per layer
  std::uint64_t slot_stride = 0;            ///< bytes from slot to slot of lent pools; 0: the block's bytes
  std::uint64_t write_back_below = 0;  ///< rows that keep their blocks are written back too while fewer slots are free
  std::uint64_t host_blocks = 0;       ///< blocks of the host store; 0: every row at its longest
  std::uint64_t max_host_blocks = 0;  ///< blocks that the host store may grow to (grow_host_store); 0: it does not grow
  std::uint32_t digest_extents = 0;   ///< places for digests of 64 blocks of a row, in all layers; 0: likewise
  std::uint64_t host_limit_bytes = 0;  ///< refuse a host store above this; 0: no limit
  /// Missing blocks of so little share are left for later: together no more than this of a row's softmax mass in a layer, in every
  /// query head. They come in the background. 0: none are, and results depend on selections alone.
  float deferred_share = 0.0F;
  /// Blocks below a selection's cut that come in the background too, in parts of the budget: 0.25 for ranks K + 1 to 1.25 K.
  float near_share = 0.0F;
  /// Most bytes that travel in the background at once: a demand waits at most for these. With less than a block of a row's lanes
  /// nothing does.
  std::uint64_t background_bytes = std::uint64_t{512} << 10U;
  std::uint32_t recalls = 0;          ///< recalls under way at once; 0: rows + 16
  std::uint32_t captured_steps = 0;   ///< steps that are captured as graphs at once; each has a plan for every layer
  std::uint32_t max_tries = 2;        ///< recalls of a row in a layer before its blocks count as lost; 255 at most
  std::uint32_t saved_sequences = 0;  ///< preempted and retained sequences at once; 0: as many as rows
  bool verify = false;  ///< checksums of every block that is written back, looked at again when it is recalled
  nanoseconds wait_limit{
    std::chrono::seconds{30}};  ///< longest that begin_step waits for the device before it gives up
};

}  // namespace pulseinfer
