#include "backend/fixtures.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Two streams of three tasks each; the second one's wait for the first one's end when `with_wait`. @return the order of tasks
template <class Run>
std::string order_of(bool with_wait, Run run)
{
  cpu_backend backend{contract_options(cpu_mode::manual)};
  auto const first = backend.create_stream(), second = backend.create_stream();
  auto const event = backend.create_event();
  std::string log;
  for (char const letter : {'a', 'b', 'c'}) {
    REQUIRE(backend.launch(first, host_function{[&log, letter] { log += letter; }}) == status::ok);
  }
  REQUIRE(backend.record(first, event) == status::ok);
  if (with_wait) { REQUIRE(backend.wait(second, event) == status::ok); }
  for (char const letter : {'x', 'y', 'z'}) {
    REQUIRE(backend.launch(second, host_function{[&log, letter] { log += letter; }}) == status::ok);
  }
  run(backend);
  CHECK(backend.queued_tasks() == 0);
  return log;
}

}  // namespace

TEST_CASE("cpu_backend in manual mode runs nothing until asked, then in the order of enqueuing")
{
  CHECK(order_of(false, [](cpu_backend& backend) {
          CHECK(backend.queued_tasks() == 6);
          CHECK(backend.run_one());
          CHECK(backend.queued_tasks() == 5);
          CHECK(backend.run_all() == 5);
          CHECK_FALSE(backend.run_one());
        }) == "abcxyz");
}

TEST_CASE("cpu_backend in manual mode runs one stream's next task when told which")
{
  cpu_backend backend{contract_options(cpu_mode::manual)};
  auto const first = backend.create_stream(), second = backend.create_stream();
  auto const event = backend.create_event();
  std::string log;
  REQUIRE(backend.launch(first, host_function{[&log] { log += 'a'; }}) == status::ok);
  REQUIRE(backend.record(first, event) == status::ok);
  REQUIRE(backend.launch(second, host_function{[&log] { log += 'x'; }}) == status::ok);
  REQUIRE(backend.wait(second, event) == status::ok);
  REQUIRE(backend.launch(second, host_function{[&log] { log += 'y'; }}) == status::ok);
  CHECK(backend.run_one(second));
  CHECK_FALSE(backend.run_one(second));  // must wait for the first
  CHECK(backend.run_one(first));
  CHECK_FALSE(backend.run_one(first));
  CHECK(backend.run_one(second));
  CHECK(backend.run_one(second));
  CHECK(log == "xay");
}

TEST_CASE("cpu_backend in manual mode has a seed for each legal order, and the wait rules out the wrong ones")
{
  // C(6,3) = 20 orders of two streams of three tasks; with the wait just one.
  std::map<std::string, int> without, with;
  int wrong_without = 0;
  constexpr std::uint64_t seeds = 2000;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    auto const run = [seed](cpu_backend& backend) { backend.run_seeded(seed); };
    std::string const order = order_of(false, run);
    ++without[order];
    wrong_without += order != "abcxyz" ? 1 : 0;
    ++with[order_of(true, run)];
    CHECK(order == order_of(false, run));  // the same seed gives the same order
  }
  MESSAGE(without.size(), " orders of ", seeds, " seeds; with the wait 0 wrong, without it ", wrong_without);
  CHECK(without.size() == 20);
  CHECK(with.size() == 1);
  CHECK(with.contains("abcxyz"));
  CHECK(wrong_without > 0);
}

TEST_CASE("cpu_backend in manual mode draws for wait_any, run_one and run_all what its own seed says")
{
  std::set<std::string> orders;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    auto const draw = [&](auto run) {
      return order_of(false, [&](cpu_backend& backend) {
        backend.reseed(seed);
        run(backend);
      });
    };
    std::string const all = draw([](cpu_backend& backend) { backend.run_all(); });
    CHECK(draw([](cpu_backend& backend) {
            while (backend.run_one()) {}
          }) == all);
    CHECK(draw([](cpu_backend& backend) { CHECK(backend.synchronize() == status::ok); }) == all);
    orders.insert(all);
  }
  CHECK(orders.size() > 15);
}

TEST_CASE("cpu_backend in manual mode counts time by tasks, so the same calls give the same times")
{
  cpu_backend backend{{.mode = cpu_mode::manual, .manual_task_time = nanoseconds{500}}};
  auto const stream = backend.create_stream();
  auto const event = backend.create_event();
  CHECK(backend.now() == nanoseconds{0});
  observation seen[6];
  for (int i = 0; i < 6; ++i) { REQUIRE(backend.launch(stream, charged_operation{}, &seen[i]) == status::ok); }
  REQUIRE(backend.record(stream, event) == status::ok);
  CHECK(backend.wait_any({&event, 1}, nanoseconds{1200}) == status::drain_timeout);
  CHECK(backend.now() == nanoseconds{1500});
  CHECK(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  for (int i = 0; i < 6; ++i) {
    CHECK(seen[i].begin == nanoseconds{500 * i});
    CHECK(seen[i].end == nanoseconds{500 * (i + 1)});
  }
  CHECK(backend.now() == nanoseconds{3000});
}

TEST_CASE("cpu_backend observes when a task ran and what it cost, read after the work that it follows")
{
  for (cpu_mode const mode : {cpu_mode::threaded, cpu_mode::manual}) {
    struct counted : archetype::operation {
      std::uint64_t const* bytes;
      explicit counted(std::uint64_t const* value) : bytes{value} {}
      [[nodiscard]] launch_shape shape() const { return {.items = 1}; }
      [[nodiscard]] operation_cost cost() const { return {.link_bytes = *bytes}; }
    };
    cpu_backend backend{contract_options(mode)};
    auto const stream = backend.create_stream();
    std::uint64_t bytes = 0;
    std::vector<std::byte> memory(100);
    copy_run const runs[2] = {{memory.data(), memory.data() + 50, 20}, {memory.data() + 20, memory.data() + 70, 30}};
    observation seen[3];
    REQUIRE(backend.launch(stream, host_function{[&bytes] { bytes = 4711; }}, &seen[0]) == status::ok);
    REQUIRE(backend.launch(stream, counted{&bytes}, &seen[1]) == status::ok);
    REQUIRE(backend.copy(stream, {runs, 2, copy_direction::device_to_host}, &seen[2]) == status::ok);
    REQUIRE(backend.synchronize() == status::ok);
    CHECK(seen[0].begin >= nanoseconds{0});
    for (int i = 0; i < 3; ++i) { CHECK(seen[i].begin <= seen[i].end); }
    for (int i = 0; i < 2; ++i) { CHECK(seen[i].end <= seen[i + 1].begin); }
    CHECK(seen[2].end <= backend.now());
    CHECK(seen[1].cost.link_bytes == 4711);
    CHECK(seen[2].cost.link_bytes == 50);
    CHECK(seen[2].cost.link_runs == 2);
    CHECK(seen[2].cost.to_host);
  }
}

TEST_CASE("cpu_backend in manual mode says drain_timeout when nothing can run, and time goes to the deadline")
{
  cpu_backend backend{{.mode = cpu_mode::manual}};
  auto const stream = backend.create_stream();
  auto const event = backend.create_event();
  std::vector<status> seen;
  // A task that waits for its own end: nothing else can run.
  auto const task = [&] {
    seen.push_back(backend.wait_any({&event, 1}, backend.now() + std::chrono::seconds{1}));
    seen.push_back(backend.wait_any({&event, 1}, no_deadline));
  };
  REQUIRE(backend.launch(stream, host_function{[&task] { task(); }}) == status::ok);
  REQUIRE(backend.record(stream, event) == status::ok);
  CHECK(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  CHECK(seen == std::vector{status::drain_timeout, status::drain_timeout});
  CHECK(backend.now() >= nanoseconds{std::chrono::seconds{1}});
}

TEST_CASE("cpu_backend lets a task enqueue more work")
{
  for (cpu_mode const mode : {cpu_mode::threaded, cpu_mode::manual}) {
    cpu_backend backend{contract_options(mode)};
    auto const first = backend.create_stream(), second = backend.create_stream();
    std::atomic<int> sum{0};
    std::atomic<int> refused{0};
    auto const task = [&] {
      for (auto const stream : {first, second}) {
        if (backend.launch(stream, host_function{[&sum] { ++sum; }}) != status::ok) { ++refused; }
      }
    };
    for (int i = 0; i < 30; ++i) {
      REQUIRE(backend.launch(first, host_function{[&task] { task(); }}) == status::ok);
    }
    REQUIRE(backend.synchronize() == status::ok);
    CHECK(sum == 60);
    CHECK(refused == 0);
  }
}

TEST_CASE("cpu_backend waits for a place in a full queue, then says busy and changes nothing")
{
  SUBCASE("threaded, tasks")
  {
    cpu_options options = contract_options(cpu_mode::threaded);
    options.full_queue_patience = std::chrono::milliseconds{20};
    gate held;
    cpu_backend backend{options};
    auto const stream = backend.create_stream();
    int ran = 0;
    REQUIRE(backend.launch(stream, host_function{[&held] { held.pass(); }}) == status::ok);
    for (std::uint32_t i = 1; i < options.queue_depth; ++i) {
      REQUIRE(backend.launch(stream, host_function{[&ran] { ++ran; }}) == status::ok);
    }
    nanoseconds const before = backend.now();
    CHECK(backend.launch(stream, host_function{[&ran] { ran += 1000; }}) == status::busy);
    CHECK(backend.now() - before >= options.full_queue_patience);
    held.open();
    CHECK(backend.launch(stream, host_function{[&ran] { ++ran; }}) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
    CHECK(ran == static_cast<int>(options.queue_depth));
  }
  SUBCASE("threaded, runs of copies")
  {
    cpu_options options = contract_options(cpu_mode::threaded);
    options.full_queue_patience = nanoseconds{0};
    gate held;
    cpu_backend backend{options};
    auto const stream = backend.create_stream();
    std::vector<std::byte> source(64, std::byte{7}), target(64);
    std::vector<copy_run> runs;
    for (std::size_t i = 0; i < 64; ++i) { runs.push_back({&target[i], &source[i], 1}); }
    REQUIRE(backend.launch(stream, host_function{[&held] { held.pass(); }}) == status::ok);
    CHECK(backend.copy(stream, {runs.data(), 40}) == status::ok);
    CHECK(backend.copy(stream, {runs.data() + 40, 24}) == status::ok);
    CHECK(backend.copy(stream, {runs.data(), 1}) == status::busy);
    held.open();
    REQUIRE(backend.synchronize(stream) == status::ok);
    CHECK(target == source);
    CHECK(backend.copy(stream, {runs.data(), 64}) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
  }
  SUBCASE("manual without patience")
  {
    cpu_options options = contract_options(cpu_mode::manual);
    options.full_queue_patience = nanoseconds{0};
    cpu_backend backend{options};
    auto const stream = backend.create_stream();
    for (std::uint32_t i = 0; i < options.queue_depth; ++i) {
      REQUIRE(backend.launch(stream, charged_operation{}) == status::ok);
    }
    CHECK(backend.launch(stream, charged_operation{}) == status::busy);
    observation seen;
    CHECK(backend.launch(stream, charged_operation{}, &seen) == status::busy);
    CHECK(seen.begin == observation::never);
    CHECK(backend.run_one());
    CHECK(backend.launch(stream, charged_operation{}) == status::ok);
  }
}

/// Public report: sgl-project/sglang#23609 (a launch of zero rows fails, and then unrelated calls do).
TEST_CASE("cpu_backend issues nothing for work that has nothing to do, nor for waits that are over")
{
  cpu_backend backend{contract_options(cpu_mode::manual)};
  auto const stream = backend.create_stream(), other = backend.create_stream();
  auto const event = backend.create_event();
  copy_run const no_bytes[3] = {};
  REQUIRE(backend.launch(stream, append_operation{.items = 0}) == status::ok);
  REQUIRE(backend.copy(stream, {}) == status::ok);
  REQUIRE(backend.copy(stream, {no_bytes, 3}) == status::ok);
  REQUIRE(backend.wait(stream, event) == status::ok);  // never recorded
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.wait(other, event) == status::ok);  // done
  CHECK(backend.queued_tasks() == 0);
  REQUIRE(backend.launch(stream, charged_operation{}) == status::ok);
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.wait(stream, event) == status::ok);  // its own stream's
  CHECK(backend.queued_tasks() == 1);
  REQUIRE(backend.wait(other, event) == status::ok);
  CHECK(backend.queued_tasks() == 2);
}

TEST_CASE("cpu_backend ends only when all its work has run")
{
  for (cpu_mode const mode : {cpu_mode::threaded, cpu_mode::manual}) {
    int ran = 0;
    {
      cpu_backend backend{contract_options(mode)};
      auto const first = backend.create_stream(), second = backend.create_stream();
      auto const event = backend.create_event();
      for (int i = 0; i < 20; ++i) {
        auto const stream = i % 2 == 0 ? first : second;
        REQUIRE(backend.wait(stream, event) == status::ok);
        REQUIRE(backend.launch(stream, host_function{[&ran] { ++ran; }}) == status::ok);
        REQUIRE(backend.record(stream, event) == status::ok);
      }
    }
    CHECK(ran == 20);
  }
}

TEST_CASE("cpu_backend counts bytes of each space, their peak, streams and events")
{
  cpu_backend backend{contract_options(cpu_mode::manual)};
  void* const a = backend.allocate(memory_space::device, 1000);
  void* const b = backend.allocate(memory_space::pinned, 300);
  CHECK(backend.device_bytes() == 1000);
  CHECK(backend.pinned_bytes() == 300);
  backend.deallocate(memory_space::device, a, 1000);
  backend.deallocate(memory_space::pinned, b, 300);
  CHECK(backend.device_bytes() == 0);
  CHECK(backend.device_bytes_peak() == 1000);
  CHECK(backend.pinned_bytes_peak() == 300);
  backend.reset_peaks();
  CHECK(backend.device_bytes_peak() == 0);
  auto const stream = backend.create_stream();
  auto const event = backend.create_event();
  CHECK(backend.live_streams() == 1);
  CHECK(backend.live_events() == 1);
  backend.destroy_stream(stream);
  backend.destroy_event(event);
  CHECK(backend.live_streams() == 0);
  CHECK(backend.live_events() == 0);
}

TEST_CASE("cpu_backend refuses sizes of 0 and negative times at construction")
{
  auto const text = [](cpu_options const& options) -> std::string {
    try {
      cpu_backend backend{options};
    } catch (configuration_error const& error) {
      return error.what();
    }
    return {};
  };
  CHECK(text({.max_streams = 0}).find("max_streams is 0") != std::string::npos);
  CHECK(text({.max_events = 0}).find("max_events is 0") != std::string::npos);
  CHECK(text({.queue_depth = 0}).find("queue_depth is 0") != std::string::npos);
  CHECK(text({.max_copy_runs = 0}).find("max_copy_runs is 0") != std::string::npos);
  CHECK(text({.full_queue_patience = nanoseconds{-7}}).find("-7 ns") != std::string::npos);
  CHECK(text({.manual_task_time = nanoseconds{-9}}).find("-9 ns") != std::string::npos);
  CHECK(text({.mode = cpu_mode::manual, .max_scratch_bytes = 0}).empty());
}

TEST_SUITE_END();
