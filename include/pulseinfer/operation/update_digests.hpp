#pragma once

/// Brings the digests of the blocks that a step touched up to date.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Cuboid-mean digests over the valid keys of each touched block. One item is one block and scoring head of one row. A
/// block without a slot keeps the digest it has.
struct update_digests {
  static constexpr char const* name = "update_digests";
  static constexpr operation_kind kind = operation_kind::data;

  digest_request request = {};
  scoring_heads heads = {};
  std::uint32_t head_groups = 1;
  dtype digest_type = dtype::float16;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = std::uint64_t{request.rows.count} * request.most_touched * heads.count, .group_threads = 64};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const
  {
    return 3U * std::size_t{request.layout.key().dim} * sizeof(float);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t touched = 0;
    for (row_id const row : request.rows) {
      row_info const& state = request.info[to_index(row)];
      touched += state.blocks(request.layout.block_tokens) - first_touched(state);
    }
    std::uint64_t const keys = std::uint64_t{request.layout.block_tokens} * request.layout.key().row_bytes;
    std::uint64_t const digest = device::cuboid_mean_elements(request.layout.key().dim) * size_of(digest_type);
    return {
      .device_bytes = touched * heads.count * (2U * keys + digest),
      .flops = touched * heads.count * 4U * request.layout.block_tokens * request.layout.key().dim};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    block_layout const& layout = request.layout;
    auto const head = static_cast<std::uint32_t>(item % heads.count);
    auto const place = static_cast<std::uint32_t>(item / heads.count % request.most_touched);
    row_id const row = request.rows[item / heads.count / request.most_touched];
    row_info const state = request.info[to_index(row)];
    std::uint32_t const block = first_touched(state) + place;
    if (block >= state.blocks(layout.block_tokens) || block >= request.residency.max_blocks) { return; }

    std::uint32_t const kv_head = heads.first + head;
    lane_id const lane = lane_of(row, kv_head / layout.heads, head_groups);
    slot_id const slot = request.residency.slots_of_lane(request.layer, lane)[block];
    if (is_none(slot)) { return; }
    plane_layout const& plane = layout.key();
    std::byte const* const keys =
      request.pool.address(request.layer, slot) + row_offset(plane, kv_head % layout.heads, 0);
    std::byte* const digest = request.digests.address(request.layer, row, block) +
      std::uint64_t{head} * device::cuboid_mean_elements(plane.dim) * size_of(digest_type);
    device::visit_elements(plane.type, [&](auto key) {
      device::visit_elements(digest_type, [&](auto stored) {
        device::cuboid_mean(
          group, reinterpret_cast<typename decltype(key)::type const*>(keys), plane.token_stride,
          state.valid_tokens(block, layout.block_tokens), plane.dim,
          reinterpret_cast<typename decltype(stored)::type*>(digest), reinterpret_cast<float*>(scratch.data));
      });
    });
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t first_touched(row_info const& state) const
  {
    return static_cast<std::uint32_t>(state.tokens - state.new_tokens) / request.layout.block_tokens;
  }
};

static_assert(operation<update_digests>);

}  // namespace pulseinfer
