/// The KV cache that holds everything in one place: the reference for what a sparse, offloaded one computes.
#pragma once

#include "block_attention.hpp"
#include "llama_engine.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace host_engine {

/// Cut into blocks, so that attention over all of them, or over some, runs as it does over anybody's blocks.
class dense_kv_cache {
 public:
  /// @throws std::bad_alloc; std::invalid_argument if block_tokens is 0
  dense_kv_cache(
    llama_geometry const& geometry, std::uint32_t rows, std::uint32_t capacity_tokens, std::uint32_t block_tokens = 16);

  /// Takes over the keys and values that the engine has projected for these rows' tokens of this step.
  /// @throws std::out_of_range if a row is full, with the numbers
  void append(std::uint32_t layer, std::span<std::uint32_t const> rows, llama_engine const& engine);

  dense_kv_cache(dense_kv_cache const&) = delete;  // lists name the memory by address
  dense_kv_cache& operator=(dense_kv_cache const&) = delete;

  /// Gives row `to` what row `from` of a cache of the same sizes holds.
  void copy_row(dense_kv_cache const& other, std::uint32_t from, std::uint32_t to);

  /// Tables of one layer as `llama_engine::attend` reads them. Valid while the cache stays where it is.
  class table {
   public:
    [[nodiscard]] std::uint32_t head_groups() const noexcept { return 1; }
    [[nodiscard]] kv_blocks blocks(std::uint32_t row, std::uint32_t head_group) const;

   private:
    friend class dense_kv_cache;
    dense_kv_cache const* cache_ = nullptr;
    std::uint32_t layer_ = 0;
    std::uint32_t sink_blocks_ = 0, recent_blocks_ = 0;  // both 0: all blocks
    mutable std::vector<float const*> shown_ = {};
  };
  [[nodiscard]] table table_of(std::uint32_t layer) const;
  /// Only the first blocks and the last ones, the block that is being filled among them.
  [[nodiscard]] table window_of(std::uint32_t layer, std::uint32_t sink_blocks, std::uint32_t recent_blocks) const;

  /// Bytes of one row of `tokens` tokens in all layers.
  [[nodiscard]] std::uint64_t bytes_of(std::uint32_t tokens) const noexcept;

 private:
  struct fill {
    std::uint32_t tokens = 0, new_tokens = 0;
  };

  [[nodiscard]] std::size_t index(std::uint32_t layer, std::uint32_t row) const noexcept;

  llama_geometry geometry_;
  std::uint32_t rows_, block_tokens_, row_blocks_;
  std::size_t block_floats_;
  std::vector<float> storage_;        // [layer][row][block][K|V][head][block_tokens][head_dim]
  std::vector<float const*> blocks_;  // [layer][row][block]
  std::vector<fill> fills_;           // [layer][row]
};

}  // namespace host_engine
