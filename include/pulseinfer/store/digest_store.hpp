#pragma once

/// The device memory of digests, given to rows in extents.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/store/device_table.hpp>
#include <pulseinfer/store/free_list.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace pulseinfer {

enum class extent_id : std::int32_t {};  ///< A piece of the digest store that holds `extent_blocks` blocks of one row.

/// A word of the device's extent table that must take `value`, in stream order, before work that reads it.
struct extent_patch {
  std::uint32_t index = 0;  ///< into digest_store_ref::extent_of
  std::int32_t value = -1;
};

static_assert(std::is_trivially_copyable_v<extent_patch>);

struct digest_store_options {
  std::uint32_t max_rows = 0;
  std::uint32_t max_blocks = 0;  ///< most blocks of a row
  std::uint32_t extents = 0;     ///< 0: as many as max_rows rows of max_blocks blocks take
  std::uint32_t extent_blocks = 64;
};

/// Owns the memory, the device's table and a host copy of it. One thread; the backend must outlive the store. A selector
/// without digests (0 bytes in every layer) takes neither memory nor extents.
template <class B>
class digest_store {
 public:
  /// @param block_bytes [layers] bytes of one block's digest, from the selector
  /// @throws configuration_error, resource_error from the backend
  digest_store(B& backend, std::span<std::uint64_t const> block_bytes, digest_store_options const& options)
    : layers_{static_cast<std::uint32_t>(block_bytes.size())},
      max_rows_{options.max_rows},
      extent_blocks_{options.extent_blocks},
      extent_bytes_{bytes_of_extent(block_bytes, options)},
      max_extents_{extent_bytes_ == 0 ? 0 : divide_up(options.max_blocks, options.extent_blocks)},
      free_{count_of_extents(options)},
      extents_(std::size_t{max_rows_} * max_extents_, none<extent_id>),
      counts_(max_rows_, 0),
      memory_{backend, memory_space::device, free_.size() * extent_bytes_},
      table_{backend, memory_space::device, std::uint64_t{max_rows_} * max_extents_ * sizeof(std::int32_t)},
      sizes_{backend, 2 * std::uint64_t{layers_}}
  {
    std::uint64_t offset = 0;
    for (std::uint32_t layer = 0; layer < layers_; ++layer) {
      sizes_.host()[layer] = offset;
      sizes_.host()[layers_ + layer] = block_bytes[layer];
      offset += section_bytes(block_bytes[layer], extent_blocks_);
    }
    sizes_.publish(backend);
    slab<B> const absent{backend, memory_space::pinned, table_.bytes()};
    std::fill_n(absent.template as<std::int32_t>(), extents_.size(), -1);
    set_up_copy(backend, table_.data(), absent.data(), table_.bytes());
  }

  digest_store(digest_store&&) = delete;

  /// Extents that a row of `blocks` blocks takes.
  [[nodiscard]] std::uint32_t extents_for(std::uint64_t blocks) const noexcept
  {
    return extent_bytes_ == 0 ? 0 : static_cast<std::uint32_t>(divide_up(blocks, std::uint64_t{extent_blocks_}));
  }

  /// Patches that the next cover(row, blocks) needs room for.
  [[nodiscard]] std::uint32_t missing_extents(row_id row, std::uint64_t blocks) const noexcept
  {
    std::uint32_t const wanted = extents_for(blocks);
    return contains(row) && wanted > counts_[to_index(row)] ? wanted - counts_[to_index(row)] : 0;
  }

  /// Gives the row extents until `blocks` blocks have a place; never takes any away.
  /// @param patches [missing_extents(row, blocks) or more], written from the begin
  /// @param written patches written
  /// @return out_of_range for a row or length beyond the configured ones, busy where extents are lacking, invalid_argument
  ///         for too few places in `patches`; nothing changed in any of these cases
  status cover(row_id row, std::uint64_t blocks, std::span<extent_patch> patches, std::uint32_t& written) noexcept
  {
    written = 0;
    if (!contains(row)) { return status::out_of_range; }
    if (extent_bytes_ == 0) { return status::ok; }
    if (divide_up(blocks, std::uint64_t{extent_blocks_}) > max_extents_) { return status::out_of_range; }
    std::uint32_t const missing = missing_extents(row, blocks);
    if (missing > free_.free_count()) { return status::busy; }
    if (missing > patches.size()) { return status::invalid_argument; }
    for (; written < missing; ++written) { patches[written] = add(row, missing - written); }
    return status::ok;
  }

  /// Takes all extents of the row away. The caller has seen to it that work on them is done, or comes before later work on
  /// the same stream. @param patches [extents(row).size() or more], written as in cover
  status release(row_id row, std::span<extent_patch> patches, std::uint32_t& written) noexcept
  {
    written = 0;
    if (!contains(row)) { return status::out_of_range; }
    std::uint32_t const count = counts_[to_index(row)];
    if (count > patches.size()) { return status::invalid_argument; }
    for (; written < count; ++written) {
      std::uint32_t const index = first(row) + written;
      static_cast<void>(free_.release(extents_[index]));
      extents_[index] = none<extent_id>;
      patches[written] = {.index = index, .value = -1};
    }
    counts_[to_index(row)] = 0;
    return status::ok;
  }

  /// Extents of the row, by ascending blocks.
  [[nodiscard]] std::span<extent_id const> extents(row_id row) const noexcept
  {
    if (!contains(row)) { return {}; }
    return {extents_.data() + first(row), counts_[to_index(row)]};
  }

  [[nodiscard]] std::uint32_t free_extents() const noexcept { return free_.free_count(); }
  [[nodiscard]] std::uint32_t total_extents() const noexcept { return free_.size(); }
  [[nodiscard]] std::uint64_t extent_bytes() const noexcept { return extent_bytes_; }
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept { return memory_.bytes() + table_.bytes(); }

  [[nodiscard]] digest_store_ref ref() const noexcept
  {
    return {
      .base = memory_.data(),
      .extent_of = table_.template as<std::int32_t>(),
      .layer_offset = sizes_.device(),
      .block_bytes = sizes_.device() + layers_,
      .extent_bytes = extent_bytes_,
      .extent_blocks = extent_blocks_,
      .max_extents = max_extents_};
  }

  /// @return what is wrong with the books, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    if (std::string const text = free_.audit(); !text.empty()) { return "digest store: " + text; }
    std::vector<bool> owned(free_.size(), false);
    std::uint32_t used = 0;
    for (std::uint32_t row = 0; row < max_rows_; ++row) {
      for (extent_id const extent : extents(static_cast<row_id>(row))) {
        if (!free_.contains(extent) || free_.is_free(extent) || owned[to_index(extent)]) {
          return "digest store: row " + std::to_string(row) + " has extent " + std::to_string(to_number(extent)) +
            ", which is free or another's";
        }
        owned[to_index(extent)] = true;
        ++used;
      }
    }
    if (used + free_.free_count() != free_.size()) {
      return "digest store: " + std::to_string(used) + " extents used and " + std::to_string(free_.free_count()) +
        " free of " + std::to_string(free_.size());
    }
    return {};
  }

 private:
  static constexpr std::uint64_t section_alignment = 128;  // a layer's digests begin on a cache line of the device

  [[nodiscard]] static std::uint64_t section_bytes(std::uint64_t block_bytes, std::uint32_t extent_blocks)
  {
    return round_up(block_bytes * extent_blocks, section_alignment);
  }

  [[nodiscard]] static std::uint64_t bytes_of_extent(
    std::span<std::uint64_t const> block_bytes, digest_store_options const& options)
  {
    if (options.extent_blocks == 0) { throw configuration_error{"digest extents of 0 blocks"}; }
    std::uint64_t sum = 0;
    for (std::uint64_t const bytes : block_bytes) {
      validate_extent(options.extent_blocks, bytes);
      sum += section_bytes(bytes, options.extent_blocks);
    }
    return sum;
  }

  [[nodiscard]] std::uint32_t count_of_extents(digest_store_options const& options) const
  {
    if (extent_bytes_ == 0) { return 0; }
    std::uint64_t const all = std::uint64_t{max_rows_} * max_extents_;
    std::uint64_t const count = options.extents == 0 ? all : options.extents;
    validate_extent(count, extent_bytes_);
    validate_extent(all, sizeof(std::int32_t));
    if (count == 0) {
      throw configuration_error{
        "a digest store for " + std::to_string(max_rows_) + " rows of " + std::to_string(options.max_blocks) +
        " blocks has no extents"};
    }
    return static_cast<std::uint32_t>(count);
  }

  [[nodiscard]] bool contains(row_id row) const noexcept { return !is_none(row) && to_index(row) < max_rows_; }
  [[nodiscard]] std::uint32_t first(row_id row) const noexcept
  {
    return static_cast<std::uint32_t>(to_index(row)) * max_extents_;
  }

  [[nodiscard]] extent_patch add(row_id row, std::uint32_t wanted) noexcept
  {
    std::uint32_t& count = counts_[to_index(row)];
    std::uint32_t const index = first(row) + count;
    extent_id const hint = count == 0 ? none<extent_id> : static_cast<extent_id>(to_number(extents_[index - 1]) + 1);
    extents_[index] = free_.acquire(hint, wanted);
    ++count;
    return {.index = index, .value = to_number(extents_[index])};
  }

  std::uint32_t layers_;
  std::uint32_t max_rows_;
  std::uint32_t extent_blocks_;
  std::uint64_t extent_bytes_;
  std::uint32_t max_extents_;  // of a row
  free_list<extent_id> free_;
  std::vector<extent_id> extents_;        // [max_rows, max_extents]
  std::vector<std::uint32_t> counts_;     // [max_rows] extents of each row
  slab<B> memory_;                        // [extents, extent_bytes]
  slab<B> table_;                         // [max_rows, max_extents] int32 words, changed by patches only
  device_table<std::uint64_t, B> sizes_;  // [2, layers] offset of a layer in an extent, bytes of a block's digest
};

}  // namespace pulseinfer
