#pragma once

/// What a scheduler knows of the machine and the model: how long passes and recalls take.

#include <pulseinfer/types.hpp>

#include <cstdint>

namespace pulseinfer {

/// Measured once for a model on a machine. A pass of n rows over a layer takes per_pass + n * per_row, the attention of their hits
/// n * per_row_hits before it.
struct decode_profile {
  nanoseconds per_pass{0};             ///< weights of a layer, launches, selection; 0: nothing is known
  nanoseconds per_row{0};              ///< what a row adds to it
  nanoseconds per_row_hits{0};         ///< attention of a row's resident blocks
  nanoseconds per_hits{0};             ///< what the hits' visit costs beside it
  nanoseconds per_recall{0};           ///< from a plan to its first byte
  double link_bytes_per_second = 0.0;  ///< 0: as fitted to the recalls of the run
  nanoseconds resume{0};               ///< from a landing to a pass that waits for it on the stream
  nanoseconds wake{0};                 ///< from a landing or a plan to a pass that the host then launches
  std::uint32_t rows_per_landing =
    1;  ///< rows of a recall that are posted as landed together, in the order in which they travel
  nanoseconds per_landing{0};  ///< link time between them
  std::uint64_t selected_bytes =
    0;                         ///< of a row in a layer: what of them travels is attended after the hits; 0: not known
  bool smallest_first = true;  ///< rows of a recall travel by rising number of blocks; else in the recall's order

  [[nodiscard]] bool known() const noexcept { return per_pass.count() > 0; }
};

}  // namespace pulseinfer
