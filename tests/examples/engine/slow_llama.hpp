/// The model's formulas once more, as slowly and obviously as they can be written: the whole sequence at once, in doubles,
/// without a cache. What the engine computes must agree with it.
#pragma once

#include "engine/llama_weights.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace slow_llama {

using row = std::vector<double>;
using matrix = std::vector<row>;

inline row multiply(std::vector<float> const& weights, std::size_t first_row, std::size_t rows, row const& in)
{
  row out(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < in.size(); ++j) out[i] += double{weights[(first_row + i) * in.size() + j]} * in[j];
  }
  return out;
}

inline row rms_norm(row const& in, std::vector<float> const& weight, double epsilon)
{
  double mean_square = 0;
  for (double const x : in) mean_square += x * x / static_cast<double>(in.size());
  row out(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) out[i] = in[i] / std::sqrt(mean_square + epsilon) * double{weight[i]};
  return out;
}

// Channels i and i + head_dim / 2 are one complex number; it turns by position / theta^(2i / head_dim).
inline void rotate(row& heads, std::size_t head_dim, double theta, std::size_t position)
{
  for (std::size_t first = 0; first < heads.size(); first += head_dim) {
    for (std::size_t i = 0; i < head_dim / 2; ++i) {
      double const angle =
        static_cast<double>(position) / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      double const re = heads[first + i], im = heads[first + i + head_dim / 2];
      heads[first + i] = re * std::cos(angle) - im * std::sin(angle);
      heads[first + i + head_dim / 2] = re * std::sin(angle) + im * std::cos(angle);
    }
  }
}

/// Logits after each of the tokens.
inline matrix logits(host_engine::llama_weights const& weights, std::vector<std::int32_t> const& tokens)
{
  host_engine::llama_geometry const& model = weights.geometry;
  std::size_t const length = tokens.size(), d = model.head_dim;
  matrix hidden;
  for (std::int32_t const token : tokens) {
    auto const first = weights.embedding.begin() + static_cast<std::ptrdiff_t>(token) * model.hidden;
    hidden.emplace_back(first, first + model.hidden);
  }
  for (host_engine::llama_weights::layer const& layer : weights.layers) {
    matrix q, k, v;
    for (std::size_t t = 0; t < length; ++t) {
      row const x = rms_norm(hidden[t], layer.attention_norm, double{model.norm_epsilon});
      q.push_back(multiply(layer.qkv, 0, model.query_heads * d, x));
      k.push_back(multiply(layer.qkv, model.query_heads * d, model.kv_heads * d, x));
      v.push_back(multiply(layer.qkv, (model.query_heads + model.kv_heads) * d, model.kv_heads * d, x));
      rotate(q[t], d, double{model.rope_theta}, t);
      rotate(k[t], d, double{model.rope_theta}, t);
    }
    for (std::size_t t = 0; t < length; ++t) {
      row attended(model.query_heads * d);
      for (std::size_t head = 0; head < model.query_heads; ++head) {
        std::size_t const kv_head = head / (model.query_heads / model.kv_heads);  // neighbours share a KV head
        row weight(t + 1);
        double sum = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          double score = 0;
          for (std::size_t i = 0; i < d; ++i) score += q[t][head * d + i] * k[s][kv_head * d + i];
          weight[s] = std::exp(score / std::sqrt(static_cast<double>(d)));
          sum += weight[s];
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < d; ++i) attended[head * d + i] += weight[s] / sum * v[s][kv_head * d + i];
        }
      }
      row const projected = multiply(layer.output, 0, model.hidden, attended);
      for (std::size_t i = 0; i < model.hidden; ++i) hidden[t][i] += projected[i];

      row const x = rms_norm(hidden[t], layer.mlp_norm, double{model.norm_epsilon});
      row const gate = multiply(layer.gate_up, 0, model.feed_forward, x);
      row const up = multiply(layer.gate_up, model.feed_forward, model.feed_forward, x);
      row product(model.feed_forward);
      for (std::size_t i = 0; i < product.size(); ++i) product[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      row const down = multiply(layer.down, 0, model.hidden, product);
      for (std::size_t i = 0; i < model.hidden; ++i) hidden[t][i] += down[i];
    }
  }
  matrix out;
  for (row const& x : hidden) {
    out.push_back(
      multiply(weights.embedding, 0, model.vocabulary, rms_norm(x, weights.final_norm, double{model.norm_epsilon})));
  }
  return out;
}

}  // namespace slow_llama
