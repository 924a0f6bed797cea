#pragma once

/// What was measured in one step.

#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Figures of one step, from `begin_step` to the next one. Exporters and admission read them.
struct step_sample {
  std::uint64_t step = 0;
  std::uint32_t rows = 0;            ///< rows of the step, late ones of the step before included
  std::uint32_t offloaded_rows = 0;  ///< of them, those that recall: row_mode::sparse_offloaded
  std::uint32_t prompt_tokens = 0;   ///< tokens of prompts that the step appended
  std::uint32_t late_rows = 0;       ///< rows left late at its end
  std::uint32_t visits = 0;
  std::uint32_t waits = 0;            ///< times that `++` slept
  std::uint64_t selected_blocks = 0;  ///< over rows and layers that selected
  std::uint64_t recalled_blocks = 0;
  std::uint64_t recalled_bytes = 0;
  std::uint64_t background_blocks = 0;  ///< brought ahead of need; recalled_blocks does not count them
  std::uint64_t background_hits = 0;    ///< of those, brought in this step or before: selected for the first time since
  std::uint64_t wasted_blocks = 0;      ///< likewise: gave their slots to recalls without having been selected
  std::uint64_t wasted_bytes = 0;       ///< those of wasted_blocks
  std::uint64_t deferrals = 0;  ///< selections, over rows, layers and head groups, of which blocks could be deferred
  std::uint64_t deferred_blocks = 0;  ///< missing blocks that they left for later; selected_blocks does not count them
  double skipped_share = 0.0;       ///< share of the softmax mass not attended for that, summed over deferrals; of each
                                    ///< that of the query head which lost most
  double most_skipped_share = 0.0;  ///< the largest one of any deferral since construction
  std::uint64_t written_bytes = 0;  ///< write-back
  std::uint64_t failed_transfers = 0;
  std::uint32_t thrash_steps =
    0;  ///< rows that recalled more blocks in this step than they found resident: their slots
        ///< are too few for how their selections move
  nanoseconds begin{0};
  nanoseconds end{0};
  nanoseconds stalled{0};  ///< time slept with nothing ready
};

static_assert(std::is_trivially_copyable_v<step_sample>);

/// What a request asks of the manager's memory.
struct demand {
  sequence_id sequence = none<sequence_id>;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;     ///< prompt and output
  std::uint64_t host_blocks = 0;    ///< host blocks for its full length
  std::uint64_t slots_prefill = 0;  ///< slots, over layers and lanes, while its prompt comes in
  std::uint64_t slots_decode = 0;   ///< slots, over layers and lanes, once it decodes
  std::uint32_t digest_extents = 0;
};

static_assert(std::is_trivially_copyable_v<demand>);

/// What is free when admission decides.
struct capacity {
  std::uint32_t rows_total = 0;
  std::uint32_t rows_running = 0;
  std::uint64_t host_blocks_free = 0;
  std::uint64_t slots_free = 0;
  std::uint64_t slots_total = 0;
  std::uint64_t host_blocks_total = 0;
  std::uint32_t digest_extents_free = 0;
  std::uint32_t digest_extents_total = 0;
};

static_assert(std::is_trivially_copyable_v<capacity>);

enum class [[nodiscard]] admission : std::uint8_t { admitted, queued, rejected };

[[nodiscard]] constexpr char const* name_of(admission value)
{
  switch (value) {
    case admission::admitted: return "admitted";
    case admission::queued: return "queued";
    case admission::rejected: return "rejected";
  }
  return "unknown";
}

}  // namespace pulseinfer
