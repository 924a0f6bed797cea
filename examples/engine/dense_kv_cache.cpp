#include "dense_kv_cache.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace host_engine {

dense_kv_cache::dense_kv_cache(llama_geometry const& geometry, std::uint32_t rows, std::uint32_t capacity_tokens)
  : geometry_{geometry}, rows_{rows}, capacity_tokens_{capacity_tokens}
{
  std::size_t const lists = std::size_t{geometry.layers} * rows;
  std::size_t const block = std::size_t{2} * geometry.kv_width() * capacity_tokens;
  storage_.resize(lists * block);
  fills_.resize(lists);
  for (std::size_t list = 0; list < lists; ++list) blocks_.push_back(storage_.data() + list * block);
}

std::size_t dense_kv_cache::index(std::uint32_t layer, std::uint32_t row) const noexcept
{
  return std::size_t{layer} * rows_ + row;
}

void dense_kv_cache::append(std::uint32_t layer, std::span<std::uint32_t const> rows, llama_engine const& engine)
{
  std::size_t const head_dim = geometry_.head_dim;
  for (std::uint32_t const row : rows) {
    std::uint32_t const count = engine.tokens(row), position = engine.position(row);
    if (position + count > capacity_tokens_) {
      throw std::out_of_range{
        "row " + std::to_string(row) + " would have " + std::to_string(position + count) + " tokens, the cache holds " +
        std::to_string(capacity_tokens_)};
    }
    float* const block = storage_.data() + index(layer, row) * 2 * geometry_.kv_width() * capacity_tokens_;
    auto const store = [&](float const* from, float* plane) {
      for (std::uint32_t token = 0; token < count; ++token) {
        for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
          std::size_t const at = (std::size_t{head} * capacity_tokens_ + position + token) * head_dim;
          std::copy_n(from + (std::size_t{token} * geometry_.kv_heads + head) * head_dim, head_dim, plane + at);
        }
      }
    };
    std::size_t const first = std::size_t{engine.first_token(row)} * geometry_.kv_width();
    store(engine.keys() + first, block);
    store(engine.values() + first, block + std::size_t{geometry_.kv_width()} * capacity_tokens_);
    fills_[index(layer, row)] = {.tokens = position + count, .new_tokens = count};
  }
}

dense_kv_cache::table dense_kv_cache::table_of(std::uint32_t layer) const
{
  table of_layer;
  of_layer.cache_ = this;
  of_layer.layer_ = layer;
  return of_layer;
}

kv_blocks dense_kv_cache::table::blocks(std::uint32_t row, std::uint32_t /*head_group*/) const
{
  std::size_t const at = cache_->index(layer_, row);
  return {
    .blocks = std::span{cache_->blocks_}.subspan(at, 1),
    .heads = cache_->geometry_.kv_heads,
    .block_tokens = cache_->capacity_tokens_,
    .tokens = cache_->fills_[at].tokens,
    .new_tokens = cache_->fills_[at].new_tokens};
}

std::uint64_t dense_kv_cache::bytes_of(std::uint32_t tokens) const noexcept
{
  return std::uint64_t{2} * geometry_.layers * geometry_.kv_width() * tokens * sizeof(float);
}

}  // namespace host_engine
