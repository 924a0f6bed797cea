#pragma once

/// What every backend must do, written once. A fixture says how to make one and how to keep a stream busy:
///
///   struct fixture {
///     auto& backend();             // with contract_sizes
///     void hold(stream);           // work that doesn't end before release() or, on a virtual clock, before `held_for`
///     void release();
///     static constexpr bool has_held_work_pending;  // false: asking for anything may end the held work (manual mode)
///     static constexpr bool moves_bytes;            // false: copies are only charged
///   };
///
/// Memory is read by the host only where it is pinned, so that a device backend can be held to it too.

#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/error.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pulseinfer_test {

using namespace pulseinfer;

struct contract_sizes {
  static constexpr std::uint32_t streams = 5;
  static constexpr std::uint32_t events = 12;
  static constexpr std::uint32_t queue_depth = 96;
  static constexpr std::uint32_t copy_runs = 64;
  static constexpr std::size_t scratch_bytes = 4096;
  static constexpr std::uint64_t memory_bytes = std::uint64_t{1} << 20U;  // of each space
};

inline constexpr nanoseconds held_for = std::chrono::microseconds{200};

/// log[count++] = value
struct append_operation {
  static constexpr char const* name = "append";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint32_t* log = nullptr;
  std::uint32_t* count = nullptr;
  std::uint32_t value = 0;
  std::uint64_t items = 1;
  std::uint32_t threads = 32;

  [[nodiscard]] launch_shape shape() const { return {.items = items, .group_threads = threads}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t, scratch_ref) const
  {
    if (group.thread_rank() == 0) {
      log[*count] = value;
      ++*count;
    }
  }
};

/// data[item] = first + item, by way of scratch
struct fill_operation {
  static constexpr char const* name = "fill";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint32_t* data = nullptr;
  std::uint64_t items = 0;
  std::uint32_t first = 0;
  std::size_t words = 1;  // of scratch

  [[nodiscard]] launch_shape shape() const { return {.items = items, .group_threads = 64}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return words * sizeof(std::uint32_t); }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = items * sizeof(std::uint32_t)}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    auto* const place = reinterpret_cast<std::uint32_t*>(scratch.data);
    bool const sound =
      scratch.bytes == words * sizeof(std::uint32_t) && reinterpret_cast<std::uintptr_t>(place) % 16 == 0;
    for (std::size_t i = group.thread_rank(); i < words; i += group.size()) {
      place[i] = first + static_cast<std::uint32_t>(item);
    }
    group.sync();
    if (group.thread_rank() == 0) { data[item] = sound ? place[words - 1] : 0xDEADU; }
    group.sync();
  }
};

/// Memory that goes back by itself.
template <class B, class T>
class buffer {
 public:
  buffer(B& backend, memory_space space, std::size_t count)
    : backend_{backend},
      space_{space},
      bytes_{count * sizeof(T)},
      data_{static_cast<T*>(backend.allocate(space, bytes_))}
  {
    if (space == memory_space::pinned) { std::memset(static_cast<void*>(data_), 0, bytes_); }
  }
  buffer(buffer const&) = delete;
  buffer& operator=(buffer const&) = delete;
  ~buffer() { backend_.deallocate(space_, data_, bytes_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] T& operator[](std::size_t i) const { return data_[i]; }

 private:
  B& backend_;
  memory_space space_;
  std::size_t bytes_;
  T* data_;
};

/// Waits until all that was enqueued on `stream` is complete.
template <class B>
void finish(B& backend, typename B::stream_ref stream)
{
  auto const event = backend.create_event();
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  CHECK(backend.done(event) == event_state::done);
  backend.destroy_event(event);
}

/// @return the text of the exception that `call` throws; empty without one
template <class Call>
[[nodiscard]] std::string text_of_resource_error(Call call)
{
  try {
    call();
  } catch (resource_error const& error) {
    return error.what();
  }
  return {};
}

namespace contract {

template <class F>
void streams_keep_order()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  // Longer than the queue is deep, so that places are used again and a full queue is met.
  constexpr std::uint32_t length = 5 * contract_sizes::queue_depth;
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, length};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  for (std::uint32_t i = 0; i < length; ++i) {
    REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), i}) == status::ok);
  }
  finish(backend, stream);
  REQUIRE(count[0] == length);
  for (std::uint32_t i = 0; i < length; ++i) { REQUIRE(log[i] == i); }
  backend.destroy_stream(stream);
}

template <class F>
void events_order_streams()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  std::vector<typename B::stream_ref> streams;
  for (std::uint32_t i = 0; i < 3; ++i) { streams.push_back(backend.create_stream(stream_priority::normal)); }
  auto const event = backend.create_event();
  constexpr std::uint32_t rounds = 60;
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, rounds};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  // A chain that goes from stream to stream; each link waits for the one before, through one event recorded again and again.
  for (std::uint32_t i = 0; i < rounds; ++i) {
    auto const stream = streams[(i * 7 + i / 3) % 3];
    REQUIRE(backend.wait(stream, event) == status::ok);
    REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), i}) == status::ok);
    REQUIRE(backend.record(stream, event) == status::ok);
  }
  REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  REQUIRE(count[0] == rounds);
  for (std::uint32_t i = 0; i < rounds; ++i) { REQUIRE(log[i] == i); }
}

template <class F>
void waits_mean_the_record_before_them()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const idle = backend.create_stream(stream_priority::normal);
  auto const held = backend.create_stream(stream_priority::normal);
  auto const waiting = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  auto const after = backend.create_event();
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 2};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};

  SUBCASE("a later record does not hold the wait up")
  {
    REQUIRE(backend.launch(idle, append_operation{log.data(), count.data(), 1}) == status::ok);
    REQUIRE(backend.record(idle, event) == status::ok);
    REQUIRE(backend.wait(waiting, event) == status::ok);
    fixture.hold(held);
    REQUIRE(backend.record(held, event) == status::ok);
    REQUIRE(backend.launch(waiting, append_operation{log.data(), count.data(), 2}) == status::ok);
    REQUIRE(backend.record(waiting, after) == status::ok);
    REQUIRE(backend.wait_any({&after, 1}, no_deadline) == status::ok);
    if constexpr (F::has_held_work_pending) { CHECK(backend.done(event) == event_state::pending); }
    CHECK(count[0] == 2);
    fixture.release();
  }
  SUBCASE("a later record does not let the wait go")
  {
    fixture.hold(held);
    REQUIRE(backend.launch(held, append_operation{log.data(), count.data(), 1}) == status::ok);
    REQUIRE(backend.record(held, event) == status::ok);
    REQUIRE(backend.wait(waiting, event) == status::ok);
    REQUIRE(backend.record(idle, event) == status::ok);
    CHECK(backend.done(event) == event_state::done);
    REQUIRE(backend.launch(waiting, append_operation{log.data(), count.data(), 2}) == status::ok);
    REQUIRE(backend.record(waiting, after) == status::ok);
    CHECK(backend.wait_any({&after, 1}, backend.now() + held_for / 10) == status::drain_timeout);
    CHECK(backend.done(after) == event_state::pending);
    fixture.release();
    REQUIRE(backend.wait_any({&after, 1}, no_deadline) == status::ok);
    CHECK(log[0] == 1);
    CHECK(log[1] == 2);
  }
}

template <class F>
void done_says_what_is()
{
  F fixture;
  auto& backend = fixture.backend();
  auto const stream = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  CHECK(backend.done(event) == event_state::done);  // never recorded
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);  // on an idle stream
  CHECK(backend.done(event) == event_state::done);
  for (int round = 0; round < 3; ++round) {
    fixture.hold(stream);
    REQUIRE(backend.record(stream, event) == status::ok);
    CHECK(backend.done(event) == event_state::pending);
    fixture.release();
    REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
    CHECK(backend.done(event) == event_state::done);
  }
}

template <class F>
void wait_any_ends_at_its_deadline()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  fixture.hold(stream);
  REQUIRE(backend.record(stream, event) == status::ok);
  for (auto const patience : {nanoseconds{-5}, nanoseconds{0}, held_for / 100, held_for / 10}) {
    nanoseconds const deadline = backend.now() + patience;
    CHECK(backend.wait_any({&event, 1}, deadline) == status::drain_timeout);
    CHECK(backend.now() >= deadline);
    CHECK(backend.done(event) == event_state::pending);
  }
  fixture.release();
  CHECK(backend.wait_any({&event, 1}, no_deadline) == status::ok);
  CHECK(backend.wait_any({&event, 1}, nanoseconds{0}) == status::ok);  // done beats a deadline that has passed
  CHECK(backend.wait_any(std::span<typename B::event_ref const>{}, no_deadline) == status::invalid_argument);
}

template <class F>
void wait_any_needs_one()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const held = backend.create_stream(stream_priority::normal);
  auto const quick = backend.create_stream(stream_priority::normal);
  std::vector<typename B::event_ref> const events{backend.create_event(), backend.create_event()};
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 1};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  for (std::size_t place : {0U, 1U}) {
    count[0] = 0;
    fixture.hold(held);
    REQUIRE(backend.record(held, events[1 - place]) == status::ok);
    REQUIRE(backend.launch(quick, append_operation{log.data(), count.data(), 1}) == status::ok);
    REQUIRE(backend.record(quick, events[place]) == status::ok);
    REQUIRE(backend.wait_any(events, no_deadline) == status::ok);
    if constexpr (F::has_held_work_pending) {
      CHECK(backend.done(events[place]) == event_state::done);
      CHECK(backend.done(events[1 - place]) == event_state::pending);
    }
    fixture.release();
    finish(backend, held);
    finish(backend, quick);
  }
}

/// Public report: sgl-project/sglang#23609 (a launch of zero rows fails, and then unrelated calls do).
template <class F>
void empty_work_completes()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 2};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  copy_run const no_bytes[2] = {};

  auto const empty = [&] {
    REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), 9, 0}) == status::ok);
    REQUIRE(backend.copy(stream, {}) == status::ok);
    REQUIRE(backend.copy(stream, {no_bytes, 0, copy_direction::device_to_host}) == status::ok);
    REQUIRE(backend.copy(stream, {no_bytes, 2, copy_direction::host_to_device}) == status::ok);
    REQUIRE(backend.record(stream, event) == status::ok);
  };
  SUBCASE("on an idle stream")
  {
    empty();
    CHECK(backend.wait_any({&event, 1}, no_deadline) == status::ok);
    CHECK(backend.done(event) == event_state::done);
    CHECK(count[0] == 0);
  }
  SUBCASE("behind other work, in order")
  {
    fixture.hold(stream);
    empty();
    CHECK(backend.done(event) == event_state::pending);
    fixture.release();
    CHECK(backend.wait_any({&event, 1}, no_deadline) == status::ok);
    CHECK(count[0] == 0);
  }
  // One normal step after it.
  REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), 7}) == status::ok);
  finish(backend, stream);
  CHECK(count[0] == 1);
  CHECK(log[0] == 7);
}

template <class F>
void operations_see_items_and_scratch()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  buffer<B, std::uint32_t> data{backend, memory_space::pinned, 1000};
  for (std::size_t const words : {std::size_t{1}, std::size_t{5}, contract_sizes::scratch_bytes / 4}) {
    for (std::uint64_t const items : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{999}}) {
      std::memset(data.data(), 0, 4000);
      REQUIRE(backend.launch(stream, fill_operation{data.data(), items, 11, words}) == status::ok);
      finish(backend, stream);
      for (std::uint64_t i = 0; i < items; ++i) { REQUIRE(data[i] == 11 + i); }
      CHECK(data[items] == 0);
    }
  }
}

template <class F>
void unfit_operations_are_refused()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 1};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  fill_operation const too_much{log.data(), 1, 0, std::size_t{1} << 28U};
  CHECK(backend.launch(stream, too_much) == status::invalid_argument);
  CHECK(backend.launch(stream, append_operation{log.data(), count.data(), 0, 1, 0}) == status::invalid_argument);
  CHECK(backend.launch(stream, append_operation{log.data(), count.data(), 0, 1, 1025}) == status::invalid_argument);
  finish(backend, stream);
  CHECK(count[0] == 0);
  REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), 0, 1, 1024}) == status::ok);
  finish(backend, stream);
  CHECK(count[0] == 1);
}

template <class F>
void copies_move_every_run()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  constexpr std::size_t size = 100000;
  buffer<B, std::byte> source{backend, memory_space::pinned, size};
  buffer<B, std::byte> device{backend, memory_space::device, size};
  buffer<B, std::byte> other{backend, memory_space::device, size};
  buffer<B, std::byte> target{backend, memory_space::pinned, size};
  std::mt19937 random{7};
  for (std::size_t i = 0; i < size; ++i) { source[i] = static_cast<std::byte>(random() & 0xFFU); }

  // [0, size) cut into runs of odd lengths, brought over and back in an order of their own; one device copy between.
  std::vector<std::size_t> cuts{0};
  while (cuts.back() < size) { cuts.push_back(std::min(size, cuts.back() + 1 + random() % 5000)); }
  std::vector<copy_run> there, across, back;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    std::size_t const at = cuts[i], bytes = cuts[i + 1] - at;
    there.push_back({device.data() + at, source.data() + at, bytes});
    across.push_back({other.data() + at, device.data() + at, bytes});
    back.push_back({target.data() + at, other.data() + at, bytes});
  }
  std::shuffle(there.begin(), there.end(), random);
  std::shuffle(across.begin(), across.end(), random);
  std::shuffle(back.begin(), back.end(), random);
  auto const enqueue = [&](std::vector<copy_run> const& runs, copy_direction direction) {
    for (std::size_t at = 0; at < runs.size(); at += contract_sizes::copy_runs) {
      std::size_t const count = std::min<std::size_t>(contract_sizes::copy_runs, runs.size() - at);
      std::vector<copy_run> here(
        runs.begin() + static_cast<std::ptrdiff_t>(at), runs.begin() + static_cast<std::ptrdiff_t>(at + count));
      REQUIRE(backend.copy(stream, {here.data(), static_cast<std::uint32_t>(count), direction}) == status::ok);
      // The list was read before the call returned.
      for (copy_run& run : here) { run = {nullptr, nullptr, ~std::uint64_t{0}}; }
    }
  };
  enqueue(there, copy_direction::host_to_device);
  enqueue(across, copy_direction::device_to_device);
  enqueue(back, copy_direction::device_to_host);
  finish(backend, stream);
  if constexpr (F::moves_bytes) { CHECK(std::memcmp(source.data(), target.data(), size) == 0); }
}

template <class F>
void bad_copies_change_nothing()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const stream = backend.create_stream(stream_priority::normal);
  buffer<B, std::byte> pinned{backend, memory_space::pinned, 128};
  buffer<B, std::byte> device{backend, memory_space::device, 128};
  CHECK(backend.copy(stream, {nullptr, 1}) == status::invalid_argument);
  copy_run const without_source[2] = {{device.data(), pinned.data(), 8}, {device.data() + 8, nullptr, 8}};
  CHECK(backend.copy(stream, {without_source, 2}) == status::invalid_argument);
  copy_run const without_target[1] = {{nullptr, pinned.data(), 8}};
  CHECK(backend.copy(stream, {without_target, 1}) == status::invalid_argument);
  std::vector<copy_run> many;
  for (std::size_t i = 0; i <= contract_sizes::copy_runs; ++i) {
    many.push_back({device.data() + i, pinned.data() + i, 1});
  }
  CHECK(backend.copy(stream, {many.data(), contract_sizes::copy_runs + 1}) == status::capacity_exceeded);
  CHECK(backend.copy(stream, {many.data(), contract_sizes::copy_runs}) == status::ok);
  finish(backend, stream);
}

template <class F>
void memory_is_aligned_and_limited()
{
  F fixture;
  auto& backend = fixture.backend();
  for (memory_space const space : {memory_space::device, memory_space::pinned}) {
    std::vector<std::pair<void*, std::size_t>> held;
    for (std::size_t const bytes : {1U, 255U, 256U, 257U, 100000U}) {
      held.emplace_back(backend.allocate(space, bytes), bytes);
      CHECK(reinterpret_cast<std::uintptr_t>(held.back().first) % 256 == 0);
    }
    std::string const text =
      text_of_resource_error([&] { static_cast<void>(backend.allocate(space, contract_sizes::memory_bytes)); });
    CAPTURE(text);
    CHECK(text.find("1048576 B") != std::string::npos);            // asked for
    CHECK(text.find("100769 of 1048576 B") != std::string::npos);  // in use, of the limit
    CHECK(text.find(space == memory_space::device ? "device" : "pinned") != std::string::npos);
    for (auto const& [pointer, bytes] : held) { backend.deallocate(space, pointer, bytes); }
    // Whole again: what was refused was not counted.
    for (int round = 0; round < 3; ++round) {
      void* const all = backend.allocate(space, contract_sizes::memory_bytes);
      CHECK(all != nullptr);
      CHECK(!text_of_resource_error([&] { static_cast<void>(backend.allocate(space, 1)); }).empty());
      backend.deallocate(space, all, contract_sizes::memory_bytes);
    }
    backend.deallocate(space, backend.allocate(space, 0), 0);
  }
}

/// Public report: kvcache-ai/Mooncake#2507 (a long-running server runs out of driver handles).
template <class F>
void handles_are_bounded_and_come_back()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  for (int round = 0; round < 50; ++round) {
    std::vector<typename B::stream_ref> streams;
    for (std::uint32_t i = 0; i < contract_sizes::streams; ++i) {
      streams.push_back(backend.create_stream(static_cast<stream_priority>(i % 3)));
    }
    std::vector<typename B::event_ref> events;
    for (std::uint32_t i = 0; i < contract_sizes::events; ++i) { events.push_back(backend.create_event()); }
    std::string const no_stream =
      text_of_resource_error([&] { static_cast<void>(backend.create_stream(stream_priority::normal)); });
    CHECK(no_stream.find("all 5") != std::string::npos);
    std::string const no_event = text_of_resource_error([&] { static_cast<void>(backend.create_event()); });
    CHECK(no_event.find("all 12") != std::string::npos);
    // A failed creation left nothing behind, and any one that goes back can be had again.
    std::size_t const place = static_cast<std::size_t>(round) % events.size();
    backend.destroy_event(events[place]);
    events[place] = backend.create_event();
    for (auto const event : events) { backend.destroy_event(event); }
    for (auto const stream : streams) { backend.destroy_stream(stream); }
  }
  // A long run with few handles.
  auto const stream = backend.create_stream(stream_priority::normal);
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 1};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  for (std::uint32_t i = 0; i < 2000; ++i) {
    auto const event = backend.create_event();
    count[0] = 0;
    REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), i}) == status::ok);
    REQUIRE(backend.record(stream, event) == status::ok);
    REQUIRE(backend.wait_any({&event, 1}, no_deadline) == status::ok);
    backend.destroy_event(event);
    REQUIRE(log[0] == i);
  }
}

template <class F>
void handles_that_went_back_are_refused()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  auto const old_stream = backend.create_stream(stream_priority::normal);
  auto const old_event = backend.create_event();
  backend.destroy_stream(old_stream);
  backend.destroy_event(old_event);
  // The same places under new names.
  auto const stream = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 1};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  append_operation const op{log.data(), count.data(), 1};
  for (auto const bad_stream : {old_stream, typename B::stream_ref{}}) {
    CHECK(backend.launch(bad_stream, op) == status::invalid_argument);
    CHECK(backend.launch(bad_stream, append_operation{log.data(), count.data(), 1, 0}) == status::invalid_argument);
    CHECK(backend.copy(bad_stream, {}) == status::invalid_argument);
    CHECK(backend.record(bad_stream, event) == status::invalid_argument);
    CHECK(backend.wait(bad_stream, event) == status::invalid_argument);
    backend.destroy_stream(bad_stream);
  }
  for (auto const bad_event : {old_event, typename B::event_ref{}}) {
    CHECK(backend.record(stream, bad_event) == status::invalid_argument);
    CHECK(backend.wait(stream, bad_event) == status::invalid_argument);
    CHECK(backend.done(bad_event) == event_state::failed);
    CHECK(backend.wait_any({&bad_event, 1}, no_deadline) == status::ok);  // not pending
    backend.destroy_event(bad_event);
  }
  CHECK(backend.done(event) == event_state::done);
  REQUIRE(backend.launch(stream, op) == status::ok);
  finish(backend, stream);
  CHECK(count[0] == 1);
}

template <class F>
void destroy_stream_runs_out_its_work()
{
  F fixture;
  auto& backend = fixture.backend();
  using B = std::remove_reference_t<decltype(backend)>;
  buffer<B, std::uint32_t> log{backend, memory_space::pinned, 100};
  buffer<B, std::uint32_t> count{backend, memory_space::pinned, 1};
  auto const other = backend.create_stream(stream_priority::normal);
  auto const event = backend.create_event();
  for (std::uint32_t round = 0; round < 4; ++round) {
    count[0] = 0;
    auto const stream = backend.create_stream(stream_priority::normal);
    for (std::uint32_t i = 0; i < 20; ++i) {
      REQUIRE(backend.launch(other, append_operation{log.data(), count.data(), i}) == status::ok);
    }
    REQUIRE(backend.record(other, event) == status::ok);
    REQUIRE(backend.wait(stream, event) == status::ok);
    for (std::uint32_t i = 20; i < 50; ++i) {
      REQUIRE(backend.launch(stream, append_operation{log.data(), count.data(), i}) == status::ok);
    }
    // Recorded on a stream that ends: stays done when another stream gets its place.
    REQUIRE(backend.record(stream, event) == status::ok);
    backend.destroy_stream(stream);
    CHECK(count[0] == 50);
    auto const next = backend.create_stream(stream_priority::normal);
    fixture.hold(next);
    CHECK(backend.done(event) == event_state::done);
    fixture.release();
    backend.destroy_stream(next);
  }
}

}  // namespace contract

template <class F>
void backend_contract()
{
  SUBCASE("work on a stream runs in the order it was enqueued") { contract::streams_keep_order<F>(); }
  SUBCASE("a wait puts a stream behind what the event recorded") { contract::events_order_streams<F>(); }
  SUBCASE("a wait means the record before it") { contract::waits_mean_the_record_before_them<F>(); }
  SUBCASE("done tells pending from done, and an unrecorded event is done") { contract::done_says_what_is<F>(); }
  SUBCASE("wait_any ends at its deadline") { contract::wait_any_ends_at_its_deadline<F>(); }
  SUBCASE("wait_any needs one event of many") { contract::wait_any_needs_one<F>(); }
  SUBCASE("empty launches and copies let events complete") { contract::empty_work_completes<F>(); }
  SUBCASE("each item runs with the scratch it asked for") { contract::operations_see_items_and_scratch<F>(); }
  SUBCASE("operations that do not fit are refused and run nothing") { contract::unfit_operations_are_refused<F>(); }
  SUBCASE("copies move every run") { contract::copies_move_every_run<F>(); }
  SUBCASE("copies without addresses or with too many runs are refused") { contract::bad_copies_change_nothing<F>(); }
  SUBCASE("memory is aligned, limited, and the refusal carries the numbers")
  {
    contract::memory_is_aligned_and_limited<F>();
  }
  SUBCASE("handles are bounded and come back") { contract::handles_are_bounded_and_come_back<F>(); }
  SUBCASE("handles that went back are refused") { contract::handles_that_went_back_are_refused<F>(); }
  SUBCASE("destroy_stream runs out what the stream holds") { contract::destroy_stream_runs_out_its_work<F>(); }
}

}  // namespace pulseinfer_test
