#include "block_attention.hpp"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

// The loops below are compiled once for each of these instruction sets, and the machine's best is taken at run time.
// Sanitizers are not ready when that choice is made, so their builds go without.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
  !defined(__SANITIZE_THREAD__)
#  define HOST_ENGINE_VECTORISED __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#  define HOST_ENGINE_VECTORISED
#endif

namespace host_engine {
namespace {

// From this many queries per KV head on, matrix products beat the direct loops, copies of scattered keys included.
constexpr std::uint32_t queries_for_products = 24;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0 to two units in the last place, without branches, so that the compiler can vectorise loops of it.
[[gnu::always_inline]] inline float exp_of_nonpositive(float x)
{
  x = x < -87.0F ? -87.0F : x;
  constexpr float to_integer = 12582912.0F;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  float const rounded = x * 1.44269504F + to_integer;
  float const power = rounded - to_integer;
  float const rest = (x - power * 0.693359375F) + power * 2.12194440e-4F;  // ln 2 in two parts
  float result = 1.9875691500e-4F;
  result = result * rest + 1.3981999507e-3F;
  result = result * rest + 8.3334519073e-3F;
  result = result * rest + 4.1665795894e-2F;
  result = result * rest + 1.6666665459e-1F;
  result = result * rest + 5.0000001201e-1F;
  result = result * rest * rest + rest + 1.0F;
  auto const exponent = std::bit_cast<std::int32_t>(rounded) - std::bit_cast<std::int32_t>(to_integer);
  return result * std::bit_cast<float>((exponent + 127) << 23);
}

[[gnu::always_inline]] inline float dot(float const* left, float const* right, std::uint32_t count)
{
  // Sixteen partial sums: additions of floats may not be reordered by the compiler, but separate sums may run together.
  constexpr std::uint32_t lanes = 16;
  float partial[lanes] = {};
  std::uint32_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) partial[lane] += left[at + lane] * right[at + lane];
  }
  for (std::uint32_t lane = 0; at < count; ++at, ++lane) partial[lane] += left[at] * right[at];
  for (std::uint32_t half = lanes / 2; half > 0; half /= 2) {
    for (std::uint32_t lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

// Turns scores into exp(score - maximum) and returns the log-sum-exp; the caller divides by `sum`.
[[gnu::always_inline]] inline float exponentials(float* scores, std::uint32_t count, float& sum)
{
  if (count == 0) {
    sum = 1.0F;
    return minus_infinity;
  }
  float maximum = scores[0];
  for (std::uint32_t at = 1; at < count; ++at) maximum = scores[at] > maximum ? scores[at] : maximum;
  for (std::uint32_t at = 0; at < count; ++at) scores[at] = exp_of_nonpositive(scores[at] - maximum);
  constexpr std::uint32_t lanes = 16;
  float partial[lanes] = {};
  std::uint32_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) partial[lane] += scores[at + lane];
  }
  for (std::uint32_t lane = 0; at < count; ++at, ++lane) partial[lane] += scores[at];
  sum = 0.0F;
  for (float const value : partial) sum += value;
  return maximum + std::log(sum);
}

HOST_ENGINE_VECTORISED float softmax_row(float* scores, std::uint32_t visible, std::uint32_t count)
{
  float sum = 0.0F;
  float const log_sum = exponentials(scores, visible, sum);
  float const inverse = 1.0F / sum;
  for (std::uint32_t at = 0; at < visible; ++at) scores[at] *= inverse;
  std::fill(scores + visible, scores + count, 0.0F);
  return log_sum;
}

// Scores of the queries of one KV head with one block's keys: scores[query][token].
HOST_ENGINE_VECTORISED void score_block(
  attention_shape const& shape, float const* keys, std::uint32_t tokens, float const* queries, float* scores,
  std::size_t scores_stride)
{
  for (std::uint32_t token = 0; token < tokens; ++token) {
    float const* const key = keys + std::size_t{token} * shape.head_dim;
    for (std::uint32_t query = 0; query < shape.queries_per_kv_head; ++query) {
      scores[query * scores_stride + token] =
        shape.scale * dot(queries + std::size_t{query} * shape.head_dim, key, shape.head_dim);
    }
  }
}

// Adds one block's values, weighted, to the outputs of one KV head's queries.
HOST_ENGINE_VECTORISED void add_block(
  attention_shape const& shape, float const* values, std::uint32_t tokens, float const* weights,
  std::size_t weights_stride, float* outputs)
{
  for (std::uint32_t query = 0; query < shape.queries_per_kv_head; ++query) {
    float* const output = outputs + std::size_t{query} * shape.head_dim;
    for (std::uint32_t token = 0; token < tokens; ++token) {
      float const weight = weights[query * weights_stride + token];
      float const* const value = values + std::size_t{token} * shape.head_dim;
      for (std::uint32_t channel = 0; channel < shape.head_dim; ++channel) output[channel] += weight * value[channel];
    }
  }
}

struct block_reader {
  kv_blocks const& kv;
  std::uint32_t head_dim;

  [[nodiscard]] std::uint32_t tokens(std::size_t block) const
  {
    return std::min(kv.block_tokens, kv.tokens - static_cast<std::uint32_t>(block) * kv.block_tokens);
  }
  [[nodiscard]] float const* keys(std::size_t block, std::uint32_t head) const
  {
    return kv.blocks[block] + std::size_t{head} * kv.block_tokens * head_dim;
  }
  [[nodiscard]] float const* values(std::size_t block, std::uint32_t head) const
  {
    return keys(block, kv.heads + head);
  }
};

// Few queries: each key and value is read once, from where it lies.
void attend_directly(
  attention_shape const& shape, kv_blocks const& kv, attention_rows const& rows, attention_scratch& scratch)
{
  block_reader const read{kv, shape.head_dim};
  scratch.scores.resize(std::size_t{shape.queries_per_kv_head} * kv.tokens);
  for (std::uint32_t token = 0; token < rows.tokens; ++token) {
    std::uint32_t const visible = kv.new_tokens == 0 ? kv.tokens : kv.tokens - (rows.tokens - 1 - token);
    for (std::uint32_t head = 0; head < kv.heads; ++head) {
      std::size_t const first = std::size_t{head} * shape.queries_per_kv_head;
      float const* const queries = rows.queries + token * rows.stride + first * shape.head_dim;
      float* const outputs = rows.outputs + token * rows.stride + first * shape.head_dim;
      for (std::size_t block = 0, begin = 0; begin < visible; ++block, begin += kv.block_tokens) {
        auto const count = std::min(read.tokens(block), visible - static_cast<std::uint32_t>(begin));
        score_block(shape, read.keys(block, head), count, queries, scratch.scores.data() + begin, kv.tokens);
      }
      for (std::uint32_t query = 0; query < shape.queries_per_kv_head; ++query) {
        rows.log_sums[token * rows.log_sum_stride + first + query] =
          softmax_row(scratch.scores.data() + std::size_t{query} * kv.tokens, visible, visible);
      }
      std::fill_n(outputs, std::size_t{shape.queries_per_kv_head} * shape.head_dim, 0.0F);
      for (std::size_t block = 0, begin = 0; begin < visible; ++block, begin += kv.block_tokens) {
        auto const count = std::min(read.tokens(block), visible - static_cast<std::uint32_t>(begin));
        add_block(shape, read.values(block, head), count, scratch.scores.data() + begin, kv.tokens, outputs);
      }
    }
  }
}

// Many queries: scores and outputs are matrix products, and keys and values are laid together for them.
void attend_by_products(
  attention_shape const& shape, kv_blocks const& kv, attention_rows const& rows, attention_scratch& scratch)
{
  block_reader const read{kv, shape.head_dim};
  auto const gather = [&](std::vector<float>& to, auto&& from) -> float const* {
    if (kv.blocks.size() == 1) return from(0);
    to.resize(std::size_t{kv.tokens} * shape.head_dim);
    float* out = to.data();
    for (std::size_t block = 0; block < kv.blocks.size(); ++block) {
      out = std::copy_n(from(block), std::size_t{read.tokens(block)} * shape.head_dim, out);
    }
    return to.data();
  };
  scratch.scores.resize(std::size_t{rows.tokens} * kv.tokens);
  auto const queries = static_cast<blasint>(rows.tokens), tokens = static_cast<blasint>(kv.tokens),
             head_dim = static_cast<blasint>(shape.head_dim), stride = static_cast<blasint>(rows.stride);
  for (std::uint32_t head = 0; head < kv.heads; ++head) {
    float const* const keys = gather(scratch.keys, [&](std::size_t block) { return read.keys(block, head); });
    float const* const values = gather(scratch.values, [&](std::size_t block) { return read.values(block, head); });
    for (std::uint32_t member = 0; member < shape.queries_per_kv_head; ++member) {
      std::size_t const query_head = std::size_t{head} * shape.queries_per_kv_head + member;
      float const* const query = rows.queries + query_head * shape.head_dim;
      cblas_sgemm(
        CblasRowMajor, CblasNoTrans, CblasTrans, queries, tokens, head_dim, shape.scale, query, stride, keys, head_dim,
        0.0F, scratch.scores.data(), tokens);
      for (std::uint32_t token = 0; token < rows.tokens; ++token) {
        std::uint32_t const visible = kv.new_tokens == 0 ? kv.tokens : kv.tokens - (rows.tokens - 1 - token);
        rows.log_sums[token * rows.log_sum_stride + query_head] =
          softmax_row(scratch.scores.data() + std::size_t{token} * kv.tokens, visible, kv.tokens);
      }
      cblas_sgemm(
        CblasRowMajor, CblasNoTrans, CblasNoTrans, queries, head_dim, tokens, 1.0F, scratch.scores.data(), tokens,
        values, head_dim, 0.0F, rows.outputs + query_head * shape.head_dim, stride);
    }
  }
}

}  // namespace

void attend_blocks(
  attention_shape const& shape, kv_blocks const& kv, attention_rows const& rows, attention_scratch& scratch)
{
  std::size_t const needed = kv.block_tokens == 0 ? 0 : (kv.tokens + kv.block_tokens - 1) / kv.block_tokens;
  if (needed != kv.blocks.size()) {
    throw std::invalid_argument{
      std::to_string(kv.tokens) + " tokens need " + std::to_string(needed) + " blocks of " +
      std::to_string(kv.block_tokens) + ", given are " + std::to_string(kv.blocks.size())};
  }
  if (kv.new_tokens != 0 && (kv.new_tokens != rows.tokens || kv.new_tokens > kv.tokens)) {
    throw std::invalid_argument{
      "of " + std::to_string(kv.tokens) + " tokens " + std::to_string(kv.new_tokens) + " are new, but the step has " +
      std::to_string(rows.tokens)};
  }
  if (kv.tokens == 0) {
    for (std::uint32_t token = 0; token < rows.tokens; ++token) {
      std::size_t const query_heads = std::size_t{kv.heads} * shape.queries_per_kv_head;
      std::fill_n(rows.outputs + token * rows.stride, query_heads * shape.head_dim, 0.0F);
      std::fill_n(rows.log_sums + token * rows.log_sum_stride, query_heads, minus_infinity);
    }
  } else if (rows.tokens < queries_for_products) {
    attend_directly(shape, kv, rows, scratch);
  } else {
    attend_by_products(shape, kv, rows, scratch);
  }
}

void merge_attention(
  float* outputs, float& log_sum, float const* other_outputs, float other_log_sum, std::uint32_t head_dim)
{
  if (other_log_sum == minus_infinity) return;
  float const maximum = std::max(log_sum, other_log_sum);
  float const weight = std::exp(log_sum - maximum), other_weight = std::exp(other_log_sum - maximum);
  float const inverse = 1.0F / (weight + other_weight);
  for (std::uint32_t channel = 0; channel < head_dim; ++channel) {
    outputs[channel] = (weight * outputs[channel] + other_weight * other_outputs[channel]) * inverse;
  }
  log_sum = maximum + std::log(weight + other_weight);
}

}  // namespace host_engine
