#include "support/parallel_group.hpp"
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/group.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

using pulseinfer::bfloat16;
using pulseinfer::fp8_e4m3;
using pulseinfer::half;

namespace {

/// Random keys with gaps between rows; rows from `tokens` on hold NaN.
template <class Key>
struct block_of_keys {
  block_of_keys(std::uint32_t tokens, std::uint32_t head_dim, std::uint32_t seed)
    : dim{head_dim}, stride{head_dim + 3}, keys((tokens + 2) * std::size_t{head_dim + 3}, Key(std::nanf("")))
  {
    std::mt19937 random{seed};
    std::normal_distribution<float> normal{0.5F, 2.0F};
    for (std::uint32_t t = 0; t < tokens; ++t) {
      for (std::uint32_t j = 0; j < dim; ++j) { keys[t * stride + j] = Key(normal(random)); }
    }
  }
  template <class Group, class Digest>
  void digest(Group const& group, std::uint32_t tokens, Digest* out, float* storage) const
  {
    pulseinfer::device::cuboid_mean(
      group, keys.data(), stride * sizeof(Key), tokens, static_cast<std::uint32_t>(dim), out, storage);
  }
  std::size_t dim;
  std::size_t stride;
  std::vector<Key> keys;
};

template <class Key, class Digest>
void check(std::uint32_t tokens, std::uint32_t dim, double tolerance)
{
  CAPTURE(tokens);
  CAPTURE(dim);
  block_of_keys<Key> const block{tokens, dim, tokens + dim};
  std::uint32_t const elements = pulseinfer::device::cuboid_mean_elements(dim);
  CHECK(elements % 16 == 0);
  std::vector<Digest> out(elements + 1, Digest(42.0F));
  std::vector<float> storage(3 * std::size_t{dim}, std::nanf(""));
  block.digest(pulseinfer::device::solo_group{}, tokens, out.data(), storage.data());
  for (std::uint32_t j = 0; j < dim; ++j) {
    double low = 1e300;
    double high = -1e300;
    double distance = 0;
    auto const key = [&](std::uint32_t t) {
      return static_cast<double>(static_cast<float>(block.keys[t * block.stride + j]));
    };
    for (std::uint32_t t = 0; t < tokens; ++t) {
      low = std::min(low, key(t));
      high = std::max(high, key(t));
    }
    for (std::uint32_t t = 0; t < tokens; ++t) { distance += std::abs((low + high) / 2 - key(t)) / tokens; }
    CHECK(std::abs(static_cast<double>(static_cast<float>(out[j])) - (low + high) / 2) <= tolerance);
    CHECK(std::abs(static_cast<double>(static_cast<float>(out[dim + j])) - distance) <= tolerance);
  }
  for (std::uint32_t j = 2 * dim; j < elements; ++j) { CHECK(static_cast<float>(out[j]) == 0.0F); }
  CHECK(static_cast<float>(out[elements]) == 42.0F);

  for (std::uint32_t const threads : {2U, 7U}) {
    std::vector<Digest> same(elements, Digest(42.0F));
    pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) {
      block.digest(group, tokens, same.data(), storage.data());
    });
    CHECK(std::memcmp(same.data(), out.data(), elements * sizeof(Digest)) == 0);
  }
}

}  // namespace

TEST_SUITE("device")
{
  // flashinfer-ai/flashinfer#941, for digests: rows behind the valid ones hold NaN here
  TEST_CASE("cuboid_mean digests the valid keys of a block and no others, over types and sizes, for any group")
  {
    for (std::uint32_t const tokens : {1U, 2U, 3U, 16U, 17U, 64U}) {
      for (std::uint32_t const dim : {1U, 46U, 51U, 64U, 128U, 256U}) {
        check<float, float>(tokens, dim, 2e-6);
        check<half, half>(tokens, dim, 6e-3);
        check<bfloat16, float>(tokens, dim, 2e-6);
        check<fp8_e4m3, half>(tokens, dim, 6e-3);
      }
    }
  }

  TEST_CASE("cuboid_mean of one key is the key itself and no distance")
  {
    block_of_keys<half> const block{1, 64, 1};
    std::vector<half> out(128);
    std::vector<float> storage(192);
    block.digest(pulseinfer::device::solo_group{}, 1, out.data(), storage.data());
    for (std::uint32_t j = 0; j < 64; ++j) {
      CHECK(out[j].bits == block.keys[j].bits);
      CHECK(static_cast<float>(out[64 + j]) == 0.0F);
    }
  }

  TEST_CASE("cuboid_mean of keys near the largest float does not overflow")
  {
    float const keys[] = {3e38F, 3.2e38F};
    std::vector<float> out(16);
    float storage[3];
    pulseinfer::device::cuboid_mean(pulseinfer::device::solo_group{}, keys, sizeof(float), 2, 1, out.data(), storage);
    CHECK(out[0] == doctest::Approx(3.1e38F));
    CHECK(out[1] == doctest::Approx(1e37F).epsilon(1e-5));
  }
}
