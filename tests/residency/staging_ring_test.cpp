#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/residency/staging_ring.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

std::string text_of(std::uint32_t depth, std::uint64_t bytes)
{
  cpu_backend backend{{.mode = cpu_mode::manual}};
  try {
    staging_ring<cpu_backend> const ring{backend, depth, bytes};
  } catch (error const& thrown) {
    return thrown.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("residency")
{
  TEST_CASE("a staging ring without places or bytes is refused, and leaves no event behind")
  {
    CHECK(text_of(0, 8) == "invalid_argument: staging ring of 0 places of 8 B");
    CHECK(text_of(2, 0) == "invalid_argument: staging ring of 2 places of 0 B");
    cpu_backend backend{{.mode = cpu_mode::manual}};
    {
      staging_ring<cpu_backend> ring{backend, 3, 64};
      CHECK(backend.live_events() == 3);
    }
    CHECK(backend.live_events() == 0);
    CHECK(backend.pinned_bytes() == 0);
  }

  TEST_CASE("places are aligned for their type, and nothing is handed out past the end")
  {
    cpu_backend backend{{.mode = cpu_mode::manual}};
    staging_ring<cpu_backend> ring{backend, 2, 32};
    REQUIRE(ring.begin(no_deadline) == status::ok);
    auto* const byte = ring.take<std::uint8_t>(3);
    auto* const words = ring.take<std::uint64_t>(2);
    REQUIRE(byte != nullptr);
    REQUIRE(words != nullptr);
    CHECK(reinterpret_cast<std::uint8_t*>(words) == byte + 8);
    CHECK(ring.free_bytes() == 8);
    CHECK(ring.take<std::uint64_t>(2) == nullptr);
    CHECK(ring.take<std::uint32_t>(2) != nullptr);
    CHECK(ring.take<std::uint8_t>(1) == nullptr);
    CHECK(ring.free_bytes() == 0);
  }

  // Report: NVIDIA/TensorRT-LLM#15546
  TEST_CASE("the device reads what was written for it, however many steps the host runs ahead")
  {
    for (std::uint64_t const seed : {0U, 1U, 2U}) {
      cpu_backend backend{{.mode = cpu_mode::manual, .seed = seed}};
      auto const stream = backend.create_stream(stream_priority::normal);
      std::vector<int> seen;
      {
        constexpr std::uint32_t depth = 3;
        staging_ring<cpu_backend> ring{backend, depth, 64};
        for (int step = 0; step < 20; ++step) {
          REQUIRE(ring.begin(no_deadline) == status::ok);
          int* const place = ring.take<int>(1);
          *place = step;
          REQUIRE(backend.launch(stream, host_function{[&seen, place] { seen.push_back(*place); }}) == status::ok);
          REQUIRE(ring.end(stream) == status::ok);
          CHECK(ring.serial() == static_cast<std::uint64_t>(step) + 1);
          CHECK(seen.size() + depth >= static_cast<std::size_t>(step) + 1);
        }
        CHECK(ring.waits() == 20 - depth);
        CHECK(ring.passed(2));
        CHECK_FALSE(ring.passed(20));
        CHECK_FALSE(ring.passed(21));  // not begun yet
        REQUIRE(ring.wait(20, no_deadline) == status::ok);
        CHECK(ring.passed(20));
      }
      std::vector<int> right(20);
      for (int i = 0; i < 20; ++i) { right[static_cast<std::size_t>(i)] = i; }
      CHECK(seen == right);
    }
  }

  TEST_CASE("a ring whose device does not get on says so at the deadline, and goes on when it does")
  {
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream(stream_priority::normal);
    auto const other = backend.create_stream(stream_priority::normal);
    auto const gate = backend.create_event();
    REQUIRE(backend.launch(other, host_function{[] {}}) == status::ok);
    REQUIRE(backend.record(other, gate) == status::ok);
    staging_ring<cpu_backend> ring{backend, 1, 64};
    REQUIRE(ring.begin(no_deadline) == status::ok);
    REQUIRE(backend.wait(stream, gate) == status::ok);
    REQUIRE(backend.launch(stream, host_function{[] {}}) == status::ok);
    REQUIRE(ring.end(stream) == status::ok);
    CHECK(ring.begin(backend.now()) == status::drain_timeout);
    CHECK(ring.begin(no_deadline) == status::ok);
    backend.destroy_event(gate);
  }
}
