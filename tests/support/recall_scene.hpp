#pragma once

/// A host store, lent slots per layer, books and a plan, with a pattern of its own in every block and poison everywhere else:
/// what a recall must do to it can be told byte by byte.

#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/residency.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace pulseinfer_test {

/// [K|V][head][token][pitch], or [token][head], without any rounding; `extra_bytes` of an opaque plane behind.
inline pulseinfer::block_layout layout_of_pitch(
  std::uint32_t pitch, std::uint32_t tokens, std::uint32_t heads = 2, bool token_major = false,
  std::uint32_t extra_bytes = 0)
{
  pulseinfer::block_layout layout;
  layout.block_tokens = tokens;
  layout.heads = heads;
  layout.alignment = 1;
  std::uint64_t end = 0;
  for (pulseinfer::plane_kind const kind : {pulseinfer::plane_kind::key, pulseinfer::plane_kind::value}) {
    layout.planes[layout.plane_count++] = {
      .offset = end,
      .head_stride = std::uint64_t{pitch} * (token_major ? 1 : tokens),
      .token_stride = std::uint64_t{pitch} * (token_major ? heads : 1),
      .bytes = std::uint64_t{pitch} * tokens * heads,
      .row_bytes = pitch,
      .dim = pitch,
      .kind = kind};
    end += std::uint64_t{pitch} * tokens * heads;
  }
  if (extra_bytes > 0) {
    layout.planes[layout.plane_count++] = {.offset = end, .bytes = extra_bytes};
    end += extra_bytes;
  }
  layout.block_bytes = end;
  return layout;
}

struct scene_sizes {
  pulseinfer::block_layout layout = layout_of_pitch(32, 4);
  std::uint32_t layers = 3;
  std::uint32_t head_groups = 2;
  std::uint32_t host_blocks = 6;
  std::uint32_t slots = 8;         ///< of each layer
  std::uint32_t offset = 0;        ///< bytes that host and device memory begin past a multiple of 256
  std::uint32_t slot_padding = 0;  ///< bytes between slots
  std::uint32_t layer_padding = 256;
  std::uint32_t max_rows = 8;
  std::uint32_t max_blocks = 16;
};

/// Bytes begun `offset` past a multiple of 256, with a guard of 16 bytes at both ends.
class guarded_bytes {
 public:
  static constexpr std::size_t guard = 16;

  guarded_bytes(std::size_t bytes, std::uint32_t offset, std::byte fill)
    : memory_(bytes + 2 * guard + 512, fill), bytes_{bytes}
  {
    std::uintptr_t const begin = reinterpret_cast<std::uintptr_t>(memory_.data()) + guard;
    place_ = guard + (256 - begin % 256) % 256 + offset % 256;
  }

  [[nodiscard]] std::byte* data() { return memory_.data() + place_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] std::vector<std::byte>& all() { return memory_; }

 private:
  std::vector<std::byte> memory_;
  std::size_t bytes_;
  std::size_t place_ = 0;
};

class recall_scene {
 public:
  static constexpr std::byte poison{0xEE};

  explicit recall_scene(scene_sizes const& sizes)
    : sizes_{sizes},
      block_bytes_{sizes.layout.block_bytes},
      slot_stride_{block_bytes_ + sizes.slot_padding},
      host_{sizes.layers * sizes.head_groups * slab_stride(), sizes.offset, poison},
      device_{sizes.layers * layer_stride(), sizes.offset, poison},
      slot_of_(std::size_t{sizes.layers} * lanes() * sizes.max_blocks, pulseinfer::none<pulseinfer::slot_id>),
      words_(std::size_t{sizes.layers} * sizes.slots),
      mailbox_(sizes.max_rows)
  {
    for (std::uint32_t l = 0; l < sizes.layers; ++l) {
      layer_base_.push_back(device_.data() + l * layer_stride());
      for (std::uint32_t g = 0; g < sizes.head_groups; ++g) {
        slab_base_.push_back(host_.data() + (std::size_t{l} * sizes.head_groups + g) * slab_stride());
        for (std::uint32_t b = 0; b < sizes.host_blocks; ++b) {
          auto const pattern = pattern_of(l, g, b);
          std::memcpy(host_ref().address(layer(l), g, host_block(b)), pattern.data(), block_bytes_);
        }
      }
    }
    host_before_ = host_.all();
    expected_ = device_.all();
  }

  recall_scene(recall_scene&&) = delete;

  static pulseinfer::layer_id layer(std::uint32_t number) { return static_cast<pulseinfer::layer_id>(number); }
  static pulseinfer::host_block_id host_block(std::uint32_t number)
  {
    return static_cast<pulseinfer::host_block_id>(number);
  }

  [[nodiscard]] std::vector<std::byte> pattern_of(std::uint32_t l, std::uint32_t g, std::uint32_t b) const
  {
    std::vector<std::byte> pattern(block_bytes_);
    std::uint32_t const tag = (l * 7 + g * 3 + b * 29 + 1) * 40503U;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      pattern[i] = static_cast<std::byte>((tag >> 8U) + i * 13 + (i >> 8U) * 5);
    }
    return pattern;
  }

  // The plan, row by row ----------------------------------------------------------------------------------------------

  /// Begins the next plan, of a layer.
  void begin_plan(std::uint32_t l)
  {
    layer_ = l;
    entries_.clear();
    row_begin_ = {0};
    rows_.clear();
    numbers_.clear();
  }

  /// Begins a row; the recall's number is 10 + row.
  void add_row(std::int32_t row)
  {
    rows_.push_back(static_cast<pulseinfer::row_id>(row));
    numbers_.push_back(10U + static_cast<std::uint32_t>(row));
    row_begin_.push_back(row_begin_.back());
  }

  void add_entry(std::uint32_t group, std::uint32_t block, std::uint32_t source, std::uint32_t target)
  {
    pulseinfer::lane_id const lane = pulseinfer::lane_of(rows_.back(), group, sizes_.head_groups);
    auto const slot = static_cast<pulseinfer::slot_id>(target);
    auto const id = static_cast<pulseinfer::block_id>(block);
    entries_.push_back({.source = host_block(source), .target = slot, .lane = lane, .block = id});
    ++row_begin_.back();
    word(layer_, target) = {.block = id, .state = pulseinfer::slot_state::in_flight, .last_used = 3};
    residency().slots_of_lane(layer(layer_), lane)[block] = slot;
  }

  /// The plan; the scene's arrays must not change before its recall has run.
  [[nodiscard]] pulseinfer::recall_plan_ref plan()
  {
    return {
      .entries = entries_.data(),
      .row_begin = row_begin_.data(),
      .failed = failed_flags(),
      .rows = {.ids = rows_.data(), .count = static_cast<std::uint32_t>(rows_.size())},
      .host = host_ref(),
      .pool = pool_ref(),
      .layer = layer(layer_),
      .head_groups = sizes_.head_groups,
      .block_bytes = block_bytes_,
      .capacity = static_cast<std::uint32_t>(entries_.size()) + 3};
  }

  [[nodiscard]] pulseinfer::landed_ref landed()
  {
    return {.mailbox = mailbox_.data(), .sequence = numbers_.data(), .residency = residency()};
  }

  // What has happened -------------------------------------------------------------------------------------------------

  /// The plan's entries of `place` are to have arrived.
  void expect_arrived(std::uint32_t place)
  {
    for (std::uint32_t i = row_begin_[place]; i < row_begin_[place + 1]; ++i) {
      pulseinfer::recall_entry const& entry = entries_[i];
      auto const group = static_cast<std::uint32_t>(pulseinfer::to_index(entry.lane) % sizes_.head_groups);
      auto const pattern = pattern_of(layer_, group, static_cast<std::uint32_t>(pulseinfer::to_index(entry.source)));
      std::byte const* const target = pool_ref().address(layer(layer_), entry.target);
      std::memcpy(expected_.data() + (target - device_.all().data()), pattern.data(), block_bytes_);
    }
  }

  void expect_all_arrived()
  {
    for (std::uint32_t place = 0; place < rows_.size(); ++place) { expect_arrived(place); }
  }

  /// @return what differs from what is expected of host and device memory, guards and paddings included; empty where nothing
  [[nodiscard]] std::string difference()
  {
    if (host_.all() != host_before_) { return "host memory changed"; }
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (device_.all()[i] != expected_[i]) {
        std::ptrdiff_t const at = static_cast<std::ptrdiff_t>(i) - (device_.data() - device_.all().data());
        return "device byte " + std::to_string(at) + " of " + std::to_string(device_.size());
      }
    }
    return {};
  }

  /// @return true where the row is posted as landed, its slots are clean and hold its blocks
  [[nodiscard]] bool has_landed(std::uint32_t place)
  {
    pulseinfer::row_mailbox const& box = mailbox_[pulseinfer::to_index(rows_[place])];
    bool right = box.landed == numbers_[place] && box.failed != numbers_[place];
    for (std::uint32_t i = row_begin_[place]; i < row_begin_[place + 1]; ++i) {
      right = right && word_of(entries_[i]).state == pulseinfer::slot_state::clean &&
        word_of(entries_[i]).block == entries_[i].block && slot_of(entries_[i]) == entries_[i].target;
    }
    return right;
  }

  /// @return true where the row is posted as failed, its slots are empty and its blocks misses
  [[nodiscard]] bool has_failed(std::uint32_t place)
  {
    pulseinfer::row_mailbox const& box = mailbox_[pulseinfer::to_index(rows_[place])];
    bool right = box.failed == numbers_[place] && box.landed != numbers_[place];
    for (std::uint32_t i = row_begin_[place]; i < row_begin_[place + 1]; ++i) {
      right = right && word_of(entries_[i]).state == pulseinfer::slot_state::empty &&
        pulseinfer::is_none(word_of(entries_[i]).block) && pulseinfer::is_none(slot_of(entries_[i]));
    }
    return right;
  }

  /// @return true where the row is posted as failed for the `entry`-th of its entries, and the others have arrived
  [[nodiscard]] bool has_failed_in(std::uint32_t place, std::uint32_t entry)
  {
    pulseinfer::row_mailbox const& box = mailbox_[pulseinfer::to_index(rows_[place])];
    bool right = box.failed == numbers_[place] && box.landed != numbers_[place] && box.failed_blocks == 1;
    for (std::uint32_t i = row_begin_[place]; i < row_begin_[place + 1]; ++i) {
      bool const lost = i == row_begin_[place] + entry;
      right = right &&
        word_of(entries_[i]).state == (lost ? pulseinfer::slot_state::empty : pulseinfer::slot_state::clean) &&
        pulseinfer::is_none(slot_of(entries_[i])) == lost;
    }
    return right;
  }

  /// @return true where nothing has been said of the row: its slots are still in flight
  [[nodiscard]] bool is_in_flight(std::uint32_t place)
  {
    pulseinfer::row_mailbox const& box = mailbox_[pulseinfer::to_index(rows_[place])];
    bool right = box.failed != numbers_[place] && box.landed != numbers_[place];
    for (std::uint32_t i = row_begin_[place]; i < row_begin_[place + 1]; ++i) {
      right = right && word_of(entries_[i]).state == pulseinfer::slot_state::in_flight;
    }
    return right;
  }

  /// Poison in all of the device's memory, and nothing expected to have arrived.
  void clear_device()
  {
    std::fill(device_.all().begin(), device_.all().end(), poison);
    expected_ = device_.all();
  }

  [[nodiscard]] pulseinfer::host_store_ref host_ref()
  {
    return {
      .slab_base = slab_base_.data(),
      .block_stride = block_bytes_,
      .head_groups = sizes_.head_groups,
      .blocks = sizes_.host_blocks};
  }
  [[nodiscard]] pulseinfer::slot_pool_ref pool_ref()
  {
    return {.layer_base = layer_base_.data(), .slot_stride = slot_stride_, .slots = sizes_.slots, .per_layer = true};
  }
  [[nodiscard]] pulseinfer::residency_ref residency()
  {
    return {
      .slot_of = slot_of_.data(),
      .slots = words_.data(),
      .layers = sizes_.layers,
      .lanes = lanes(),
      .max_blocks = sizes_.max_blocks};
  }
  [[nodiscard]] scene_sizes const& sizes() const { return sizes_; }
  [[nodiscard]] std::vector<std::byte>& host_memory() { return host_.all(); }
  [[nodiscard]] std::uint32_t rows() const { return static_cast<std::uint32_t>(rows_.size()); }

 private:
  [[nodiscard]] std::uint32_t lanes() const { return sizes_.max_rows * sizes_.head_groups; }
  [[nodiscard]] std::size_t slab_stride() const { return sizes_.host_blocks * block_bytes_ + 48; }
  [[nodiscard]] std::size_t layer_stride() const { return sizes_.slots * slot_stride_ + sizes_.layer_padding; }
  [[nodiscard]] pulseinfer::slot_word& word(std::uint32_t l, std::uint32_t slot)
  {
    return words_[std::size_t{l} * sizes_.slots + slot];
  }
  [[nodiscard]] pulseinfer::slot_word& word_of(pulseinfer::recall_entry const& entry)
  {
    return word(layer_, static_cast<std::uint32_t>(pulseinfer::to_index(entry.target)));
  }
  [[nodiscard]] pulseinfer::slot_id slot_of(pulseinfer::recall_entry const& entry)
  {
    return residency().slots_of_lane(layer(layer_), entry.lane)[pulseinfer::to_index(entry.block)];
  }

  scene_sizes sizes_;
  std::uint64_t block_bytes_;
  std::uint64_t slot_stride_;
  guarded_bytes host_;
  guarded_bytes device_;
  std::vector<std::byte*> slab_base_;
  std::vector<std::byte*> layer_base_;
  std::vector<pulseinfer::slot_id> slot_of_;
  std::vector<pulseinfer::slot_word> words_;
  std::vector<pulseinfer::row_mailbox> mailbox_;
  std::vector<std::byte> host_before_;
  std::vector<std::byte> expected_;
  std::uint32_t layer_ = 0;
  /// Flags of the plan's entries, all clear.
  [[nodiscard]] std::uint32_t* failed_flags()
  {
    failed_.assign(entries_.size() + 3, 0);
    return failed_.data();
  }

  std::vector<std::uint32_t> failed_;
  std::vector<pulseinfer::recall_entry> entries_;
  std::vector<std::uint32_t> row_begin_ = {0};
  std::vector<pulseinfer::row_id> rows_;
  std::vector<std::uint32_t> numbers_;
};

/// Three rows of one layer: two with misses of both head groups, neighbours and strangers among them, one with none.
inline void plan_three_rows(recall_scene& scene, std::uint32_t layer)
{
  scene.begin_plan(layer);
  scene.add_row(4);
  scene.add_entry(0, 0, 1, 2);
  scene.add_entry(0, 2, 2, 3);  // neighbour of the one before, at both ends
  scene.add_entry(1, 1, 0, 7);
  scene.add_row(0);
  scene.add_row(5);
  scene.add_entry(0, 3, 5, 0);
  scene.add_entry(1, 5, 3, 1);
  scene.add_entry(1, 6, 4, 6);  // neighbour in the host store alone
}

}  // namespace pulseinfer_test
