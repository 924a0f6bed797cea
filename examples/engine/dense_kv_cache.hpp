/// The KV cache that holds everything in one place: the reference for what a sparse, offloaded one computes.
#pragma once

#include "block_attention.hpp"
#include "llama_engine.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace host_engine {

/// Each row of each layer is one block as large as the longest sequence.
class dense_kv_cache {
 public:
  /// @throws std::bad_alloc
  dense_kv_cache(llama_geometry const& geometry, std::uint32_t rows, std::uint32_t capacity_tokens);

  /// Takes over the keys and values that the engine has projected for these rows' tokens of this step.
  /// @throws std::out_of_range if a row is full, with the numbers
  void append(std::uint32_t layer, std::span<std::uint32_t const> rows, llama_engine const& engine);

  /// Tables of one layer as `llama_engine::attend` reads them.
  class table {
   public:
    [[nodiscard]] std::uint32_t head_groups() const noexcept { return 1; }
    [[nodiscard]] kv_blocks blocks(std::uint32_t row, std::uint32_t head_group) const;

   private:
    friend class dense_kv_cache;
    dense_kv_cache const* cache_ = nullptr;
    std::uint32_t layer_ = 0;
  };
  [[nodiscard]] table table_of(std::uint32_t layer) const;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return storage_.size() * sizeof(float); }
  /// Bytes that a sequence of this length fills in all layers.
  [[nodiscard]] std::uint64_t bytes_of(std::uint32_t tokens) const noexcept;

 private:
  struct fill {
    std::uint32_t tokens = 0, new_tokens = 0;
  };

  [[nodiscard]] std::size_t index(std::uint32_t layer, std::uint32_t row) const noexcept;

  llama_geometry geometry_;
  std::uint32_t rows_, capacity_tokens_;
  std::vector<float> storage_;        // [layer][row][K|V][head][capacity_tokens][head_dim]
  std::vector<float const*> blocks_;  // [layer][row]
  std::vector<fill> fills_;           // [layer][row]
};

}  // namespace host_engine
