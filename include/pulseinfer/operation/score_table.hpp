#pragma once

/// Where scores of blocks lie between the operations that make, share and sum them.

#include <pulseinfer/config.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Scores, then shares, of each row's blocks for some query tokens and all scoring heads. Owned by a selector.
struct score_table {
  float* data = nullptr;      // [max_rows, queries, heads, pitch], device memory
  std::uint32_t queries = 1;  ///< query tokens that one pass scores
  std::uint32_t heads = 0;    ///< scoring query heads
  std::uint32_t pitch = 0;    ///< floats, a multiple of 16, at least the most blocks of a sequence

  [[nodiscard]] PULSEINFER_HOST_DEVICE float* row(row_id row, std::uint32_t query, std::uint32_t head) const
  {
    return data + ((to_index(row) * queries + query) * heads + head) * pitch;
  }
};

static_assert(std::is_trivially_copyable_v<score_table>);

/// A part of the rows' query tokens: [first, first + table.queries) of each row that has so many.
struct query_pass {
  std::uint32_t first = 0;
  bool last = true;  ///< no row has query tokens behind it

  /// Query tokens of a row with `new_tokens` that belong to the pass.
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t count(std::int32_t new_tokens, std::uint32_t most) const
  {
    auto const all = static_cast<std::uint32_t>(new_tokens);
    if (all <= first) { return 0U; }
    return all - first < most ? all - first : most;
  }
};

static_assert(std::is_trivially_copyable_v<query_pass>);

/// KV heads of a layer whose query heads score. Digests hold these heads alone, in this order.
struct scoring_heads {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

static_assert(std::is_trivially_copyable_v<scoring_heads>);

}  // namespace pulseinfer
