#include "attention.hpp"

#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/lanes.hpp>

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace accuracy {

using pulseinfer::device::float_lanes;
using pulseinfer::device::minus_infinity;

float attention_geometry::scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }

layer_cache::layer_cache(attention_geometry const& geometry, std::uint32_t capacity)
  : geometry_{geometry}, stride_{std::size_t{pulseinfer::round_up(capacity, part)} * geometry.head_dim}
{
  if (geometry.head_dim % part != 0 || geometry.head_dim > 256) {
    throw std::invalid_argument{
      "heads of " + std::to_string(geometry.head_dim) + " channels: multiples of 16 up to 256 are served"};
  }
  keys_.resize(geometry.kv_heads * stride_);
  values_.resize(geometry.kv_heads * stride_);
  columns_.resize(geometry.kv_heads * stride_);
}

void layer_cache::write(std::uint32_t position, std::uint32_t count, float const* keys, float const* values)
{
  std::size_t const dim = geometry_.head_dim;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::size_t const token = position + i;
    for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      std::size_t const from = (std::size_t{i} * geometry_.kv_heads + head) * dim;
      std::copy_n(keys + from, dim, keys_.data() + head * stride_ + token * dim);
      std::copy_n(values + from, dim, values_.data() + head * stride_ + token * dim);
      float* const column = columns_.data() + head * stride_ + token / part * part * dim + token % part;
      for (std::size_t j = 0; j < dim; ++j) { column[j * part] = keys[from + j]; }
    }
  }
}

namespace {

// Scores of one row become weights relative to the largest; returns their sum.
float exponentials(float* scores, std::uint32_t visible, std::uint32_t padded)
{
  std::fill(scores + visible, scores + padded, minus_infinity);
  float_lanes largest{minus_infinity};
  for (std::uint32_t t = 0; t < padded; t += float_lanes::size) {
    float_lanes score;
    score.load(scores + t);
    largest.take_larger(score);
  }
  float const top = largest.largest();
  float_lanes sum;
  for (std::uint32_t t = 0; t < padded; t += float_lanes::size) {
    float_lanes score;
    score.load(scores + t);
    score.exponential_below(top);
    sum.add(score);
    score.store(scores + t);
  }
  return sum.sum();
}

void sum_blocks(float const* weights, std::uint32_t padded, std::uint32_t block_tokens, float factor, float* shares)
{
  for (std::uint32_t begin = 0, block = 0; begin < padded; begin += block_tokens, ++block) {
    float_lanes sum;
    for (std::uint32_t t = begin; t < std::min(begin + block_tokens, padded); t += float_lanes::size) {
      float_lanes weight;
      weight.load(weights + t);
      sum.add(weight);
    }
    shares[block] = sum.sum() * factor;
  }
}

}  // namespace

void attend_densely(
  layer_cache const& cache, float const* queries, std::uint32_t position, std::span<std::uint32_t const> chosen,
  std::uint32_t block_tokens, share_table* shares, float* outputs, dense_scratch& scratch)
{
  attention_geometry const& g = cache.geometry();
  std::uint32_t const group = g.query_group();
  std::size_t const dim = g.head_dim;
  constexpr std::size_t tile = 64;
  for (std::size_t first = 0; first < chosen.size(); first += tile) {
    auto const tokens = static_cast<std::uint32_t>(std::min(tile, chosen.size() - first));
    std::uint32_t const rows = tokens * group;
    std::uint32_t const last = position + chosen[first + tokens - 1] + 1;
    std::uint32_t const padded = pulseinfer::round_up(last, float_lanes::size);
    scratch.queries.resize(rows * dim);
    scratch.scores.resize(std::size_t{rows} * padded);
    scratch.sums.resize(rows);
    scratch.outputs.resize(rows * dim);
    for (std::uint32_t head = 0; head < g.kv_heads; ++head) {
      for (std::uint32_t i = 0; i < tokens; ++i) {
        std::copy_n(
          queries + chosen[first + i] * g.query_width() + head * group * dim, group * dim,
          scratch.queries.data() + i * group * dim);
      }
      auto const m = static_cast<blasint>(rows), n = static_cast<blasint>(last), k = static_cast<blasint>(dim),
                 pitch = static_cast<blasint>(padded);
      cblas_sgemm(
        CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, g.scale(), scratch.queries.data(), k, cache.keys(head), k,
        0.0F, scratch.scores.data(), pitch);
      for (std::uint32_t row = 0; row < rows; ++row) {
        float* const scores = scratch.scores.data() + std::size_t{row} * padded;
        std::uint32_t const visible = position + chosen[first + row / group] + 1;
        scratch.sums[row] = exponentials(scores, visible, padded);
        if (shares != nullptr) {
          auto const place = static_cast<std::uint32_t>(first) + row / group;
          float* const to = shares->row(head * group + row % group, place);
          sum_blocks(scores, padded, block_tokens, 1.0F / scratch.sums[row], to);
          std::fill(to + pulseinfer::divide_up(padded, block_tokens), to + shares->pitch, 0.0F);
        }
      }
      if (outputs == nullptr) { continue; }
      cblas_sgemm(
        CblasRowMajor, CblasNoTrans, CblasNoTrans, m, k, n, 1.0F, scratch.scores.data(), pitch, cache.values(head), k,
        0.0F, scratch.outputs.data(), k);
      for (std::uint32_t row = 0; row < rows; ++row) {
        float const factor = 1.0F / scratch.sums[row];
        float* const to = outputs + (first + row / group) * g.query_width() + (head * group + row % group) * dim;
        for (std::size_t j = 0; j < dim; ++j) { to[j] = scratch.outputs[row * dim + j] * factor; }
      }
    }
  }
}

namespace {

// Up to four query heads at a time: what is read of keys and values serves all of them.
template <std::uint32_t Heads>
void score_part(
  float const* columns, float const* queries, std::size_t dim, float scale, float* scores, std::size_t pitch)
{
  float_lanes even[Heads], odd[Heads];
  for (std::size_t j = 0; j < dim; j += 2) {
    float_lanes first, second;
    first.load(columns + j * layer_cache::part);
    second.load(columns + (j + 1) * layer_cache::part);
    for (std::uint32_t h = 0; h < Heads; ++h) {
      even[h].add_scaled(queries[h * dim + j], first);
      odd[h].add_scaled(queries[h * dim + j + 1], second);
    }
  }
  for (std::uint32_t h = 0; h < Heads; ++h) {
    even[h].add(odd[h]);
    even[h].scale(scale);
    even[h].store(scores + h * pitch);
  }
}

template <std::uint32_t Heads>
void sum_values(
  float const* values, std::span<pulseinfer::block_id const> blocks, std::uint32_t block_tokens, std::uint32_t visible,
  std::size_t dim, float const* weights, std::size_t pitch, float const* factors, float* outputs)
{
  for (std::size_t channel = 0; channel < dim; channel += float_lanes::size) {
    float_lanes sum[Heads];
    std::size_t at = 0;
    for (pulseinfer::block_id const block : blocks) {
      std::uint32_t const begin = static_cast<std::uint32_t>(pulseinfer::to_number(block)) * block_tokens;
      std::uint32_t const count = std::min(block_tokens, visible - begin);
      float const* value = values + begin * dim + channel;
      for (std::uint32_t t = 0; t < count; ++t, value += dim) {
        float_lanes lanes;
        lanes.load(value);
        for (std::uint32_t h = 0; h < Heads; ++h) { sum[h].add_scaled(weights[h * pitch + at + t], lanes); }
      }
      at += block_tokens;
    }
    for (std::uint32_t h = 0; h < Heads; ++h) {
      sum[h].scale(factors[h]);
      sum[h].store(outputs + h * dim + channel);
    }
  }
}

template <std::uint32_t Heads>
void attend_heads(
  layer_cache const& cache, std::uint32_t head, float const* queries, std::span<pulseinfer::block_id const> blocks,
  std::uint32_t block_tokens, std::uint32_t visible, float* outputs, std::vector<float>& scratch)
{
  std::size_t const dim = cache.geometry().head_dim;
  std::size_t const pitch = blocks.size() * block_tokens;
  scratch.resize(Heads * pitch);
  std::size_t at = 0;
  for (pulseinfer::block_id const block : blocks) {
    std::uint32_t const begin = static_cast<std::uint32_t>(pulseinfer::to_number(block)) * block_tokens;
    for (std::uint32_t t = 0; t < block_tokens; t += layer_cache::part, at += layer_cache::part) {
      if (begin + t >= visible) {
        for (std::uint32_t h = 0; h < Heads; ++h) {
          std::fill_n(scratch.data() + h * pitch + at, std::size_t{layer_cache::part}, minus_infinity);
        }
        continue;
      }
      score_part<Heads>(
        cache.key_columns(head, (begin + t) / layer_cache::part), queries, dim, cache.geometry().scale(),
        scratch.data() + at, pitch);
      for (std::uint32_t i = begin + t + layer_cache::part > visible ? visible - begin - t : layer_cache::part;
           i < layer_cache::part; ++i) {
        for (std::uint32_t h = 0; h < Heads; ++h) { scratch[h * pitch + at + i] = minus_infinity; }
      }
    }
  }
  float factors[Heads];
  for (std::uint32_t h = 0; h < Heads; ++h) {
    auto const count = static_cast<std::uint32_t>(pitch);
    factors[h] = 1.0F / exponentials(scratch.data() + h * pitch, count, count);
  }
  sum_values<Heads>(cache.values(head), blocks, block_tokens, visible, dim, scratch.data(), pitch, factors, outputs);
}

}  // namespace

void attend_chosen(
  layer_cache const& cache, std::uint32_t head, float const* queries, std::span<pulseinfer::block_id const> blocks,
  std::uint32_t block_tokens, std::uint32_t visible, float* outputs, std::vector<float>& scratch)
{
  std::size_t const dim = cache.geometry().head_dim;
  for (std::uint32_t left = cache.geometry().query_group(); left > 0;) {
    std::uint32_t const now = std::min(left, 4U);
    auto const run = [&](auto attend) {
      attend(cache, head, queries, blocks, block_tokens, visible, outputs, scratch);
    };
    switch (now) {
      case 1: run(attend_heads<1>); break;
      case 2: run(attend_heads<2>); break;
      case 3: run(attend_heads<3>); break;
      default: run(attend_heads<4>); break;
    }
    queries += now * dim;
    outputs += now * dim;
    left -= now;
  }
}

}  // namespace accuracy
