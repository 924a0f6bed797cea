#pragma once

/// Attention over a block table, in tiles of tokens, with the log-sum-exp of its scores.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/exponential.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer::device {

/// Sizes of the pieces that one call works in. They follow from the row sizes alone, so that results depend on no batch.
struct attention_tile {
  std::uint32_t queries = 1;  ///< (token, query head) pairs of one call
  std::uint32_t tokens = 16;  ///< a multiple of 16
  std::uint32_t key_dim = 0;
  std::uint32_t value_dim = 0;
  std::uint32_t value_pitch = 0;  ///< value_dim, rounded up to lanes

  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::size_t scratch_floats() const
  {
    return std::size_t{queries} * (key_dim + tokens + 2U * value_pitch + 5U) +
      std::size_t{tokens} * (key_dim + value_pitch) + 4U * std::size_t{key_dim};
  }
};

static_assert(std::is_trivially_copyable_v<attention_tile>);

/// @param pairs the most (token, query head) pairs of a row and KV head; the tile is no larger
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr attention_tile make_attention_tile(
  block_layout const& layout, std::uint32_t pairs)
{
  attention_tile tile;
  tile.key_dim = layout.key().dim;
  tile.value_dim = layout.value_dim;
  tile.value_pitch = round_up(layout.value_dim, float_lanes::size);
  // Keys and values of a tile are to stay in a CPU's first cache, all of it in a GPU's shared memory.
  constexpr std::uint32_t most_floats = 8192;
  tile.tokens = 64;
  while (tile.tokens > 16U && tile.tokens * (tile.key_dim + tile.value_pitch) > most_floats) { tile.tokens /= 2U; }
  tile.queries = 32;
  while (tile.queries > 4U && tile.queries * (tile.key_dim + 2U * tile.value_pitch) > most_floats) {
    tile.queries /= 2U;
  }
  if (pairs < tile.queries) { tile.queries = pairs == 0U ? 1U : pairs; }
  return tile;
}

/// What the query heads of one KV head ask of one lane.
struct attention_task {
  lane_id lane = none<lane_id>;
  std::uint32_t head = 0;    ///< KV head inside the lane's head group
  tensor_view queries = {};  ///< [tokens, query_heads, key_dim]
  tensor_view out = {};      ///< [tokens, query_heads, value_dim], written
  float* lse = nullptr;      ///< [tokens, query_heads], written; natural logarithm, -inf where nothing was attended
  std::uint64_t first_token = 0;  ///< the row's first token in the tensors
  std::uint32_t tokens = 0;       ///< the row's query tokens, which are the last ones of its sequence
  std::uint32_t first_query_head = 0;
  std::uint32_t query_heads = 1;  ///< query heads that share the KV head
  std::uint32_t first_pair = 0;   ///< pair i is token i / query_heads, query head first_query_head + i % query_heads
  std::uint32_t pairs = 0;        ///< at most tile.queries
  float scale = 1.0F;
};

static_assert(std::is_trivially_copyable_v<attention_task>);

namespace detail {

/// Four queries at a time give a processor enough independent sums to work on.
inline constexpr std::uint32_t attention_quad = 4;

/// The last query where the quad has fewer than four: it is computed again and not used.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t quad_member(
  std::uint32_t quad, std::uint32_t member, std::uint32_t count)
{
  std::uint32_t const index = quad * attention_quad + member;
  return index < count ? index : count - 1U;
}

struct attention_arrays {
  float* queries;     // [pairs, key_dim], scaled
  float* keys;        // [key_dim, tile tokens]
  float* values;      // [tile tokens, value_pitch]
  float* rows;        // [4, key_dim] keys on their way to columns
  float* weights;     // [pairs, tile tokens]
  float* sums;        // [pairs, value_pitch]
  float* lost;        // [pairs, value_pitch] what rounding has added to `sums`
  float* top;         // [pairs] largest score so far
  float* total;       // [pairs] sum of e^(score - top)
  float* total_lost;  // [pairs]
  float* factor;      // [pairs] by which this tile's top lowers what was summed before
  float* visible;     // [pairs] tokens of this tile that the pair sees

  PULSEINFER_HOST_DEVICE attention_arrays(attention_tile const& tile, std::byte* temp_storage)
  {
    auto* next = reinterpret_cast<float*>(temp_storage);
    auto const take = [&next](std::size_t count) {
      float* const begin = next;
      next += count;
      return begin;
    };
    keys = take(std::size_t{tile.key_dim} * tile.tokens);
    values = take(std::size_t{tile.tokens} * tile.value_pitch);
    rows = take(4U * std::size_t{tile.key_dim});
    weights = take(std::size_t{tile.queries} * tile.tokens);
    sums = take(std::size_t{tile.queries} * tile.value_pitch);
    lost = take(std::size_t{tile.queries} * tile.value_pitch);
    queries = take(std::size_t{tile.queries} * tile.key_dim);
    top = take(tile.queries);
    total = take(tile.queries);
    total_lost = take(tile.queries);
    factor = take(tile.queries);
    visible = take(tile.queries);
  }
};

/// Row of a token of a lane's table.
template <class T>
[[nodiscard]] PULSEINFER_HOST_DEVICE T const* table_row(
  block_table const& table, attention_task const& task, plane_layout const& plane, std::uint32_t token)
{
  std::uint32_t const block_tokens = table.layout.block_tokens;
  return reinterpret_cast<T const*>(
    table.block(task.lane, token / block_tokens) + row_offset(plane, task.head, token % block_tokens));
}

/// Keys of tokens [begin, begin + count), tokens side by side.
template <class Key, thread_group Group>
PULSEINFER_HOST_DEVICE void load_attention_keys(
  Group const& group, block_table const& table, attention_task const& task, attention_tile const& tile,
  attention_arrays const& at, std::uint32_t begin, std::uint32_t count)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  // Four tokens at a time, so that a column is written in pieces of four. Each rank has channels of its own.
  for (std::uint32_t first = 0; first < round_up(count, float_lanes::size); first += 4U) {
    float const* row[4];
    for (std::uint32_t i = 0; i < 4U; ++i) {
      float* const wide = at.rows + std::size_t{i} * tile.key_dim;
      row[i] = wide;
      if (first + i >= count) {
        for (std::uint32_t j = rank; j < tile.key_dim; j += size) { wide[j] = 0.0F; }
        continue;
      }
      auto const* const key = table_row<Key>(table, task, table.layout.key(), begin + first + i);
      if constexpr (std::is_same_v<Key, float>) {
        row[i] = key;
      } else {
        convert_row(group, key, wide, tile.key_dim);
      }
    }
    float* const columns = at.keys + first;
    for (std::uint32_t j = rank; j < tile.key_dim; j += size) {
      float* const column = columns + std::size_t{j} * tile.tokens;
      float const values[4] = {row[0][j], row[1][j], row[2][j], row[3][j]};
      for (std::uint32_t i = 0; i < 4U; ++i) { column[i] = values[i]; }
    }
  }
}

/// Values of tokens [begin, begin + count).
template <class Value, thread_group Group>
PULSEINFER_HOST_DEVICE void load_attention_values(
  Group const& group, block_table const& table, attention_task const& task, attention_tile const& tile,
  attention_arrays const& at, std::uint32_t begin, std::uint32_t count)
{
  for (std::uint32_t t = 0; t < count; ++t) {
    convert_row(
      group, table_row<Value>(table, task, table.layout.value(), begin + t),
      at.values + std::size_t{t} * tile.value_pitch, tile.value_dim);
  }
}

/// Weights of the tile's tokens become scores.
template <thread_group Group>
PULSEINFER_HOST_DEVICE void score_attention_tile(
  Group const& group, attention_task const& task, attention_tile const& tile, attention_arrays const& at,
  std::uint32_t count)
{
  std::uint32_t const chunks = divide_up(count, float_lanes::size);
  std::uint32_t const units = divide_up(task.pairs, attention_quad) * chunks;
  for (std::uint32_t unit = group.thread_rank(); unit < units; unit += group.size()) {
    std::uint32_t const quad = unit / chunks;
    std::uint32_t const chunk = unit % chunks * float_lanes::size;
    float const* query[attention_quad];
    float_lanes sum[attention_quad];
    for (std::uint32_t i = 0; i < attention_quad; ++i) {
      query[i] = at.queries + std::size_t{quad_member(quad, i, task.pairs)} * tile.key_dim;
    }
    for (std::uint32_t j = 0; j < tile.key_dim; ++j) {
      float_lanes key;
      key.load(at.keys + std::size_t{j} * tile.tokens + chunk);
      for (std::uint32_t i = 0; i < attention_quad; ++i) { sum[i].add_scaled(query[i][j], key); }
    }
    for (std::uint32_t i = 0; i < attention_quad; ++i) {
      sum[i].store(at.weights + std::size_t{quad_member(quad, i, task.pairs)} * tile.tokens + chunk);
    }
  }
}

/// Adds `value` to `sum`, keeping in `lost` what rounding adds, so that an order of many tiles costs no accuracy.
template <class T>
PULSEINFER_HOST_DEVICE void add_compensated(T& sum, T& lost, T value)
{
  value -= lost;
  T const next = sum + value;
  lost = (next - sum) - value;
  sum = next;
}

PULSEINFER_HOST_DEVICE inline void add_compensated(float_lanes& sum, float_lanes& lost, float_lanes& value)
{
  value.subtract(lost);
  float_lanes next = sum;
  next.add(value);
  lost = next;
  lost.subtract(sum);
  lost.subtract(value);
  sum = next;
}

/// Scores become weights relative to the largest score so far.
/// @param begin place of the tile's first token in the table   @param tokens of the table
template <thread_group Group>
PULSEINFER_HOST_DEVICE void weigh_attention_tile(
  Group const& group, block_table const& table, attention_task const& task, attention_tile const& tile,
  attention_arrays const& at, std::uint32_t begin, std::uint32_t count, std::uint32_t tokens)
{
  for (std::uint32_t pair = group.thread_rank(); pair < task.pairs; pair += group.size()) {
    // A query sees its own token and earlier ones. The landed part holds full earlier blocks only.
    std::uint32_t const later =
      table.which == part::landed ? 0U : task.tokens - 1U - (task.first_pair + pair) / task.query_heads;
    std::uint32_t const end = tokens > later ? tokens - later : 0U;
    std::uint32_t const visible = end <= begin ? 0U : (end - begin < count ? end - begin : count);
    at.visible[pair] = static_cast<float>(visible);
    at.factor[pair] = 1.0F;
    if (visible == 0U) { continue; }

    float* const weight = at.weights + std::size_t{pair} * tile.tokens;
    std::uint32_t const padded = round_up(visible, float_lanes::size);
    for (std::uint32_t t = visible; t < padded; ++t) { weight[t] = minus_infinity; }
    float_lanes largest{minus_infinity};
    for (std::uint32_t t = 0; t < padded; t += float_lanes::size) {
      float_lanes score;
      score.load(weight + t);
      largest.take_larger(score);
    }
    float const before = at.top[pair];
    float const here = largest.largest();
    float const top = here > before ? here : before;
    float_lanes sum;
    for (std::uint32_t t = 0; t < padded; t += float_lanes::size) {
      float_lanes score;
      score.load(weight + t);
      score.exponential_below(top);
      sum.add(score);
      score.store(weight + t);
    }
    float const factor = exponential(before - top);
    float total = at.total[pair] * factor;
    float lost = at.total_lost[pair] * factor;
    add_compensated(total, lost, sum.sum());
    at.total[pair] = total;
    at.total_lost[pair] = lost;
    at.factor[pair] = factor;
    at.top[pair] = top;
  }
}

/// Adds the tile's weighted values to the sums.
template <thread_group Group>
PULSEINFER_HOST_DEVICE void sum_attention_tile(
  Group const& group, attention_task const& task, attention_tile const& tile, attention_arrays const& at)
{
  std::uint32_t const chunks = tile.value_pitch / float_lanes::size;
  std::uint32_t const units = divide_up(task.pairs, attention_quad) * chunks;
  for (std::uint32_t unit = group.thread_rank(); unit < units; unit += group.size()) {
    std::uint32_t const quad = unit / chunks;
    std::uint32_t const chunk = unit % chunks * float_lanes::size;
    float const* weight[attention_quad];
    std::uint32_t visible[attention_quad];
    std::uint32_t common = tile.tokens;
    float_lanes sum[attention_quad];
    for (std::uint32_t i = 0; i < attention_quad; ++i) {
      std::uint32_t const pair = quad_member(quad, i, task.pairs);
      weight[i] = at.weights + std::size_t{pair} * tile.tokens;
      visible[i] = static_cast<std::uint32_t>(at.visible[pair]);
      common = visible[i] < common ? visible[i] : common;
    }
    for (std::uint32_t t = 0; t < common; ++t) {
      float_lanes value;
      value.load(at.values + std::size_t{t} * tile.value_pitch + chunk);
      for (std::uint32_t i = 0; i < attention_quad; ++i) { sum[i].add_scaled(weight[i][t], value); }
    }
    for (std::uint32_t i = 0; i < attention_quad && quad * attention_quad + i < task.pairs; ++i) {
      if (visible[i] == 0U) { continue; }
      for (std::uint32_t t = common; t < visible[i]; ++t) {
        float_lanes value;
        value.load(at.values + std::size_t{t} * tile.value_pitch + chunk);
        sum[i].add_scaled(weight[i][t], value);
      }
      std::uint32_t const pair = quad * attention_quad + i;
      std::size_t const place = std::size_t{pair} * tile.value_pitch + chunk;
      float_lanes total;
      float_lanes lost;
      total.load(at.sums + place);
      lost.load(at.lost + place);
      total.scale(at.factor[pair]);
      lost.scale(at.factor[pair]);
      add_compensated(total, lost, sum[i]);
      total.store(at.sums + place);
      lost.store(at.lost + place);
    }
  }
}

}  // namespace detail

/// Attends one lane's table with the queries of one KV head. Softmax in one pass, float sums, tokens in the table's order.
/// @param temp_storage [tile.scratch_floats()] floats, shared by the group   @sync several; none after the last write
template <thread_group Group>
PULSEINFER_HOST_DEVICE void attend(
  Group const& group, block_table const& table, attention_task const& task, attention_tile const& tile,
  std::byte* temp_storage)
{
  detail::attention_arrays const at{tile, temp_storage};
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  auto const token_of = [&](std::uint32_t pair) {
    return task.first_token + (task.first_pair + pair) / task.query_heads;
  };
  auto const head_of = [&](std::uint32_t pair) {
    return task.first_query_head + (task.first_pair + pair) % task.query_heads;
  };

  for (std::uint32_t pair = 0; pair < task.pairs; ++pair) {
    float* const query = at.queries + std::size_t{pair} * tile.key_dim;
    widen_row(group, task.queries.row(token_of(pair), head_of(pair)), task.queries.type, query, tile.key_dim);
    for (std::uint32_t j = rank; j < tile.key_dim; j += size) { query[j] *= task.scale; }
  }
  for (std::uint32_t i = rank; i < task.pairs * tile.value_pitch; i += size) {
    at.sums[i] = 0.0F;
    at.lost[i] = 0.0F;
  }
  std::uint32_t const padding = tile.value_pitch - tile.value_dim;
  for (std::uint32_t i = rank; i < padding * tile.tokens; i += size) {
    at.values[std::size_t{i / padding} * tile.value_pitch + tile.value_dim + i % padding] = 0.0F;
  }
  for (std::uint32_t pair = rank; pair < task.pairs; pair += size) {
    at.top[pair] = minus_infinity;
    at.total[pair] = 0.0F;
    at.total_lost[pair] = 0.0F;
  }

  std::uint32_t const tokens = table.tokens(task.lane);
  for (std::uint32_t begin = 0; begin < tokens; begin += tile.tokens) {
    std::uint32_t const count = tokens - begin < tile.tokens ? tokens - begin : tile.tokens;
    visit_elements(table.layout.key().type, [&](auto stored) {
      detail::load_attention_keys<typename decltype(stored)::type>(group, table, task, tile, at, begin, count);
    });
    visit_elements(table.layout.value().type, [&](auto stored) {
      detail::load_attention_values<typename decltype(stored)::type>(group, table, task, tile, at, begin, count);
    });
    group.sync();
    detail::score_attention_tile(group, task, tile, at, count);
    group.sync();
    detail::weigh_attention_tile(group, table, task, tile, at, begin, count, tokens);
    group.sync();
    detail::sum_attention_tile(group, task, tile, at);
    group.sync();
  }
  if (tokens == 0U) { group.sync(); }

  for (std::uint32_t pair = 0; pair < task.pairs; ++pair) {
    float* const sums = at.sums + std::size_t{pair} * tile.value_pitch;
    float const* const lost = at.lost + std::size_t{pair} * tile.value_pitch;
    float const total = at.total[pair] - at.total_lost[pair];
    bool const attended = at.top[pair] > minus_infinity || total != 0.0F;
    float const divisor = attended ? total : 1.0F;
    for (std::uint32_t j = rank; j < tile.value_dim; j += size) { sums[j] = (sums[j] - lost[j]) / divisor; }
    narrow_row(group, sums, task.out.row(token_of(pair), head_of(pair)), task.out.type, tile.value_dim);
    if (rank == 0U && task.lse != nullptr) {
      task.lse[token_of(pair) * task.out.heads + head_of(pair)] = at.top[pair] + logarithm(divisor);
    }
  }
}

}  // namespace pulseinfer::device
