#pragma once

/// Where each row stands in its step.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>

namespace pulseinfer {

/// Progress of a row. A step takes it from `begun` through (`standing`, `handed`) once per layer to `done`.
enum class row_progress : std::uint8_t {
  outside,   ///< not part of a step
  begun,     ///< named by begin_step, not yet at the first layer
  standing,  ///< entered a layer: its recall is known by its ticket
  handed,    ///< part of a visit that the host engine has: next it enters a layer, or was sampled
  done,      ///< sampled
  failed     ///< gets no further visit; `code` says why
};

struct row_runtime {
  row_progress progress = row_progress::outside;
  status code = status::ok;
  layer_id layer = none<layer_id>;
  bool attended_hits = false;     ///< the hits visit of this layer is out
  bool resident = true;           ///< known before the device says so: nothing of this layer travels
  bool unsound = false;           ///< has tokens whose attention lacked blocks: it cannot go on
  bool behind = false;            ///< its own recall has landed, and one of the background that it waits for has not
  bool stalled = false;           ///< blocks of this layer found no slot, and were asked for again
  bool flying = false;            ///< its blocks travelled when the mailbox was last read
  bool closing = false;           ///< close was asked for while a recall flew
  std::uint8_t late_history = 0;  ///< bit i: late i steps ago
  std::uint8_t tries = 0;         ///< recalls of this layer that have failed
  std::uint32_t recall = 0;       ///< place of its recall in the ring; valid while `standing` and not resident
  std::uint32_t new_tokens = 0;
  std::uint32_t token_offset = 0;  ///< the row's first token in the engine's tensors
  std::uint32_t unproven_first =
    0;  ///< number of the first recall that a visit was handed with and the host had yet to see land
  std::uint32_t unproven_last = 0;  ///< and of the last one; 0: there is none
  std::uint32_t unproven_before =
    0;  ///< of the last one of earlier steps, whose tokens are committed; 0: there is none
  std::uint32_t misses = 0;
  std::uint64_t bytes = 0;
  nanoseconds entered{0};
};

}  // namespace pulseinfer
