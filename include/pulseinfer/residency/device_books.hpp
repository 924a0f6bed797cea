#pragma once

/// Device memory of the books that a step works on: rows, selections, slots, tables, plans by lane.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstdint>
#include <string>

namespace pulseinfer {

/// Sizes of the books.
struct book_sizes {
  std::uint32_t layers = 0;
  std::uint32_t rows = 0;
  std::uint32_t head_groups = 1;
  std::uint32_t max_blocks = 0;    ///< blocks of a sequence
  std::uint32_t max_selected = 0;  ///< blocks of a selection, the largest over the layers
  std::uint32_t max_lease = 0;     ///< slots of a lane that resolve may refill
  std::uint32_t ring = 1;          ///< slots of a lane that the host keeps for open blocks
  std::uint64_t slot_words = 0;    ///< slots of all pools
  bool wants = false;              ///< blocks come in the background without being asked for
  bool owes = false;               ///< selected blocks may be left for later

  [[nodiscard]] std::uint64_t lanes() const { return std::uint64_t{rows} * head_groups; }
};

/// Owns the arrays; everything in them is written in stream order, from the fill that `clear` enqueues on.
template <class B>
class device_books {
 public:
  /// @throws resource_error
  device_books(B& backend, book_sizes const& sizes)
    : sizes_{sizes},
      info_{words(backend, std::uint64_t{sizes.rows} * 2 * sizeof(row_info) / 4)},
      step_{words(backend, 1)},
      host_blocks_{words(backend, std::uint64_t{sizes.rows} * sizes.max_blocks)},
      slot_of_{words(backend, lane_layers() * sizes.max_blocks)},
      listed_{words(backend, lane_layers() * sizes.max_blocks)},
      slot_words_{words(backend, sizes.slot_words * sizeof(slot_word) / 4)},
      lease_{words(backend, lane_layers() * sizes.max_lease)},
      lane_layer_counts_{words(backend, lane_layers() * 2)},
      selected_{words(backend, sizes.lanes() * sizes.max_selected)},
      previous_{words(backend, lane_layers() * previous_words())},
      landed_{words(backend, sizes.lanes() * (sizes.max_selected + 1ULL))},
      entries_{words(backend, sizes.lanes() * sizes.max_selected * sizeof(recall_entry) / 4)},
      lane_counts_{words(backend, sizes.lanes() * 8)},
      expected_{words(backend, sizes.lanes() * sizes.max_selected)},
      wanted_{words(backend, sizes.wants ? lane_layers() * previous_words() : 0)},
      owed_{words(backend, sizes.owes ? lane_layers() * previous_words() : 0)},
      foresight_{backend, memory_space::pinned, sizes.lanes() * sizeof(lane_foresight)},
      spare_{backend, memory_space::pinned, lane_layers() * sizes.ring * sizeof(slot_id)},
      kept_{backend, memory_space::pinned, lane_layers() * sizes.max_selected * sizeof(block_id)}
  {
    for (std::uint64_t i = 0; i < sizes.lanes(); ++i) { totals()[i] = lane_foresight{}; }
    for (std::uint64_t i = 0; i < lane_layers() * sizes.ring; ++i) { spare_.template as<slot_id>()[i] = none<slot_id>; }
    for (std::uint64_t i = 0; i < lane_layers() * sizes.max_selected; ++i) {
      kept_.template as<block_id>()[i] = none<block_id>;
    }
  }

  /// Enqueues the first contents: ids none, counts 0, slots free.
  status clear(B& backend, typename B::stream_ref stream) noexcept
  {
    constexpr std::uint32_t absent = 0xFFFFFFFFU;
    status result = status::ok;
    auto const fill = [&](slab<B> const& memory, std::uint32_t value) {
      if (result != status::ok || memory.bytes() == 0) { return; }
      result = backend.launch(stream, fill_words{.target = memory.data(), .count = memory.bytes() / 4, .value = value});
    };
    fill(info_, 0);
    fill(step_, 0);
    fill(host_blocks_, absent);
    fill(slot_of_, absent);
    fill(listed_, absent);
    fill(slot_words_, 0);
    fill(lease_, absent);
    fill(lane_layer_counts_, 0);
    fill(selected_, absent);
    fill(previous_, 0);
    fill(landed_, absent);
    fill(entries_, absent);
    fill(lane_counts_, 0);
    fill(expected_, absent);
    fill(wanted_, 0);
    fill(owed_, 0);
    return result;
  }

  [[nodiscard]] row_info* info() const noexcept { return info_.template as<row_info>(); }
  /// The rows as `warm_up` sees them: only the last queries ask.
  [[nodiscard]] row_info* asking() const noexcept { return info() + sizes_.rows; }
  [[nodiscard]] std::uint32_t* step() const noexcept { return step_.template as<std::uint32_t>(); }
  [[nodiscard]] host_block_id* host_blocks() const noexcept { return host_blocks_.template as<host_block_id>(); }
  [[nodiscard]] slot_id* spare() const noexcept { return spare_.template as<slot_id>(); }
  [[nodiscard]] block_id* kept() const noexcept { return kept_.template as<block_id>(); }
  [[nodiscard]] book_sizes const& sizes() const noexcept { return sizes_; }

  [[nodiscard]] residency_ref residency() const noexcept
  {
    return {
      .slot_of = slot_of_.template as<slot_id>(),
      .slots = slot_words_.template as<slot_word>(),
      .lease = lease_.template as<slot_id>(),
      .lease_count = lane_layer_counts_.template as<std::uint32_t>(),
      .spare = spare_.template as<slot_id>(),
      .layers = sizes_.layers,
      .lanes = static_cast<std::uint32_t>(sizes_.lanes()),
      .max_blocks = sizes_.max_blocks,
      .max_lease = sizes_.max_lease};
  }

  [[nodiscard]] selection_ref selection() const noexcept
  {
    return {
      .ids = selected_.template as<block_id>(),
      .counts = lane_counts_.template as<std::uint32_t>(),
      .previous = previous_.template as<std::uint32_t>(),
      .max_selected = sizes_.max_selected,
      .lanes = static_cast<std::uint32_t>(sizes_.lanes()),
      .previous_words = previous_words()};
  }

  /// What a prefetch expects to be selected: a list of its own, so that a demand of the same rows can be tried again.
  [[nodiscard]] selection_ref expected() const noexcept
  {
    selection_ref expected = selection();
    expected.ids = expected_.template as<block_id>();
    expected.counts = lane_count(6);
    return expected;
  }

  /// What may come in the background, and what has come of it, of each lane.
  [[nodiscard]] foresight_ref foresight() const noexcept
  {
    return {
      .owed = sizes_.owes ? owed_.template as<std::uint32_t>() : nullptr,
      .wanted = sizes_.wants ? wanted_.template as<std::uint32_t>() : nullptr,
      .totals = totals(),
      .lanes = static_cast<std::uint32_t>(sizes_.lanes()),
      .words = previous_words()};
  }
  [[nodiscard]] lane_foresight* totals() const noexcept { return foresight_.template as<lane_foresight>(); }

  [[nodiscard]] lane_table_ref table() const noexcept
  {
    return {
      .listed = listed_.template as<slot_id>(),
      .listed_count = lane_layer_counts_.template as<std::uint32_t>() + lane_layers(),
      .landed = landed_.template as<slot_id>(),
      .landed_count = lane_count(1),
      .stride = sizes_.max_blocks,
      .max_selected = sizes_.max_selected};
  }

  /// An empty list of each lane: [lanes] ids that are none, and counts that are 0.
  [[nodiscard]] slot_id const* no_slots() const noexcept
  {
    return landed_.template as<slot_id>() + sizes_.lanes() * sizes_.max_selected;
  }
  [[nodiscard]] std::uint32_t const* no_counts() const noexcept { return lane_count(7); }

  [[nodiscard]] lane_plan_ref plan() const noexcept
  {
    return {
      .entries = entries_.template as<recall_entry>(),
      .misses = lane_count(2),
      .hits = lane_count(3),
      .flying = lane_count(4),
      .stalled = lane_count(5),
      .foresight = totals()};
  }

  /// Bytes of device memory.
  [[nodiscard]] std::uint64_t device_bytes() const noexcept
  {
    return info_.bytes() + step_.bytes() + host_blocks_.bytes() + slot_of_.bytes() + listed_.bytes() +
      slot_words_.bytes() + lease_.bytes() + lane_layer_counts_.bytes() + selected_.bytes() + previous_.bytes() +
      landed_.bytes() + entries_.bytes() + lane_counts_.bytes() + expected_.bytes() + wanted_.bytes() + owed_.bytes();
  }

 private:
  [[nodiscard]] static slab<B> words(B& backend, std::uint64_t count)
  {
    return slab<B>{backend, memory_space::device, count * sizeof(std::uint32_t)};
  }
  [[nodiscard]] std::uint64_t lane_layers() const noexcept { return sizes_.layers * sizes_.lanes(); }
  [[nodiscard]] std::uint32_t previous_words() const noexcept { return divide_up(sizes_.max_blocks, 32); }
  [[nodiscard]] std::uint32_t* lane_count(std::uint64_t place) const noexcept
  {
    return lane_counts_.template as<std::uint32_t>() + place * sizes_.lanes();
  }

  book_sizes sizes_;
  slab<B> info_;               // [2, rows] row_info: as they are, and as warm_up sees them
  slab<B> step_;               // [1]
  slab<B> host_blocks_;        // [rows, max_blocks]
  slab<B> slot_of_;            // [layers, lanes, max_blocks]
  slab<B> listed_;             // [layers, lanes, max_blocks]
  slab<B> slot_words_;         // [slot_words]
  slab<B> lease_;              // [layers, lanes, max_lease]
  slab<B> lane_layer_counts_;  // [2, layers, lanes] lease counts, table counts
  slab<B> selected_;           // [lanes, max_selected]
  slab<B> previous_;           // [layers, lanes, previous_words]
  slab<B> landed_;             // [lanes, max_selected], and [lanes] that stay none
  slab<B> entries_;            // [lanes, max_selected]
  slab<B> lane_counts_;        // [8, lanes] selected, landed, misses, hits, flying, stalled, expected, zeros
  slab<B> expected_;           // [lanes, max_selected]
  slab<B> wanted_;             // [layers, lanes, previous_words]; empty unless sizes.wants
  slab<B> owed_;               // likewise, unless sizes.owes
  slab<B> foresight_;          // [lanes] lane_foresight
  slab<B> spare_;              // [layers, lanes, ring]
  slab<B> kept_;               // [layers, lanes, max_selected]
};

}  // namespace pulseinfer
