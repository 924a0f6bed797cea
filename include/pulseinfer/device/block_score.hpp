#pragma once

/// A block's score for a query, from the block's digest.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/numeric.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer::device {

/// Queries that are scored against a digest at once, so that it is read and widened once for them.
inline constexpr std::uint32_t score_quad = 4;

/// How a query x, scaled, meets the two parts of a digest: sum of x * first + |x| * second. Of cuboid-mean and min-max ones.
struct absolute_spread {
  static constexpr std::uint32_t parts = 2;
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr float second(float x) { return x < 0.0F ? -x : x; }
};

/// Sum of x * first + x^2 / 2 * second. Of log-mass digests.
struct square_spread {
  static constexpr std::uint32_t parts = 2;
  [[nodiscard]] static PULSEINFER_HOST_DEVICE constexpr float second(float x) { return 0.5F * x * x; }
};

/// Sum of x * first. Of mean-key digests.
struct plain_spread {
  static constexpr std::uint32_t parts = 1;
};

/// Writes a query in the form of a digest, so that a score is one inner product: scale * q, then what its second part is
/// multiplied by, zeros.
/// @param query [head_dim] of `type`   @param spread [elements]   @param stride values from part to part, see digest_stride
/// @param elements of a digest, see digest_elements   @sync none
template <class Spread, thread_group Group>
PULSEINFER_HOST_DEVICE void spread_query(
  Group const& group, void const* query, dtype type, std::uint32_t head_dim, float scale, float* spread,
  std::uint32_t stride, std::uint32_t elements)
{
  visit_elements(type, [&](auto element_type) {
    auto const* const channels = static_cast<typename decltype(element_type)::type const*>(query);
    for (std::uint32_t j = group.thread_rank(); j < head_dim; j += group.size()) {
      float const value = scale * widen(channels[j]);
      spread[j] = value;
      if constexpr (Spread::parts == 2) { spread[stride + j] = Spread::second(value); }
    }
  });
  for (std::uint32_t part = 0; part < Spread::parts; ++part) {
    std::uint32_t const end = part + 1U < Spread::parts ? (part + 1U) * stride : elements;
    for (std::uint32_t j = part * stride + head_dim + group.thread_rank(); j < end; j += group.size()) {
      spread[j] = 0.0F;
    }
  }
}

/// For cuboid digests in floats or halves: scale * q, scale * |q|, zeros.
/// @param spread [cuboid_mean_elements(head_dim)]
template <thread_group Group>
PULSEINFER_HOST_DEVICE void spread_query(
  Group const& group, void const* query, dtype type, std::uint32_t head_dim, float scale, float* spread)
{
  spread_query<absolute_spread>(group, query, type, head_dim, scale, spread, head_dim, cuboid_mean_elements(head_dim));
}

/// Scores of four queries: inner products of their spread form with a digest, scale * (q . centre + sum over channels of
/// |q| * distance) for cuboids. One rank alone, in a fixed order.
/// @param spread [score_quad, elements]   @param digest of `elements` values   @param scores [score_quad], written
/// @source ArkVale (NeurIPS 2024), cuboid score
template <class T>
PULSEINFER_HOST_DEVICE void block_scores(
  float const* const (&spread)[score_quad], digest_values<T> const& digest, std::uint32_t elements,
  float (&scores)[score_quad])
{
  float_lanes sum[score_quad];
  for (std::uint32_t j = 0; j < elements; j += float_lanes::size) {
    float_lanes part_of_digest;
    digest.load(j, part_of_digest);
    for (std::uint32_t i = 0; i < score_quad; ++i) {
      float_lanes part_of_query;
      part_of_query.load(spread[i] + j);
      sum[i].add_product(part_of_query, part_of_digest);
    }
  }
  for (std::uint32_t i = 0; i < score_quad; ++i) { scores[i] = sum[i].sum(); }
}

/// @param digest [elements] floats or halves
template <class Digest>
PULSEINFER_HOST_DEVICE void block_scores(
  float const* const (&spread)[score_quad], Digest const* digest, std::uint32_t elements, float (&scores)[score_quad])
{
  block_scores(spread, digest_values<Digest const>{digest, elements}, elements, scores);
}

}  // namespace pulseinfer::device
