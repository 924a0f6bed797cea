#include "dense_decoder.hpp"

#include <algorithm>
#include <numeric>

namespace decode_text {

dense_decoder::dense_decoder(
  host_engine::llama_weights const& weights, std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk,
  std::uint32_t block_tokens)
  : engine_{weights, {.rows = rows, .row_tokens = chunk}},
    cache_{weights.geometry, rows, max_tokens, block_tokens},
    chunk_{chunk},
    rows_(rows),
    lengths_(rows)
{
  std::iota(rows_.begin(), rows_.end(), 0U);
}

void dense_decoder::prefill(std::uint32_t row, std::span<std::int32_t const> prompt, progress const& report)
{
  std::span<std::int32_t const> rest = prompt.first(prompt.size() - 1);
  while (!rest.empty()) {
    std::size_t const count = std::min<std::size_t>(chunk_, rest.size());
    engine_.feed(row, rest.first(count), lengths_[row]);
    run_layers({&row, 1});
    lengths_[row] += static_cast<std::uint32_t>(count);
    rest = rest.subspan(count);
    report(lengths_[row]);
  }
  engine_.feed(row, prompt.last(1), lengths_[row]++);
  run_layers({&row, 1});
  engine_.sample({&row, 1});
  report(lengths_[row]);
}

void dense_decoder::step(std::span<std::int32_t const> tokens)
{
  for (std::uint32_t const row : rows_) engine_.feed(row, tokens.subspan(row, 1), lengths_[row]++);
  run_layers(rows_);
  engine_.sample(rows_);
}

void dense_decoder::run_layers(std::span<std::uint32_t const> rows)
{
  for (std::uint32_t layer = 0; layer < engine_.geometry().layers; ++layer) {
    engine_.project(layer, rows);
    cache_.append(layer, rows, engine_);
    engine_.attend(layer, rows, cache_.window_of(layer, sink_blocks_, recent_blocks_), host_engine::part::whole);
    engine_.feed_forward(layer, rows);
  }
}

void dense_decoder::read_only(std::uint32_t sink_blocks, std::uint32_t recent_blocks)
{
  sink_blocks_ = sink_blocks;
  recent_blocks_ = recent_blocks;
}

void dense_decoder::copy_prompts_from(reference_decoder const& other)
{
  auto const& from = dynamic_cast<dense_decoder const&>(other);
  for (std::uint32_t const row : rows_) cache_.copy_row(from.cache_, row, row);
  lengths_ = from.lengths_;
}

std::uint64_t dense_decoder::bytes() const noexcept
{
  return std::accumulate(
    lengths_.begin(), lengths_.end(), std::uint64_t{0},
    [&](std::uint64_t sum, std::uint32_t length) { return sum + cache_.bytes_of(length); });
}

}  // namespace decode_text
