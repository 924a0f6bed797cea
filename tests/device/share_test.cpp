#include "support/parallel_group.hpp"
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/share.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

std::vector<float> solo(std::vector<float> scores, std::uint32_t blocks)
{
  std::vector<float> storage(pulseinfer::device::share_temp_floats(blocks, 1), std::nanf(""));
  pulseinfer::device::share(pulseinfer::device::solo_group{}, scores.data(), blocks, storage.data());
  scores.resize(blocks);
  return scores;
}

std::vector<float> padded(std::uint32_t blocks, float garbage)
{
  return std::vector<float>(pulseinfer::round_up(blocks, 16U), garbage);
}

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("share is the softmax, whatever stands behind the last block")
  {
    std::mt19937 random{2};
    std::normal_distribution<float> normal{0.0F, 4.0F};
    for (std::uint32_t const blocks : {1U, 2U, 15U, 16U, 17U, 255U, 256U, 257U, 1000U, 5000U}) {
      for (float const base : {0.0F, 3000.0F, -3000.0F}) {
        CAPTURE(blocks);
        CAPTURE(base);
        std::vector<float> scores = padded(blocks, std::nanf(""));
        double top = -1e300;
        for (std::uint32_t b = 0; b < blocks; ++b) {
          scores[b] = base + normal(random);
          top = std::max(top, static_cast<double>(scores[b]));
        }
        double total = 0;
        for (std::uint32_t b = 0; b < blocks; ++b) { total += std::exp(static_cast<double>(scores[b]) - top); }
        std::vector<float> const shares = solo(scores, blocks);
        double sum = 0;
        double worst = 0;
        for (std::uint32_t b = 0; b < blocks; ++b) {
          double const right = std::exp(static_cast<double>(scores[b]) - top) / total;
          worst = std::max(worst, std::abs(static_cast<double>(shares[b]) - right) / right);
          sum += static_cast<double>(shares[b]);
        }
        CHECK(worst <= 2e-6);
        CHECK(sum == doctest::Approx(1.0).epsilon(1e-6));
      }
    }
  }

  TEST_CASE("law 8: share gives the same bits for every size of the group")
  {
    std::mt19937 random{8};
    std::normal_distribution<float> normal{0.0F, 4.0F};
    for (std::uint32_t const blocks : {3U, 100U, 777U, 4001U}) {
      std::vector<float> scores = padded(blocks, 0.0F);
      for (float& score : scores) { score = normal(random); }
      std::vector<float> const right = solo(scores, blocks);
      for (std::uint32_t const threads : {2U, 3U, 8U, 13U}) {
        std::vector<float> shares = scores;
        std::vector<float> storage(pulseinfer::device::share_temp_floats(blocks, threads), std::nanf(""));
        pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) {
          pulseinfer::device::share(group, shares.data(), blocks, storage.data());
        });
        shares.resize(blocks);
        CHECK(shares == right);
      }
    }
  }

  TEST_CASE("law 8: the scale of shares gives the bits that share writes, for every size of the group")
  {
    std::mt19937 random{9};
    std::normal_distribution<float> normal{0.0F, 4.0F};
    for (std::uint32_t const blocks : {1U, 3U, 100U, 777U, 4001U}) {
      std::vector<float> scores(blocks);
      for (float& score : scores) { score = normal(random); }
      std::vector<float> enough = padded(blocks, 0.0F);
      std::copy(scores.begin(), scores.end(), enough.begin());
      std::vector<float> const right = solo(enough, blocks);
      for (std::uint32_t const threads : {1U, 2U, 13U}) {
        std::vector<float> shares(blocks);
        std::vector<float> storage(pulseinfer::device::share_temp_floats(blocks, threads), std::nanf(""));
        pulseinfer_test::run_group(threads, [&](pulseinfer_test::parallel_group const& group) {
          auto const scale = pulseinfer::device::find_share_scale(group, scores.data(), blocks, storage.data());
          for (std::uint32_t b = group.thread_rank(); b < blocks; b += group.size()) {
            shares[b] = pulseinfer::device::exponential(scores[b] - scale.top) * scale.factor;
          }
        });
        CHECK(shares == right);
      }
    }
  }
}
