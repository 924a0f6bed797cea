#pragma once

/// Some earlier blocks of a row whose prompt streams in, together in slots for one attention.

#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Blocks [first_block, first_block + block_count) of one row at one layer. Attend `table` for `rows` as a visit's landed
/// part, with the row's queries of this step, and merge by the log-sum-exp. The table is valid until the range goes on.
struct stream_part {
  layer_id layer = none<layer_id>;
  row_list rows = {};  ///< the one row
  block_table table = {};
  pulseinfer::part part = pulseinfer::part::landed;  ///< full earlier blocks: every query sees all of their tokens
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
};

static_assert(std::is_trivially_copyable_v<stream_part>);

}  // namespace pulseinfer
