#include "backend/fixtures.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;
using pulseinfer_test::gate;

TEST_CASE("cpu_backend orders plain memory over streams by events alone")
{
  // A token goes from stream to stream; each task changes memory that no lock protects.
  cpu_backend backend{{.queue_depth = 32}};
  std::vector<cpu_backend::stream_ref> streams;
  for (int i = 0; i < 4; ++i) { streams.push_back(backend.create_stream()); }
  auto const event = backend.create_event();
  std::mt19937 random{1};
  std::uint64_t value = 0, expected = 0;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    auto const stream = streams[random() % streams.size()];
    REQUIRE(backend.wait(stream, event) == status::ok);
    REQUIRE(backend.launch(stream, host_function{[&value, i] { value = value * 31 + i; }}) == status::ok);
    REQUIRE(backend.record(stream, event) == status::ok);
    expected = expected * 31 + i;
    if (i % 257 == 0) {
      REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
      REQUIRE(value == expected);  // the host sees what the event covers
    }
  }
  REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  CHECK(value == expected);
}

TEST_CASE("cpu_backend copies behind a producer and before its memory is used again")
{
  cpu_backend backend;
  auto const compute = backend.create_stream(), transfer = backend.create_stream(stream_priority::high);
  auto const written = backend.create_event(), copied = backend.create_event();
  std::array<std::uint64_t, 512> source{}, target{};
  std::array<copy_run, 8> runs;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    runs[i] = {reinterpret_cast<std::byte*>(&target[i * 64]), reinterpret_cast<std::byte const*>(&source[i * 64]), 512};
  }
  std::uint64_t wrong = 0;
  for (std::uint64_t round = 1; round <= 500; ++round) {
    REQUIRE(backend.wait(compute, copied) == status::ok);
    REQUIRE(backend.launch(compute, host_function{[&source, round] { source.fill(round); }}) == status::ok);
    REQUIRE(backend.record(compute, written) == status::ok);
    REQUIRE(backend.wait(transfer, written) == status::ok);
    REQUIRE(backend.copy(transfer, {runs.data(), 8, copy_direction::device_to_host}) == status::ok);
    REQUIRE(backend.launch(transfer, host_function{[&target, &wrong, round] {
                             for (std::uint64_t const word : target) { wrong += word != round ? 1 : 0; }
                           }}) == status::ok);
    REQUIRE(backend.record(transfer, copied) == status::ok);
  }
  REQUIRE(backend.wait_any({&copied, 1}, no_deadline) == status::ok);
  CHECK(wrong == 0);
}

TEST_CASE("cpu_backend serves many host threads at once")
{
  cpu_backend backend{{.max_streams = 6, .max_events = 64, .queue_depth = 16}};
  std::atomic<std::uint64_t> ran{0};
  std::atomic<std::uint64_t> failures{0};
  auto const check = [&failures](bool sound) {
    if (!sound) { ++failures; }
  };
  auto const shared = backend.create_stream();
  auto const drive = [&](std::uint32_t seed) {
    std::mt19937 random{seed};
    for (int round = 0; round < 30; ++round) {
      auto const own = backend.create_stream();
      auto const event = backend.create_event();
      std::size_t const bytes = 1 + random() % 5000;
      void* const memory = backend.allocate(memory_space::device, bytes);
      for (int i = 0; i < 30; ++i) {
        auto const stream = random() % 3 == 0 ? shared : own;
        check(backend.launch(stream, host_function{[&ran] { ++ran; }}) == status::ok);
        check(backend.record(stream, event) == status::ok);
        if (random() % 2 == 0) { check(backend.wait(random() % 2 == 0 ? shared : own, event) == status::ok); }
        if (random() % 5 == 0) {
          status const waited = backend.wait_any({&event, 1}, backend.now() + std::chrono::seconds{20});
          check(waited == status::ok && backend.done(event) == event_state::done);
        }
      }
      check(backend.synchronize(own) == status::ok);
      backend.destroy_event(event);
      backend.destroy_stream(own);
      backend.deallocate(memory_space::device, memory, bytes);
    }
  };
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i) { threads.emplace_back(drive, i + 1); }
  for (std::thread& thread : threads) { thread.join(); }
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(ran == 4 * 30 * 30);
  CHECK(failures == 0);
  CHECK(backend.device_bytes() == 0);
  CHECK(backend.live_events() == 0);
  CHECK(backend.live_streams() == 1);
}

TEST_CASE("cpu_backend wakes a waiting host when the first of many events is done")
{
  std::array<gate, 8> gates;
  cpu_backend backend{{.max_streams = 8}};
  std::vector<cpu_backend::event_ref> pending;
  std::array<cpu_backend::event_ref, 8> events;
  for (std::size_t i = 0; i < 8; ++i) {
    auto const stream = backend.create_stream();
    pending.push_back(events[i] = backend.create_event());
    REQUIRE(backend.launch(stream, host_function{[&gates, i] { gates[i].pass(); }}) == status::ok);
    REQUIRE(backend.record(stream, events[i]) == status::ok);
  }
  for (std::size_t const i : {5U, 0U, 7U, 2U, 1U, 6U, 4U, 3U}) {
    CHECK(backend.wait_any(pending, backend.now() + std::chrono::milliseconds{1}) == status::drain_timeout);
    std::thread opener{[&gates, i] { gates[i].open(); }};
    REQUIRE(backend.wait_any(pending, no_deadline) == status::ok);
    CHECK(backend.done(events[i]) == event_state::done);
    opener.join();
    std::erase(pending, events[i]);
  }
}

TEST_SUITE_END();
