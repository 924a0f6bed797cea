#pragma once

/// The device's books in host vectors: what the operations on leases and tables work on.

#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pulseinfer_test {

struct lane_book_sizes {
  std::uint32_t layers = 2;
  std::uint32_t rows = 2;
  std::uint32_t head_groups = 1;
  std::uint32_t max_blocks = 16;
  std::uint32_t max_selected = 8;
  std::uint32_t max_lease = 8;
  std::uint32_t ring = 2;
  std::uint32_t slots = 64;
};

/// All ids none, all counts 0, all slots free, as after a manager's construction.
struct lane_books {
  explicit lane_books(lane_book_sizes const& s) : sizes{s}
  {
    using namespace pulseinfer;
    std::size_t const lanes = std::size_t{s.rows} * s.head_groups, lane_layers = lanes * s.layers;
    slot_of.assign(lane_layers * s.max_blocks, none<slot_id>);
    words.assign(s.slots, slot_word{});
    lease.assign(lane_layers * s.max_lease, none<slot_id>);
    lease_count.assign(lane_layers, 0);
    spare.assign(lane_layers * s.ring, none<slot_id>);
    ids.assign(lanes * s.max_selected, none<block_id>);
    counts.assign(lanes, 0);
    previous_words = (s.max_blocks + 31) / 32;
    previous.assign(lane_layers * previous_words, 0);
    listed.assign(lane_layers * s.max_blocks, none<slot_id>);
    listed_count.assign(lane_layers, 0);
    landed.assign(lanes * s.max_selected, none<slot_id>);
    landed_count.assign(lanes, 0);
    entries.assign(lanes * s.max_selected, recall_entry{});
    lane_counts.assign(lanes * 4, 0);
    info.assign(s.rows, row_info{});
    host_blocks.assign(std::size_t{s.rows} * s.max_blocks, none<host_block_id>);
    bases.assign(s.layers, nullptr);
  }

  [[nodiscard]] pulseinfer::residency_ref residency()
  {
    return {
      .slot_of = slot_of.data(),
      .slots = words.data(),
      .lease = lease.data(),
      .lease_count = lease_count.data(),
      .spare = spare.data(),
      .layers = sizes.layers,
      .lanes = sizes.rows * sizes.head_groups,
      .max_blocks = sizes.max_blocks,
      .max_lease = sizes.max_lease};
  }
  [[nodiscard]] pulseinfer::selection_ref selection()
  {
    return {
      .ids = ids.data(),
      .counts = counts.data(),
      .previous = previous.data(),
      .max_selected = sizes.max_selected,
      .lanes = sizes.rows * sizes.head_groups,
      .previous_words = previous_words};
  }
  [[nodiscard]] pulseinfer::lane_table_ref table()
  {
    return {
      .listed = listed.data(),
      .listed_count = listed_count.data(),
      .landed = landed.data(),
      .landed_count = landed_count.data(),
      .stride = sizes.max_blocks,
      .max_selected = sizes.max_selected};
  }
  [[nodiscard]] pulseinfer::lane_plan_ref plan()
  {
    std::size_t const lanes = std::size_t{sizes.rows} * sizes.head_groups;
    return {
      .entries = entries.data(),
      .misses = lane_counts.data(),
      .hits = lane_counts.data() + lanes,
      .flying = lane_counts.data() + 2 * lanes,
      .stalled = lane_counts.data() + 3 * lanes};
  }
  [[nodiscard]] pulseinfer::slot_pool_ref pool() const
  {
    return {.layer_base = bases.data(), .slot_stride = 1, .slots = sizes.slots};
  }

  /// Gives a lane slots [first, first + count) as its lease, empty.
  void give_lease(pulseinfer::layer_id layer, pulseinfer::lane_id lane, std::uint32_t first, std::uint32_t count)
  {
    pulseinfer::residency_ref const books = residency();
    for (std::uint32_t i = 0; i < count; ++i) {
      books.lease_of_lane(layer, lane)[i] = static_cast<pulseinfer::slot_id>(first + i);
      words[first + i] = {.state = pulseinfer::slot_state::empty};
    }
    books.lease_count[books.lane_index(layer, lane)] = count;
  }

  /// Places a block in a slot, in both directions.
  void place(
    pulseinfer::layer_id layer, pulseinfer::lane_id lane, std::int32_t block, std::int32_t slot,
    pulseinfer::slot_state state, std::uint32_t last_used = 0)
  {
    words[static_cast<std::size_t>(slot)] = {
      .block = static_cast<pulseinfer::block_id>(block), .state = state, .last_used = last_used};
    residency().slots_of_lane(layer, lane)[block] = static_cast<pulseinfer::slot_id>(slot);
  }

  void select(pulseinfer::lane_id lane, std::vector<std::int32_t> const& blocks)
  {
    pulseinfer::block_id* const list = selection().ids_of(lane);
    for (std::uint32_t i = 0; i < sizes.max_selected; ++i) {
      list[i] =
        i < blocks.size() ? static_cast<pulseinfer::block_id>(blocks[i]) : pulseinfer::none<pulseinfer::block_id>;
    }
    counts[to_index(lane)] = static_cast<std::uint32_t>(blocks.size());
  }

  lane_book_sizes sizes;
  std::uint32_t previous_words = 0;
  std::vector<pulseinfer::slot_id> slot_of, lease, spare, listed, landed;
  std::vector<pulseinfer::slot_word> words;
  std::vector<std::uint32_t> lease_count, counts, previous, listed_count, landed_count, lane_counts;
  std::vector<pulseinfer::block_id> ids;
  std::vector<pulseinfer::recall_entry> entries;
  std::vector<pulseinfer::row_info> info;
  std::vector<pulseinfer::host_block_id> host_blocks;
  std::vector<std::byte*> bases;
  std::uint32_t step = 0;
};

}  // namespace pulseinfer_test
