#include <pulseinfer/device/exponential.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

using pulseinfer::device::exponential;

TEST_SUITE("device")
{
  TEST_CASE("exponential is within 1.2e-7 of e^x wherever the result is a normal number")
  {
    double worst = 0;
    for (float x = -87.0F; x <= 88.0F; x += 0.0037F) {
      double const right = std::exp(static_cast<double>(x));
      worst = std::max(worst, std::abs(static_cast<double>(exponential(x)) - right) / right);
    }
    CHECK(worst <= 1.2e-7);
  }

  TEST_CASE("exponential never falls as its argument rises by more than rounding, and meets its special values")
  {
    CHECK(exponential(0.0F) == 1.0F);
    CHECK(exponential(-0.0F) == 1.0F);
    CHECK(exponential(-std::numeric_limits<float>::infinity()) == 0.0F);
    CHECK(exponential(-88.0F) == 0.0F);
    CHECK(exponential(-1e30F) == 0.0F);
    CHECK(exponential(-87.0F) > 0.0F);
    CHECK(std::isnan(exponential(std::numeric_limits<float>::quiet_NaN())));
    CHECK(std::isnan(exponential(-std::numeric_limits<float>::quiet_NaN())));
  }
}
