#pragma once

/// Brings the digests of the blocks that a step touched up to date.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/digest_pieces.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/selection.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

/// Digests over the valid keys of each touched block, and their bounds where asked. One item is one block and scoring head
/// of one row, or one piece of that. A block without a slot keeps the digest it has; a piece without valid keys has none.
/// @tparam Form of the digests: device::cuboid_mean_form and its neighbours
/// @tparam Pieces of a block, each with a digest of its own, selector/split.hpp
template <class Form, std::uint32_t Pieces = 1>
struct make_digests {
  static constexpr char const* name = "update_digests";
  static constexpr operation_kind kind = operation_kind::data;

  digest_request request = {};
  scoring_heads heads = {};
  std::uint32_t head_groups = 1;
  dtype digest_type = dtype::float16;
  std::uint64_t bounds_offset =
    0;  ///< from a block's digest to the block_bounds of the scoring heads' pieces; 0: none are kept

  [[nodiscard]] launch_shape shape() const
  {
    return {
      .items = std::uint64_t{request.rows.count} * request.most_touched * heads.count * Pieces, .group_threads = 64};
  }

  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const
  {
    std::size_t const bounds = bounds_offset == 0 ? 0 : group_threads;
    return (3U * std::size_t{request.layout.key().dim} + bounds) * sizeof(float);
  }

  [[nodiscard]] operation_cost cost() const
  {
    std::uint64_t touched = 0;
    for (row_id const row : request.rows) {
      row_info const& state = request.info[to_index(row)];
      touched += state.blocks(request.layout.block_tokens) - first_touched(state);
    }
    std::uint64_t const keys = std::uint64_t{request.layout.block_tokens} * request.layout.key().row_bytes;
    std::uint64_t const bounds = bounds_offset == 0 ? 0 : keys + Pieces * sizeof(block_bounds);
    std::uint64_t const digest = Pieces * digest_bytes() + bounds;
    return {
      .device_bytes = touched * heads.count * (2U * keys + digest),
      .flops = touched * heads.count * 4U * request.layout.block_tokens * request.layout.key().dim};
  }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    block_layout const& layout = request.layout;
    auto const piece = static_cast<std::uint32_t>(item % Pieces);
    std::uint64_t const of_pieces = item / Pieces;
    auto const head = static_cast<std::uint32_t>(of_pieces % heads.count);
    auto const place = static_cast<std::uint32_t>(of_pieces / heads.count % request.most_touched);
    row_id const row = request.rows[of_pieces / heads.count / request.most_touched];
    row_info const state = request.info[to_index(row)];
    std::uint32_t const block = first_touched(state) + place;
    if (block >= state.blocks(layout.block_tokens) || block >= request.residency.max_blocks) { return; }
    std::uint32_t const first = piece * (layout.block_tokens / Pieces);
    std::uint32_t const tokens =
      device::piece_tokens<Pieces>(state.valid_tokens(block, layout.block_tokens), piece, layout.block_tokens);
    if (tokens == 0) { return; }

    std::uint32_t const kv_head = heads.first + head;
    lane_id const lane = lane_of(row, kv_head / layout.heads, head_groups);
    slot_id const slot = request.residency.slots_of_lane(request.layer, lane)[block];
    if (is_none(slot)) { return; }
    plane_layout const& plane = layout.key();
    std::byte const* const keys =
      request.pool.address(request.layer, slot) + row_offset(plane, kv_head % layout.heads, first);
    std::byte* const digests = request.digests.address(request.layer, row, block);
    auto* const floats = reinterpret_cast<float*>(scratch.data);
    device::visit_elements(plane.type, [&](auto key) {
      device::visit_digests(digest_type, [&](auto stored) {
        using value = typename decltype(stored)::type;
        Form::make(
          group, reinterpret_cast<typename decltype(key)::type const*>(keys), plane.token_stride, tokens, plane.dim,
          device::digest_values<value>{
            reinterpret_cast<value*>(digests + (head * Pieces + piece) * digest_bytes()),
            device::digest_elements(digest_type, Form::parts, plane.dim)},
          floats);
      });
    });
    if (bounds_offset == 0) { return; }
    group.sync();
    plane_layout const& values = layout.value();
    std::byte const* const value_rows =
      request.pool.address(request.layer, slot) + row_offset(values, kv_head % layout.heads, first);
    block_bounds const bounds{
      .key_radius = radius(group, plane, keys, tokens, plane.dim, floats, floats + std::size_t{3} * plane.dim),
      .value_norm =
        radius(group, values, value_rows, tokens, layout.value_dim, nullptr, floats + std::size_t{3} * plane.dim)};
    if (group.thread_rank() == 0U) {
      reinterpret_cast<block_bounds*>(digests + bounds_offset)[head * Pieces + piece] = bounds;
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint64_t digest_bytes() const
  {
    return device::digest_bytes(digest_type, Form::parts, request.layout.key().dim);
  }

  template <thread_group Group>
  [[nodiscard]] static PULSEINFER_HOST_DEVICE float radius(
    Group const& group, plane_layout const& plane, std::byte const* rows, std::uint32_t tokens, std::uint32_t dim,
    float const* origin, float* temp_storage)
  {
    float result = 0.0F;
    device::visit_elements(plane.type, [&](auto stored) {
      result = device::largest_distance(
        group, reinterpret_cast<typename decltype(stored)::type const*>(rows), plane.token_stride, tokens, dim, origin,
        temp_storage);
    });
    return result;
  }

  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t first_touched(row_info const& state) const
  {
    return static_cast<std::uint32_t>(state.tokens - state.new_tokens) / request.layout.block_tokens;
  }
};

using update_digests = make_digests<device::cuboid_mean_form>;

static_assert(operation<update_digests>);

}  // namespace pulseinfer
