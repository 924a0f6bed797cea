#pragma once

/// The pinned host memory that every sealed block has a copy in.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/store/block_book.hpp>
#include <pulseinfer/store/device_table.hpp>
#include <pulseinfer/store/growing_slab.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <pthread.h>
#include <string>
#include <vector>

namespace pulseinfer {

/// Size of a host store: `blocks`, or as many whole blocks of all layers and head groups as `bytes` hold.
struct host_store_options {
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;               ///< used where `blocks` is 0
  std::uint64_t limit_bytes = 0;         ///< most bytes to take; 0: no limit
  std::uint64_t slab_padding_bytes = 0;  ///< bytes between the slabs of neighbouring (layer, head group) pairs
  std::uint64_t most_blocks = 0;  ///< blocks that the store may grow to, counted into the limit; 0: it does not grow
  /// Of each slab, that are made and registered at once while the store grows: a multiple of 2 MiB, at most 64 MiB.
  std::uint64_t growth_chunk_bytes = std::uint64_t{64} << 20U;
};

/// How a store's growth goes.
struct host_growth {
  std::uint32_t blocks = 0;       ///< that can be used
  std::uint32_t most_blocks = 0;  ///< that it may grow to
  bool under_way = false;
  nanoseconds longest_chunk{0};  ///< that one chunk took, of all so far that adopt_growth has seen
};

/// Blocks that a host store of these options has.
/// @throws configuration_error where not one block fits, the bytes overflow or the padding breaks the blocks' alignment;
///         resource_error above the limit
[[nodiscard]] inline std::uint32_t host_store_blocks(
  host_store_options const& options, std::uint32_t layers, std::uint32_t head_groups, block_layout const& layout)
{
  std::uint64_t const block_bytes = layout.block_bytes;
  if (layout.alignment != 0 && options.slab_padding_bytes % layout.alignment != 0) {
    throw configuration_error{
      "unsupported_layout: slab padding of " + std::to_string(options.slab_padding_bytes) + " B, blocks need " +
      std::to_string(layout.alignment) + " B alignment"};
  }
  validate_extent(std::uint64_t{layers} * head_groups, block_bytes);
  std::uint64_t const slabs = std::uint64_t{layers} * head_groups;
  std::uint64_t const whole_bytes = slabs * block_bytes;
  if (whole_bytes == 0) {
    throw configuration_error{
      "a host store of " + std::to_string(layers) + " layers x " + std::to_string(head_groups) + " head groups x " +
      std::to_string(block_bytes) + " B has no blocks"};
  }
  std::uint64_t const begun_with = options.blocks != 0 ? options.blocks : options.bytes / whole_bytes;
  std::uint64_t const blocks = begun_with == 0 ? 0 : std::max(begun_with, options.most_blocks);
  if (blocks == 0) {
    throw configuration_error{
      std::to_string(options.bytes) + " B holds no block of " + std::to_string(whole_bytes) + " B (" +
      std::to_string(layers) + " layers x " + std::to_string(head_groups) + " head groups x " +
      std::to_string(block_bytes) + " B)"};
  }
  validate_extent(blocks, whole_bytes);
  std::uint64_t const padding = options.slab_padding_bytes;
  if (padding != 0 && padding > (std::numeric_limits<std::uint64_t>::max() - blocks * whole_bytes) / slabs) {
    throw configuration_error{
      "overflow: " + std::to_string(slabs) + " slabs with " + std::to_string(padding) +
      " B of padding do not fit 64 bits"};
  }
  std::uint64_t const needed = blocks * whole_bytes + padding * (slabs - 1);
  if (options.limit_bytes != 0 && needed > options.limit_bytes) {
    throw resource_error{
      "out_of_host_memory: " + std::to_string(needed) + " B for " + std::to_string(blocks) +
      " host blocks exceed the limit of " + std::to_string(options.limit_bytes) + " B"};
  }
  constexpr std::uint64_t grain = growth_grain_bytes;
  std::uint64_t const chunk = options.growth_chunk_bytes;
  if (options.most_blocks != 0 && (chunk == 0 || chunk % grain != 0 || chunk > 32 * grain)) {
    throw configuration_error{
      "growth_chunk_bytes " + std::to_string(chunk) + ": a multiple of " + std::to_string(grain) + ", at most " +
      std::to_string(32 * grain)};
  }
  return static_cast<std::uint32_t>(begun_with);
}

/// Owns the memory and the books. One id names the same place in the slab of every (layer, head group). All memory is
/// taken at construction; what is allocated exceeds the bytes asked for by less than a page of 4 KiB for up to 512 slabs
/// (8 B a slab for the table of their begins). One thread; the backend must outlive the store.
///
/// A store that may grow (most_blocks) takes the addresses of all blocks at once and memory for the first ones, each slab's in
/// whole pages of 2 MiB. More comes chunk by chunk on a thread of its own, beside all use of the store; blocks keep their places.
template <class B>
class host_store {
 public:
  static constexpr std::uint64_t smallest_chunk_bytes = growth_grain_bytes;

  /// @throws configuration_error, resource_error: see host_store_blocks; resource_error from the backend. A store that grows
  ///         also where the first blocks can't be pinned: there is no other memory to fall back to
  host_store(
    B& backend, std::uint32_t layers, std::uint32_t head_groups, block_layout const& layout,
    host_store_options const& options)
    : backend_{&backend},
      layers_{layers},
      head_groups_{head_groups},
      block_bytes_{layout.block_bytes},
      padding_{options.slab_padding_bytes},
      chunk_bytes_{options.growth_chunk_bytes},
      book_{host_store_blocks(options, layers, head_groups, layout), static_cast<std::uint32_t>(options.most_blocks)},
      most_blocks_{
        options.most_blocks == 0 ? book_.size()
                                 : std::max(book_.size(), static_cast<std::uint32_t>(options.most_blocks))},
      grows_{options.most_blocks != 0},
      memory_{backend, memory_space::pinned, grows_ ? 0 : slabs() * slab_stride() - padding_},
      growing_{backend, grows_ ? slabs() * slab_stride() : 0},
      table_{backend, slabs()},
      pinned_(grows_ ? slabs() : 0, 0)
  {
    std::byte* const begin = grows_ ? growing_.data() : memory_.data();
    for (std::uint64_t i = 0; i < slabs(); ++i) { table_.host()[i] = begin + i * slab_stride(); }
    table_.publish(backend);
    if (grows_) {
      goal_bytes_ = bytes_for(book_.size());
      pin(goal_bytes_, 16);
      if (!refusal_.empty()) { throw resource_error{refusal_}; }
      grown_bytes_ = goal_bytes_;
      refusal_.clear();
    }
  }

  host_store(host_store&&) = delete;
  /// A growth under way ends with its chunk.
  ~host_store()
  {
    stop_.store(true);
    if (growing_now_) { static_cast<void>(pthread_join(grower_, nullptr)); }
  }

  /// Begins to make `blocks` more, on a thread of its own. They can be used once adopt_growth has taken them over.
  /// @status invalid_state for a store that does not grow; capacity_exceeded past most_blocks; busy while a growth is under way;
  ///         resource_exhausted where the system has no thread
  status grow(std::uint32_t blocks) noexcept
  {
    if (!grows_) { return status::invalid_state; }
    if (growing_now_) { return status::busy; }
    if (blocks > most_blocks_ - book_.size()) { return status::capacity_exceeded; }
    goal_blocks_ = book_.size() + blocks;
    goal_bytes_ = bytes_for(goal_blocks_);
    refusal_.clear();
    finished_.store(false);
    if (pthread_create(&grower_, nullptr, &host_store::run_growth, this) != 0) { return status::resource_exhausted; }
    growing_now_ = true;
    return status::ok;
  }

  /// Takes over what a growth has made since. Neither waits nor allocates.   @return whether there are more blocks
  bool adopt_growth() noexcept
  {
    if (!growing_now_) { return false; }
    bool const over = finished_.load(std::memory_order_acquire);
    std::uint64_t const made = grown_bytes_.load(std::memory_order_acquire) / block_bytes_;
    std::uint32_t const before = book_.size();
    book_.extend(static_cast<std::uint32_t>(std::min<std::uint64_t>(made, goal_blocks_)));
    if (over) {
      static_cast<void>(pthread_join(grower_, nullptr));  // it has nothing left to do
      growing_now_ = false;
      longest_chunk_ = std::max(longest_chunk_, longest_);
    }
    return book_.size() != before;
  }

  [[nodiscard]] host_growth growth() const noexcept
  {
    return {
      .blocks = book_.size(), .most_blocks = most_blocks_, .under_way = growing_now_, .longest_chunk = longest_chunk_};
  }
  /// Why the last growth ended before its goal; empty where it did not. Not to be asked while one is under way.
  [[nodiscard]] std::string const& growth_refusal() const noexcept { return refusal_; }

  /// Takes an unreserved block with one reference; `hint` is best the id after the sequence's previous block, `run` the
  /// blocks that the sequence may still want. @return none where there is none
  [[nodiscard]] host_block_id acquire(host_block_id hint = none<host_block_id>, std::uint32_t run = 1) noexcept
  {
    return book_.acquire(hint, run);
  }

  /// As acquire, from what reserve() kept back.
  [[nodiscard]] host_block_id acquire_reserved(host_block_id hint = none<host_block_id>, std::uint32_t run = 1) noexcept
  {
    return book_.acquire_reserved(hint, run);
  }

  /// Keeps free blocks back, so that a request's full length is certain.
  /// @return busy where they are not available now, capacity_exceeded where they never will be
  status reserve(std::uint32_t blocks) noexcept { return book_.reserve(blocks); }
  status unreserve(std::uint32_t blocks) noexcept { return book_.unreserve(blocks); }

  status share(host_block_id block) noexcept { return book_.share(block); }
  /// @return invalid_state for a double release, which changes nothing and is told by refused_release()
  status release(host_block_id block) noexcept { return book_.release(block); }
  /// A copy names the block: it isn't given to anybody else before the copy's unpin, whoever releases it meanwhile.
  status pin(host_block_id block) noexcept { return book_.pin(block); }
  status unpin(host_block_id block) noexcept { return book_.unpin(block); }

  [[nodiscard]] std::uint32_t blocks() const noexcept { return book_.size(); }
  /// Ids that blocks may ever have.
  [[nodiscard]] std::uint32_t most_blocks() const noexcept { return most_blocks_; }
  [[nodiscard]] std::uint32_t available() const noexcept { return book_.available(); }
  [[nodiscard]] std::uint32_t reserved() const noexcept { return book_.reserved(); }
  [[nodiscard]] std::uint32_t references(host_block_id block) const noexcept { return book_.references(block); }
  [[nodiscard]] std::uint32_t pins(host_block_id block) const noexcept { return book_.pins(block); }
  [[nodiscard]] block_counts counts() const noexcept { return book_.counts(); }
  /// Of a store that grows, what has been taken over.
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept
  {
    return (grows_ ? slabs() * bytes_for(book_.size()) : memory_.bytes()) + table_.host_bytes();
  }
  [[nodiscard]] std::string refused_release() const { return book_.refused_release(); }

  [[nodiscard]] host_store_ref ref() const noexcept
  {
    return {
      .slab_base = table_.host(),
      .device_slab_base = table_.device(),
      .block_stride = block_bytes_,
      .head_groups = head_groups_,
      .blocks = most_blocks_};
  }

  /// @return what is wrong with the books, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    std::string const text = book_.audit();
    return text.empty() ? text : "host store: " + text;
  }

 private:
  static constexpr std::uint64_t grain = smallest_chunk_bytes;

  [[nodiscard]] std::uint64_t slabs() const noexcept { return std::uint64_t{layers_} * head_groups_; }
  [[nodiscard]] std::uint64_t slab_stride() const noexcept
  {
    std::uint64_t const bytes = most_blocks_ * block_bytes_ + padding_;
    return grows_ ? divide_up(bytes, grain) * grain : bytes;
  }
  /// Bytes of a slab that so many blocks need.
  [[nodiscard]] std::uint64_t bytes_for(std::uint64_t blocks) const noexcept
  {
    return divide_up(blocks * block_bytes_, grain) * grain;
  }

  /// Pins the slabs up to the goal, a chunk of each in turn, until something is refused or the store ends. What a refused try
  /// had pinned is not pinned again.
  void pin(std::uint64_t chunk_bytes, std::size_t threads) noexcept
  {
    longest_ = nanoseconds{0};
    for (std::uint64_t at = grown_bytes_.load(); at < goal_bytes_;) {
      std::uint64_t const end = at + std::min(chunk_bytes, goal_bytes_ - at);
      for (std::uint64_t i = 0; i < slabs(); ++i) {
        if (stop_.load()) { return; }
        std::uint64_t const from = std::max(at, pinned_[i]);
        if (from >= end) { continue; }
        nanoseconds const begin = backend_->now();
        refusal_ = growing_.add(i * slab_stride() + from, end - from, threads);
        longest_ = std::max(longest_, backend_->now() - begin);
        if (!refusal_.empty()) { return; }
        pinned_[i] = end;
      }
      at = end;
      grown_bytes_.store(at, std::memory_order_release);
    }
  }

  static void* run_growth(void* store) noexcept
  {
    auto* const own = static_cast<host_store*>(store);
    own->pin(own->chunk_bytes_, 1);
    own->finished_.store(true, std::memory_order_release);
    return nullptr;
  }

  B* backend_;
  std::uint32_t layers_;
  std::uint32_t head_groups_;
  std::uint64_t block_bytes_;
  std::uint64_t padding_;
  std::uint64_t chunk_bytes_;
  block_book<host_block_id> book_;
  std::uint32_t most_blocks_;
  bool grows_;
  slab<B> memory_;                     // [layers, head_groups] slabs of blocks, slab_stride() apart
  growing_slab<B> growing_;            // the same of a store that grows
  device_table<std::byte*, B> table_;  // [layers, head_groups] begin of each slab

  // The thread that makes blocks writes these while it is under way, and nobody else.
  std::vector<std::uint64_t> pinned_;  // [layers, head_groups] bytes of each slab
  std::string refusal_;
  nanoseconds longest_{0};
  // It tells by these.
  std::atomic<std::uint64_t> grown_bytes_{0};  // that every slab has
  std::atomic<bool> finished_{false};
  std::atomic<bool> stop_{false};
  // The driving thread's.
  std::uint64_t goal_bytes_ = 0;
  std::uint32_t goal_blocks_ = 0;
  bool growing_now_ = false;
  pthread_t grower_{};
  nanoseconds longest_chunk_{0};
};

}  // namespace pulseinfer
