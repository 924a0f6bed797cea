#pragma once

/// Device and sizes of the CUDA backend.

#include <pulseinfer/backend/memory_ledger.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

struct cuda_options {
  int device = 0;
  std::uint32_t max_streams = 16;
  std::uint32_t max_events = 4096;
  std::uint32_t max_copy_runs = 16384;   ///< of one call of `copy`
  std::size_t max_scratch_bytes = 0;     ///< of one item of an operation; 0: all that a block of the device can have
  std::uint32_t max_blocks = 1U << 16U;  ///< of one launch; further items follow in the same blocks
  /// Of one registration of large pinned memory. The driver holds its locks for so long, about 2 ms for 64 MiB. A multiple of
  /// 2 MiB.
  std::size_t pinned_chunk_bytes = std::size_t{64} << 20U;
  bool pinned_may_spill =
    true;  ///< pages of large pinned memory that the device's own memory node lacks come from others
  memory_limits memory = {};
};

}  // namespace pulseinfer
