#include <pulseinfer/device/logarithm.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>

using pulseinfer::device::logarithm;

TEST_SUITE("device")
{
  TEST_CASE("logarithm is within 1.2e-7 of ln x over the normal numbers")
  {
    double worst = 0;
    auto const look = [&](float x) {
      double const right = std::log(static_cast<double>(x));
      double const size = std::max(1.0, std::abs(right));
      worst = std::max(worst, std::abs(static_cast<double>(logarithm(x)) - right) / size);
    };
    for (float x = std::numeric_limits<float>::min(); x < 3e38F; x *= 1.0007F) { look(x); }
    for (std::uint32_t tokens = 1; tokens <= 4096; ++tokens) { look(static_cast<float>(tokens)); }
    for (float x = 0.5F; x < 2.0F; x += 1.3e-5F) { look(x); }
    CHECK(worst <= 1.2e-7);
    CHECK(logarithm(1.0F) == 0.0F);
    CHECK(std::isnan(logarithm(std::numeric_limits<float>::quiet_NaN())));
  }
}
