#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/merge.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using pulseinfer::device::merge_log_sums;
using pulseinfer::device::merge_weights;

namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

struct partial {
  std::vector<float> values;
  float lse = nothing;
};

partial merged(partial const& a, partial const& b)
{
  partial result{.values = std::vector<float>(a.values.size())};
  merge_weights const weights = merge_log_sums(a.lse, b.lse);
  pulseinfer::device::merge(
    pulseinfer::device::solo_group{}, a.values.data(), b.values.data(), weights, result.values.data(),
    static_cast<std::uint32_t>(result.values.size()));
  result.lse = weights.lse;
  return result;
}

}  // namespace

TEST_SUITE("device")
{
  // flashinfer-ai/flashinfer#4051: two empty partial results gave NaN
  TEST_CASE("merging two empty results gives an empty one")
  {
    partial const both = merged({{0, 0, 0}}, {{0, 0, 0}});
    CHECK(both.values == std::vector<float>{0, 0, 0});
    CHECK(both.lse == nothing);
    // What an empty part holds is not read.
    CHECK(merged({{not_a_number}}, {{not_a_number}}).values == std::vector<float>{0});
  }

  TEST_CASE("merging with an empty result gives the other one, bit for bit, on either side and along a chain")
  {
    std::vector<float> const v{0.1F, -3.7F, 1e-30F, 65504.0F};
    for (float const lse : {0.5F, -1e4F, 80.0F, 0.0F}) {
      CAPTURE(lse);
      for (float const garbage : {0.0F, not_a_number}) {
        partial const empty{.values = std::vector<float>(v.size(), garbage)};
        partial const left = merged({v, lse}, empty);
        partial const right = merged(empty, {v, lse});
        CHECK(left.values == v);
        CHECK(left.lse == lse);
        CHECK(right.values == v);
        CHECK(right.lse == lse);
        for (int full = 0; full < 5; ++full) {
          partial chain = full == 0 ? partial{v, lse} : empty;
          for (int i = 1; i < 5; ++i) { chain = merged(chain, i == full ? partial{v, lse} : empty); }
          CHECK(chain.values == v);
          CHECK(chain.lse == lse);
        }
      }
    }
  }

  TEST_CASE("merging is within 1e-6 of double precision for any finite log-sums, however negative")
  {
    std::mt19937 random{5};
    std::normal_distribution<float> normal;
    for (float const base : {0.0F, -1e4F, 1e4F, 30.0F}) {
      for (float const apart : {0.0F, 1e-3F, 0.7F, -5.0F, 30.0F, -200.0F}) {
        CAPTURE(base);
        CAPTURE(apart);
        partial const a{.values = {normal(random), normal(random)}, .lse = base};
        partial const b{.values = {normal(random), normal(random)}, .lse = base + apart};
        partial const both = merged(a, b);
        double const top = static_cast<double>(std::max(a.lse, b.lse));
        double const first = std::exp(static_cast<double>(a.lse) - top);
        double const second = std::exp(static_cast<double>(b.lse) - top);
        double const lse = top + std::log(first + second);
        CHECK(std::abs(static_cast<double>(both.lse) - lse) <= 1e-6 * std::max(1.0, std::abs(lse)));
        for (std::size_t i = 0; i < 2; ++i) {
          double const right =
            (first * static_cast<double>(a.values[i]) + second * static_cast<double>(b.values[i])) / (first + second);
          double const size = std::abs(static_cast<double>(a.values[i])) + std::abs(static_cast<double>(b.values[i]));
          CHECK(std::isfinite(both.values[i]));
          CHECK(std::abs(static_cast<double>(both.values[i]) - right) <= 1e-6 * size);
        }
      }
    }
  }
}
