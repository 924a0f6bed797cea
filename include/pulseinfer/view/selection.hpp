#pragma once

/// The blocks that attention reads in a layer of this step.

#include <pulseinfer/config.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Selected block ids by lane, ascending, the rest of a lane's places none. Device memory.
struct selection_ref {
  block_id* ids = nullptr;          // [lanes, max_selected]
  std::uint32_t* counts = nullptr;  // [lanes]
  std::uint32_t* previous =
    nullptr;  // [layers, lanes, previous_words] bit b: block b was in the logical selection of the
              // lane's previous step in this layer; the selector keeps it
  std::uint32_t max_selected = 0;
  std::uint32_t lanes = 0;
  std::uint32_t previous_words = 0;

  [[nodiscard]] PULSEINFER_HOST_DEVICE block_id* ids_of(lane_id lane) const
  {
    return ids + to_index(lane) * max_selected;
  }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t* previous_of(layer_id layer, lane_id lane) const
  {
    return previous + (to_index(layer) * lanes + to_index(lane)) * previous_words;
  }
};

static_assert(std::is_trivially_copyable_v<selection_ref>);

/// What a selector needs to choose. Rows in dense mode are not in `rows`.
struct select_request {
  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  tensor_view queries = {};        // [tokens, query_heads, head_dim]
  digest_store_ref digests = {};
  selection_ref selection = {};    // written
  std::uint32_t most_blocks = 0;   ///< no row of `rows` has more blocks; known to the host
  std::uint32_t most_queries = 1;  ///< no row of `rows` appends more tokens in this step
  bool remember = true;            ///< the selection becomes the `previous` one (false for a prefetch)
};

static_assert(std::is_trivially_copyable_v<select_request>);

/// Blocks whose digests must follow their keys: of each row, those that this step's tokens touched.
struct digest_request {
  layer_id layer = none<layer_id>;
  row_list rows = {};
  row_info const* info = nullptr;  // [max_rows], device memory
  residency_ref residency = {};
  slot_pool_ref pool = {};
  block_layout layout = {};
  digest_store_ref digests = {};
  std::uint32_t most_touched = 0;  ///< no row touches more blocks in this step
};

static_assert(std::is_trivially_copyable_v<digest_request>);

}  // namespace pulseinfer
