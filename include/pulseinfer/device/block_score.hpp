#pragma once

/// A block's score for a query, from the block's cuboid digest.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/numeric.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Queries that are scored against a digest at once, so that it is read and widened once for them.
inline constexpr std::uint32_t score_quad = 4;

/// Writes a query in the form of a digest, so that a score is one inner product: scale * q, scale * |q|, zeros.
/// @param query [head_dim] of `type`   @param spread [cuboid_mean_elements(head_dim)]   @sync none
template <thread_group Group>
PULSEINFER_HOST_DEVICE void spread_query(
  Group const& group, void const* query, dtype type, std::uint32_t head_dim, float scale, float* spread)
{
  visit_elements(type, [&](auto element_type) {
    auto const* const elements = static_cast<typename decltype(element_type)::type const*>(query);
    for (std::uint32_t j = group.thread_rank(); j < head_dim; j += group.size()) {
      float const value = scale * widen(elements[j]);
      spread[j] = value;
      spread[head_dim + j] = value < 0.0F ? -value : value;
    }
  });
  for (std::uint32_t j = 2U * head_dim + group.thread_rank(); j < cuboid_mean_elements(head_dim); j += group.size()) {
    spread[j] = 0.0F;
  }
}

/// Scores of four queries: scale * (q . centre + sum over channels of |q| * distance). One rank alone, in a fixed order.
/// @param spread [score_quad, elements]   @param digest [elements]   @param scores [score_quad], written
/// @source ArkVale (NeurIPS 2024), cuboid score
template <class Digest>
PULSEINFER_HOST_DEVICE void block_scores(
  float const* const (&spread)[score_quad], Digest const* digest, std::uint32_t elements, float (&scores)[score_quad])
{
  float_lanes sum[score_quad];
  for (std::uint32_t j = 0; j < elements; j += float_lanes::size) {
    float_lanes part_of_digest;
    part_of_digest.load(digest + j);
    for (std::uint32_t i = 0; i < score_quad; ++i) {
      float_lanes part_of_query;
      part_of_query.load(spread[i] + j);
      sum[i].add_product(part_of_query, part_of_digest);
    }
  }
  for (std::uint32_t i = 0; i < score_quad; ++i) { scores[i] = sum[i].sum(); }
}

}  // namespace pulseinfer::device
