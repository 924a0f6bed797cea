#pragma once

/// A backend that writes down what runs when.

#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/backend/trace_record.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer {

struct trace_options {
  std::uint32_t max_records = 16384;  ///< what comes after them is counted and not kept
};

/// Decorator of `B`: one record for each launch and copy that has something to do. Where `B` observes its tasks, begin, end and
/// cost are those of the run; elsewhere begin and end are when the host enqueued it. Changes neither order nor time.
/// @thread_safety as `B`; records() and clear() when no work is in flight
template <class B>
class traced {
  static_assert(backend<B>, "traced decorates a backend");
  static_assert(std::equality_comparable<typename B::stream_ref>, "traced finds the row of a stream by ==");

 public:
  using stream_ref = typename B::stream_ref;
  using event_ref = typename B::event_ref;

  static constexpr bool host_reads_device_memory = requires { requires B::host_reads_device_memory; };
  static constexpr bool prefers_few_launches = pulseinfer::prefers_few_launches<B>;

  /// Arguments are those of `B`.
  template <class... Args>
    requires std::constructible_from<B, Args...>
  explicit traced(Args&&... args) : traced{trace_options{}, std::forward<Args>(args)...}
  {}

  template <class... Args>
    requires std::constructible_from<B, Args...>
  explicit traced(trace_options options, Args&&... args)
    : records_(options.max_records), base_{std::forward<Args>(args)...}
  {}

  traced(traced const&) = delete;
  traced& operator=(traced const&) = delete;

  [[nodiscard]] stream_ref create_stream(stream_priority priority = stream_priority::normal)
  {
    return create_stream({}, priority);
  }

  /// @param name of the timeline's row; "stream N" when empty
  [[nodiscard]] stream_ref create_stream(std::string const& name, stream_priority priority = stream_priority::normal)
  {
    std::unique_lock lock{mutex_};
    std::string text = name.empty() ? "stream " + std::to_string(streams_.size()) : name;
    streams_.reserve(streams_.size() + 1);
    stream_ref const stream = base_.create_stream(priority);
    // A stream that takes over a nameless one's place goes on in its row.
    for (named& row : streams_) {
      if (!row.live && name.empty() && row.nameless) {
        row.live = true;
        row.stream = stream;
        return stream;
      }
    }
    streams_.push_back({stream, std::move(text), true, name.empty()});
    return stream;
  }

  void destroy_stream(stream_ref stream) noexcept
  {
    base_.destroy_stream(stream);
    std::unique_lock lock{mutex_};
    for (named& row : streams_) {
      if (row.live && row.stream == stream) { row.live = false; }
    }
  }

  template <operation Op>
  status launch(stream_ref stream, Op const& op) noexcept
  {
    if (detail::has_no_items(op)) { return base_.launch(stream, op); }
    return write_down(stream, Op::name, [&](observation* observed) {
      if constexpr (observed_backend<B>) {
        return base_.launch(stream, op, observed);
      } else {
        return base_.launch(stream, op);
      }
    });
  }

  status copy(stream_ref stream, copy_list runs) noexcept
  {
    if (runs.runs == nullptr || detail::moves_nothing(runs)) { return base_.copy(stream, runs); }
    return write_down(stream, name_of(runs.direction), [&](observation* observed) {
      if constexpr (observed_backend<B>) {
        return base_.copy(stream, runs, observed);
      } else {
        return base_.copy(stream, runs);
      }
    });
  }

  [[nodiscard]] event_ref create_event() { return base_.create_event(); }
  void destroy_event(event_ref event) noexcept { base_.destroy_event(event); }
  status record(stream_ref stream, event_ref event) noexcept { return base_.record(stream, event); }
  status wait(stream_ref stream, event_ref event) noexcept { return base_.wait(stream, event); }
  [[nodiscard]] event_state done(event_ref event) noexcept { return base_.done(event); }
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    return base_.wait_any(events, deadline);
  }

  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes) { return base_.allocate(space, bytes); }
  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    base_.deallocate(space, pointer, bytes);
  }

  [[nodiscard]] nanoseconds now() const noexcept { return base_.now(); }

  [[nodiscard]] bool is_capturing(stream_ref stream) const noexcept
    requires requires(B const& b, stream_ref s) { b.is_capturing(s); }
  {
    return base_.is_capturing(stream);
  }
  status synchronize(stream_ref stream) noexcept
    requires requires(B& b, stream_ref s) { b.synchronize(s); }
  {
    return base_.synchronize(stream);
  }
  status synchronize() noexcept
    requires requires(B& b) { b.synchronize(); }
  {
    return base_.synchronize();
  }

  /// In the order of enqueuing. Those of calls that were refused have never run.
  [[nodiscard]] std::span<trace_record const> records() const noexcept
  {
    return {records_.data(), std::min<std::size_t>(used_.load(), records_.size())};
  }

  /// Launches and copies that came when the records were full.
  [[nodiscard]] std::uint64_t dropped() const noexcept
  {
    std::uint64_t const used = used_.load();
    return used > records_.size() ? used - records_.size() : 0;
  }

  /// Forgets the records.
  void clear() noexcept
  {
    std::uint64_t const used = std::min<std::uint64_t>(used_.exchange(0), records_.size());
    for (std::uint64_t i = 0; i < used; ++i) { records_[i] = {}; }
  }

  /// Names of the rows, by trace_record::stream.
  [[nodiscard]] std::vector<std::string> stream_names() const
  {
    std::unique_lock lock{mutex_};
    std::vector<std::string> names;
    for (named const& row : streams_) { names.push_back(row.name); }
    return names;
  }

  [[nodiscard]] B& base() noexcept { return base_; }
  [[nodiscard]] B const& base() const noexcept { return base_; }

 private:
  struct named {
    stream_ref stream;
    std::string name;
    bool live = true;
    bool nameless = true;
  };

  [[nodiscard]] static char const* name_of(copy_direction direction) noexcept
  {
    switch (direction) {
      case copy_direction::host_to_device: return "copy to device";
      case copy_direction::device_to_host: return "copy to host";
      case copy_direction::device_to_device: return "copy on device";
    }
    return "copy";
  }

  [[nodiscard]] std::uint32_t number_of(stream_ref stream) const noexcept
  {
    std::unique_lock lock{mutex_};
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].live && streams_[i].stream == stream) { return static_cast<std::uint32_t>(i); }
    }
    return static_cast<std::uint32_t>(streams_.size());  // not made here
  }

  template <class Enqueue>
  status write_down(stream_ref stream, char const* name, Enqueue enqueue) noexcept
  {
    std::uint64_t const place = used_.fetch_add(1);
    if (place >= records_.size()) { return enqueue(nullptr); }
    trace_record& record = records_[place];
    record = {name, number_of(stream), {}};
    if constexpr (observed_backend<B>) {
      return enqueue(&record.seen);
    } else {
      nanoseconds const begin = base_.now();
      status const result = enqueue(nullptr);
      if (result == status::ok) { record.seen = {begin, base_.now(), {}}; }
      return result;
    }
  }

  std::vector<trace_record> records_;  // [max_records]
  std::atomic<std::uint64_t> used_{0};
  mutable std::mutex mutex_;
  std::vector<named> streams_;
  B base_;  // last: ends first, and with it all work that writes the records
};

}  // namespace pulseinfer
