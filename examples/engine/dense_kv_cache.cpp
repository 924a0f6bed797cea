#include "dense_kv_cache.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace host_engine {

dense_kv_cache::dense_kv_cache(
  llama_geometry const& geometry, std::uint32_t rows, std::uint32_t capacity_tokens, std::uint32_t block_tokens)
  : geometry_{geometry}, rows_{rows}, block_tokens_{block_tokens}
{
  if (block_tokens == 0) throw std::invalid_argument{"a cache with blocks of 0 tokens"};
  row_blocks_ = (capacity_tokens + block_tokens - 1) / block_tokens;
  block_floats_ = std::size_t{2} * geometry.kv_width() * block_tokens;
  std::size_t const lists = std::size_t{geometry.layers} * rows;
  storage_.resize(lists * row_blocks_ * block_floats_);
  fills_.resize(lists);
  for (std::size_t block = 0; block < lists * row_blocks_; ++block) {
    blocks_.push_back(storage_.data() + block * block_floats_);
  }
}

std::size_t dense_kv_cache::index(std::uint32_t layer, std::uint32_t row) const noexcept
{
  return std::size_t{layer} * rows_ + row;
}

void dense_kv_cache::append(std::uint32_t layer, std::span<std::uint32_t const> rows, llama_engine const& engine)
{
  std::size_t const head_dim = geometry_.head_dim;
  token_tensor const keys = engine.keys(), values = engine.values();
  for (std::uint32_t const row : rows) {
    std::uint32_t const count = engine.tokens(row), position = engine.position(row);
    if (position + count > row_blocks_ * block_tokens_) {
      throw std::out_of_range{
        "row " + std::to_string(row) + " would have " + std::to_string(position + count) + " tokens, the cache holds " +
        std::to_string(row_blocks_ * block_tokens_)};
    }
    for (std::uint32_t token = 0; token < count; ++token) {
      std::uint32_t const place = position + token;
      float* const block = storage_.data() + (index(layer, row) * row_blocks_ + place / block_tokens_) * block_floats_;
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        std::size_t const at = (std::size_t{head} * block_tokens_ + place % block_tokens_) * head_dim;
        std::copy_n(keys.row(engine.first_token(row) + token, head), head_dim, block + at);
        std::copy_n(values.row(engine.first_token(row) + token, head), head_dim, block + block_floats_ / 2 + at);
      }
    }
    fills_[index(layer, row)] = {.tokens = position + count, .new_tokens = count};
  }
}

void dense_kv_cache::copy_row(dense_kv_cache const& other, std::uint32_t from, std::uint32_t to)
{
  if (other.row_blocks_ != row_blocks_ || other.block_floats_ != block_floats_) {
    throw std::invalid_argument{
      "rows of " + std::to_string(other.row_blocks_) + " blocks of " + std::to_string(other.block_floats_) +
      " numbers can't be copied into rows of " + std::to_string(row_blocks_) + " of " + std::to_string(block_floats_)};
  }
  for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
    auto const row_floats = static_cast<std::ptrdiff_t>(row_blocks_ * block_floats_);
    std::copy_n(
      other.storage_.begin() + static_cast<std::ptrdiff_t>(other.index(layer, from)) * row_floats, row_floats,
      storage_.begin() + static_cast<std::ptrdiff_t>(index(layer, to)) * row_floats);
    fills_[index(layer, to)] = other.fills_[other.index(layer, from)];
  }
}

dense_kv_cache::table dense_kv_cache::table_of(std::uint32_t layer) const { return window_of(layer, 0, 0); }

dense_kv_cache::table dense_kv_cache::window_of(
  std::uint32_t layer, std::uint32_t sink_blocks, std::uint32_t recent_blocks) const
{
  table of_layer;
  of_layer.cache_ = this;
  of_layer.layer_ = layer;
  of_layer.sink_blocks_ = sink_blocks;
  of_layer.recent_blocks_ = recent_blocks;
  return of_layer;
}

kv_blocks dense_kv_cache::table::blocks(std::uint32_t row, std::uint32_t /*head_group*/) const
{
  std::size_t const at = cache_->index(layer_, row);
  fill const& filled = cache_->fills_[at];
  std::uint32_t const count = (filled.tokens + cache_->block_tokens_ - 1) / cache_->block_tokens_;
  kv_blocks shown{
    .blocks = std::span{cache_->blocks_}.subspan(at * cache_->row_blocks_, count),
    .heads = cache_->geometry_.kv_heads,
    .block_tokens = cache_->block_tokens_,
    .tokens = filled.tokens,
    .new_tokens = filled.new_tokens};
  std::uint32_t const kept = sink_blocks_ + recent_blocks_;
  if (kept == 0 || kept >= count) return shown;
  shown_.assign(shown.blocks.begin(), shown.blocks.begin() + sink_blocks_);
  shown_.insert(shown_.end(), shown.blocks.end() - recent_blocks_, shown.blocks.end());
  shown.blocks = shown_;
  shown.tokens -= (count - kept) * cache_->block_tokens_;
  return shown;
}

std::uint64_t dense_kv_cache::bytes_of(std::uint32_t tokens) const noexcept
{
  return std::uint64_t{2} * geometry_.layers * geometry_.kv_width() * tokens * sizeof(float);
}

}  // namespace host_engine
