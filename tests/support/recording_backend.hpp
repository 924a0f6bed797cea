#pragma once

/// A backend whose streams can be captured: what a GPU's graphs do, on any backend.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace pulseinfer_test {

/// Decorator of `B`. Between begin_capture and end_capture nothing runs: launches, copies, records and waits become calls of
/// the graph that end_capture returns, by value, and `replay` makes them in their order. As CUDA's events, those that were
/// recorded in a capture can't be asked until they have been recorded outside of one.
template <class B>
class recording {
  static_assert(pulseinfer::backend<B>, "recording decorates a backend");

 public:
  using stream_ref = typename B::stream_ref;
  using event_ref = typename B::event_ref;
  using graph = std::vector<std::function<pulseinfer::status()>>;

  static constexpr bool host_reads_device_memory = requires { requires B::host_reads_device_memory; };

  template <class... Args>
  explicit recording(Args&&... args) : base_{std::forward<Args>(args)...}
  {}
  recording(recording&&) = delete;

  void begin_capture()
  {
    captures_ = true;
    calls_.clear();
  }
  [[nodiscard]] graph end_capture()
  {
    captures_ = false;
    return std::move(calls_);
  }
  static pulseinfer::status replay(graph const& calls)
  {
    for (auto const& call : calls) {
      if (pulseinfer::status const said = call(); said != pulseinfer::status::ok) { return said; }
    }
    return pulseinfer::status::ok;
  }
  /// Copies are calls that a graph must not contain: batches of them can be lost. Counted since construction.
  [[nodiscard]] std::uint32_t captured_copies() const noexcept { return captured_copies_; }
  /// Events asked for although they were last recorded in a capture.
  [[nodiscard]] std::uint32_t wrong_questions() const noexcept { return wrong_questions_; }

  [[nodiscard]] stream_ref create_stream(pulseinfer::stream_priority priority) { return base_.create_stream(priority); }
  void destroy_stream(stream_ref stream) noexcept { base_.destroy_stream(stream); }

  template <pulseinfer::operation Op>
  pulseinfer::status launch(stream_ref stream, Op const& op) noexcept
  {
    if (!captures_) { return base_.launch(stream, op); }
    calls_.push_back([this, stream, op] { return base_.launch(stream, op); });
    return pulseinfer::status::ok;
  }
  pulseinfer::status copy(stream_ref stream, pulseinfer::copy_list runs) noexcept
  {
    if (captures_) {
      ++captured_copies_;
      return pulseinfer::status::capture_unsupported;
    }
    return base_.copy(stream, runs);
  }

  [[nodiscard]] event_ref create_event() { return base_.create_event(); }
  void destroy_event(event_ref event) noexcept { base_.destroy_event(event); }
  pulseinfer::status record(stream_ref stream, event_ref event) noexcept
  {
    if (!captures_) {
      of_captures_.erase(event.index);
      return base_.record(stream, event);
    }
    of_captures_.insert(event.index);
    calls_.push_back([this, stream, event] { return base_.record(stream, event); });
    return pulseinfer::status::ok;
  }
  pulseinfer::status wait(stream_ref stream, event_ref event) noexcept
  {
    if (!captures_) { return base_.wait(stream, event); }
    calls_.push_back([this, stream, event] { return base_.wait(stream, event); });
    return pulseinfer::status::ok;
  }
  [[nodiscard]] pulseinfer::event_state done(event_ref event) noexcept
  {
    if (of_captures_.contains(event.index)) {
      ++wrong_questions_;
      return pulseinfer::event_state::failed;
    }
    return base_.done(event);
  }
  pulseinfer::status wait_any(std::span<event_ref const> events, pulseinfer::nanoseconds deadline) noexcept
  {
    for (event_ref const event : events) { wrong_questions_ += of_captures_.contains(event.index) ? 1U : 0U; }
    return base_.wait_any(events, deadline);
  }

  [[nodiscard]] void* allocate(pulseinfer::memory_space space, std::size_t bytes)
  {
    return base_.allocate(space, bytes);
  }
  void deallocate(pulseinfer::memory_space space, void* memory, std::size_t bytes) noexcept
  {
    base_.deallocate(space, memory, bytes);
  }
  [[nodiscard]] pulseinfer::nanoseconds now() const noexcept { return base_.now(); }
  pulseinfer::status synchronize() noexcept { return base_.synchronize(); }
  pulseinfer::status synchronize(stream_ref stream) noexcept { return base_.synchronize(stream); }

 private:
  B base_;
  bool captures_ = false;
  graph calls_;
  std::set<std::uint32_t> of_captures_;
  std::uint32_t captured_copies_ = 0;
  std::uint32_t wrong_questions_ = 0;
};

}  // namespace pulseinfer_test
