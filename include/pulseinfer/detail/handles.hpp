#pragma once

/// Streams and events of a backend, owned.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/abandonment.hpp>

#include <utility>

namespace pulseinfer::detail {

template <class B>
class owned_stream {
 public:
  /// @throws resource_error
  owned_stream(B& backend, stream_priority priority) : backend_{&backend}, stream_{backend.create_stream(priority)} {}
  owned_stream(owned_stream&&) = delete;
  ~owned_stream()
  {
    if (!abandonment::under_way()) { backend_->destroy_stream(stream_); }
  }

  [[nodiscard]] typename B::stream_ref get() const noexcept { return stream_; }

 private:
  B* backend_;
  typename B::stream_ref stream_;
};

template <class B>
class owned_event {
 public:
  /// @throws resource_error
  explicit owned_event(B& backend) : backend_{&backend}, event_{backend.create_event()} {}
  owned_event(owned_event&& other) noexcept : backend_{std::exchange(other.backend_, nullptr)}, event_{other.event_} {}
  owned_event& operator=(owned_event&&) = delete;
  ~owned_event()
  {
    if (backend_ != nullptr && !abandonment::under_way()) { backend_->destroy_event(event_); }
  }

  [[nodiscard]] typename B::event_ref get() const noexcept { return event_; }

 private:
  B* backend_;
  typename B::event_ref event_;
};

}  // namespace pulseinfer::detail
