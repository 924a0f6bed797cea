// Forms of digests as they are stored, beside slow references: min_max, mean_key, log_mass; bytes with scales; bounds.

#include "support/parallel_group.hpp"
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/log_mass.hpp>
#include <pulseinfer/device/mean_key.hpp>
#include <pulseinfer/device/min_max.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using pulseinfer::bfloat16;
using pulseinfer::half;
using pulseinfer::device::digest_values;

namespace {

using doubles = std::vector<double>;

/// Keys of a block with NaN behind the valid ones. Some channels are large, some are the same in all keys.
template <class Key>
struct block_of_keys {
  block_of_keys(std::uint32_t valid, std::uint32_t head_dim, std::uint32_t seed, float spread = 1.0F)
    : tokens{valid}, dim{head_dim}, keys((valid + 1) * std::size_t{head_dim}, Key(std::nanf("")))
  {
    std::mt19937 random{seed};
    std::normal_distribution<float> normal;
    for (std::uint32_t j = 0; j < dim; ++j) {
      float const middle = 3.0F * normal(random);
      float const width = j % 7 == 3 ? 20.0F : j % 5 == 1 ? 0.0F : spread;
      for (std::uint32_t t = 0; t < tokens; ++t) { keys[t * dim + j] = Key(middle + width * normal(random)); }
    }
  }
  [[nodiscard]] double key(std::size_t t, std::size_t j) const
  {
    return static_cast<double>(static_cast<float>(keys[t * dim + j]));
  }
  std::size_t tokens;
  std::size_t dim;
  std::vector<Key> keys;
};

/// A digest of one head in memory of its exact size, between guards.
template <class Form, class T>
struct stored {
  explicit stored(std::uint32_t head_dim)
    : dim{head_dim},
      elements{digest_values<T>::elements(Form::parts, dim)},
      bytes(static_cast<std::size_t>(digest_values<T>::bytes(Form::parts, dim)) + 16, std::byte{0xA5})
  {}
  template <class Key>
  stored(block_of_keys<Key> const& block) : stored{static_cast<std::uint32_t>(block.dim)}
  {
    make(pulseinfer::device::solo_group{}, block);
  }
  template <class Group, class Key>
  void make(Group const& group, block_of_keys<Key> const& block)
  {
    Form::make(
      group, block.keys.data(), block.dim * sizeof(Key), static_cast<std::uint32_t>(block.tokens), dim, values(),
      storage.data());
  }
  [[nodiscard]] digest_values<T> values() { return digest_values<T>{reinterpret_cast<T*>(bytes.data()), elements}; }
  /// Channel j of a part, as scoring reads it.
  [[nodiscard]] double at(std::uint32_t part, std::size_t j)
  {
    std::size_t const place = part * std::size_t{digest_values<T>::stride(dim)} + j;
    pulseinfer::device::float_lanes lanes;
    values().load(static_cast<std::uint32_t>(place / 16 * 16), lanes);
    float all[16];
    lanes.store(all);
    return static_cast<double>(all[place % 16]);
  }
  [[nodiscard]] bool guarded() const
  {
    return std::all_of(bytes.end() - 16, bytes.end(), [](std::byte b) { return b == std::byte{0xA5}; });
  }
  std::uint32_t dim;
  std::uint32_t elements;
  std::vector<std::byte> bytes;
  std::vector<float> storage = std::vector<float>(3 * std::size_t{dim}, std::nanf(""));
};

/// How far a value may be from what was to be stored.
template <class T>
double rounding_of(double largest_of_sixteen, double value)
{
  if (sizeof(T) == 1) { return largest_of_sixteen / 254.0 * (1.0 + 0x1p-9) + 0x1p-24; }
  return sizeof(T) == 2 ? std::abs(value) * 0x1p-11 + 0x1p-25 : std::abs(value) * 0x1p-23;
}

doubles means_of(auto const& block)
{
  doubles mean(block.dim, 0.0);
  for (std::size_t j = 0; j < block.dim; ++j) {
    for (std::size_t t = 0; t < block.tokens; ++t) { mean[j] += block.key(t, j) / static_cast<double>(block.tokens); }
  }
  return mean;
}

double largest_of_sixteen(doubles const& channels, std::size_t j)
{
  double largest = 0;
  for (std::size_t i = j / 16 * 16; i < std::min(channels.size(), j / 16 * 16 + 16); ++i) {
    largest = std::max(largest, std::abs(channels[i]));
  }
  return largest;
}

template <class Form, class T, class Key>
void check_groups(block_of_keys<Key> const& block, stored<Form, T>& solo)
{
  CHECK(solo.guarded());
  for (std::uint32_t const threads : {2U, 5U}) {
    stored<Form, T> same{solo.dim};
    pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) { same.make(group, block); });
    CHECK(std::memcmp(same.bytes.data(), solo.bytes.data(), solo.bytes.size()) == 0);
  }
}

template <class T, class Key>
void check_forms(std::uint32_t tokens, std::uint32_t dim)
{
  CAPTURE(tokens);
  CAPTURE(dim);
  CAPTURE(sizeof(T));
  block_of_keys<Key> const block{tokens, dim, 100 * dim + tokens};

  stored<pulseinfer::device::min_max_form, T> box{block};
  doubles centres(dim);
  doubles widths(dim);
  for (std::size_t j = 0; j < dim; ++j) {
    double low = block.key(0, j);
    double high = low;
    for (std::size_t t = 0; t < tokens; ++t) {
      low = std::min(low, block.key(t, j));
      high = std::max(high, block.key(t, j));
    }
    centres[j] = (low + high) / 2;
    widths[j] = (high - low) / 2;
  }
  std::uint32_t outside = 0;
  std::uint32_t wide = 0;
  for (std::size_t j = 0; j < dim; ++j) {
    for (std::size_t t = 0; t < tokens; ++t) {
      outside += std::abs(block.key(t, j) - box.at(0, j)) > box.at(1, j) ? 1U : 0U;
    }
    double const off = rounding_of<T>(largest_of_sixteen(centres, j), centres[j]);
    double const step = sizeof(T) == 1 ? largest_of_sixteen(widths, j) / 127 + off : 2 * widths[j] * 0x1p-11;
    wide += box.at(1, j) > widths[j] + 2 * off + 2 * step + 0x1p-20 ? 1U : 0U;
  }
  CHECK(outside == 0);
  CHECK(wide == 0);
  check_groups(block, box);

  doubles const means = means_of(block);
  stored<pulseinfer::device::mean_key_form, T> mean{block};
  stored<pulseinfer::device::log_mass_form, T> mass{block};
  doubles variances(dim, 0.0);
  for (std::size_t j = 0; j < dim; ++j) {
    for (std::size_t t = 0; t < tokens; ++t) {
      variances[j] += std::pow(block.key(t, j) - mass.at(0, j), 2.0) / tokens;
    }
  }
  std::uint32_t far = 0;
  for (std::size_t j = 0; j < dim; ++j) {
    double const off = rounding_of<T>(largest_of_sixteen(means, j), means[j]) + 1e-5 * (1.0 + std::abs(means[j]));
    far += std::abs(mean.at(0, j) - means[j]) > off ? 1U : 0U;
    far += std::abs(mass.at(0, j) - means[j]) > off ? 1U : 0U;
    double const apart =
      rounding_of<T>(largest_of_sixteen(variances, j), variances[j]) + 1e-5 * (1.0 + std::abs(variances[j]));
    far += std::abs(mass.at(1, j) - variances[j]) > apart ? 1U : 0U;
  }
  CHECK(far == 0);
  check_groups(block, mean);
  check_groups(block, mass);
}

/// ln of the sum of exp(q . key) in double.
double log_mass_of(auto const& block, doubles const& query)
{
  doubles logits;
  for (std::size_t t = 0; t < block.tokens; ++t) {
    double sum = 0;
    for (std::size_t j = 0; j < block.dim; ++j) { sum += query[j] * block.key(t, j); }
    logits.push_back(sum);
  }
  double const top = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (double const logit : logits) { total += std::exp(logit - top); }
  return top + std::log(total);
}

std::uint32_t any(std::uint32_t from, std::uint32_t to) { return *rc::gen::inRange(from, to); }

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("min_max, mean_key and log_mass hold what a slow reference does, over types, odd sizes and groups")
  {
    for (std::uint32_t const tokens : {1U, 2U, 16U, 33U}) {
      for (std::uint32_t const dim : {1U, 16U, 46U, 51U, 64U, 128U}) {
        check_forms<float, float>(tokens, dim);
        check_forms<half, half>(tokens, dim);
        check_forms<half, bfloat16>(tokens, dim);
        check_forms<std::int8_t, float>(tokens, dim);
        check_forms<std::int8_t, half>(tokens, dim);
      }
    }
  }

  TEST_CASE("a min_max score is never below the largest q . key, whatever the type that it is stored in")
  {
    CHECK(rc::check([] {
      std::uint32_t const tokens = any(1, 40);
      std::uint32_t const dim = any(1, 80);
      std::uint32_t const seed = any(0, 1U << 30U);
      block_of_keys<float> const block{tokens, dim, seed, 0.1F + static_cast<float>(any(0, 30))};
      std::mt19937 random{seed + 1};
      std::normal_distribution<double> normal;
      doubles query(dim);
      for (double& q : query) { q = normal(random); }
      double largest = -1e300;
      for (std::size_t t = 0; t < tokens; ++t) {
        double sum = 0;
        for (std::size_t j = 0; j < dim; ++j) { sum += query[j] * block.key(t, j); }
        largest = std::max(largest, sum);
      }
      auto const bound = [&](auto digest) {
        double sum = 0;
        for (std::size_t j = 0; j < dim; ++j) {
          sum += query[j] * digest.at(0, j) + std::abs(query[j]) * digest.at(1, j);
        }
        return sum;
      };
      using form = pulseinfer::device::min_max_form;
      double const slack = 1e-12 * (1.0 + std::abs(largest));  // of the sums in this test
      RC_ASSERT(bound(stored<form, float>{block}) >= largest - slack);
      RC_ASSERT(bound(stored<form, half>{block}) >= largest - slack);
      RC_ASSERT(bound(stored<form, std::int8_t>{block}) >= largest - slack);
    }));
  }

  // The third cumulant of what lies in an interval of length R is at most R^3 / (6 sqrt 3), and the error a sixth of it.
  TEST_CASE("a log_mass estimate along one channel is off by less than R^3 / 62 for logits within R; mean_key is below")
  {
    CHECK(rc::check([] {
      std::uint32_t const tokens = any(2, 40);
      std::uint32_t const dim = any(1, 40);
      std::uint32_t const seed = any(0, 1U << 30U);
      block_of_keys<float> const block{tokens, dim, seed};
      std::uint32_t const channel = any(0, dim);
      doubles query(dim, 0.0);
      query[channel] = static_cast<double>(any(1, 300)) / 100.0 * (seed % 2 == 0 ? 1.0 : -1.0);
      double low = 1e300;
      double high = -1e300;
      for (std::size_t t = 0; t < tokens; ++t) {
        low = std::min(low, block.key(t, channel));
        high = std::max(high, block.key(t, channel));
      }
      double const range = std::abs(query[channel]) * (high - low);
      double const exact = log_mass_of(block, query);
      stored<pulseinfer::device::log_mass_form, float> digest{block};
      double const first = std::log(tokens) + query[channel] * digest.at(0, channel);
      double const estimate = first + query[channel] * query[channel] * digest.at(1, channel) / 2;
      double const rounding = 1e-5 * (1.0 + std::abs(exact) + range * range);
      RC_ASSERT(std::abs(estimate - exact) <= range * range * range / 62.0 + rounding);
      stored<pulseinfer::device::mean_key_form, float> mean{block};
      RC_ASSERT(std::log(tokens) + query[channel] * mean.at(0, channel) <= exact + rounding);
    }));
  }

  TEST_CASE("bytes with a scale take zeros, one large channel of sixteen, tiny ones and what is no number")
  {
    auto const make = [](std::vector<float> channels) {
      auto const dim = static_cast<std::uint32_t>(channels.size());
      stored<pulseinfer::device::mean_key_form, std::int8_t> digest{dim};
      digest.values().store(pulseinfer::device::solo_group{}, 0, dim, channels.data());
      doubles result;
      for (std::uint32_t j = 0; j < dim; ++j) {
        result.push_back(digest.at(0, j));
        CHECK(result.back() == static_cast<double>(channels[j]));
      }
      CHECK(digest.guarded());
      return result;
    };
    CHECK(make(std::vector<float>(5, 0.0F)) == doubles(5, 0.0));
    doubles const large = make({1.0F, 0.4F, -0.6F, 127.0F, 3.2F, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.25F, -0.125F});
    CHECK(large[0] == 1.0);
    CHECK(large[1] == 0.0);
    CHECK(large[2] == -1.0);
    CHECK(large[3] == 127.0);
    CHECK(std::abs(large[16] - 0.25) <= 1e-3);  // a scale of its own
    CHECK(std::abs(large[17] + 0.125) <= 1e-3);
    for (double const value : make({1e-9F, -1e-9F, 0.0F})) { CHECK(std::abs(value) <= 0x1p-24); }
    for (double const value : make({std::nanf(""), 1.0F, std::numeric_limits<float>::infinity(), -3e38F})) {
      CHECK(std::isfinite(value));
    }
  }

  TEST_CASE("block_bounds are never below the largest distance and norm, and little above, over types and groups")
  {
    auto const check = [](auto zero, std::uint32_t tokens, std::uint32_t dim) {
      using key = decltype(zero);
      CAPTURE(tokens);
      CAPTURE(dim);
      block_of_keys<key> const block{tokens, dim, dim};
      std::vector<float> origin(dim);
      for (std::uint32_t j = 0; j < dim; ++j) { origin[j] = 0.1F * static_cast<float>(j % 9); }
      for (bool const around_origin : {false, true}) {
        double right = 0;
        for (std::size_t t = 0; t < tokens; ++t) {
          double sum = 0;
          for (std::size_t j = 0; j < dim; ++j) {
            sum += std::pow(block.key(t, j) - (around_origin ? static_cast<double>(origin[j]) : 0.0), 2.0);
          }
          right = std::max(right, std::sqrt(sum));
        }
        std::vector<float> storage(7);
        std::vector<float> results(7);
        for (std::uint32_t const threads : {1U, 3U, 7U}) {
          pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) {
            results[group.thread_rank()] = pulseinfer::device::largest_distance(
              group, block.keys.data(), dim * sizeof(key), tokens, dim, around_origin ? origin.data() : nullptr,
              storage.data());
          });
          for (std::uint32_t rank = 0; rank < threads; ++rank) {
            CHECK(static_cast<double>(results[rank]) >= right);
            CHECK(static_cast<double>(results[rank]) <= right * (1.0 + 1e-4) + 1e-15);
          }
        }
      }
    };
    for (std::uint32_t const tokens : {1U, 16U, 19U}) {
      for (std::uint32_t const dim : {1U, 51U, 128U, 576U}) {
        check(float{}, tokens, dim);
        check(half{}, tokens, dim);
        check(bfloat16{}, tokens, dim);
      }
    }
  }

  TEST_CASE(
    "keys near the largest float are digested without overflow, and a variance that is too large is the largest")
  {
    block_of_keys<float> block{2, 1, 1};
    block.keys = {3e38F, 3.2e38F, 0.0F};
    CHECK(stored<pulseinfer::device::mean_key_form, float>{block}.at(0, 0) == doctest::Approx(3.1e38));
    CHECK(stored<pulseinfer::device::min_max_form, float>{block}.at(0, 0) == doctest::Approx(3.1e38));
    CHECK(std::isfinite(stored<pulseinfer::device::log_mass_form, float>{block}.at(1, 0)));
    block.keys = {-30000.0F, 30000.0F, 0.0F};
    CHECK(stored<pulseinfer::device::log_mass_form, half>{block}.at(1, 0) == 65504.0);
  }
}
