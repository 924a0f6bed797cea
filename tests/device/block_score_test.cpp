#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/group.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

using pulseinfer::dtype;
using pulseinfer::half;

namespace {

template <class Digest>
void check(std::uint32_t dim, dtype query_type)
{
  CAPTURE(dim);
  std::mt19937 random{dim};
  std::normal_distribution<float> normal;
  std::uint32_t const elements = pulseinfer::device::cuboid_mean_elements(dim);
  std::vector<Digest> digest(elements, Digest(0.0F));
  for (std::uint32_t j = 0; j < dim; ++j) {
    digest[j] = Digest(normal(random));
    digest[dim + j] = Digest(std::abs(normal(random)));
  }
  pulseinfer_test::tensor queries{query_type, 4, 1, dim, 5};
  queries.randomise(random);
  constexpr float scale = 0.3F;
  std::vector<float> spread(4 * std::size_t{elements}, std::nanf(""));
  float const* rows[4];
  for (std::uint32_t i = 0; i < 4; ++i) {
    float* const row = spread.data() + i * std::size_t{elements};
    rows[i] = row;
    pulseinfer_test::run_group(3, [&](pulseinfer_test::parallel_group const& group) {
      pulseinfer::device::spread_query(group, queries.view.row(i, 0), query_type, dim, scale, row);
    });
  }
  float scores[4];
  pulseinfer::device::block_scores(rows, digest.data(), elements, scores);
  for (std::uint32_t i = 0; i < 4; ++i) {
    double right = 0;
    double size = 0;
    for (std::uint32_t j = 0; j < dim; ++j) {
      double const q = static_cast<double>(queries.at(i, 0, j));
      double const centre = q * static_cast<double>(static_cast<float>(digest[j]));
      double const distance = std::abs(q) * static_cast<double>(static_cast<float>(digest[dim + j]));
      right += centre + distance;
      size += std::abs(centre) + distance;
    }
    CHECK(std::abs(static_cast<double>(scores[i]) - static_cast<double>(scale) * right) <= 1e-6 * (1.0 + size));
  }
}

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("block_scores is scale * (q . centre + sum |q| distance) for four queries, over types and odd sizes")
  {
    for (std::uint32_t const dim : {1U, 7U, 46U, 51U, 64U, 128U, 256U}) {
      for (dtype const query_type : {dtype::float32, dtype::float16, dtype::bfloat16}) {
        check<float>(dim, query_type);
        check<half>(dim, query_type);
      }
    }
  }
}
