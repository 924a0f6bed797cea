#include "backend/fixtures.hpp"
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// One byte a nanosecond in the device and on the link, 10 ns a launch, 100 ns an operation and 5 ns a run on the link.
[[nodiscard]] sim_options simple_options(bool move_data = false)
{
  link_cost const link{nanoseconds{100}, nanoseconds{5}, 1e9, 0.5e9};
  return {.move_data = move_data, .copies = link, .kernels = link, .compute = {nanoseconds{10}, 1e9, 1e9}};
}

[[nodiscard]] auto data_work(std::uint64_t device_bytes, std::uint64_t flops = 0)
{
  return host_function{[] {}, operation_cost{.device_bytes = device_bytes, .flops = flops}};
}

[[nodiscard]] auto gather(std::uint64_t link_bytes, std::uint64_t runs, bool to_host = false)
{
  return host_function{[] {}, operation_cost{.link_bytes = link_bytes, .link_runs = runs, .to_host = to_host}};
}

/// Time when all that stands on `stream` has run.
nanoseconds end_of(sim_backend& backend, sim_backend::stream_ref stream)
{
  auto const event = backend.create_event();
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  backend.destroy_event(event);
  return backend.now();
}

}  // namespace

TEST_CASE("sim_backend charges an operation its launch and the longer of bytes and arithmetic")
{
  sim_backend backend{simple_options()};
  auto const stream = backend.create_stream();
  REQUIRE(backend.launch(stream, data_work(1000)) == status::ok);
  CHECK(backend.now() == nanoseconds{0});  // enqueuing takes no time
  CHECK(end_of(backend, stream) == nanoseconds{1010});
  REQUIRE(backend.launch(stream, data_work(1000, 2500)) == status::ok);
  CHECK(end_of(backend, stream) == nanoseconds{1010 + 2510});
  CHECK(backend.busy(sim_resource::device) == nanoseconds{1010 + 2510});
}

TEST_CASE("sim_backend charges the link per operation, run and byte of each direction")
{
  sim_backend backend{simple_options()};
  auto const stream = backend.create_stream();
  std::vector<std::byte> memory(1000);
  copy_run const runs[3] = {
    {memory.data(), memory.data() + 500, 100},
    {memory.data() + 100, memory.data() + 600, 50},
    {memory.data() + 200, memory.data() + 700, 0}};
  REQUIRE(backend.copy(stream, {runs, 3, copy_direction::host_to_device}) == status::ok);
  CHECK(end_of(backend, stream) == nanoseconds{100 + 3 * 5 + 150});
  nanoseconds const begin = backend.now();
  REQUIRE(backend.copy(stream, {runs, 2, copy_direction::device_to_host}) == status::ok);
  CHECK(end_of(backend, stream) - begin == nanoseconds{100 + 2 * 5 + 300});
  REQUIRE(backend.launch(stream, gather(4000, 20)) == status::ok);
  CHECK(end_of(backend, stream) - begin == nanoseconds{410 + 100 + 20 * 5 + 4000});
  CHECK(backend.busy(sim_resource::to_device) == nanoseconds{265 + 4200});
  CHECK(backend.busy(sim_resource::to_host) == nanoseconds{410});
  nanoseconds const before_device = backend.now();
  REQUIRE(backend.copy(stream, {runs, 2, copy_direction::device_to_device}) == status::ok);
  CHECK(end_of(backend, stream) - before_device == nanoseconds{100 + 2 * 5 + 2 * 150});
  CHECK(backend.busy(sim_resource::to_device) == nanoseconds{265 + 4200});
}

TEST_CASE("sim_backend lets link and device work at the same time, and each direction of the link one after another")
{
  sim_backend backend{simple_options()};
  auto const compute = backend.create_stream(), up = backend.create_stream(), up_too = backend.create_stream(),
             down = backend.create_stream();
  REQUIRE(backend.launch(compute, data_work(5000)) == status::ok);
  REQUIRE(backend.launch(up, gather(1000, 0)) == status::ok);
  REQUIRE(backend.launch(up_too, gather(1000, 0)) == status::ok);
  REQUIRE(backend.launch(down, gather(1000, 0, true)) == status::ok);
  CHECK(end_of(backend, up) == nanoseconds{1100});
  CHECK(end_of(backend, down) == nanoseconds{2100});
  CHECK(end_of(backend, up_too) == nanoseconds{2200});
  CHECK(end_of(backend, compute) == nanoseconds{5010});
}

TEST_CASE("sim_backend runs operations on data one after another on the device, those on metadata beside them")
{
  sim_backend backend{simple_options()};
  auto const first = backend.create_stream(), second = backend.create_stream(), small = backend.create_stream();
  int ran = 0;
  REQUIRE(backend.launch(first, data_work(1000)) == status::ok);
  REQUIRE(backend.launch(second, data_work(1000)) == status::ok);
  REQUIRE(
    backend.launch(small, named_host_function<"count", operation_kind::metadata>([&ran] { ++ran; })) == status::ok);
  CHECK(ran == 0);  // what it does happens when it ends
  CHECK(end_of(backend, small) == nanoseconds{10});
  CHECK(ran == 1);
  CHECK(end_of(backend, first) == nanoseconds{1010});
  CHECK(end_of(backend, second) == nanoseconds{2020});
}

TEST_CASE("sim_backend starts the more urgent of two streams that come to the link together")
{
  for (bool const swapped : {false, true}) {
    sim_backend backend{simple_options()};
    auto const gate = backend.create_stream();
    auto const a = backend.create_stream(swapped ? stream_priority::high : stream_priority::low);
    auto const b = backend.create_stream(swapped ? stream_priority::low : stream_priority::high);
    auto const event = backend.create_event();
    REQUIRE(backend.launch(gate, data_work(90)) == status::ok);
    REQUIRE(backend.record(gate, event) == status::ok);
    for (auto const stream : {a, b}) {
      REQUIRE(backend.wait(stream, event) == status::ok);
      REQUIRE(backend.launch(stream, gather(1000, 0)) == status::ok);
    }
    CHECK(end_of(backend, swapped ? a : b) == nanoseconds{100 + 1100});
    CHECK(end_of(backend, swapped ? b : a) == nanoseconds{100 + 2200});
  }
}

TEST_CASE("sim_backend reads a cost when the operation starts, after the work that it follows")
{
  struct planned : archetype::operation {
    std::uint64_t const* bytes;
    explicit planned(std::uint64_t const* counted) : bytes{counted} {}
    [[nodiscard]] launch_shape shape() const { return {.items = 1}; }
    [[nodiscard]] operation_cost cost() const { return {.link_bytes = *bytes}; }
  };
  sim_backend backend{simple_options()};
  auto const stream = backend.create_stream();
  std::uint64_t bytes = 0;
  REQUIRE(backend.launch(stream, named_host_function<"plan", operation_kind::metadata>([&bytes] {
                           bytes = 700;
                         })) == status::ok);
  REQUIRE(backend.launch(stream, planned{&bytes}) == status::ok);
  CHECK(end_of(backend, stream) == nanoseconds{10 + 100 + 700});
}

TEST_CASE("sim_backend moves bytes only when asked, and then when the copy ends")
{
  for (bool const move_data : {false, true}) {
    sim_backend backend{simple_options(move_data)};
    auto const stream = backend.create_stream();
    std::vector<std::byte> source(64, std::byte{1}), target(64);
    copy_run const run{target.data(), source.data(), 64};
    REQUIRE(backend.copy(stream, {&run, 1}) == status::ok);
    backend.advance(nanoseconds{100});
    source.assign(64, std::byte{2});
    CHECK(target[0] == std::byte{0});
    CHECK(end_of(backend, stream) == nanoseconds{100 + 5 + 64});
    CHECK(target[63] == (move_data ? std::byte{2} : std::byte{0}));
  }
}

TEST_CASE("sim_backend stands at the deadline of a wait, and at the host's own time")
{
  sim_backend backend{simple_options()};
  auto const stream = backend.create_stream();
  auto const event = backend.create_event();
  bool ran = false;
  REQUIRE(backend.launch(stream, data_work(980)) == status::ok);
  REQUIRE(backend.launch(stream, named_host_function<"note", operation_kind::metadata>([&ran] {
                           ran = true;
                         })) == status::ok);
  REQUIRE(backend.record(stream, event) == status::ok);
  CHECK(backend.wait_any({&event, 1}, nanoseconds{400}) == status::drain_timeout);
  CHECK(backend.now() == nanoseconds{400});
  CHECK(backend.done(event) == event_state::pending);
  backend.advance(nanoseconds{599});
  CHECK(backend.now() == nanoseconds{999});
  CHECK(backend.done(event) == event_state::pending);
  CHECK_FALSE(ran);
  backend.advance(nanoseconds{500});
  CHECK(backend.now() == nanoseconds{1499});
  CHECK(backend.done(event) == event_state::done);
  CHECK(ran);
}

TEST_CASE("sim_backend observes a task from when it holds what it needs until it ends")
{
  sim_backend backend{simple_options()};
  auto const first = backend.create_stream(), second = backend.create_stream();
  observation ahead, behind, device, empty;
  REQUIRE(backend.launch(first, gather(1000, 2), &ahead) == status::ok);
  REQUIRE(backend.launch(second, gather(500, 0), &behind) == status::ok);
  std::vector<std::byte> memory(100);
  copy_run const runs[2] = {{memory.data(), memory.data() + 50, 20}, {memory.data() + 20, memory.data() + 70, 30}};
  REQUIRE(backend.copy(first, {runs, 2, copy_direction::device_to_device}, &device) == status::ok);
  REQUIRE(backend.copy(first, {}, &empty) == status::ok);
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(ahead.begin == nanoseconds{0});
  CHECK(ahead.end == nanoseconds{1110});
  CHECK(ahead.cost.link_bytes == 1000);
  CHECK(ahead.cost.link_runs == 2);
  CHECK(behind.begin == nanoseconds{1110});
  CHECK(behind.end == nanoseconds{1710});
  CHECK(device.begin == nanoseconds{1110});
  CHECK(device.end == nanoseconds{1110 + 100 + 10 + 100});
  CHECK(device.cost.device_bytes == 100);
  CHECK(device.cost.link_bytes == 0);
  CHECK(empty.begin == observation::never);
}

TEST_CASE("sim_backend slows device and link where both are at work, for as long as they are")
{
  sim_options options = simple_options();
  options.sharing.link_beside_compute[1] = 0.5;
  options.sharing.compute_beside_link[1] = 0.8;
  sim_backend backend{options};
  auto const compute = backend.create_stream(), up = backend.create_stream();
  observation computed, moved;
  REQUIRE(backend.launch(compute, data_work(790), &computed) == status::ok);  // 800 ns alone
  REQUIRE(backend.launch(up, gather(900, 0), &moved) == status::ok);          // 1000 ns alone
  REQUIRE(backend.synchronize() == status::ok);
  // Both until 1000, when the device is through; the link has done half of its work then.
  CHECK(computed.end == nanoseconds{1000});
  CHECK(moved.end == nanoseconds{1500});
  CHECK(backend.busy(sim_resource::device) == nanoseconds{1000});
  CHECK(backend.busy(sim_resource::to_device) == nanoseconds{1500});
}

TEST_CASE("sim_backend shares the link between directions as its table says for who moves")
{
  sim_options options = simple_options();
  options.copies.to_host_bytes_per_s = options.kernels.to_host_bytes_per_s = 1e9;
  options.sharing.both_ways[1][0] = {0.5, 0.8};  // a kernel reads, the copy engine writes
  sim_backend backend{options};
  auto const up = backend.create_stream(), down = backend.create_stream();
  std::vector<std::byte> memory(1590);
  copy_run const run{memory.data(), memory.data() + 795, 695};  // 800 ns alone
  observation read, written;
  REQUIRE(backend.launch(up, gather(900, 0), &read) == status::ok);
  REQUIRE(backend.copy(down, {&run, 1, copy_direction::device_to_host}, &written) == status::ok);
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(written.end == nanoseconds{1000});
  CHECK(read.end == nanoseconds{1500});
  // Two kernels do not disturb one another here.
  nanoseconds const begin = backend.now();
  REQUIRE(backend.launch(up, gather(900, 0), &read) == status::ok);
  REQUIRE(backend.launch(down, gather(700, 0, true), &written) == status::ok);
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(written.end - begin == nanoseconds{800});
  CHECK(read.end - begin == nanoseconds{1000});
}

TEST_CASE("sim_backend charges a stream that had to wait its resumption, and a host that slept its waking")
{
  sim_options options = simple_options();
  options.control = {nanoseconds{20}, nanoseconds{80}, nanoseconds{7}};
  sim_backend backend{options};
  auto const up = backend.create_stream(), compute = backend.create_stream();
  auto const landed = backend.create_event();
  observation seen;
  REQUIRE(backend.launch(up, gather(900, 0)) == status::ok);
  REQUIRE(backend.record(up, landed) == status::ok);
  REQUIRE(backend.wait(compute, landed) == status::ok);
  REQUIRE(backend.launch(compute, data_work(90), &seen) == status::ok);
  REQUIRE(backend.wait_any({&landed, 1}, no_deadline) == status::ok);
  CHECK(backend.now() == nanoseconds{1080});
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(seen.begin == nanoseconds{1020});
  CHECK(backend.now() == nanoseconds{1120});
  // What has happened already is neither resumed from nor slept for.
  REQUIRE(backend.wait(compute, landed) == status::ok);
  REQUIRE(backend.launch(compute, data_work(90), &seen) == status::ok);
  REQUIRE(backend.wait_any({&landed, 1}, no_deadline) == status::ok);
  CHECK(backend.now() == nanoseconds{1120});
  backend.charge_segment();
  CHECK(backend.now() == nanoseconds{1127});
  REQUIRE(backend.synchronize() == status::ok);
  CHECK(seen.begin == nanoseconds{1120});
  REQUIRE(backend.launch(up, gather(900, 0)) == status::ok);
  REQUIRE(backend.record(up, landed) == status::ok);
  nanoseconds const before = backend.now();
  CHECK(backend.wait_any({&landed, 1}, before + nanoseconds{500}) == status::drain_timeout);
  CHECK(backend.now() == before + nanoseconds{580});
}

TEST_CASE("sim_backend gives background pieces the link's free time, and none that another wants")
{
  struct pieces final : background_source {
    std::uint64_t given = 0, most = 0;
    std::vector<std::uint64_t> ended;
    bool next(piece& p) noexcept override
    {
      if (given == most) { return false; }
      p = {nanoseconds{300}, given++};
      return true;
    }
    void done(std::uint64_t name) noexcept override { ended.push_back(name); }
  };
  pieces source;
  source.most = 4;
  sim_backend backend{simple_options()};
  auto const up = backend.create_stream();
  backend.set_background(&source);
  backend.advance(nanoseconds{400});  // the first, and a third of the second
  CHECK(source.ended.size() == 1);
  observation seen;
  REQUIRE(backend.launch(up, gather(900, 0), &seen) == status::ok);
  backend.advance(nanoseconds{1000});
  CHECK(seen.begin == nanoseconds{400});
  CHECK(seen.end == nanoseconds{1400});
  CHECK(source.ended.size() == 1);
  backend.advance(nanoseconds{200});  // the rest of the second
  CHECK(source.ended.size() == 2);
  CHECK(backend.background_busy() == nanoseconds{600});
  backend.advance(nanoseconds{10'000});
  CHECK(source.ended == std::vector<std::uint64_t>{0, 1, 2, 3});
  CHECK(backend.background_busy() == nanoseconds{1200});
  CHECK(backend.busy(sim_resource::to_device) == nanoseconds{2200});
  backend.set_background(nullptr);
}

TEST_CASE("sim_backend gives the same times for the same calls")
{
  auto const run = [] {
    sim_backend backend{sim_options{}};
    std::vector<sim_backend::stream_ref> streams;
    for (auto const priority : {stream_priority::low, stream_priority::high, stream_priority::normal}) {
      streams.push_back(backend.create_stream(priority));
    }
    auto const event = backend.create_event();
    std::vector<std::int64_t> times;
    for (std::uint64_t i = 0; i < 300; ++i) {
      auto const stream = streams[i * 5 % 3];
      REQUIRE(backend.launch(stream, data_work(1000 * (i % 17))) == status::ok);
      REQUIRE(backend.launch(stream, gather(977 * (i % 23), i % 7, i % 2 == 0)) == status::ok);
      if (i % 4 == 0) { REQUIRE(backend.record(stream, event) == status::ok); }
      if (i % 6 == 0) { REQUIRE(backend.wait(streams[i % 3], event) == status::ok); }
      if (i % 9 == 0) {
        REQUIRE(backend.wait_any({&event, 1}, backend.now() + nanoseconds{5000}) != status::device_lost);
      }
      times.push_back(backend.now().count());
    }
    REQUIRE(backend.synchronize() == status::ok);
    times.push_back(backend.now().count());
    return times;
  };
  CHECK(run() == run());
}

TEST_CASE("sim_backend refuses rates that are not positive and sizes of 0")
{
  auto const refused = [](auto change) {
    sim_options options;
    change(options);
    CHECK_THROWS_AS(sim_backend{options}, configuration_error);
  };
  refused([](sim_options& o) { o.max_streams = 0; });
  refused([](sim_options& o) { o.queue_depth = 0; });
  refused([](sim_options& o) { o.copies.to_device_bytes_per_s = 0.0; });
  refused([](sim_options& o) { o.kernels.to_host_bytes_per_s = -1.0; });
  refused([](sim_options& o) { o.sharing.link_beside_compute[0] = 0.0; });
  refused([](sim_options& o) { o.sharing.both_ways[1][0].to_host = -1.0; });
  refused([](sim_options& o) { o.compute.flops_per_s = std::numeric_limits<double>::quiet_NaN(); });
}

TEST_SUITE_END();
