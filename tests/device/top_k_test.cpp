#include "support/parallel_group.hpp"
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/top_k.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

using pulseinfer::block_id;

namespace {

constexpr auto unwritten = static_cast<block_id>(-777);

std::vector<std::int32_t> numbers_of(std::vector<block_id> const& ids)
{
  std::vector<std::int32_t> result;
  for (block_id const id : ids) { result.push_back(pulseinfer::to_number(id)); }
  return result;
}

/// Ids written by one thread; the place behind the last stays as it was.
std::vector<std::int32_t> solo(std::vector<float> const& values, std::uint32_t k, std::uint32_t first = 0)
{
  auto const count = static_cast<std::uint32_t>(values.size());
  std::vector<block_id> ids(std::min(k, count) + 1U, unwritten);
  std::vector<std::uint32_t> storage(pulseinfer::device::top_k_temp_words(1), 0xFFFFFFFFU);
  std::uint32_t const written = pulseinfer::device::top_k(
    pulseinfer::device::solo_group{}, values.data(), count, k, first, ids.data(), storage.data());
  CHECK(written == std::min(k, count));
  CHECK(ids.back() == unwritten);
  ids.pop_back();
  return numbers_of(ids);
}

std::vector<std::int32_t> parallel(std::vector<float> const& values, std::uint32_t k, std::uint32_t threads)
{
  auto const count = static_cast<std::uint32_t>(values.size());
  std::vector<block_id> ids(std::min(k, count), unwritten);
  std::vector<std::uint32_t> storage(pulseinfer::device::top_k_temp_words(threads), 0xFFFFFFFFU);
  std::vector<std::uint32_t> written(threads);
  pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) {
    written[group.thread_rank()] =
      pulseinfer::device::top_k(group, values.data(), count, k, 0, ids.data(), storage.data());
  });
  for (std::uint32_t const n : written) { CHECK(n == std::min(k, count)); }
  return numbers_of(ids);
}

std::vector<std::int32_t> sorted_reference(std::vector<float> const& values, std::uint32_t k)
{
  std::vector<std::int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    float const x = values[static_cast<std::size_t>(a)];
    float const y = values[static_cast<std::size_t>(b)];
    return !std::isnan(x) && (std::isnan(y) || x > y);
  });
  order.resize(std::min<std::size_t>(k, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

TEST_SUITE("device")
{
  // vllm-project/vllm#51323: too few ids where many scores tie, old ids in the places that were not written
  TEST_CASE("top_k gives k distinct ids, the lowest, when all values tie, time and again")
  {
    for (float const value : {0.0F, -0.0F, 1.5F, -3.0F}) {
      std::vector<float> const values(8192, value);
      std::vector<std::int32_t> right(2048);
      std::iota(right.begin(), right.end(), 0);
      for (int i = 0; i < 20; ++i) { CHECK(solo(values, 2048) == right); }
      CHECK(parallel(values, 2048, 7) == right);
    }
  }

  TEST_CASE("top_k takes everything above the k-th value however many tie with it")
  {
    std::vector<float> values(4096, 1.0F);
    std::mt19937 random{11};
    std::vector<std::int32_t> above;
    while (above.size() < 96) {
      auto const i = static_cast<std::int32_t>(random() % values.size());
      if (values[static_cast<std::size_t>(i)] == 1.0F) {
        values[static_cast<std::size_t>(i)] = 1.0F + 1e-6F * static_cast<float>(random() % 7 + 1);
        above.push_back(i);
      }
    }
    std::vector<std::int32_t> const ids = solo(values, 100);
    for (std::int32_t const i : above) { CHECK(std::binary_search(ids.begin(), ids.end(), i)); }
    CHECK(ids == sorted_reference(values, 100));
    CHECK(parallel(values, 100, 5) == ids);
  }

  TEST_CASE("top_k takes all of a short array and adds the first id")
  {
    CHECK(solo({3, 1, 2}, 100) == std::vector<std::int32_t>{0, 1, 2});
    CHECK(solo({3, 1, 2}, 3) == std::vector<std::int32_t>{0, 1, 2});
    CHECK(solo({3, 1, 2}, 2, 40) == std::vector<std::int32_t>{40, 42});
    CHECK(solo({3, 1, 2}, 0).empty());
    CHECK(solo({}, 4).empty());
  }

  TEST_CASE("law 8: top_k equals a stable sort for any numbers and any group")
  {
    std::mt19937 random{17};
    std::normal_distribution<float> normal;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float special[] = {0.0F,
                                 -0.0F,
                                 infinity,
                                 -infinity,
                                 std::numeric_limits<float>::quiet_NaN(),
                                 -std::numeric_limits<float>::quiet_NaN(),
                                 1e-42F,
                                 -1e-42F,
                                 3.4e38F,
                                 -3.4e38F};
    for (int round = 0; round < 60; ++round) {
      std::vector<float> values(1 + random() % 700);
      for (float& value : values) {
        switch (random() % 3) {
          case 0: value = normal(random); break;
          case 1: value = std::round(normal(random)); break;
          default: value = round % 2 == 0 ? special[random() % 10] : normal(random); break;
        }
      }
      auto const k = static_cast<std::uint32_t>(random() % values.size() + 1);
      CAPTURE(round);
      CAPTURE(k);
      std::vector<std::int32_t> const right = sorted_reference(values, k);
      CHECK(solo(values, k) == right);
      CHECK(parallel(values, k, static_cast<std::uint32_t>(1 + random() % 9)) == right);
    }
  }
}
