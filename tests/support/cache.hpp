#pragma once

/// A cache with random keys and values in shuffled slots, and the same numbers at hand for slow references. What was never
/// written holds NaN. Memory comes from std::pmr's default resource, which a test on a GPU sets to one that the GPU reads.

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
#include <cstring>
#include <memory_resource>
#include <numeric>
#include <random>
#include <vector>

namespace pulseinfer_test {

/// `value` as an element of `type` holds it.
inline float rounded(pulseinfer::dtype type, float value)
{
  std::byte stored[4];
  pulseinfer::store_from_float(stored, type, 0, value);
  return pulseinfer::load_as_float(stored, type, 0);
}

/// A [tokens, heads, dim] tensor with padding between heads, and random contents.
class tensor {
 public:
  tensor(
    pulseinfer::dtype type, std::uint64_t tokens, std::uint32_t heads, std::uint32_t dim, std::uint32_t padding = 0)
  {
    view.type = type;
    view.tokens = tokens;
    view.heads = heads;
    view.dim = dim;
    view.head_stride = std::uint64_t{dim + padding} * pulseinfer::size_of(type);
    view.token_stride = view.head_stride * heads;
    bytes_.assign(static_cast<std::size_t>(view.token_stride * tokens + 1), std::byte{0xFF});
    view.data = bytes_.data();
  }
  tensor(tensor&&) = delete;

  void randomise(std::mt19937& random, float sigma = 1.0F)
  {
    std::normal_distribution<float> normal{0.0F, sigma};
    for (std::uint64_t t = 0; t < view.tokens; ++t) {
      for (std::uint32_t h = 0; h < view.heads; ++h) {
        for (std::uint32_t j = 0; j < view.dim; ++j) { set(t, h, j, normal(random)); }
      }
    }
  }
  void set(std::uint64_t token, std::uint32_t head, std::uint32_t j, float value)
  {
    pulseinfer::store_from_float(view.row(token, head), view.type, j, value);
  }
  [[nodiscard]] float at(std::uint64_t token, std::uint32_t head, std::uint32_t j) const
  {
    return pulseinfer::load_as_float(view.row(token, head), view.type, j);
  }
  [[nodiscard]] std::vector<std::byte> bytes() const { return {bytes_.begin(), bytes_.end()}; }

  pulseinfer::tensor_view view;

 private:
  std::pmr::vector<std::byte> bytes_;
};

struct row_shape {
  std::uint32_t tokens = 0;  ///< new ones included
  std::uint32_t new_tokens = 1;
};

class cache {
 public:
  /// Row i of the batch is row id rows - 1 - i, and its tensors begin after those of the rows before it.
  cache(pulseinfer::kv_geometry const& shape, std::vector<row_shape> const& rows, std::uint32_t seed, bool fill = true)
    : geometry{shape}, layout{pulseinfer::make_block_layout(shape)}, random{seed}
  {
    auto const count = static_cast<std::uint32_t>(rows.size());
    std::int32_t offset = 2;  // tensors hold other tokens too
    info.resize(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      auto const row = count - 1 - i;
      ids.push_back(static_cast<pulseinfer::row_id>(row));
      info[row] = {
        .tokens = static_cast<std::int32_t>(rows[i].tokens),
        .new_tokens = static_cast<std::int32_t>(rows[i].new_tokens),
        .token_offset = offset,
        .mode = pulseinfer::row_mode::sparse_offloaded};
      offset += info[row].new_tokens;
      max_blocks = std::max(max_blocks, info[row].blocks(layout.block_tokens));
      most_new = std::max(most_new, rows[i].new_tokens);
    }
    tensor_tokens = static_cast<std::uint64_t>(offset) + 1;

    std::uint32_t const lanes = count * geometry.head_groups;
    std::uint32_t const slots = std::max(1U, lanes * max_blocks + 3);
    memory_.assign(std::size_t{geometry.layers} * slots * layout.block_bytes + 16, std::byte{0xFF});
    std::byte* base = memory_.data();
    while (reinterpret_cast<std::uintptr_t>(base) % 16 != 0) { ++base; }
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      bases_.push_back(base + std::size_t{layer} * slots * layout.block_bytes);
    }
    pool = {.layer_base = bases_.data(), .slot_stride = layout.block_bytes, .slots = slots, .per_layer = true};
    slot_of_.assign(std::size_t{geometry.layers} * lanes * max_blocks, pulseinfer::none<pulseinfer::slot_id>);
    residency.slot_of = slot_of_.data();
    residency.layers = geometry.layers;
    residency.lanes = lanes;
    residency.max_blocks = max_blocks;
    std::vector<std::int32_t> order(slots);
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::size_t next = 0;
      for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        std::uint32_t const blocks = info[lane / geometry.head_groups].blocks(layout.block_tokens);
        pulseinfer::slot_id* const places =
          residency.slots_of_lane(static_cast<pulseinfer::layer_id>(layer), static_cast<pulseinfer::lane_id>(lane));
        for (std::uint32_t block = 0; block < blocks; ++block) {
          places[block] = static_cast<pulseinfer::slot_id>(order[next++]);
        }
      }
    }
    if (fill) { fill_random(); }
  }
  cache(cache&&) = delete;

  /// Address of a (row, KV head, position) row of a plane.
  [[nodiscard]] std::byte* address(
    pulseinfer::plane_layout const& plane, std::uint32_t layer, std::uint32_t row, std::uint32_t kv_head,
    std::uint32_t position) const
  {
    std::uint32_t const group = kv_head / layout.heads;
    pulseinfer::lane_id const lane =
      pulseinfer::lane_of(static_cast<pulseinfer::row_id>(row), group, geometry.head_groups);
    auto const id = static_cast<pulseinfer::layer_id>(layer);
    pulseinfer::slot_id const slot = residency.slots_of_lane(id, lane)[position / layout.block_tokens];
    return pool.address(id, slot) +
      pulseinfer::row_offset(plane, kv_head % layout.heads, position % layout.block_tokens);
  }
  [[nodiscard]] float key(
    std::uint32_t layer, std::uint32_t row, std::uint32_t head, std::uint32_t position, std::uint32_t j) const
  {
    return pulseinfer::load_as_float(address(layout.key(), layer, row, head, position), layout.key().type, j);
  }
  [[nodiscard]] float value(
    std::uint32_t layer, std::uint32_t row, std::uint32_t head, std::uint32_t position, std::uint32_t j) const
  {
    return pulseinfer::load_as_float(address(layout.value(), layer, row, head, position), layout.value().type, j);
  }
  void set_key(
    std::uint32_t layer, std::uint32_t row, std::uint32_t head, std::uint32_t position, std::uint32_t j,
    float value) const
  {
    pulseinfer::store_from_float(address(layout.key(), layer, row, head, position), layout.key().type, j, value);
  }
  void set_value(
    std::uint32_t layer, std::uint32_t row, std::uint32_t head, std::uint32_t position, std::uint32_t j,
    float value) const
  {
    pulseinfer::store_from_float(address(layout.value(), layer, row, head, position), layout.value().type, j, value);
  }

  void fill_random()
  {
    std::normal_distribution<float> normal{0.0F, 1.0F};
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      for (std::uint32_t row = 0; row < info.size(); ++row) {
        for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
          for (std::uint32_t t = 0; t < static_cast<std::uint32_t>(info[row].tokens); ++t) {
            for (std::uint32_t i = 0; i < (layout.value_is_key_prefix ? 1U : 2U); ++i) {
              pulseinfer::plane_layout const* const plane = &layout.planes[i];
              std::byte* const at = address(*plane, layer, row, head, t);
              for (std::uint32_t j = 0; j < plane->dim; ++j) {
                pulseinfer::store_from_float(at, plane->type, j, normal(random));
              }
            }
          }
        }
      }
    }
  }

  [[nodiscard]] pulseinfer::row_list rows() const
  {
    return {.ids = ids.data(), .count = static_cast<std::uint32_t>(ids.size())};
  }

  /// A table that lists, for each lane, the blocks that `chosen` is true for, by ascending id. Lives as long as the cache.
  template <class Chosen>
  [[nodiscard]] pulseinfer::block_table table(
    std::uint32_t layer, Chosen const& chosen, pulseinfer::part which = pulseinfer::part::whole)
  {
    std::uint32_t const lanes = residency.lanes;
    auto& slots = tables_.emplace_back(std::size_t{lanes} * max_blocks + 1, pulseinfer::none<pulseinfer::slot_id>);
    auto& counts = counts_.emplace_back(lanes + 1, 0U);
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      std::uint32_t const blocks = info[lane / geometry.head_groups].blocks(layout.block_tokens);
      for (std::uint32_t block = 0; block < blocks; ++block) {
        if (!chosen(lane, block)) { continue; }
        slots[std::size_t{lane} * max_blocks + counts[lane]++] = residency.slots_of_lane(
          static_cast<pulseinfer::layer_id>(layer), static_cast<pulseinfer::lane_id>(lane))[block];
      }
    }
    return {
      .slots = slots.data(),
      .counts = counts.data(),
      .info = info.data(),
      .pool = pool,
      .layout = layout,
      .layer = static_cast<pulseinfer::layer_id>(layer),
      .stride = max_blocks,
      .head_groups = geometry.head_groups,
      .which = which};
  }

  pulseinfer::kv_geometry geometry;
  pulseinfer::block_layout layout;
  std::mt19937 random;
  std::pmr::vector<pulseinfer::row_info> info;  // by row id
  std::pmr::vector<pulseinfer::row_id> ids;     // the batch
  pulseinfer::slot_pool_ref pool;
  pulseinfer::residency_ref residency;  // slot_of alone
  std::uint32_t max_blocks = 0;
  std::uint32_t most_new = 1;
  std::uint64_t tensor_tokens = 0;  // of the engine's tensors

 private:
  std::pmr::vector<std::byte> memory_;
  std::pmr::vector<std::byte*> bases_;
  std::pmr::vector<pulseinfer::slot_id> slot_of_;
  std::pmr::vector<std::pmr::vector<pulseinfer::slot_id>> tables_;
  std::pmr::vector<std::pmr::vector<std::uint32_t>> counts_;
};

}  // namespace pulseinfer_test
