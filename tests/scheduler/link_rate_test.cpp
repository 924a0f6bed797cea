#include <pulseinfer/scheduler/link_rate.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <chrono>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

TEST_SUITE("scheduler")
{
  TEST_CASE("a rate is that of the stretches in which the link was busy; idle time and late looks do not count")
  {
    link_rate rate;
    CHECK(rate.bytes_per_second() == 0.0);
    rate.look(0us, 0, 1000, false);
    rate.look(100us, 1000, 0, true);  // slept for, 10 bytes a microsecond
    CHECK(rate.bytes_per_second() == doctest::Approx(1e7));
    rate.look(5000us, 0, 2000, false);  // nothing travelled
    rate.look(5050us, 500, 1500, false);
    CHECK(rate.bytes_per_second() == doctest::Approx(1e7));
    rate.look(9000us, 1500, 0, false);  // landed at some time before the look
    CHECK(rate.bytes_per_second() == doctest::Approx(1e7));
  }

  TEST_CASE("a rate follows a link that becomes slower")
  {
    link_rate rate{.half_life_bytes = 1e6};
    nanoseconds now{0};
    rate.look(now, 0, 100'000, false);
    for (int i = 0; i < 100; ++i) {
      now += 10us;
      rate.look(now, 100'000, 100'000, false);
    }
    CHECK(rate.bytes_per_second() == doctest::Approx(1e10));
    for (int i = 0; i < 100; ++i) {
      now += 20us;
      rate.look(now, 100'000, 100'000, false);
    }
    CHECK(rate.bytes_per_second() == doctest::Approx(5e9).epsilon(0.02));
  }

  TEST_CASE("a rate comes close to the link's, whenever one looks")
  {
    bool const held = rc::check([](std::uint32_t seed) {
      double const bytes_per_ns = *rc::gen::inRange(1, 60);
      // Rows of some bytes land one after another on a link that is never idle; looks come at any time.
      std::uint64_t mix = seed + 1;
      auto const next = [&](std::uint64_t most) {
        mix = mix * 6'364'136'223'846'793'005ULL + 1'442'695'040'888'963'407ULL;
        return (mix >> 33U) % most;
      };
      link_rate rate;
      double end = 0.0, time = 0.0;
      std::uint64_t row = 1 + next(1'000'000);
      for (int look = 0; look < 2000; ++look) {
        time += static_cast<double>(1 + next(40'000));
        std::uint64_t landed = 0;
        while (end + static_cast<double>(row) / bytes_per_ns <= time) {
          end += static_cast<double>(row) / bytes_per_ns;
          landed += row;
          row = 1 + next(1'000'000);
        }
        rate.look(nanoseconds{static_cast<std::int64_t>(time)}, landed, row, false);
      }
      RC_ASSERT(rate.bytes_per_second() > 0.97e9 * bytes_per_ns);
      RC_ASSERT(rate.bytes_per_second() < 1.03e9 * bytes_per_ns);
    });
    CHECK(held);
  }
}
