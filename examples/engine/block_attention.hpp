/// Attention of one row over the KV blocks that it is given. This is all that the engine knows about a KV cache: whether
/// the blocks are one large contiguous area or the slots that a table names makes no difference to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace host_engine {

/// What one row reads at one layer for one group of KV heads. Borrowed: valid while the table that gave it is.
struct kv_blocks {
  std::span<float const* const> blocks;  // in the order of their tokens; each [K|V][head][block_tokens][head_dim]
  std::uint32_t heads = 0;               // KV heads in a block
  std::uint32_t block_tokens = 0;
  std::uint32_t tokens = 0;      // valid ones: all blocks are full except the last
  std::uint32_t new_tokens = 0;  // how many of them, at the end, are this step's: these are read causally; 0 or all
};

struct attention_shape {
  std::uint32_t queries_per_kv_head = 1;
  std::uint32_t head_dim = 0;
  float scale = 1.0F;
};

/// Rows of queries and of results: token t of head h begins at `data + t * stride + h * head_dim`.
struct attention_rows {
  float const* queries = nullptr;
  float* outputs = nullptr;
  std::size_t stride = 0;
  float* log_sums = nullptr;  // ln of the sum of exp(score); head h of token t at `log_sums + t * log_sum_stride + h`
  std::size_t log_sum_stride = 0;
  std::uint32_t tokens = 0;
};

/// Memory that calls share.
struct attention_scratch {
  std::vector<float> scores, keys, values;
};

/// Softmax attention over the blocks, normalised over these blocks only; the log-sum-exp lets two parts be merged.
/// Without any token the outputs are 0 and the log-sums minus infinity.
/// @throws std::invalid_argument if the blocks don't hold the tokens
void attend_blocks(
  attention_shape const& shape, kv_blocks const& kv, attention_rows const& rows, attention_scratch& scratch);

/// Merges attention over other blocks into `outputs` and `log_sum`, exact up to rounding.
void merge_attention(
  float* outputs, float& log_sum, float const* other_outputs, float other_log_sum, std::uint32_t head_dim);

}  // namespace host_engine
