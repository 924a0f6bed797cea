#pragma once

/// Pinned places in which the host writes what the device will read, reused only once that has been read.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// A ring of `depth` buffers of `bytes`. `begin` hands out the next one empty, waiting if the device has yet to read what
/// was written into it `depth` times ago; `end` marks the point of the stream after which it has.
template <class B>
class staging_ring {
 public:
  /// @throws configuration_error, resource_error
  staging_ring(B& backend, std::uint32_t depth, std::uint64_t bytes)
    : backend_{&backend}, bytes_{bytes}, memory_{backend, memory_space::pinned, depth * bytes}
  {
    if (depth == 0 || bytes == 0) {
      throw configuration_error{
        "staging ring of " + std::to_string(depth) + " places of " + std::to_string(bytes) + " B"};
    }
    places_.resize(depth);
    events_.reserve(depth);
    for (place& p : places_) { p.event = events_.emplace_back(backend).get(); }
  }

  staging_ring(staging_ring&&) = delete;

  /// Opens the next place.
  /// @status drain_timeout where the device did not get on by `deadline`; device_lost
  status begin(nanoseconds deadline) noexcept
  {
    std::uint32_t const next = (current_ + 1) % static_cast<std::uint32_t>(places_.size());
    if (places_[next].recorded) {
      switch (backend_->done(places_[next].event)) {
        case event_state::done: break;
        case event_state::failed: return status::device_lost;
        case event_state::pending:
          ++waits_;
          if (status const waited = backend_->wait_any({&places_[next].event, 1}, deadline); waited != status::ok) {
            return waited;
          }
      }
    }
    current_ = next;
    used_ = 0;
    return status::ok;
  }

  /// `count` places of T in the open buffer, nullptr where it is full. Contents undefined.
  template <class T>
  [[nodiscard]] T* take(std::uint64_t count) noexcept
  {
    std::uint64_t const from = round_up(used_, std::uint64_t{alignof(T)});
    if (from + count * sizeof(T) > bytes_) { return nullptr; }
    used_ = from + count * sizeof(T);
    return reinterpret_cast<T*>(memory_.data() + current_ * bytes_ + from);
  }

  [[nodiscard]] std::uint64_t free_bytes() const noexcept { return bytes_ - used_; }

  /// All that reads the open buffer has been enqueued on `stream`. On a refusal the buffer is still open.
  status end(typename B::stream_ref stream) noexcept
  {
    if (status const said = backend_->record(stream, places_[current_].event); said != status::ok) { return said; }
    places_[current_].recorded = true;
    places_[current_].serial = ++serial_;
    return status::ok;
  }

  /// Number of the last `end`.
  [[nodiscard]] std::uint64_t serial() const noexcept { return serial_; }

  /// Whether the device has passed the `end` with that number.
  [[nodiscard]] bool passed(std::uint64_t serial) noexcept
  {
    for (place const& p : places_) {
      if (p.recorded && p.serial == serial) { return backend_->done(p.event) == event_state::done; }
    }
    return serial <= serial_;  // its place has been reused, which waited for it
  }

  /// Sleeps until the device has passed the `end` with that number.
  status wait(std::uint64_t serial, nanoseconds deadline) noexcept
  {
    for (place const& p : places_) {
      if (p.recorded && p.serial == serial) { return backend_->wait_any({&p.event, 1}, deadline); }
    }
    return status::ok;
  }

  /// Times that `begin` had to wait.
  [[nodiscard]] std::uint64_t waits() const noexcept { return waits_; }

 private:
  struct place {
    typename B::event_ref event = {};
    bool recorded = false;
    std::uint64_t serial = 0;
  };

  B* backend_;
  std::uint64_t bytes_;
  slab<B> memory_;
  std::vector<detail::owned_event<B>> events_;  // [depth]
  std::vector<place> places_;
  std::uint32_t current_ = 0;
  std::uint64_t used_ = 0;
  std::uint64_t serial_ = 0;
  std::uint64_t waits_ = 0;
};

}  // namespace pulseinfer
