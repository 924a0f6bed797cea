#include "llama_engine.hpp"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace host_engine {
namespace {

// out[rows, outputs] = in[rows, inputs] * matrix[outputs, inputs]^T
void multiply(float const* in, std::size_t rows, std::vector<float> const& matrix, std::size_t inputs, float* out)
{
  auto const outputs = static_cast<blasint>(matrix.size() / inputs), columns = static_cast<blasint>(inputs);
  if (rows == 1) {
    cblas_sgemv(CblasRowMajor, CblasNoTrans, outputs, columns, 1.0F, matrix.data(), columns, in, 1, 0.0F, out, 1);
  } else {
    cblas_sgemm(
      CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(rows), outputs, columns, 1.0F, in, columns,
      matrix.data(), columns, 0.0F, out, outputs);
  }
}

void rms_norm(float const* in, std::vector<float> const& weight, float epsilon, float* out)
{
  double squares = 0.0;
  for (std::size_t at = 0; at < weight.size(); ++at) squares += double{in[at]} * double{in[at]};
  auto const inverse =
    static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(weight.size()) + double{epsilon}));
  for (std::size_t at = 0; at < weight.size(); ++at) out[at] = in[at] * inverse * weight[at];
}

float silu(float x) { return x / (1.0F + std::exp(-x)); }

}  // namespace

std::vector<float> make_rotation(llama_geometry const& model)
{
  // Angles in 32-bit floats, as the models were trained: more exact ones would differ by up to 2e-4 at 8K positions.
  std::vector<float> rotation(std::size_t{model.context_tokens} * model.head_dim);
  for (std::uint32_t pair = 0; pair < model.head_dim / 2; ++pair) {
    float const exponent = static_cast<float>(2 * pair) / static_cast<float>(model.head_dim);
    float const frequency = 1.0F / std::pow(model.rope_theta, exponent);
    for (std::uint32_t position = 0; position < model.context_tokens; ++position) {
      float const angle = static_cast<float>(position) * frequency;
      float* const entry = rotation.data() + std::size_t{position} * model.head_dim + std::size_t{2} * pair;
      entry[0] = std::cos(angle);
      entry[1] = std::sin(angle);
    }
  }
  return rotation;
}

void check_fed_tokens(
  llama_geometry const& model, llama_engine::size_limits limits, std::uint32_t row,
  std::span<std::int32_t const> tokens, std::uint32_t position)
{
  if (row >= limits.rows || tokens.empty() || tokens.size() > limits.row_tokens) {
    throw std::out_of_range{
      "row " + std::to_string(row) + " with " + std::to_string(tokens.size()) + " tokens, the engine has " +
      std::to_string(limits.rows) + " rows of 1 to " + std::to_string(limits.row_tokens) + " tokens"};
  }
  if (position + tokens.size() > model.context_tokens) {
    throw std::out_of_range{
      "row " + std::to_string(row) + " would reach " + std::to_string(position + tokens.size()) +
      " tokens, the model's context has " + std::to_string(model.context_tokens)};
  }
  for (std::int32_t const token : tokens) {
    if (token < 0 || static_cast<std::uint32_t>(token) >= model.vocabulary) {
      throw std::out_of_range{
        "token " + std::to_string(token) + " in a vocabulary of " + std::to_string(model.vocabulary)};
    }
  }
}

llama_engine::llama_engine(llama_weights const& weights, size_limits limits)
  : weights_{&weights}, limits_{limits}, rows_(limits.rows)
{
  llama_geometry const& model = geometry();
  model.check();
  if (limits.rows == 0 || limits.row_tokens == 0) {
    throw std::invalid_argument{
      "an engine needs at least 1 row of 1 token, given are " + std::to_string(limits.rows) + " of " +
      std::to_string(limits.row_tokens)};
  }
  std::size_t const slots = std::size_t{limits.rows} * limits.row_tokens;
  std::size_t const query_width = model.query_width(), kv_width = model.kv_width();
  hidden_.resize(slots * model.hidden);
  queries_.resize(slots * query_width);
  keys_.resize(slots * kv_width);
  values_.resize(slots * kv_width);
  attended_.resize(slots * query_width);
  log_sums_.resize(slots * model.query_heads);
  logits_.resize(std::size_t{limits.rows} * model.vocabulary);

  normed_.resize(slots * std::max<std::size_t>(model.hidden, query_width));
  stacked_.resize(slots * std::max<std::size_t>(query_width + 2 * kv_width, std::size_t{2} * model.feed_forward));
  projected_.resize(slots * model.hidden);
  partial_.resize(limits.row_tokens * query_width);
  partial_log_sums_.resize(std::size_t{limits.row_tokens} * model.query_heads);

  rotation_ = make_rotation(model);
}

void llama_engine::feed(std::uint32_t row, std::span<std::int32_t const> tokens, std::uint32_t position)
{
  llama_geometry const& model = geometry();
  check_fed_tokens(model, limits_, row, tokens, position);
  float* out = hidden_.data() + std::size_t{first_token(row)} * model.hidden;
  for (std::int32_t const token : tokens) {
    out = std::copy_n(
      weights_->embedding.data() + static_cast<std::size_t>(token) * model.hidden, std::size_t{model.hidden}, out);
  }
  rows_[row] = {.tokens = static_cast<std::uint32_t>(tokens.size()), .position = position, .layer = 0, .sampled = -1};
}

void llama_engine::resume(std::uint32_t row, std::span<float const> hidden, std::uint32_t position, std::uint32_t layer)
{
  llama_geometry const& model = geometry();
  std::size_t const tokens = hidden.size() / model.hidden;
  if (
    row >= limits_.rows || tokens == 0 || tokens > limits_.row_tokens || tokens * model.hidden != hidden.size() ||
    layer > model.layers || position + tokens > model.context_tokens) {
    throw std::out_of_range{
      "row " + std::to_string(row) + " with " + std::to_string(hidden.size()) + " values from position " +
      std::to_string(position) + " before layer " + std::to_string(layer)};
  }
  std::copy(
    hidden.begin(), hidden.end(),
    hidden_.begin() + static_cast<std::ptrdiff_t>(std::size_t{first_token(row)} * model.hidden));
  rows_[row] = {.tokens = static_cast<std::uint32_t>(tokens), .position = position, .layer = layer, .sampled = -1};
}

void llama_engine::project(std::uint32_t layer, row_span rows)
{
  expect_layer(layer, rows, "project");
  llama_geometry const& model = geometry();
  llama_weights::layer const& weights = weights_->layers[layer];
  std::size_t const hidden = model.hidden, query_width = model.query_width(), kv_width = model.kv_width();
  std::size_t const width = query_width + 2 * kv_width;

  for_each_token(rows, [&](std::size_t slot, std::size_t index) {
    rms_norm(
      hidden_.data() + slot * hidden, weights.attention_norm, model.norm_epsilon, normed_.data() + index * hidden);
  });
  multiply(normed_.data(), count_tokens(rows), weights.qkv, hidden, stacked_.data());

  std::size_t index = 0;
  for (std::uint32_t const row : rows) {
    for (std::uint32_t token = 0; token < rows_[row].tokens; ++token, ++index) {
      std::size_t const slot = std::size_t{first_token(row)} + token;
      float const* const from = stacked_.data() + index * width;
      std::copy_n(from, query_width, queries_.data() + slot * query_width);
      std::copy_n(from + query_width, kv_width, keys_.data() + slot * kv_width);
      std::copy_n(from + query_width + kv_width, kv_width, values_.data() + slot * kv_width);
      for (std::size_t at = 0; at < query_width; at += model.head_dim) {
        rotate(queries_.data() + slot * query_width + at, rows_[row].position + token);
      }
      for (std::size_t at = 0; at < kv_width; at += model.head_dim) {
        rotate(keys_.data() + slot * kv_width + at, rows_[row].position + token);
      }
    }
  }
}

void llama_engine::attend_row(
  std::uint32_t layer, std::uint32_t row, std::uint32_t group, std::uint32_t groups, kv_blocks const& kv, part which)
{
  expect_layer(layer, std::span{&row, 1}, "attend");
  llama_geometry const& model = geometry();
  if (kv.heads * groups != model.kv_heads) {
    throw std::invalid_argument{
      "a table of " + std::to_string(groups) + " groups with " + std::to_string(kv.heads) +
      " KV heads each, the model has " + std::to_string(model.kv_heads)};
  }
  attention_shape const shape{
    .queries_per_kv_head = model.queries_per_kv_head(),
    .head_dim = model.head_dim,
    .scale = 1.0F / std::sqrt(static_cast<float>(model.head_dim))};
  std::size_t const slot = first_token(row), stride = model.query_width();
  std::size_t const query_heads = std::size_t{kv.heads} * shape.queries_per_kv_head, first_head = group * query_heads;
  float* const outputs = attended_.data() + slot * stride + first_head * model.head_dim;
  float* const log_sums = log_sums_.data() + slot * model.query_heads + first_head;
  bool const merge = which == part::landed;

  attend_blocks(
    shape, kv,
    {.queries = queries_.data() + slot * stride + first_head * model.head_dim,
     .outputs = merge ? partial_.data() : outputs,
     .stride = stride,
     .log_sums = merge ? partial_log_sums_.data() : log_sums,
     .log_sum_stride = model.query_heads,
     .tokens = rows_[row].tokens},
    attention_);
  if (!merge) return;
  for (std::size_t token = 0; token < rows_[row].tokens; ++token) {
    for (std::size_t head = 0; head < query_heads; ++head) {
      std::size_t const at = token * stride + head * model.head_dim, sum_at = token * model.query_heads + head;
      merge_attention(outputs + at, log_sums[sum_at], partial_.data() + at, partial_log_sums_[sum_at], model.head_dim);
    }
  }
}

void llama_engine::feed_forward(std::uint32_t layer, row_span rows)
{
  expect_layer(layer, rows, "feed_forward");
  llama_geometry const& model = geometry();
  llama_weights::layer const& weights = weights_->layers[layer];
  std::size_t const hidden = model.hidden, query_width = model.query_width(), feed_forward = model.feed_forward;
  std::size_t const count = count_tokens(rows);
  auto const add_projected = [&] {
    for_each_token(rows, [&](std::size_t slot, std::size_t index) {
      float* const to = hidden_.data() + slot * hidden;
      for (std::size_t at = 0; at < hidden; ++at) to[at] += projected_[index * hidden + at];
    });
  };

  for_each_token(rows, [&](std::size_t slot, std::size_t index) {
    std::copy_n(attended_.data() + slot * query_width, query_width, normed_.data() + index * query_width);
  });
  multiply(normed_.data(), count, weights.output, query_width, projected_.data());
  add_projected();

  for_each_token(rows, [&](std::size_t slot, std::size_t index) {
    rms_norm(hidden_.data() + slot * hidden, weights.mlp_norm, model.norm_epsilon, normed_.data() + index * hidden);
  });
  multiply(normed_.data(), count, weights.gate_up, hidden, stacked_.data());
  // The product of gate and up takes the gates' place; rows move together, since `down` wants them without gaps.
  for (std::size_t index = 0; index < count; ++index) {
    float const* const gate = stacked_.data() + index * 2 * feed_forward;
    float* const to = stacked_.data() + index * feed_forward;
    for (std::size_t at = 0; at < feed_forward; ++at) to[at] = silu(gate[at]) * gate[feed_forward + at];
  }
  multiply(stacked_.data(), count, weights.down, feed_forward, projected_.data());
  add_projected();
  for (std::uint32_t const row : rows) ++rows_[row].layer;
}

void llama_engine::sample(row_span rows)
{
  llama_geometry const& model = geometry();
  expect_layer(model.layers, rows, "sample");
  for (std::uint32_t const row : rows) {
    std::size_t const slot = std::size_t{first_token(row)} + rows_[row].tokens - 1;
    rms_norm(hidden_.data() + slot * model.hidden, weights_->final_norm, model.norm_epsilon, normed_.data());
    float* const out = logits_.data() + std::size_t{row} * model.vocabulary;
    multiply(normed_.data(), 1, weights_->embedding, model.hidden, out);
    rows_[row].sampled = static_cast<std::int32_t>(std::max_element(out, out + model.vocabulary) - out);
  }
}

void llama_engine::token_logits(std::uint32_t row, std::uint32_t first, std::uint32_t count, float* out)
{
  llama_geometry const& model = geometry();
  expect_layer(model.layers, std::span{&row, 1}, "token_logits");
  if (count == 0 || first + std::uint64_t{count} > rows_[row].tokens) {
    throw std::out_of_range{
      "logits of tokens " + std::to_string(first) + " to " + std::to_string(first + std::uint64_t{count}) + " of " +
      std::to_string(rows_[row].tokens)};
  }
  for (std::size_t index = 0; index < count; ++index) {
    std::size_t const slot = std::size_t{first_token(row)} + first + index;
    rms_norm(
      hidden_.data() + slot * model.hidden, weights_->final_norm, model.norm_epsilon,
      normed_.data() + index * model.hidden);
  }
  multiply(normed_.data(), count, weights_->embedding, model.hidden, out);
}

std::span<float> llama_engine::attended(std::uint32_t row) noexcept
{
  std::size_t const width = geometry().query_width();
  return std::span{attended_}.subspan(first_token(row) * width, rows_[row].tokens * width);
}

std::span<float const> llama_engine::hidden(std::uint32_t row) const noexcept
{
  std::size_t const width = geometry().hidden;
  return std::span{hidden_}.subspan(first_token(row) * width, rows_[row].tokens * width);
}

void llama_engine::guess_queries(std::uint32_t row, std::uint32_t layer, float* out)
{
  llama_geometry const& model = geometry();
  llama_weights::layer const& weights = weights_->layers.at(layer);
  std::size_t const width = model.query_width(), count = rows_[row].tokens;
  std::span<float const> const before = hidden(row);
  for (std::size_t index = 0; index < count; ++index) {
    rms_norm(
      before.data() + index * model.hidden, weights.attention_norm, model.norm_epsilon,
      normed_.data() + index * model.hidden);
  }
  auto const columns = static_cast<blasint>(model.hidden), outputs = static_cast<blasint>(width);
  cblas_sgemm(
    CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(count), outputs, columns, 1.0F, normed_.data(),
    columns, weights.qkv.data(), columns, 0.0F, out, outputs);
  for (std::size_t index = 0; index < count; ++index) {
    for (std::size_t at = 0; at < width; at += model.head_dim) {
      rotate(out + index * width + at, rows_[row].position + static_cast<std::uint32_t>(index));
    }
  }
}

std::span<float const> llama_engine::logits(std::uint32_t row) const noexcept
{
  return std::span{logits_}.subspan(std::size_t{row} * geometry().vocabulary, geometry().vocabulary);
}

void llama_engine::expect_layer(std::uint32_t layer, row_span rows, char const* call) const
{
  for (std::uint32_t const row : rows) {
    if (row >= limits_.rows || rows_[row].tokens == 0 || rows_[row].layer != layer) {
      throw std::logic_error{
        std::string{call} + " of row " + std::to_string(row) + " at layer " + std::to_string(layer) + ": " +
        (row >= limits_.rows        ? "the engine has " + std::to_string(limits_.rows) + " rows"
           : rows_[row].tokens == 0 ? std::string{"it has no tokens"}
                                    : "it is at layer " + std::to_string(rows_[row].layer))};
    }
  }
}

std::size_t llama_engine::count_tokens(row_span rows) const noexcept
{
  std::size_t count = 0;
  for (std::uint32_t const row : rows) count += rows_[row].tokens;
  return count;
}

template <class Body>
void llama_engine::for_each_token(row_span rows, Body&& body) const
{
  std::size_t index = 0;
  for (std::uint32_t const row : rows) {
    for (std::uint32_t token = 0; token < rows_[row].tokens; ++token) {
      body(std::size_t{first_token(row)} + token, index++);
    }
  }
}

// Rotates channel i together with channel i + head_dim / 2.
void llama_engine::rotate(float* head, std::uint32_t position) const noexcept
{
  std::uint32_t const half = geometry().head_dim / 2;
  float const* const rotation = rotation_.data() + std::size_t{position} * geometry().head_dim;
  for (std::uint32_t pair = 0; pair < half; ++pair) {
    float const cosine = rotation[2 * pair], sine = rotation[2 * pair + 1];
    float const low = head[pair], high = head[pair + half];
    head[pair] = low * cosine - high * sine;
    head[pair + half] = high * cosine + low * sine;
  }
}

}  // namespace host_engine
