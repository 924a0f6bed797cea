#pragma once

/// The pinned host memory that every sealed block has a copy in.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/store/block_book.hpp>
#include <pulseinfer/store/device_table.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace pulseinfer {

/// Size of a host store: `blocks`, or as many whole blocks of all layers and head groups as `bytes` hold.
struct host_store_options {
  std::uint64_t blocks = 0;
  std::uint64_t bytes = 0;               ///< used where `blocks` is 0
  std::uint64_t limit_bytes = 0;         ///< most bytes to take; 0: no limit
  std::uint64_t slab_padding_bytes = 0;  ///< bytes between the slabs of neighbouring (layer, head group) pairs
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
  std::uint64_t const blocks = options.blocks != 0 ? options.blocks : options.bytes / whole_bytes;
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
  return static_cast<std::uint32_t>(blocks);
}

/// Owns the memory and the books. One id names the same place in the slab of every (layer, head group). All memory is
/// taken at construction; what is allocated exceeds the bytes asked for by less than a page of 4 KiB for up to 512 slabs
/// (8 B a slab for the table of their begins). One thread; the backend must outlive the store.
template <class B>
class host_store {
 public:
  /// @throws configuration_error, resource_error: see host_store_blocks; resource_error from the backend
  host_store(
    B& backend, std::uint32_t layers, std::uint32_t head_groups, block_layout const& layout,
    host_store_options const& options)
    : layers_{layers},
      head_groups_{head_groups},
      block_bytes_{layout.block_bytes},
      padding_{options.slab_padding_bytes},
      book_{host_store_blocks(options, layers, head_groups, layout)},
      memory_{backend, memory_space::pinned, std::uint64_t{layers} * head_groups * slab_stride() - padding_},
      table_{backend, std::uint64_t{layers} * head_groups}
  {
    for (std::uint64_t i = 0; i < std::uint64_t{layers} * head_groups; ++i) {
      table_.host()[i] = memory_.data() + i * slab_stride();
    }
    table_.publish(backend);
  }

  host_store(host_store&&) = delete;

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
  [[nodiscard]] std::uint32_t available() const noexcept { return book_.available(); }
  [[nodiscard]] std::uint32_t reserved() const noexcept { return book_.reserved(); }
  [[nodiscard]] std::uint32_t references(host_block_id block) const noexcept { return book_.references(block); }
  [[nodiscard]] std::uint32_t pins(host_block_id block) const noexcept { return book_.pins(block); }
  [[nodiscard]] block_counts counts() const noexcept { return book_.counts(); }
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept { return memory_.bytes() + table_.host_bytes(); }
  [[nodiscard]] std::string refused_release() const { return book_.refused_release(); }

  [[nodiscard]] host_store_ref ref() const noexcept
  {
    return {
      .slab_base = table_.host(),
      .device_slab_base = table_.device(),
      .block_stride = block_bytes_,
      .head_groups = head_groups_,
      .blocks = book_.size()};
  }

  /// @return what is wrong with the books, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    std::string const text = book_.audit();
    return text.empty() ? text : "host store: " + text;
  }

 private:
  [[nodiscard]] std::uint64_t slab_stride() const noexcept { return book_.size() * block_bytes_ + padding_; }

  std::uint32_t layers_;
  std::uint32_t head_groups_;
  std::uint64_t block_bytes_;
  std::uint64_t padding_;
  block_book<host_block_id> book_;
  slab<B> memory_;                     // [layers, head_groups] slabs of blocks, slab_stride() apart
  device_table<std::byte*, B> table_;  // [layers, head_groups] begin of each slab
};

}  // namespace pulseinfer
