#pragma once

/// Where operations, copies and events run: launcher + copier + event_source + memory_source + clock.
/// Meanings: docs/concepts.md#backend.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace pulseinfer {

/// `device`: what attention reads. `pinned`: host memory that the device can read and write by the same address.
enum class memory_space : std::uint8_t { device, pinned };

enum class event_state : std::uint8_t { pending, done, failed };

/// Urgency of a stream's work against other streams of the backend.
enum class stream_priority : std::uint8_t { low, normal, high };

namespace archetype {

/// The smallest operation there is.
struct operation {
  static constexpr char const* name = "archetype";
  static constexpr operation_kind kind = operation_kind::metadata;
  [[nodiscard]] launch_shape shape() const { return {}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const&, std::uint64_t, scratch_ref) const
  {}
};

static_assert(pulseinfer::operation<operation>);

}  // namespace archetype

template <class B>
concept backend_names_streams = std::is_trivially_copyable_v<typename B::stream_ref>;

template <class B>
concept backend_creates_streams = backend_names_streams<B> && requires(B& backend, stream_priority priority) {
  { backend.create_stream(priority) } -> std::same_as<typename B::stream_ref>;  // may throw resource_error
};

template <class B>
concept backend_destroys_streams = backend_names_streams<B> && requires(B& backend, typename B::stream_ref stream) {
  { backend.destroy_stream(stream) } noexcept;
};

/// Streams run their work in the order it was enqueued.
template <class B>
concept stream_source = backend_creates_streams<B> && backend_destroys_streams<B>;

template <class B>
concept launcher =
  stream_source<B> && requires(B& backend, typename B::stream_ref stream, archetype::operation const& op) {
    { backend.launch(stream, op) } noexcept -> std::same_as<status>;
  };

template <class B>
concept copier = stream_source<B> && requires(B& backend, typename B::stream_ref stream, copy_list runs) {
  { backend.copy(stream, runs) } noexcept -> std::same_as<status>;
};

template <class B>
concept backend_names_events = std::is_trivially_copyable_v<typename B::event_ref>;

template <class B>
concept backend_creates_events = backend_names_events<B> && requires(B& backend) {
  { backend.create_event() } -> std::same_as<typename B::event_ref>;  // may throw resource_error
};

template <class B>
concept backend_destroys_events = backend_names_events<B> && requires(B& backend, typename B::event_ref event) {
  { backend.destroy_event(event) } noexcept;
};

template <class B>
concept backend_records = stream_source<B> && backend_names_events<B> &&
  requires(B& backend, typename B::stream_ref stream, typename B::event_ref event) {
    { backend.record(stream, event) } noexcept -> std::same_as<status>;
  };

template <class B>
concept backend_waits = stream_source<B> && backend_names_events<B> &&
  requires(B& backend, typename B::stream_ref stream, typename B::event_ref event) {
    { backend.wait(stream, event) } noexcept -> std::same_as<status>;
  };

template <class B>
concept backend_tells_done = backend_names_events<B> && requires(B& backend, typename B::event_ref event) {
  { backend.done(event) } noexcept -> std::same_as<event_state>;
};

template <class B>
concept backend_waits_for_any =
  backend_names_events<B> && requires(B& backend, std::span<typename B::event_ref const> events, nanoseconds deadline) {
    { backend.wait_any(events, deadline) } noexcept -> std::same_as<status>;  // drain_timeout at the deadline
  };

template <class B>
concept event_source = backend_creates_events<B> && backend_destroys_events<B> && backend_records<B> &&
  backend_waits<B> && backend_tells_done<B> && backend_waits_for_any<B>;

template <class B>
concept backend_allocates = requires(B& backend, memory_space space, std::size_t bytes) {
  { backend.allocate(space, bytes) } -> std::same_as<void*>;  // 256-byte aligned; may throw resource_error
};

template <class B>
concept backend_deallocates = requires(B& backend, memory_space space, std::size_t bytes, void* pointer) {
  { backend.deallocate(space, pointer, bytes) } noexcept;
};

template <class B>
concept memory_source = backend_allocates<B> && backend_deallocates<B>;

template <class B>
concept clock_source = requires(B const& backend) {
  { backend.now() } noexcept -> std::same_as<nanoseconds>;
};

template <class B>
concept backend = launcher<B> && copier<B> && event_source<B> && memory_source<B> && clock_source<B>;

/// Whether a launch on `B` costs as much as moving hundreds of kilobytes over the link (a GPU), so that policies which are free
/// to choose should launch less often. A backend says so by a static member of this name; others need none.
template <class B>
inline constexpr bool prefers_few_launches = requires { requires B::prefers_few_launches; };

/// One sentence for each requirement that `B` misses. What cannot be said without another requirement waits for that one.
template <class B>
consteval bool explain_backend()
{
  static_assert(backend_names_streams<B>, "a backend must name its streams by a trivially copyable stream_ref");
  static_assert(backend_names_events<B>, "a backend must name its events by a trivially copyable event_ref");
  if constexpr (backend_names_streams<B>) {
    static_assert(backend_creates_streams<B>, "a backend must return stream_ref from create_stream(priority)");
    static_assert(backend_destroys_streams<B>, "a backend must take streams back, noexcept, in destroy_stream(stream)");
  }
  if constexpr (stream_source<B>) {
    static_assert(launcher<B>, "a backend must return status, noexcept, from launch(stream, op)");
    static_assert(copier<B>, "a backend must return status, noexcept, from copy(stream, copy_list)");
  }
  if constexpr (backend_names_events<B>) {
    static_assert(backend_creates_events<B>, "a backend must return event_ref from create_event()");
    static_assert(backend_destroys_events<B>, "a backend must take events back, noexcept, in destroy_event(event)");
    static_assert(backend_tells_done<B>, "a backend must return event_state, noexcept, from done(event)");
    static_assert(backend_waits_for_any<B>, "a backend must return status, noexcept, from wait_any(events, deadline)");
  }
  if constexpr (stream_source<B> && backend_names_events<B>) {
    static_assert(backend_records<B>, "a backend must return status, noexcept, from record(stream, event)");
    static_assert(backend_waits<B>, "a backend must return status, noexcept, from wait(stream, event)");
  }
  static_assert(backend_allocates<B>, "a backend must return void* from allocate(space, bytes)");
  static_assert(
    backend_deallocates<B>, "a backend must take memory back, noexcept, in deallocate(space, pointer, bytes)");
  static_assert(clock_source<B>, "a backend must return nanoseconds, noexcept, from now() const");
  return backend<B>;
}

/// A wait without a limit.
inline constexpr nanoseconds no_deadline = nanoseconds::max();

}  // namespace pulseinfer
