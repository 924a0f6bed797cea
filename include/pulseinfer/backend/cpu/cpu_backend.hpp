#pragma once

/// Runs operations on the host. Both memory spaces are host memory.

#include <pulseinfer/backend/cpu/options.hpp>
#include <pulseinfer/backend/growing_memory.hpp>
#include <pulseinfer/backend/handle_table.hpp>
#include <pulseinfer/backend/host_memory.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace pulseinfer {

/// A backend that needs no device. An operation's items run one after another on one thread, and each task of a stream (an
/// operation, a copy, a wait) is complete before its next one begins. Priorities change nothing here.
///
/// Threaded: one worker thread per stream, kept until the backend ends; nobody spins. Manual: nothing runs until run_one, run_all, run_seeded, wait_any,
/// synchronize, destroy_stream or a full queue asks for it, and then on the caller's thread. The **manual order** is the order
/// of enqueuing for seed 0; for any other seed each next task comes from a stream drawn among those that can go on, so each
/// legal interleaving of the streams has seeds that give it. In manual mode time is counted, not measured: each task adds
/// `manual_task_time`, and a wait that ends without success brings now() to its deadline. So the same calls give the same run.
///
/// A full queue: `launch`, `copy` and `wait` wait up to `full_queue_patience` for a place, as a device's queue does,
/// then return busy and change nothing. Sizes should make that rare: nothing else on the step path waits.
///
/// An event holds the place its stream had reached at the last `record`; one that was never recorded is done. `record` takes no
/// place in the queue. A wait means the record before it, as in CUDA, so streams can't wait for each other in a circle.
///
/// A handle that is not valid gives invalid_argument, or `failed` from `done`. An exception that leaves an operation ends the
/// program.
/// @thread_safety every member may be called from any thread; manual mode: from one thread, or from a task that it runs
class cpu_backend {
  struct stream_tag;
  struct event_tag;

 public:
  /// The host may read and write what allocate(memory_space::device) gives.
  static constexpr bool host_reads_device_memory = true;

  using stream_ref = handle_ref<stream_tag>;
  using event_ref = handle_ref<event_tag>;

  /// @throws configuration_error when a size is 0
  explicit cpu_backend(cpu_options options = {})
    : options_{checked(options)},
      ledger_{options.memory},
      stream_handles_{options.max_streams},
      event_handles_{options.max_events},
      streams_(options.max_streams),
      events_(options.max_events),
      random_{options.seed}
  {}

  cpu_backend(cpu_backend const&) = delete;
  cpu_backend& operator=(cpu_backend const&) = delete;

  /// Runs out all that is enqueued, then ends the threads.
  ~cpu_backend()
  {
    static_cast<void>(synchronize());
    for (auto& place : streams_) {
      if (place) { stop(*place); }
    }
  }

  // Streams -----------------------------------------------------------------------------------------------------------

  /// @throws resource_error when max_streams are in use, or memory or threads are not to be had
  [[nodiscard]] stream_ref create_stream(stream_priority = stream_priority::normal)
  {
    std::unique_lock lock{mutex_};
    std::optional<stream_ref> const handle = stream_handles_.acquire();
    if (!handle) { throw resource_error{"streams: all " + std::to_string(options_.max_streams) + " are in use"}; }
    try {
      // Both stay for the next stream of this index, and the queue because events may still hold its positions.
      auto& place = streams_[handle->index];
      if (!place) { place = std::make_unique<stream_state>(queue_sizes(), handle->index); }
      if (options_.mode == cpu_mode::threaded && !place->worker.joinable()) {
        place->worker = std::thread{[this, stream = place.get()] { work(*stream); }};
      }
    } catch (error const&) {
      stream_handles_.release(*handle);
      throw;
    } catch (std::exception const& reason) {
      stream_handles_.release(*handle);
      throw resource_error{std::string{"stream "} + std::to_string(handle->index) + ": " + reason.what()};
    }
    return *handle;
  }

  /// Runs out what the stream holds, then gives it back.
  void destroy_stream(stream_ref stream) noexcept
  {
    if (synchronize(stream) != status::ok) { return; }
    std::unique_lock lock{mutex_};
    stream_handles_.release(stream);
  }

  /// @param observed when it ran; may be nullptr; in manual mode a task takes manual_task_time
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
    std::unique_lock lock{mutex_};
    std::optional<event_ref> const handle = event_handles_.acquire();
    if (!handle) { throw resource_error{"events: all " + std::to_string(options_.max_events) + " are in use"}; }
    events_[handle->index] = {};
    return *handle;
  }

  void destroy_event(event_ref event) noexcept
  {
    std::unique_lock lock{mutex_};
    event_handles_.release(event);
    if (host_waiters_ > 0) { host_.notify_all(); }
  }

  status record(stream_ref stream, event_ref event) noexcept
  {
    std::unique_lock lock{mutex_};
    if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
    events_[event.index] = {stream.index, streams_[stream.index]->queue.enqueued()};
    return status::ok;
  }

  status wait(stream_ref stream, event_ref event) noexcept
  {
    detail::stream_position until;
    bool reached_already = false;
    {
      std::unique_lock lock{mutex_};
      if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
      until = events_[event.index];
      reached_already = until.stream == stream.index || reached(until);
    }
    return enqueue(stream, reached_already, 0, [&](detail::task_queue& queue, std::uint64_t order) {
      queue.push_wait(order, until);
    });
  }

  [[nodiscard]] event_state done(event_ref event) noexcept
  {
    std::unique_lock lock{mutex_};
    return state_of(event);
  }

  /// Returns ok as soon as `done` of one of the events is not pending.
  /// @param deadline on this backend's clock: now() + patience, or no_deadline
  /// @status drain_timeout at the deadline; in manual mode also when nothing is left that could run; invalid_argument without
  /// events
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    if (events.empty()) { return status::invalid_argument; }
    std::unique_lock lock{mutex_};
    return wait_until(lock, deadline, [&] {
      for (event_ref const event : events) {
        if (state_of(event) != event_state::pending) { return true; }
      }
      return false;
    });
  }

  // Memory ------------------------------------------------------------------------------------------------------------

  /// @return 256-byte aligned, contents undefined; nullptr for 0 bytes   @throws resource_error with the numbers
  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes)
  {
    return detail::allocate_host_memory(ledger_, space, bytes);
  }

  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    detail::deallocate_host_memory(ledger_, space, pointer, bytes);
  }

  /// Addresses without memory, see growing_slab.   @throws resource_error
  [[nodiscard]] void* reserve_pinned(std::size_t bytes) { return growing_.reserve(bytes); }
  /// @thread_safety any thread   @throws resource_error past the ledger's limit
  [[nodiscard]] std::string add_pinned(void* begin, std::size_t bytes, std::size_t threads)
  {
    detail::no_registrar nobody;
    detail::system_page_placer placer;
    return growing_.add(
      ledger_, nobody, placer, detail::unknown_node, true, bytes, static_cast<std::byte*>(begin), bytes, threads);
  }
  void release_pinned(void* begin) noexcept
  {
    detail::no_registrar nobody;
    growing_.release(ledger_, nobody, static_cast<std::byte*>(begin));
  }

  [[nodiscard]] std::uint64_t device_bytes() const noexcept { return ledger_.used_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t device_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return ledger_.used_bytes(memory_space::pinned); }
  [[nodiscard]] std::uint64_t pinned_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::pinned); }
  void reset_peaks() noexcept
  {
    ledger_.reset_peak(memory_space::device);
    ledger_.reset_peak(memory_space::pinned);
  }

  // Time --------------------------------------------------------------------------------------------------------------

  /// Threaded: steady time since construction. Manual: see manual order above.
  [[nodiscard]] nanoseconds now() const noexcept
  {
    if (options_.mode == cpu_mode::manual) { return nanoseconds{manual_time_.load()}; }
    return std::chrono::duration_cast<nanoseconds>(clock::now() - start_);
  }

  // Set-up and tests --------------------------------------------------------------------------------------------------

  /// Returns when the stream holds no work; what others enqueue meanwhile included.
  status synchronize(stream_ref stream) noexcept
  {
    std::unique_lock lock{mutex_};
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    return wait_until(lock, no_deadline, [&] { return streams_[stream.index]->queue.empty(); });
  }

  /// Returns when no stream holds work.
  status synchronize() noexcept
  {
    std::unique_lock lock{mutex_};
    return wait_until(lock, no_deadline, [&] {
      for (auto const& stream : streams_) {
        if (stream && !stream->queue.empty()) { return false; }
      }
      return true;
    });
  }

  [[nodiscard]] cpu_options const& options() const noexcept { return options_; }

  [[nodiscard]] std::uint32_t live_streams() const noexcept
  {
    std::unique_lock lock{mutex_};
    return stream_handles_.live();
  }

  [[nodiscard]] std::uint32_t live_events() const noexcept
  {
    std::unique_lock lock{mutex_};
    return event_handles_.live();
  }

  // Manual mode -------------------------------------------------------------------------------------------------------
  // Precondition of each: mode is manual.

  /// Runs the next task of the manual order. @return false when nothing can run
  bool run_one() noexcept
  {
    PULSEINFER_EXPECTS(options_.mode == cpu_mode::manual, "run_one is for manual mode");
    std::unique_lock lock{mutex_};
    return run_next(lock, random_);
  }

  /// Runs the next task of one stream. @return false when it has none or must wait for another stream
  bool run_one(stream_ref stream) noexcept
  {
    PULSEINFER_EXPECTS(options_.mode == cpu_mode::manual, "run_one is for manual mode");
    std::unique_lock lock{mutex_};
    if (!stream_handles_.valid(stream) || !runnable(*streams_[stream.index])) { return false; }
    run_front(lock, *streams_[stream.index]);
    return true;
  }

  /// Runs until nothing can. @return tasks that ran
  std::uint64_t run_all() noexcept
  {
    PULSEINFER_EXPECTS(options_.mode == cpu_mode::manual, "run_all is for manual mode");
    std::unique_lock lock{mutex_};
    std::uint64_t count = 0;
    while (run_next(lock, random_)) { ++count; }
    return count;
  }

  /// run_all in the order of a seed of its own.
  std::uint64_t run_seeded(std::uint64_t seed) noexcept
  {
    PULSEINFER_EXPECTS(options_.mode == cpu_mode::manual, "run_seeded is for manual mode");
    std::unique_lock lock{mutex_};
    order_source order{seed};
    std::uint64_t count = 0;
    while (run_next(lock, order)) { ++count; }
    return count;
  }

  /// The manual order goes on as that of `seed` from here.
  void reseed(std::uint64_t seed) noexcept
  {
    std::unique_lock lock{mutex_};
    random_ = order_source{seed};
  }

  /// Tasks that are enqueued and not complete, over all streams.
  [[nodiscard]] std::uint64_t queued_tasks() const noexcept
  {
    std::unique_lock lock{mutex_};
    std::uint64_t count = 0;
    for (auto const& stream : streams_) {
      if (stream) { count += stream->queue.enqueued() - stream->queue.completed(); }
    }
    return count;
  }

 private:
  using clock = std::chrono::steady_clock;

  struct stream_state {
    stream_state(detail::queue_sizes sizes, std::uint32_t at) : queue{sizes}, index{at} {}

    detail::task_queue queue;
    std::uint32_t index;
    std::condition_variable work;
    std::thread worker;
    bool running = false;  // its front task is being run, without the lock
    bool stopping = false;
  };

  /// Draws streams: splitmix64, the same on every system. Seed 0 draws nothing and keeps the order of enqueuing.
  struct order_source {
    explicit order_source(std::uint64_t seed) : seeded{seed != 0}, state{seed} {}

    std::uint32_t draw(std::uint32_t count) noexcept
    {
      state += 0x9E3779B97F4A7C15U;
      std::uint64_t z = state;
      z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
      z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
      return static_cast<std::uint32_t>((z ^ (z >> 31U)) % count);
    }

    bool seeded;
    std::uint64_t state;
  };

  [[nodiscard]] static cpu_options const& checked(cpu_options const& options)
  {
    auto const positive = [](std::uint64_t value, char const* what) {
      if (value == 0) { throw configuration_error{std::string{"cpu_options: "} + what + " is 0"}; }
    };
    positive(options.max_streams, "max_streams");
    positive(options.max_events, "max_events");
    positive(options.queue_depth, "queue_depth");
    positive(options.max_copy_runs, "max_copy_runs");
    if (options.full_queue_patience < nanoseconds{0} || options.manual_task_time < nanoseconds{0}) {
      throw configuration_error{
        "cpu_options: full_queue_patience " + std::to_string(options.full_queue_patience.count()) +
        " ns, manual_task_time " + std::to_string(options.manual_task_time.count()) + " ns; neither may be negative"};
    }
    return options;
  }

  [[nodiscard]] detail::queue_sizes queue_sizes() const noexcept
  {
    return {options_.queue_depth, options_.max_copy_runs, options_.max_scratch_bytes};
  }

  // All below: under the lock.

  [[nodiscard]] bool reached(detail::stream_position position) const noexcept
  {
    return position.completed == 0 || streams_[position.stream]->queue.completed() >= position.completed;
  }

  [[nodiscard]] event_state state_of(event_ref event) const noexcept
  {
    if (!event_handles_.valid(event)) { return event_state::failed; }
    return reached(events_[event.index]) ? event_state::done : event_state::pending;
  }

  [[nodiscard]] bool runnable(stream_state const& stream) const noexcept
  {
    if (stream.running || stream.queue.empty()) { return false; }
    detail::task const& front = stream.queue.front();
    return front.kind != detail::task_kind::wait || reached(front.until);
  }

  /// `push(queue, order)` when the queue has a place for one task and `copy_runs` runs. With `nothing` only the stream is
  /// checked: what changes nothing needs no place, and later records see the stream as it is.
  template <class Push>
  status enqueue(stream_ref stream, bool nothing, std::uint32_t copy_runs, Push push) noexcept
  {
    std::unique_lock lock{mutex_};
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    if (nothing) { return status::ok; }
    stream_state& state = *streams_[stream.index];
    if (!state.queue.has_place(copy_runs)) {
      if (options_.full_queue_patience == nanoseconds{0}) { return status::busy; }
      nanoseconds const deadline =
        options_.mode == cpu_mode::manual ? no_deadline : now() + options_.full_queue_patience;
      status const waited =
        wait_until(lock, deadline, [&] { return !stream_handles_.valid(stream) || state.queue.has_place(copy_runs); });
      if (waited != status::ok) { return status::busy; }
      if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    }
    push(state.queue, next_order_++);
    if (options_.mode == cpu_mode::threaded) { state.work.notify_one(); }
    return status::ok;
  }

  /// Sleeps, or in manual mode runs tasks, until `ready()`. @status drain_timeout at the deadline
  template <class Ready>
  status wait_until(std::unique_lock<std::mutex>& lock, nanoseconds deadline, Ready ready) noexcept
  {
    if (options_.mode == cpu_mode::manual) {
      while (!ready()) {
        if (now() >= deadline) { return status::drain_timeout; }
        if (!run_next(lock, random_)) {
          if (deadline != no_deadline) { manual_time_.store(deadline.count()); }
          return status::drain_timeout;
        }
      }
      return status::ok;
    }
    ++host_waiters_;
    bool is_ready = true;
    // A deadline so far away that the clock can't count to it is none.
    if (deadline > now() + std::chrono::hours{24 * 365}) {
      host_.wait(lock, ready);
    } else {
      is_ready = host_.wait_until(lock, start_ + deadline, ready);
    }
    --host_waiters_;
    return is_ready ? status::ok : status::drain_timeout;
  }

  void run_front(std::unique_lock<std::mutex>& lock, stream_state& stream) noexcept
  {
    detail::task const& front = stream.queue.front();
    if (front.kind != detail::task_kind::wait) {
      stream.running = true;
      lock.unlock();
      run_task(stream.queue, front);
      lock.lock();
      stream.running = false;
    }
    stream.queue.pop();
    if (options_.mode == cpu_mode::manual) {
      manual_time_.fetch_add(options_.manual_task_time.count());
      return;
    }
    for (auto const& other : streams_) {
      if (other && !other->queue.empty() && runnable(*other)) { other->work.notify_one(); }
    }
    if (host_waiters_ > 0) { host_.notify_all(); }
  }

  /// Without the lock.
  void run_task(detail::task_queue const& queue, detail::task const& task) const noexcept
  {
    bool const is_copy = task.kind == detail::task_kind::copy;
    if (task.observed != nullptr) {
      task.observed->cost = is_copy ? queue.cost_of(task) : task.operation.cost();
      task.observed->begin = now();
    }
    if (is_copy) {
      queue.move_bytes(task);
    } else {
      task.operation.run(queue.scratch());
    }
    if (task.observed != nullptr) {
      task.observed->end = now() + (options_.mode == cpu_mode::manual ? options_.manual_task_time : nanoseconds{0});
    }
  }

  /// One task of the manual order.
  bool run_next(std::unique_lock<std::mutex>& lock, order_source& order) noexcept
  {
    stream_state* chosen = nullptr;
    std::uint32_t candidates = 0;
    for (auto const& stream : streams_) {
      if (!stream || !runnable(*stream)) { continue; }
      ++candidates;
      if (chosen == nullptr || stream->queue.front().order < chosen->queue.front().order) { chosen = stream.get(); }
    }
    if (chosen == nullptr) { return false; }
    if (order.seeded) {
      std::uint32_t skip = order.draw(candidates);
      for (auto const& stream : streams_) {
        if (!stream || !runnable(*stream)) { continue; }
        if (skip-- == 0) {
          chosen = stream.get();
          break;
        }
      }
    }
    run_front(lock, *chosen);
    return true;
  }

  void work(stream_state& stream) noexcept
  {
    std::unique_lock lock{mutex_};
    for (;;) {
      stream.work.wait(lock, [&] { return runnable(stream) || (stream.stopping && stream.queue.empty()); });
      if (!runnable(stream)) { return; }
      run_front(lock, stream);
    }
  }

  // Without the lock.
  void stop(stream_state& stream) noexcept
  {
    if (!stream.worker.joinable()) { return; }
    {
      std::unique_lock lock{mutex_};
      stream.stopping = true;
      stream.work.notify_one();
    }
    stream.worker.join();
  }

  cpu_options options_;
  clock::time_point start_ = clock::now();
  std::atomic<std::int64_t> manual_time_{0};
  memory_ledger ledger_;
  detail::growing_memory growing_;

  mutable std::mutex mutex_;
  std::condition_variable host_;
  std::uint32_t host_waiters_ = 0;
  std::uint64_t next_order_ = 0;
  handle_table<stream_tag> stream_handles_;
  handle_table<event_tag> event_handles_;
  std::vector<std::unique_ptr<stream_state>> streams_;  // [max_streams], made when first asked for
  std::vector<detail::stream_position> events_;         // [max_events] where each was recorded
  order_source random_;
};

static_assert(observed_backend<cpu_backend>);

}  // namespace pulseinfer
