#pragma once

/// One row with a random cache, its table and its tensors, for benchmarks of operations.

#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace pulseinfer_bench {

struct paged_cache {
  paged_cache(pulseinfer::kv_geometry const& shape, std::uint32_t tokens, std::uint32_t new_tokens)
    : geometry{shape},
      layout{pulseinfer::make_block_layout(shape)},
      info{
        .tokens = static_cast<std::int32_t>(tokens),
        .new_tokens = static_cast<std::int32_t>(new_tokens),
        .token_offset = 0,
        .mode = pulseinfer::row_mode::sparse_offloaded},
      blocks{info.blocks(shape.block_tokens)},
      memory(std::size_t{blocks} * layout.block_bytes),
      slots(blocks)
  {
    std::mt19937 random{1};
    std::normal_distribution<float> normal;
    pulseinfer::dtype const type = shape.key_type;
    std::uint64_t const elements = memory.size() / size_of(type);
    // A table of numbers repeats: drawing gigabytes one by one takes longer than what is measured.
    std::vector<float> drawn(4099);
    for (float& x : drawn) { x = normal(random); }
    for (std::uint64_t i = 0; i < elements; ++i) {
      pulseinfer::store_from_float(memory.data(), type, i, drawn[static_cast<std::size_t>(i % drawn.size())]);
    }
    std::vector<std::int32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (std::uint32_t i = 0; i < blocks; ++i) { slots[i] = static_cast<pulseinfer::slot_id>(order[i]); }
    queries.resize(std::size_t{new_tokens} * shape.query_heads * shape.head_dim);
    for (std::size_t i = 0; i < queries.size(); ++i) { queries[i] = drawn[i % drawn.size()]; }
    out.resize(std::size_t{new_tokens} * shape.query_heads * layout.value_dim);
    lse.resize(std::size_t{new_tokens} * shape.query_heads);
  }
  paged_cache(paged_cache&&) = delete;

  [[nodiscard]] pulseinfer::slot_pool_ref pool() const
  {
    return {.layer_base = &base, .slot_stride = layout.block_bytes, .slots = blocks};
  }
  [[nodiscard]] pulseinfer::row_list rows() const { return {.ids = &row, .count = 1}; }
  [[nodiscard]] pulseinfer::block_table table() const
  {
    return {
      .slots = slots.data(),
      .counts = &blocks,
      .info = &info,
      .pool = pool(),
      .layout = layout,
      .layer = pulseinfer::layer_id{0},
      .stride = blocks,
      .head_groups = 1};
  }
  [[nodiscard]] pulseinfer::residency_ref residency()
  {
    return {.slot_of = slots.data(), .layers = 1, .lanes = 1, .max_blocks = blocks};
  }
  [[nodiscard]] pulseinfer::tensor_view query_view()
  {
    return pulseinfer::contiguous_tensor(
      queries.data(), pulseinfer::dtype::float32, static_cast<std::uint64_t>(info.new_tokens), geometry.query_heads,
      geometry.head_dim);
  }
  [[nodiscard]] pulseinfer::tensor_view out_view()
  {
    return pulseinfer::contiguous_tensor(
      out.data(), pulseinfer::dtype::float32, static_cast<std::uint64_t>(info.new_tokens), geometry.query_heads,
      layout.value_dim);
  }

  pulseinfer::kv_geometry geometry;
  pulseinfer::block_layout layout;
  pulseinfer::row_info info;
  std::uint32_t blocks;
  std::vector<std::byte> memory;
  std::byte* base = memory.data();
  std::vector<pulseinfer::slot_id> slots;
  std::vector<float> queries;
  std::vector<float> out;
  std::vector<float> lse;
  pulseinfer::row_id row{0};
};

}  // namespace pulseinfer_bench
