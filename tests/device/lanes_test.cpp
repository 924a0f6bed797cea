#include <pulseinfer/device/lanes.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

using pulseinfer::device::float_lanes;

TEST_SUITE("device")
{
  TEST_CASE("float_lanes does in each of sixteen places what floats do")
  {
    std::mt19937 random{3};
    std::normal_distribution<float> normal;
    float a[16];
    float b[16];
    float c[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = normal(random);
      b[i] = normal(random);
      c[i] = normal(random);
    }
    auto const loaded = [](float const(&source)[16]) {
      auto lanes = float_lanes{};
      lanes.load(source);
      return lanes;
    };
    auto const check = [](float_lanes const& lanes, auto const& right) {
      float stored[16];
      lanes.store(stored);
      for (int i = 0; i < 16; ++i) { CHECK(stored[i] == doctest::Approx(right(i)).epsilon(1e-6)); }
    };
    float_lanes x = loaded(a);
    x.add(loaded(b));
    check(x, [&](int i) { return a[i] + b[i]; });
    x.subtract(loaded(c));
    check(x, [&](int i) { return a[i] + b[i] - c[i]; });
    x = loaded(a);
    x.scale(3.0F);
    check(x, [&](int i) { return 3.0F * a[i]; });
    x.add_scaled(-2.0F, loaded(b));
    check(x, [&](int i) { return 3.0F * a[i] - 2.0F * b[i]; });
    x = loaded(a);
    x.add_product(loaded(b), loaded(c));
    check(x, [&](int i) { return a[i] + b[i] * c[i]; });
    x = loaded(a);
    x.take_larger(loaded(b));
    check(x, [&](int i) { return std::max(a[i], b[i]); });
    x = loaded(a);
    x.exponential_below(5.0F);
    check(x, [&](int i) { return std::exp(a[i] - 5.0F); });

    double sum = 0;
    float largest = a[0];
    for (float const value : a) {
      sum += static_cast<double>(value);
      largest = std::max(largest, value);
    }
    CHECK(static_cast<double>(loaded(a).sum()) == doctest::Approx(sum).epsilon(1e-6));
    CHECK(loaded(a).largest() == largest);
    check(float_lanes{-7.0F}, [](int) { return -7.0F; });
    check(float_lanes{}, [](int) { return 0.0F; });
    CHECK(float_lanes{-std::numeric_limits<float>::infinity()}.largest() == -std::numeric_limits<float>::infinity());
  }

  TEST_CASE("float_lanes finds its largest and sums alike wherever a value stands")
  {
    for (int place = 0; place < 16; ++place) {
      float values[16] = {};
      values[place] = 2.5F;
      float_lanes lanes;
      lanes.load(values);
      CHECK(lanes.largest() == 2.5F);
      CHECK(lanes.sum() == 2.5F);
    }
  }
}
