#pragma once

/// Sizes and mode of the CPU backend.

#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// `threaded`: one worker thread per stream. `manual`: nothing runs until asked, and then on the caller's thread.
enum class cpu_mode : std::uint8_t { threaded, manual };

struct cpu_options {
  cpu_mode mode = cpu_mode::threaded;
  std::uint32_t max_streams = 16;
  std::uint32_t max_events = 4096;
  std::uint32_t queue_depth = 1024;                       ///< tasks of a stream that are not complete
  std::uint32_t max_copy_runs = 16384;                    ///< runs of them in all, and of one call of `copy`
  std::size_t max_scratch_bytes = std::size_t{1} << 20U;  ///< of one item of an operation
  memory_limits memory = {};
  nanoseconds full_queue_patience =
    std::chrono::seconds{10};  ///< how long a call waits for a place before it says busy
  std::uint64_t seed = 0;      ///< manual: order of streams, see manual order in cpu_backend
  nanoseconds manual_task_time = std::chrono::microseconds{1};  ///< manual: what each task adds to now()
};

}  // namespace pulseinfer
