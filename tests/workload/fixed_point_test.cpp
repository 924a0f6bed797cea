#include <pulseinfer/workload/fixed_point.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>

using namespace pulseinfer::workload_detail;

namespace {

[[nodiscard]] double to_double(fixed value) { return static_cast<double>(value) / 65536.0; }
[[nodiscard]] double share_of(std::uint64_t value) { return static_cast<double>(value) / 4294967296.0; }

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("exponential, logistic, logarithm and root are those of the library, to some units of the last place")
  {
    for (int i = -704; i <= 704; ++i) {
      double const x = i / 64.0 + 0.003;
      fixed const value = to_fixed(x);
      if (x <= 0) { CHECK(share_of(exponential(value)) == doctest::Approx(std::exp(to_double(value))).epsilon(2e-4)); }
      CHECK(share_of(logistic(value)) == doctest::Approx(1.0 / (1.0 + std::exp(-to_double(value)))).epsilon(2e-4));
    }
    CHECK(exponential(to_fixed(-40.0)) == 0);
    CHECK(logistic(0) == std::uint64_t{1} << 31U);
    CHECK(logistic(to_fixed(40.0)) == std::uint64_t{1} << 32U);
    for (auto const& [a, b] : {std::pair{1, 3}, {7, 2}, {1, 1}, {65536, 196608}, {220000, 1000000000}, {2000000, 3}}) {
      double const ratio = static_cast<double>(a) / b;
      fixed const got = logarithm(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b));
      CHECK(to_double(got) == doctest::Approx(std::log(ratio)).epsilon(3e-4));
    }
    for (double const x : {0.0, 0.19, 1.0, 2.0, 100.0}) {
      CHECK(to_double(square_root(to_fixed(x))) == doctest::Approx(std::sqrt(x)).epsilon(1e-3));
    }
    CHECK(square_root(-1) == 0);
  }

  TEST_CASE("normal numbers have the moments of a normal distribution, and places of their own")
  {
    double sum = 0.0, squares = 0.0, beyond_two = 0.0, together = 0.0, before = 0.0;
    constexpr int count = 200'000;
    for (std::uint64_t i = 0; i < count; ++i) {
      double const x = to_double(normal(bits_of({3, i})));
      sum += x;
      squares += x * x;
      beyond_two += std::abs(x) > 2.0 ? 1.0 : 0.0;
      together += x * before;
      before = x;
    }
    CHECK(std::abs(sum / count) < 0.01);
    CHECK(squares / count == doctest::Approx(1.0).epsilon(0.01));
    CHECK(beyond_two / count == doctest::Approx(0.0455).epsilon(0.05));
    CHECK(std::abs(together / count) < 0.01);
    CHECK(bits_of({1, 2}) != bits_of({2, 1}));
  }
}
