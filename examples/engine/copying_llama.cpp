#include "copying_llama.hpp"

#include "portable_random.hpp"

#include <cmath>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>

namespace host_engine {
namespace {

constexpr std::uint32_t passages = copying_text_shape::passages, passage_tokens = copying_text_shape::passage_tokens,
                        vocabulary = copying_text_shape::vocabulary;

// The hidden state: the token's code, the previous token's code, and one channel that is always 1.
constexpr std::uint32_t code = 64, own_code = 0, previous_code = code, constant = 2 * code, hidden = 2 * code + 4;
constexpr std::uint32_t query_heads = 4, kv_heads = 2, head_dim = 128, pairs = head_dim / 2;
constexpr std::uint32_t query_width = query_heads * head_dim, kv_width = kv_heads * head_dim;

// Rotary frequencies fall from 1 to 1e-10: the fast pairs tell positions apart, the slow ones don't turn within any context
// and can hold what a token is.
constexpr float theta = 1e10F;
constexpr std::uint32_t slow_pairs = code / 2, first_slow_pair = pairs - slow_pairs, fast_pairs = 13;

// Scores are in nats. A neighbouring position must lose to the previous one by far, and a token of the same passage to the
// token itself.
constexpr float position_score = 40.0F, match_score = 40.0F, copy_gain = 4.0F;
// How surely the copied token is predicted: with more, a passage that begins anew would cost more.
constexpr float logit_scale = 14.0F;

class matrix_writer {
 public:
  matrix_writer(std::vector<float>& values, std::uint32_t rows, std::uint32_t columns)
    : values_{values}, columns_{columns}
  {
    values_.assign(std::size_t{rows} * columns, 0.0F);
  }
  float& operator()(std::uint32_t row, std::uint32_t column) { return values_[std::size_t{row} * columns_ + column]; }

 private:
  std::vector<float>& values_;
  std::uint32_t columns_;
};

// Channel of a head that holds channel `index` of a code.
constexpr std::uint32_t code_channel(std::uint32_t index)
{
  return index < slow_pairs ? first_slow_pair + index : pairs + first_slow_pair + index - slow_pairs;
}

// A direction of length 1 that is orthogonal to `avoid`, so that lengths add up.
std::vector<float> random_direction(std::span<float const> avoid, portable_random& random)
{
  std::vector<float> direction(code);
  for (float& value : direction) value = random.spread(1.0F);
  auto const dot = [](auto const& left, auto const& right) {
    return std::inner_product(left.begin(), left.end(), right.begin(), 0.0F);
  };
  if (!avoid.empty()) {
    float const along = dot(direction, avoid) / dot(avoid, avoid);
    for (std::size_t at = 0; at < code; ++at) direction[at] -= along * avoid[at];
  }
  float const length = std::sqrt(dot(direction, direction));
  for (float& value : direction) value /= length;
  return direction;
}

// Norms divide by the root of the mean square, and it is known: `parts` parts of the hidden state have length 1 each.
std::vector<float> norm_that_keeps(float parts)
{
  return std::vector<float>(hidden, std::sqrt(parts / static_cast<float>(hidden)));
}

llama_weights::layer idle_layer(float parts)
{
  return {
    .attention_norm = norm_that_keeps(parts),
    .qkv = std::vector<float>((query_width + 2 * kv_width) * hidden),
    .output = std::vector<float>(hidden * query_width),
    .mlp_norm = norm_that_keeps(parts),
    .gate_up = std::vector<float>(2 * hidden * hidden),
    .down = std::vector<float>(hidden * hidden)};
}

// What both layers share: KV head 0 reads `key_from` or `query_from`, its values are the tokens' codes, and the heads that
// read it share the work.
void carry_codes(llama_weights::layer& layer, std::uint32_t to, float gain)
{
  constexpr std::uint32_t readers = query_heads / kv_heads;
  for (std::uint32_t index = 0; index < code; ++index) {
    layer.qkv[std::size_t{query_width + kv_width + index} * hidden + own_code + index] = 1.0F;
    for (std::uint32_t head = 0; head < readers; ++head) {
      layer.output[std::size_t{to + index} * query_width + head * head_dim + index] = gain / readers;
    }
  }
}

// Queries and keys are constants. Rotation turns them by their positions, and with the keys turned on by one position they
// fit best where the query stands one position later.
llama_weights::layer previous_token_layer()
{
  llama_weights::layer layer = idle_layer(2.0F);
  float const amplitude = std::sqrt(position_score * std::sqrt(static_cast<float>(head_dim)));
  for (std::uint32_t pair = 0; pair < fast_pairs; ++pair) {
    float const turn = std::pow(theta, -static_cast<float>(pair) / static_cast<float>(pairs));
    for (std::uint32_t head = 0; head < query_heads / kv_heads; ++head) {
      layer.qkv[std::size_t{head * head_dim + pair} * hidden + constant] = amplitude;
    }
    layer.qkv[std::size_t{query_width + pair} * hidden + constant] = amplitude * std::cos(turn);
    layer.qkv[std::size_t{query_width + pairs + pair} * hidden + constant] = amplitude * std::sin(turn);
  }
  carry_codes(layer, previous_code, 1.0F);
  return layer;
}

// The query is the present token's code, a key the code of the token before it.
llama_weights::layer matching_layer()
{
  llama_weights::layer layer = idle_layer(3.0F);
  float const amplitude = std::sqrt(match_score * std::sqrt(static_cast<float>(head_dim)));
  for (std::uint32_t index = 0; index < code; ++index) {
    for (std::uint32_t head = 0; head < query_heads / kv_heads; ++head) {
      layer.qkv[std::size_t{head * head_dim + code_channel(index)} * hidden + own_code + index] = amplitude;
    }
    layer.qkv[std::size_t{query_width + code_channel(index)} * hidden + previous_code + index] = amplitude;
  }
  // Four times the present token's own code, so that the copied one leads in the sum of both.
  carry_codes(layer, own_code, copy_gain);
  return layer;
}

}  // namespace

llama_weights make_copying_llama(std::uint64_t seed)
{
  llama_weights weights;
  weights.name = "synthetic";
  weights.geometry = {
    .layers = 2,
    .hidden = hidden,
    .query_heads = query_heads,
    .kv_heads = kv_heads,
    .head_dim = head_dim,
    .feed_forward = hidden,
    .vocabulary = vocabulary,
    .context_tokens = 2 * vocabulary,
    .rope_theta = theta,
    .norm_epsilon = 1e-6F};
  weights.geometry.check();

  portable_random random{seed};
  weights.embedding.assign(std::size_t{vocabulary} * hidden, 0.0F);
  for (std::uint32_t passage = 0; passage < passages; ++passage) {
    std::vector<float> const shared = random_direction({}, random);
    for (std::uint32_t token = 0; token < passage_tokens; ++token) {
      float* const entry = weights.embedding.data() + std::size_t{passage * passage_tokens + token} * hidden;
      std::vector<float> const own = random_direction(shared, random);
      for (std::uint32_t at = 0; at < code; ++at) entry[own_code + at] = std::sqrt(0.5F) * (shared[at] + own[at]);
      entry[constant] = 1.0F;
    }
  }
  weights.layers = {previous_token_layer(), matching_layer()};
  // Three parts of length 1, and the copied code beside them.
  weights.final_norm = norm_that_keeps(3 + copy_gain * copy_gain);
  for (float& value : weights.final_norm) value *= logit_scale;
  return weights;
}

std::vector<std::int32_t> make_copying_text(std::uint32_t prompt_tokens, std::uint32_t tokens, std::uint64_t seed)
{
  if (prompt_tokens < passage_tokens || prompt_tokens > vocabulary) {
    throw std::invalid_argument{
      "a prompt of " + std::to_string(prompt_tokens) + " tokens, the synthetic text allows " +
      std::to_string(passage_tokens) + " to " + std::to_string(vocabulary)};
  }
  portable_random random{seed};
  std::vector<std::int32_t> text;
  for (std::uint32_t const passage : random.order(passages)) {
    for (std::uint32_t const token : random.order(passage_tokens)) {
      text.push_back(static_cast<std::int32_t>(passage * passage_tokens + token));
    }
  }
  text.resize(prompt_tokens);
  while (text.size() < std::size_t{prompt_tokens} + tokens) {
    for (std::uint32_t const passage : random.order(prompt_tokens / passage_tokens)) {
      for (std::uint32_t at = 0; at < passage_tokens; ++at) text.push_back(text[passage * passage_tokens + at]);
    }
  }
  text.resize(std::size_t{prompt_tokens} + tokens);
  return text;
}

}  // namespace host_engine
