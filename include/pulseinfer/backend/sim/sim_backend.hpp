#pragma once

/// Runs a program in virtual time: what it would take on a device and a link of given speeds, without either.

#include <pulseinfer/backend/handle_table.hpp>
#include <pulseinfer/backend/host_memory.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/reserved_pages.hpp>
#include <pulseinfer/backend/sim/compute_model.hpp>
#include <pulseinfer/backend/sim/link_model.hpp>
#include <pulseinfer/backend/sim/machine.hpp>
#include <pulseinfer/backend/sim/options.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// Virtual time starts at 0 and moves only in wait_any, synchronize, advance, destroy_stream and when a queue is full: the host
/// itself takes no time unless it says so by advance(), and what options.control charges it. Both memory spaces are host
/// memory.
///
/// A task starts when its stream comes to it and then holds what it needs: an operation on metadata, or one that finds nothing
/// to do, nothing; one on data the device; one that moves link bytes or a copy between host and device its direction of the
/// link (models: sim/link_model.hpp, sim/compute_model.hpp). Device and link serve one holder at a time each, at rates that
/// depend on what the others do (options.sharing). A task's cost is read when it starts, and what it does to memory happens
/// when it ends. Operations on metadata always run; operations on data and copies only with `move_data`. Of streams that start
/// at the same time the more urgent goes first, then the lower index; so the same calls give the same run.
///
/// Events and full queues are as in cpu_backend, but a full queue advances time until there is a place.
/// @thread_safety none
class sim_backend {
  struct stream_tag;
  struct event_tag;

 public:
  /// The host may read and write what allocate(memory_space::device) gives.
  static constexpr bool host_reads_device_memory = true;

  using stream_ref = handle_ref<stream_tag>;
  using event_ref = handle_ref<event_tag>;

  /// @throws configuration_error when a size is 0 or a rate is not positive
  explicit sim_backend(sim_options options = {})
    : options_{checked(options)},
      ledger_{options.memory},
      machine_{options.max_streams, options.sharing},
      stream_handles_{options.max_streams},
      event_handles_{options.max_events},
      streams_(options.max_streams),
      events_(options.max_events)
  {
    by_urgency_.reserve(options.max_streams);
  }

  sim_backend(sim_backend const&) = delete;
  sim_backend& operator=(sim_backend const&) = delete;

  /// Runs out all that is enqueued.
  ~sim_backend() { static_cast<void>(synchronize()); }

  // Streams -----------------------------------------------------------------------------------------------------------

  /// @throws resource_error when max_streams are in use or there is no memory for the queue
  [[nodiscard]] stream_ref create_stream(stream_priority priority = stream_priority::normal)
  {
    std::optional<stream_ref> const handle = stream_handles_.acquire();
    if (!handle) { throw resource_error{"streams: all " + std::to_string(options_.max_streams) + " are in use"}; }
    auto& place = streams_[handle->index];
    if (!place) {
      try {
        place = std::make_unique<stream_state>(queue_sizes());  // stays: events may still hold its positions
      } catch (...) {
        stream_handles_.release(*handle);
        throw;
      }
    }
    place->priority = priority;
    by_urgency_.clear();
    for (stream_priority const urgency : {stream_priority::high, stream_priority::normal, stream_priority::low}) {
      for (std::uint32_t i = 0; i < streams_.size(); ++i) {
        if (streams_[i] && streams_[i]->priority == urgency) { by_urgency_.push_back(i); }
      }
    }
    return *handle;
  }

  /// Runs out what the stream holds, then gives it back.
  void destroy_stream(stream_ref stream) noexcept
  {
    if (synchronize(stream) != status::ok) { return; }
    stream_handles_.release(stream);
  }

  /// @status invalid_argument, also for an operation whose item needs more than max_scratch_bytes; busy
  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed = nullptr) noexcept
  {
    if (status const sound = detail::stored_operation::check(op, options_.max_scratch_bytes); sound != status::ok) {
      return sound;
    }
    return enqueue(stream, detail::has_no_items(op), 0, [&](detail::task_queue& queue, std::uint64_t order) {
      queue.push_operation(order, op, observed);
    });
  }

  /// @status invalid_argument; capacity_exceeded for more than max_copy_runs runs; busy
  status copy(stream_ref stream, copy_list runs, observation* observed = nullptr) noexcept
  {
    if (status const sound = detail::check_copy(runs, queue_sizes()); sound != status::ok) { return sound; }
    return enqueue(
      stream, detail::moves_nothing(runs), runs.count,
      [&](detail::task_queue& queue, std::uint64_t order) { queue.push_copy(order, runs, observed); });
  }

  // Events ------------------------------------------------------------------------------------------------------------

  /// @throws resource_error when max_events are in use
  [[nodiscard]] event_ref create_event()
  {
    std::optional<event_ref> const handle = event_handles_.acquire();
    if (!handle) { throw resource_error{"events: all " + std::to_string(options_.max_events) + " are in use"}; }
    events_[handle->index] = {};
    return *handle;
  }

  void destroy_event(event_ref event) noexcept { event_handles_.release(event); }

  status record(stream_ref stream, event_ref event) noexcept
  {
    if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
    events_[event.index] = {stream.index, streams_[stream.index]->queue.enqueued()};
    return status::ok;
  }

  status wait(stream_ref stream, event_ref event) noexcept
  {
    if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
    detail::stream_position const until = events_[event.index];
    bool const reached_already = until.stream == stream.index || reached(until);
    return enqueue(stream, reached_already, 0, [&](detail::task_queue& queue, std::uint64_t order) {
      queue.push_wait(order, until);
    });
  }

  [[nodiscard]] event_state done(event_ref event) noexcept
  {
    if (!event_handles_.valid(event)) { return event_state::failed; }
    return reached(events_[event.index]) ? event_state::done : event_state::pending;
  }

  /// Advances time from one completion to the next until `done` of one of the events is not pending.
  /// @param deadline in virtual time, or no_deadline
  /// @status drain_timeout at the deadline; time stands there then   invalid_argument without events
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    if (events.empty()) { return status::invalid_argument; }
    auto const any_done = [&] {
      for (event_ref const event : events) {
        if (done(event) != event_state::pending) { return true; }
      }
      return false;
    };
    settle();
    if (any_done()) { return status::ok; }
    status const woke = advance_until(deadline, any_done);
    advance(options_.control.wake);
    return woke;
  }

  // Memory ------------------------------------------------------------------------------------------------------------

  /// Large memory is addresses alone until it is written to: a simulated pool may be larger than the machine's memory.
  /// @return 256-byte aligned, contents undefined; nullptr for 0 bytes   @throws resource_error with the numbers
  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes)
  {
    if (bytes < reserved_from) { return detail::allocate_host_memory(ledger_, space, bytes); }
    ledger_.take(space, bytes);
    void* const memory = detail::reserve_pages(bytes);
    if (memory != nullptr) { return memory; }
    ledger_.give_back(space, bytes);
    throw resource_error{std::string{name_of(space)} + " memory: no addresses for " + std::to_string(bytes) + " B"};
  }

  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    if (bytes < reserved_from) {
      detail::deallocate_host_memory(ledger_, space, pointer, bytes);
    } else if (pointer != nullptr) {
      detail::give_pages_back(pointer, bytes);
      ledger_.give_back(space, bytes);
    }
  }

  [[nodiscard]] std::uint64_t device_bytes() const noexcept { return ledger_.used_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t device_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return ledger_.used_bytes(memory_space::pinned); }
  [[nodiscard]] std::uint64_t pinned_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::pinned); }

  // Time --------------------------------------------------------------------------------------------------------------

  [[nodiscard]] nanoseconds now() const noexcept { return now_; }

  /// The host spends `time`; what ends meanwhile ends in its order.
  void advance(nanoseconds time) noexcept
  {
    static_cast<void>(advance_until(now_ + time, [] { return false; }));
  }

  /// The host launches a segment.
  void charge_segment() noexcept { advance(options_.control.host_per_segment); }

  /// Time that a resource has been held so far, at whatever rate.
  [[nodiscard]] nanoseconds busy(sim_resource resource) const noexcept { return machine_.busy(resource); }
  /// The part of busy(sim_resource::to_device) that background pieces took.
  [[nodiscard]] nanoseconds background_busy() const noexcept { return machine_.background_busy(); }

  /// Gives the link's free time to `source`, which must outlive the backend or be taken away by a null pointer.
  void set_background(background_source* source) noexcept { machine_.set_background(source); }

  // Set-up and tests --------------------------------------------------------------------------------------------------

  status synchronize(stream_ref stream) noexcept
  {
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    return advance_until(no_deadline, [&] { return streams_[stream.index]->queue.empty(); });
  }

  status synchronize() noexcept
  {
    return advance_until(no_deadline, [&] {
      for (auto const& stream : streams_) {
        if (stream && !stream->queue.empty()) { return false; }
      }
      return true;
    });
  }

  [[nodiscard]] sim_options const& options() const noexcept { return options_; }
  [[nodiscard]] std::uint32_t live_streams() const noexcept { return stream_handles_.live(); }
  [[nodiscard]] std::uint32_t live_events() const noexcept { return event_handles_.live(); }

 private:
  static constexpr std::size_t reserved_from = std::size_t{16} << 20U;

  struct stream_state {
    explicit stream_state(detail::queue_sizes sizes) : queue{sizes} {}

    detail::task_queue queue;
    stream_priority priority = stream_priority::normal;
    bool running = false;       // its front task has started
    bool holds = false;         // ... and holds the device or the link: it ends when that says so
    bool blocked = false;       // its front is a wait that was not reached when the stream came to it
    nanoseconds begin{0};       // when running
    nanoseconds end{0};         // when running and holding nothing
    nanoseconds not_before{0};  // the next task starts then at the earliest
    operation_cost cost = {};   // when running
  };

  [[nodiscard]] static sim_options const& checked(sim_options const& options)
  {
    auto const positive = [](auto value, char const* what) {
      if (!(value > 0)) {
        throw configuration_error{std::string{"sim_options: "} + what + " is " + std::to_string(value)};
      }
    };
    positive(options.max_streams, "max_streams");
    positive(options.max_events, "max_events");
    positive(options.queue_depth, "queue_depth");
    positive(options.max_copy_runs, "max_copy_runs");
    positive(options.copies.to_device_bytes_per_s, "copies.to_device_bytes_per_s");
    positive(options.copies.to_host_bytes_per_s, "copies.to_host_bytes_per_s");
    positive(options.kernels.to_device_bytes_per_s, "kernels.to_device_bytes_per_s");
    positive(options.kernels.to_host_bytes_per_s, "kernels.to_host_bytes_per_s");
    positive(options.compute.device_bytes_per_s, "compute.device_bytes_per_s");
    positive(options.compute.flops_per_s, "compute.flops_per_s");
    for (std::size_t up = 0; up < 2; ++up) {
      positive(options.sharing.link_beside_compute[up], "sharing.link_beside_compute");
      positive(options.sharing.compute_beside_link[up], "sharing.compute_beside_link");
      for (link_sharing::rates const& both : options.sharing.both_ways[up]) {
        positive(both.to_device, "sharing.both_ways.to_device");
        positive(both.to_host, "sharing.both_ways.to_host");
      }
    }
    return options;
  }

  [[nodiscard]] detail::queue_sizes queue_sizes() const noexcept
  {
    return {options_.queue_depth, options_.max_copy_runs, options_.max_scratch_bytes};
  }

  [[nodiscard]] bool reached(detail::stream_position position) const noexcept
  {
    return position.completed == 0 || streams_[position.stream]->queue.completed() >= position.completed;
  }

  template <class Push>
  status enqueue(stream_ref stream, bool nothing, std::uint32_t copy_runs, Push push) noexcept
  {
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    if (nothing) { return status::ok; }
    detail::task_queue& queue = streams_[stream.index]->queue;
    if (!queue.has_place(copy_runs)) {
      auto const has_place = [&] { return queue.has_place(copy_runs); };
      if (advance_until(no_deadline, has_place) != status::ok) { return status::busy; }
    }
    bool const idle = queue.empty();
    push(queue, next_order_++);
    if (idle) { settle(); }  // else what stands before it has to end first
    return status::ok;
  }

  /// From completion to completion until `ready()`.
  template <class Ready>
  status advance_until(nanoseconds deadline, Ready ready) noexcept
  {
    settle();
    while (!ready()) {
      nanoseconds const next = next_change();
      if (next == nanoseconds::max() || next > deadline) {
        if (deadline != no_deadline && deadline > now_) { now_ = deadline; }
        return status::drain_timeout;
      }
      if (next > now_) { now_ = next; }
      settle();
    }
    return status::ok;
  }

  /// Starts and ends what can start and end at now().
  void settle() noexcept
  {
    if (settling_) { return; }  // a task that enqueues: the loop below goes on until nothing changes
    settling_ = true;
    bool changed = true;
    while (changed) {
      changed = false;
      for (std::uint32_t const stream : by_urgency_) { changed = start_front(stream) || changed; }
      machine_.fill(now_);
      changed = end_fronts() || changed;
    }
    settling_ = false;
  }

  /// The next time at which something ends or may start.
  [[nodiscard]] nanoseconds next_change() const noexcept
  {
    nanoseconds next = machine_.next_end();
    for (std::uint32_t const i : by_urgency_) {
      stream_state const* const stream = streams_[i].get();
      if (stream->queue.empty()) { continue; }
      if (stream->running && !stream->holds) { next = std::min(next, stream->end); }
      if (!stream->running && stream->not_before > now_) { next = std::min(next, stream->not_before); }
    }
    return next;
  }

  /// Ends all that is through at now(), in the order of time. @return whether anything was
  bool end_fronts() noexcept
  {
    bool any = false;
    for (;;) {
      stream_state* next = nullptr;
      for (std::uint32_t const i : by_urgency_) {
        stream_state* const stream = streams_[i].get();
        bool const ends = stream->running && !stream->holds && stream->end <= now_;
        if (ends && (next == nullptr || stream->end < next->end)) { next = stream; }
      }
      if (next == nullptr) {
        bool more = false;
        nanoseconds begin{0};
        std::uint32_t const holder = machine_.take_ended(now_, begin, more);
        if (!more) { return any; }
        any = true;
        if (holder == detail::sim_machine::nobody) { continue; }
        next = streams_[holder].get();
        next->begin = begin;
      }
      any = true;
      end_front(*next);
    }
  }

  /// @return false when the stream's front has started before or can't start
  bool start_front(std::uint32_t index) noexcept
  {
    stream_state& stream = *streams_[index];
    if (stream.running || stream.queue.empty() || stream.not_before > now_) { return false; }
    detail::task const& front = stream.queue.front();
    switch (front.kind) {
      case detail::task_kind::wait:
        if (!reached(front.until)) {
          stream.blocked = true;
          return false;
        }
        if (stream.blocked) { stream.not_before = now_ + options_.control.resume; }
        stream.blocked = false;
        stream.queue.pop();
        return true;
      case detail::task_kind::operation: start_operation(stream, index, front.operation); break;
      case detail::task_kind::copy: start_copy(stream, index, front); break;
    }
    stream.running = true;
    if (front.observed != nullptr) { *front.observed = {now_, observation::never, stream.cost}; }
    return true;
  }

  void end_front(stream_state& stream) noexcept
  {
    stream.running = false;
    detail::task const& front = stream.queue.front();
    if (front.observed != nullptr) { *front.observed = {stream.begin, now_, stream.cost}; }
    if (front.kind == detail::task_kind::operation) {
      if (options_.move_data || front.operation.kind() == operation_kind::metadata) {
        front.operation.run(stream.queue.scratch());
      }
    } else if (options_.move_data) {
      stream.queue.move_bytes(front);
    }
    stream.queue.pop();
  }

  void start_operation(stream_state& stream, std::uint32_t index, detail::stored_operation const& op) noexcept
  {
    operation_cost const cost = op.cost();
    nanoseconds const working = options_.compute.duration(cost);
    if (cost.link_bytes > 0) {
      nanoseconds const moving = options_.kernels.duration(cost.link_runs, cost.link_bytes, cost.to_host) -
        (cost.continues ? options_.kernels.per_operation : nanoseconds{0});
      hold(
        stream, index, cost.to_host ? sim_resource::to_host : sim_resource::to_device, mover::kernel,
        cost.continues ? moving : std::max(working, moving), cost);
    } else if (
      op.kind() == operation_kind::metadata || (cost.device_bytes == 0 && cost.flops == 0 && cost.device_ns == 0)) {
      run_alone(stream, working, cost);
    } else {
      hold(stream, index, sim_resource::device, mover::kernel, working, cost);
    }
  }

  void start_copy(stream_state& stream, std::uint32_t index, detail::task const& copy) noexcept
  {
    operation_cost const cost = stream.queue.cost_of(copy);
    nanoseconds const took = options_.copies.duration(copy.runs, cost.link_bytes, cost.to_host);
    if (copy.direction == copy_direction::device_to_device) {
      run_alone(stream, took + options_.compute.duration(cost) - options_.compute.per_launch, cost);
    } else {
      hold(
        stream, index, cost.to_host ? sim_resource::to_host : sim_resource::to_device, mover::copy_engine, took, cost);
    }
  }

  void run_alone(stream_state& stream, nanoseconds took, operation_cost const& cost) noexcept
  {
    stream.cost = cost;
    stream.holds = false;
    stream.begin = now_;
    stream.end = now_ + took;
  }

  void hold(
    stream_state& stream, std::uint32_t index, sim_resource resource, mover by, nanoseconds work,
    operation_cost const& cost) noexcept
  {
    stream.cost = cost;
    stream.holds = true;
    machine_.request(now_, resource, index, by, work);
  }

  sim_options options_;
  nanoseconds now_{0};
  memory_ledger ledger_;
  detail::sim_machine machine_;
  std::uint64_t next_order_ = 0;
  bool settling_ = false;
  handle_table<stream_tag> stream_handles_;
  handle_table<event_tag> event_handles_;
  std::vector<std::unique_ptr<stream_state>> streams_;  // [max_streams], made when first asked for
  std::vector<detail::stream_position> events_;         // [max_events] where each was recorded
  std::vector<std::uint32_t> by_urgency_ = {};          // streams that have been made, in the order in which they start
};

static_assert(observed_backend<sim_backend>);

}  // namespace pulseinfer
