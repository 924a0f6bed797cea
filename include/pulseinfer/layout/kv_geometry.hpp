#pragma once

/// The shape of a model's KV cache, and how it is cut into blocks.

#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/layout/plane.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pulseinfer {

/// How a layer attends. `selected`: the selector chooses blocks. `windowed`: the first `sink_tokens` and the last
/// `window_tokens`. `dense`: every block, always resident.
enum class layer_kind : std::uint8_t { selected, windowed, dense };

/// Consecutive layers of one kind.
struct layer_group {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  layer_kind kind = layer_kind::selected;
  std::uint32_t window_tokens = 0;
  std::uint32_t sink_tokens = 0;
};

/// Order of a plane's rows inside a block: `hnd` [head][token][dim], `nhd` [token][head][dim].
enum class token_order : std::uint8_t { hnd, nhd };

/// Configuration of a cache. Plain values; `validate` checks them, the manager does so at construction.
struct kv_geometry {
  std::uint32_t layers = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;   ///< elements of a key row
  std::uint32_t value_dim = 0;  ///< elements of a value row; 0 means head_dim
  std::uint32_t block_tokens = 16;
  std::uint32_t head_groups = 1;  ///< selections per layer: 1 shared by all KV heads, kv_heads headwise, or between
  dtype key_type = dtype::float16;
  dtype value_type = dtype::float16;
  token_order order = token_order::hnd;
  bool value_is_key_prefix = false;  ///< MLA: one latent row per token; its first value_dim elements are the value
  std::uint32_t row_alignment = 1;   ///< bytes that each row's pitch is rounded up to
  std::vector<extra_plane> extra_planes = {};
  std::vector<layer_group> layer_groups = {};  ///< empty: every layer is `selected`

  [[nodiscard]] std::uint32_t value_elements() const { return value_dim == 0 ? head_dim : value_dim; }
  [[nodiscard]] std::uint32_t group_heads() const { return kv_heads / head_groups; }
  [[nodiscard]] std::uint32_t query_group() const { return query_heads / kv_heads; }

  /// The group that `layer` belongs to; one group of `selected` layers where none are given.
  [[nodiscard]] layer_group group_of(layer_id layer) const
  {
    for (layer_group const& group : layer_groups) {
      if (to_index(layer) >= group.first && to_index(layer) < std::uint64_t{group.first} + group.count) {
        return group;
      }
    }
    return layer_group{.first = 0, .count = layers};
  }
};

/// Checks a geometry.
/// @throws configuration_error naming the numbers that do not fit
inline void validate(kv_geometry const& geometry)
{
  auto const number = [](std::uint64_t value) { return std::to_string(value); };
  auto const positive = [&](std::uint64_t value, char const* name) {
    if (value == 0) { throw configuration_error{std::string{name} + " is 0"}; }
  };
  positive(geometry.layers, "layers");
  positive(geometry.query_heads, "query_heads");
  positive(geometry.kv_heads, "kv_heads");
  positive(geometry.head_dim, "head_dim");
  positive(geometry.block_tokens, "block_tokens");
  positive(geometry.head_groups, "head_groups");
  positive(geometry.row_alignment, "row_alignment");
  if (geometry.query_heads % geometry.kv_heads != 0) {
    throw configuration_error{
      number(geometry.query_heads) + " query heads are not a multiple of " + number(geometry.kv_heads) + " KV heads"};
  }
  if (geometry.kv_heads % geometry.head_groups != 0) {
    throw configuration_error{
      number(geometry.kv_heads) + " KV heads cannot be cut into " + number(geometry.head_groups) +
      " equal head groups"};
  }
  if (!is_floating(geometry.key_type) || !is_floating(geometry.value_type)) {
    throw configuration_error{
      std::string{"keys of "} + name_of(geometry.key_type) + " and values of " + name_of(geometry.value_type) +
      ": both need a floating-point type; opaque bytes and scaled integers go into extra planes"};
  }
  if (geometry.value_is_key_prefix && geometry.value_elements() > geometry.head_dim) {
    throw configuration_error{
      "value row of " + number(geometry.value_elements()) + " elements is no prefix of a key row of " +
      number(geometry.head_dim)};
  }
  if (geometry.value_is_key_prefix && geometry.key_type != geometry.value_type) {
    throw configuration_error{
      std::string{"value rows that lie in key rows have their type, "} + name_of(geometry.key_type) + ", not " +
      name_of(geometry.value_type)};
  }
  if (geometry.extra_planes.size() + 2 > block_layout::max_planes) {
    throw configuration_error{
      number(geometry.extra_planes.size()) + " extra planes, at most " + number(block_layout::max_planes - 2) + " fit"};
  }
  for (extra_plane const& plane : geometry.extra_planes) {
    if (plane.bytes_per_token == 0 && plane.bytes_per_block == 0) {
      throw configuration_error{"plane '" + plane.name + "' has no bytes"};
    }
  }
  std::uint64_t next = 0;
  for (layer_group const& group : geometry.layer_groups) {
    if (group.first != next || group.count == 0) {
      throw configuration_error{
        "layer groups must follow one another: group at layer " + number(group.first) + " of " + number(group.count) +
        " layers where layer " + number(next) + " comes next"};
    }
    if (group.kind == layer_kind::windowed && group.window_tokens == 0) {
      throw configuration_error{"windowed layer group at layer " + number(group.first) + " has a window of 0 tokens"};
    }
    next += group.count;
  }
  if (!geometry.layer_groups.empty() && next != geometry.layers) {
    throw configuration_error{"layer groups cover " + number(next) + " of " + number(geometry.layers) + " layers"};
  }
}

/// Lays the planes of a block out: keys, values, then extras in their order, each begun on 16 bytes, the block's size
/// rounded up to 16. With the default order and no padding a block is [K|V][head][token][dim], contiguous.
/// @throws configuration_error
[[nodiscard]] inline block_layout make_block_layout(kv_geometry const& geometry)
{
  validate(geometry);
  constexpr std::uint64_t alignment = 16;
  // Sizes of planes stay far from what 64 bits hold, so that their sum and its rounding do too.
  auto const check_plane = [&](std::uint64_t rows, std::uint64_t bytes) {
    constexpr std::uint64_t most = std::uint64_t{1} << 60U;
    if (bytes > most / rows) {
      throw configuration_error{
        "overflow: a plane of " + std::to_string(rows) + " x " + std::to_string(bytes) + " B in one block exceeds " +
        std::to_string(most) + " B"};
    }
  };
  block_layout layout;
  layout.block_tokens = geometry.block_tokens;
  layout.heads = geometry.group_heads();
  layout.alignment = static_cast<std::uint32_t>(alignment);
  layout.value_is_key_prefix = geometry.value_is_key_prefix;
  layout.value_dim = geometry.value_elements();
  std::uint64_t end = 0;
  auto const add = [&](plane_layout plane) {
    check_plane(1, plane.bytes);
    plane.offset = round_up(end, alignment);
    end = plane.offset + plane.bytes;
    layout.planes[layout.plane_count++] = plane;
  };
  auto const rows = [&](plane_kind kind, dtype type, std::uint32_t dim) {
    plane_layout plane;
    plane.kind = kind;
    plane.type = type;
    plane.dim = dim;
    std::uint64_t const row = std::uint64_t{dim} * size_of(type);
    std::uint64_t const pitch = round_up(row, std::uint64_t{geometry.row_alignment});
    if (pitch > std::numeric_limits<std::uint32_t>::max()) {
      throw configuration_error{
        "a row of " + std::to_string(dim) + " elements, " + std::to_string(pitch) + " B, does not fit 32 bits"};
    }
    if (pitch % size_of(type) != 0) {
      throw configuration_error{
        "unsupported_layout: rows of " + std::to_string(row) + " B rounded up to multiples of " +
        std::to_string(geometry.row_alignment) + " B lie " + std::to_string(pitch) + " B apart, elements need " +
        std::to_string(size_of(type)) + " B alignment"};
    }
    plane.row_bytes = static_cast<std::uint32_t>(row);
    check_plane(geometry.block_tokens, pitch * layout.heads);
    bool const by_head = geometry.order == token_order::hnd;
    plane.token_stride = by_head ? pitch : pitch * layout.heads;
    plane.head_stride = by_head ? pitch * geometry.block_tokens : pitch;
    plane.bytes = pitch * layout.heads * geometry.block_tokens;
    return plane;
  };
  add(rows(plane_kind::key, geometry.key_type, geometry.head_dim));
  if (!geometry.value_is_key_prefix) { add(rows(plane_kind::value, geometry.value_type, geometry.value_elements())); }
  for (extra_plane const& extra : geometry.extra_planes) {
    plane_layout plane;
    plane.token_stride = extra.bytes_per_token;
    plane.row_bytes = extra.bytes_per_token;
    plane.dim = extra.bytes_per_token;
    plane.bytes = std::uint64_t{extra.bytes_per_token} * geometry.block_tokens + extra.bytes_per_block;
    add(plane);
  }
  layout.block_bytes = round_up(end, alignment);
  return layout;
}

/// Byte offset of block `block` in an array of blocks `block_bytes` apart.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t block_offset(
  std::uint64_t block, std::uint64_t block_bytes)
{
  return block * block_bytes;
}

/// Blocks that hold `tokens` tokens.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t blocks_of(std::uint64_t tokens, std::uint32_t block_tokens)
{
  return divide_up(tokens, std::uint64_t{block_tokens});
}

/// The most blocks that a window of `window_tokens` tokens can touch, wherever it begins.
[[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint64_t window_blocks(
  std::uint64_t window_tokens, std::uint32_t block_tokens)
{
  return window_tokens == 0 ? 0 : (window_tokens + block_tokens - 2) / block_tokens + 1;
}

/// Checks that `count` blocks of `block_bytes` can be addressed in 64 bits and numbered in 31.
/// @throws configuration_error with both numbers
inline void validate_extent(std::uint64_t count, std::uint64_t block_bytes)
{
  if (count > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) {
    throw configuration_error{
      std::to_string(count) + " blocks exceed the " + std::to_string(std::numeric_limits<std::int32_t>::max()) +
      " that a 32-bit id numbers"};
  }
  if (block_bytes != 0 && count > std::numeric_limits<std::uint64_t>::max() / block_bytes) {
    throw configuration_error{
      "overflow: " + std::to_string(count) + " blocks x " + std::to_string(block_bytes) + " B does not fit 64 bits"};
  }
}

}  // namespace pulseinfer
