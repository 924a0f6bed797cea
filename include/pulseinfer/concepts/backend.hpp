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

/// Streams run their work in the order it was enqueued.
template <class B>
concept stream_source = std::is_trivially_copyable_v<typename B::stream_ref> &&
  requires(B& backend, typename B::stream_ref stream, stream_priority priority) {
    { backend.create_stream(priority) } -> std::same_as<typename B::stream_ref>;  // may throw resource_error
    { backend.destroy_stream(stream) } noexcept;
  };

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
concept event_source = stream_source<B> && std::is_trivially_copyable_v<typename B::event_ref> &&
  requires(B& backend, typename B::stream_ref stream, typename B::event_ref event,
           std::span<typename B::event_ref const> events, nanoseconds deadline) {
    { backend.create_event() } -> std::same_as<typename B::event_ref>;  // may throw resource_error
    { backend.destroy_event(event) } noexcept;
    { backend.record(stream, event) } noexcept -> std::same_as<status>;
    { backend.wait(stream, event) } noexcept -> std::same_as<status>;
    { backend.done(event) } noexcept -> std::same_as<event_state>;
    { backend.wait_any(events, deadline) } noexcept -> std::same_as<status>;  // drain_timeout at the deadline
  };

template <class B>
concept memory_source = requires(B& backend, memory_space space, std::size_t bytes, void* pointer) {
  { backend.allocate(space, bytes) } -> std::same_as<void*>;  // 256-byte aligned; may throw resource_error
  { backend.deallocate(space, pointer, bytes) } noexcept;
};

template <class B>
concept clock_source = requires(B const& backend) {
  { backend.now() } noexcept -> std::same_as<nanoseconds>;
};

template <class B>
concept backend = launcher<B> && copier<B> && event_source<B> && memory_source<B> && clock_source<B>;

/// One sentence for each part that `B` misses.
template <class B>
consteval bool explain_backend()
{
  static_assert(stream_source<B>, "a backend must name a trivially copyable stream_ref and create and destroy streams");
  static_assert(launcher<B>, "a backend must return status, noexcept, from launch(stream, op)");
  static_assert(copier<B>, "a backend must return status, noexcept, from copy(stream, copy_list)");
  static_assert(
    event_source<B>,
    "a backend must name event_ref and offer create_event, destroy_event, record, wait, done and wait_any");
  static_assert(
    memory_source<B>, "a backend must return memory from allocate(space, bytes) and take it back, noexcept");
  static_assert(clock_source<B>, "a backend must return nanoseconds, noexcept, from now()");
  return backend<B>;
}

/// Bytes read at the latest when they are wanted: a wait without a limit.
inline constexpr nanoseconds no_deadline = nanoseconds::max();

}  // namespace pulseinfer
