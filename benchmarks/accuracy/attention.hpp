/// Attention of many positions at once over a key-value cache that holds everything: dense, with the mass of each block, and
/// over chosen blocks.
#pragma once

#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace accuracy {

struct attention_geometry {
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;  // a multiple of 16

  [[nodiscard]] std::uint32_t query_group() const { return query_heads / kv_heads; }
  [[nodiscard]] std::size_t query_width() const { return std::size_t{query_heads} * head_dim; }
  [[nodiscard]] float scale() const;
};

/// Keys and values of one layer.
class layer_cache {
 public:
  static constexpr std::uint32_t part = 16;  // tokens that are scored together

  layer_cache(attention_geometry const& geometry, std::uint32_t capacity);

  /// Writes the keys and values of tokens from `position` on.
  /// @param keys, values [count, kv_heads, head_dim]
  void write(std::uint32_t position, std::uint32_t count, float const* keys, float const* values);

  [[nodiscard]] float const* keys(std::uint32_t head) const { return keys_.data() + head * stride_; }
  [[nodiscard]] float const* values(std::uint32_t head) const { return values_.data() + head * stride_; }
  /// Of sixteen tokens, channel by channel.
  [[nodiscard]] float const* key_columns(std::uint32_t head, std::uint32_t index) const
  {
    return columns_.data() + head * stride_ + std::size_t{index} * part * geometry_.head_dim;
  }
  [[nodiscard]] attention_geometry const& geometry() const { return geometry_; }

 private:
  attention_geometry geometry_;
  std::size_t stride_;  // floats of one head
  std::vector<float> keys_, values_, columns_;
};

/// Shares of blocks, [query_heads, tokens, pitch]: part of each query head's softmax mass, true or estimated.
struct share_table {
  std::uint32_t tokens = 0;
  std::uint32_t pitch = 0;
  std::vector<float> values = {};

  void resize(std::uint32_t heads, std::uint32_t token_count, std::uint32_t most_blocks)
  {
    tokens = token_count;
    pitch = pulseinfer::round_up(most_blocks, 16);
    values.resize(std::size_t{heads} * tokens * pitch);
  }
  [[nodiscard]] float* row(std::uint32_t head, std::uint32_t token)
  {
    return values.data() + (std::size_t{head} * tokens + token) * pitch;
  }
  [[nodiscard]] float const* row(std::uint32_t head, std::uint32_t token) const
  {
    return values.data() + (std::size_t{head} * tokens + token) * pitch;
  }
};

struct dense_scratch {
  std::vector<float> queries, scores, sums, outputs;
};

/// Dense attention of some of the tokens that stand from `position` on; each sees itself and what stands before it.
/// @param queries [tokens, query_heads, head_dim] of all of them   @param chosen which of them, ascending
/// @param shares null, or written: row i is the mass of the blocks for token chosen[i]; zeros behind the last block
/// @param outputs null, or [chosen, query_heads, head_dim], written
void attend_densely(
  layer_cache const& cache, float const* queries, std::uint32_t position, std::span<std::uint32_t const> chosen,
  std::uint32_t block_tokens, share_table* shares, float* outputs, dense_scratch& scratch);

/// Attention of the query heads of one KV head of one token over chosen blocks.
/// @param queries [query_group, head_dim]   @param blocks ascending   @param visible tokens of the sequence
/// @param outputs [query_group, head_dim]
void attend_chosen(
  layer_cache const& cache, std::uint32_t head, float const* queries, std::span<pulseinfer::block_id const> blocks,
  std::uint32_t block_tokens, std::uint32_t visible, float* outputs, std::vector<float>& scratch);

}  // namespace accuracy
