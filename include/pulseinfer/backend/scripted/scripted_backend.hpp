#pragma once

/// Runs a program's streams on the caller's thread in the order that a script names: a given one, a random one, or, run again
/// and again, all of them; with copies, delays and failures as the script says.

#include <pulseinfer/backend/handle_table.hpp>
#include <pulseinfer/backend/host_memory.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/scripted/script.hpp>
#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer {

/// A task that ran, for a history.
struct script_step {
  char const* name = "";
  std::uint32_t stream = 0;
};

/// A backend for tests. Metadata and data operations run for real, whole and one after the other: an order is which stream's
/// front task runs next. Waits and records take no time and are no choice. Both memory spaces are host memory, filled with 0xFF
/// when it is given out. The same program under the same script runs the same way; choices() says what was chosen, and
/// script::choices takes it back.
///
/// An operation that moves link bytes is a copy here too, see copy_mode.
///
/// A task that fails at completion does nothing, nor do the tasks behind it up to the next record on its stream: that event is
/// `failed`, and the stream goes on behind it. A wait for a failed event ends as for any other. Once the device is lost, calls
/// return device_lost, nothing runs and every event is failed; memory stays readable.
///
/// Time is virtual: each task adds script::task_time, delayed tasks complete at their time, and where nothing else can run time
/// goes on to the next of them, or to the deadline of the wait. A full queue runs tasks until there is a place.
/// @thread_safety none
class scripted_backend {
  struct stream_tag;
  struct event_tag;

 public:
  /// The host may read and write what allocate(memory_space::device) gives.
  static constexpr bool host_reads_device_memory = true;

  using stream_ref = handle_ref<stream_tag>;
  using event_ref = handle_ref<event_tag>;

  explicit scripted_backend(script how = {})
    : script_{std::move(how)},
      ledger_{script_.memory},
      stream_handles_{script_.max_streams},
      event_handles_{script_.max_events},
      streams_(script_.max_streams),
      events_(script_.max_events),
      rules_seen_(script_.rules.size(), 0),
      order_random_{script_.seed},
      fault_random_{script_.fault_seed}
  {}

  scripted_backend(scripted_backend const&) = delete;
  scripted_backend& operator=(scripted_backend const&) = delete;

  /// Runs out what can run.
  ~scripted_backend()
  {
    static_cast<void>(synchronize());
    // What was left to a device that had not come to its end.
    for (given const& g : given_) { detail::deallocate_host_memory(ledger_, g.space, g.pointer, g.bytes); }
  }

  // Streams -----------------------------------------------------------------------------------------------------------

  /// @throws resource_error when max_streams are in use, or by a rule
  [[nodiscard]] stream_ref create_stream(stream_priority = stream_priority::normal)
  {
    if (refusal({.call = script_call::create_stream})) { throw resource_error{"streams: refused by the script"}; }
    std::optional<stream_ref> const handle = stream_handles_.acquire();
    if (!handle) { throw resource_error{"streams: all " + std::to_string(script_.max_streams) + " are in use"}; }
    return *handle;
  }

  /// Runs out what the stream holds, then gives it back. Where a task never completes the stream stays, as a device's would.
  void destroy_stream(stream_ref stream) noexcept
  {
    if (synchronize(stream) == status::ok) { stream_handles_.release(stream); }
  }

  /// @status invalid_argument, also for an operation whose item needs more than max_scratch_bytes; busy; device_lost; what a
  /// rule says
  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed = nullptr) noexcept
  {
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    if (status const sound = detail::stored_operation::check(op, script_.max_scratch_bytes); sound != status::ok) {
      return sound;
    }
    if (lost_) { return status::device_lost; }
    if (detail::has_no_items(op)) { return status::ok; }
    fate const f = fate_of({.call = script_call::launch, .name = Op::name, .stream = stream.index});
    if (f.refused != status::ok) { return f.refused; }
    if (status const room = make_room(stream); room != status::ok) { return room; }
    task& t = push(stream, task_kind::operation, f, Op::name, observed);
    t.operation.store(op);
    ++counts_.launches;
    settle();
    return status::ok;
  }

  /// @status invalid_argument; capacity_exceeded for more than max_copy_runs runs; busy; device_lost; what a rule says
  status copy(stream_ref stream, copy_list runs, observation* observed = nullptr) noexcept
  {
    detail::queue_sizes const sizes{.copy_runs = script_.max_copy_runs};
    if (status const sound = detail::check_copy(runs, sizes); sound != status::ok) { return sound; }
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    if (lost_) { return status::device_lost; }
    if (detail::moves_nothing(runs)) { return status::ok; }
    char const* const name = name_of(runs.direction);
    fate const f = fate_of({.call = script_call::copy, .name = name, .stream = stream.index, .runs = runs});
    if (f.refused != status::ok) { return f.refused; }
    if (status const room = make_room(stream); room != status::ok) { return room; }
    task& t = push(stream, task_kind::copy, f, name, observed);
    t.runs.assign(runs.runs, runs.runs + runs.count);
    t.direction = runs.direction;
    ++counts_.copies;
    for (copy_run const& run : t.runs) { counts_.copied_bytes += run.bytes; }
    settle();
    return status::ok;
  }

  // Events ------------------------------------------------------------------------------------------------------------

  /// @throws resource_error when max_events are in use, or by a rule
  [[nodiscard]] event_ref create_event()
  {
    if (refusal({.call = script_call::create_event})) {
      throw resource_error{"events: refused by the script, " + std::to_string(live_events()) + " are in use"};
    }
    std::optional<event_ref> const handle = event_handles_.acquire();
    if (!handle) { throw resource_error{"events: all " + std::to_string(script_.max_events) + " are in use"}; }
    events_[handle->index] = {};
    ++counts_.events_created;
    counts_.live_events_peak = std::max<std::uint64_t>(counts_.live_events_peak, live_events());
    return *handle;
  }

  void destroy_event(event_ref event) noexcept { event_handles_.release(event); }

  status record(stream_ref stream, event_ref event) noexcept
  {
    if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
    if (lost_) { return status::device_lost; }
    fate const f = fate_of({.call = script_call::record, .stream = stream.index});
    if (f.refused != status::ok) { return f.refused; }
    may_run(progress::at_all_calls);
    stream_state& state = streams_[stream.index];
    task& t = push(stream, task_kind::mark, {}, "", nullptr);
    t.event = event;
    t.serial = ++records_;
    events_[event.index] = {.until = {stream.index, state.enqueued}, .serial = t.serial, .failed = false};
    settle();
    return status::ok;
  }

  status wait(stream_ref stream, event_ref event) noexcept
  {
    if (!stream_handles_.valid(stream) || !event_handles_.valid(event)) { return status::invalid_argument; }
    if (lost_) { return status::device_lost; }
    detail::stream_position const until = events_[event.index].until;
    fate const f = fate_of({.call = script_call::wait, .stream = stream.index, .recorded_on = until.stream});
    if (f.refused != status::ok) { return f.refused; }
    if (f.dropped) {
      ++counts_.dropped_waits;
      return status::ok;
    }
    may_run(progress::at_all_calls);
    if (until.stream == stream.index || reached(until)) { return status::ok; }
    if (status const room = make_room(stream); room != status::ok) { return room; }
    push(stream, task_kind::wait, {}, "", nullptr).until = until;
    return status::ok;
  }

  [[nodiscard]] event_state done(event_ref event) noexcept
  {
    may_run(progress::at_polls);
    event_state const state = state_of(event);
    if (script_.rules.empty() || lost_ || !event_handles_.valid(event)) { return state; }
    fate const f = fate_of({.call = script_call::done, .recorded_on = events_[event.index].until.stream});
    if (!f.hurried || state == event_state::done) { return state; }
    ++counts_.hurried;
    return event_state::done;
  }

  /// Runs tasks until `done` of one of the events is not pending.
  /// @param deadline in virtual time, or no_deadline
  /// @status drain_timeout at the deadline, time stands there then, or when nothing is left that could run; invalid_argument
  /// without events; device_lost
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    if (events.empty()) { return status::invalid_argument; }
    status const waited = run_until(deadline, [&] {
      return std::ranges::any_of(events, [&](event_ref e) { return state_of(e) != event_state::pending; });
    });
    return lost_ ? status::device_lost : waited;
  }

  // Memory ------------------------------------------------------------------------------------------------------------

  /// @return 256-byte aligned, filled with 0xFF; nullptr for 0 bytes   @throws resource_error with the numbers, or by a rule
  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes)
  {
    if (bytes != 0 && refusal({.call = script_call::allocate, .space = space, .bytes = bytes})) {
      throw resource_error{
        std::string{pulseinfer::name_of(space)} + " memory: " + std::to_string(bytes) + " B refused by the script, " +
        std::to_string(ledger_.used_bytes(space)) + " B in use"};
    }
    void* const pointer = detail::allocate_host_memory(ledger_, space, bytes);
    if (pointer != nullptr) {
      std::memset(pointer, 0xFF, bytes);
      given_.push_back({space, pointer, bytes});
    }
    return pointer;
  }

  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    if (pointer != nullptr && !lost_) { watch(static_cast<std::byte const*>(pointer), bytes); }
    std::erase_if(given_, [&](given const& g) { return g.pointer == pointer; });
    detail::deallocate_host_memory(ledger_, space, pointer, bytes);
  }

  [[nodiscard]] std::uint64_t device_bytes() const noexcept { return ledger_.used_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return ledger_.used_bytes(memory_space::pinned); }

  // Time --------------------------------------------------------------------------------------------------------------

  [[nodiscard]] nanoseconds now() const noexcept { return now_; }

  /// The host spends `time`; tasks run meanwhile as a wait of that length would let them.
  void advance(nanoseconds time) noexcept
  {
    static_cast<void>(run_until(now_ + time, [] { return false; }));
  }

  // Driving by hand ---------------------------------------------------------------------------------------------------

  /// Runs or starts one task. @return false when none can run before time goes on
  bool run_one() noexcept
  {
    end_due();
    return run_next();
  }

  /// Runs or starts the next task of one stream. @return false when it has none that can run
  bool run_one(stream_ref stream) noexcept
  {
    if (!stream_handles_.valid(stream) || !runnable(streams_[stream.index])) { return false; }
    run_front(stream.index);
    return true;
  }

  /// Runs what can run before time goes on. @return tasks that ran or were started
  std::uint64_t run_all() noexcept
  {
    std::uint64_t count = 0;
    while (run_one()) { ++count; }
    return count;
  }

  /// Tasks that were started and never complete by themselves complete now, and later ones are not delayed for ever.
  void release() noexcept
  {
    for (script_rule& rule : script_.rules) {
      if (rule.delay == never) { rule.delay = nanoseconds{0}; }
    }
    for (stream_state& stream : streams_) {
      for (task& t : stream.tasks) {
        if (t.delay == never) { t.delay = nanoseconds{0}; }
      }
      if (stream.running && stream.due == never) { stream.due = now_; }
    }
    end_due();
  }

  status synchronize(stream_ref stream) noexcept
  {
    if (!stream_handles_.valid(stream)) { return status::invalid_argument; }
    return run_until(no_deadline, [&] { return lost_ || streams_[stream.index].tasks.empty(); });
  }

  status synchronize() noexcept
  {
    return run_until(no_deadline, [&] {
      return lost_ || std::ranges::all_of(streams_, [](stream_state const& s) { return s.tasks.empty(); });
    });
  }

  // The script --------------------------------------------------------------------------------------------------------

  /// Off: tasks run as enqueued and at waits only, and no choice is recorded: for what leads up to the part that matters.
  void choose(bool on) noexcept { choosing_ = on; }
  void set_progress(progress runs) noexcept { script_.runs = runs; }

  /// @return its place, for remove_rule and seen_by
  std::size_t add_rule(script_rule rule)
  {
    script_.rules.push_back(std::move(rule));
    rules_seen_.push_back(0);
    return script_.rules.size() - 1;
  }
  /// The rule applies to nothing any more; places of the others stay.
  void remove_rule(std::size_t place) noexcept { script_.rules[place].count = 0; }
  /// Calls that fitted the rule, whether it applied to them or not.
  [[nodiscard]] std::uint64_t seen_by(std::size_t place) const noexcept { return rules_seen_[place]; }

  [[nodiscard]] std::vector<choice> const& choices() const noexcept { return choices_; }
  [[nodiscard]] script const& how() const noexcept { return script_; }
  [[nodiscard]] script_counts const& counts() const noexcept { return counts_; }
  /// Tasks in the order in which they ran, where script::keep_history asks for it.
  [[nodiscard]] std::vector<script_step> const& history() const noexcept { return history_; }

  [[nodiscard]] std::uint32_t live_streams() const noexcept { return stream_handles_.live(); }
  [[nodiscard]] std::uint32_t live_events() const noexcept { return event_handles_.live(); }
  /// Launches and copies that are not complete.
  [[nodiscard]] std::uint64_t pending_tasks() const noexcept
  {
    std::uint64_t count = 0;
    for (stream_state const& stream : streams_) {
      count += static_cast<std::uint64_t>(std::ranges::count_if(stream.tasks, [](task const& t) { return t.works(); }));
    }
    return count;
  }
  [[nodiscard]] bool lost() const noexcept { return lost_; }

 private:
  enum class task_kind : std::uint8_t { operation, copy, wait, mark };

  struct task {
    task_kind kind = task_kind::wait;
    bool fails = false;
    bool loses = false;
    bool swallowed = false;
    bool moved = false;  // an early write that has written
    copy_direction direction = copy_direction::host_to_device;
    char const* name = "";
    std::uint64_t order = 0;
    nanoseconds delay{0};
    observation* observed = nullptr;
    detail::stream_position until = {};  // wait
    event_ref event = {};                // mark
    std::uint64_t serial = 0;            // mark
    std::vector<copy_run> runs = {};     // copy
    detail::stored_operation operation;

    [[nodiscard]] bool works() const noexcept { return kind == task_kind::operation || kind == task_kind::copy; }
  };

  struct stream_state {
    std::deque<task> tasks;
    std::uint64_t enqueued = 0;  // since the backend was made, so that positions stay comparable
    std::uint64_t completed = 0;
    std::uint32_t held = 0;  // tasks that count against the queue's depth
    bool running = false;    // its front task has started and is late
    bool broken = false;     // a task failed and no record has told of it yet
    nanoseconds due{0};      // when running
  };

  struct event_place {
    detail::stream_position until = {};
    std::uint64_t serial = 0;
    bool failed = false;
  };

  struct given {
    memory_space space = memory_space::device;
    void* pointer = nullptr;
    std::size_t bytes = 0;
  };

  /// What the rules have decided for a call.
  struct fate {
    status refused = status::ok;
    bool dropped = false;
    bool hurried = false;
    bool fails = false;
    bool loses = false;
    bool swallowed = false;
    nanoseconds delay{0};
  };

  /// splitmix64, the same on every system.
  struct random_source {
    std::uint64_t state;

    std::uint64_t next() noexcept
    {
      state += 0x9E3779B97F4A7C15U;
      std::uint64_t z = state;
      z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
      z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
      return z ^ (z >> 31U);
    }
    bool with(double probability) noexcept
    {
      return static_cast<double>(next() >> 11U) < probability * 9007199254740992.0;  // 2^53
    }
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

  // Rules -------------------------------------------------------------------------------------------------------------

  [[nodiscard]] fate fate_of(script_task const& seen) noexcept
  {
    fate f;
    for (std::size_t i = 0; i < script_.rules.size(); ++i) {
      script_rule const& rule = script_.rules[i];
      if (rule.call != seen.call || (!rule.name.empty() && rule.name != seen.name)) { continue; }
      if (rule.where && !rule.where(seen)) { continue; }
      std::uint64_t const place = rules_seen_[i]++;
      if (place < rule.first || place - rule.first >= rule.count) { continue; }
      if (rule.probability < 1.0 && !fault_random_.with(rule.probability)) { continue; }
      switch (rule.effect) {
        case script_effect::refuse:
          if (f.refused == status::ok) { f.refused = rule.code; }
          break;
        case script_effect::fail: f.fails = true; break;
        case script_effect::lose: f.fails = f.loses = true; break;
        case script_effect::swallow: f.swallowed = true; break;
        case script_effect::delay: f.delay = later(f.delay, rule.delay); break;
        case script_effect::drop: f.dropped = true; break;
        case script_effect::hurry: f.hurried = true; break;
      }
    }
    counts_.refused += f.refused == status::ok ? 0U : 1U;
    return f;
  }
  [[nodiscard]] bool refusal(script_task const& seen) noexcept { return fate_of(seen).refused != status::ok; }

  [[nodiscard]] static nanoseconds later(nanoseconds from, nanoseconds by) noexcept
  {
    return by >= never - from ? never : from + by;
  }

  // Queues ------------------------------------------------------------------------------------------------------------

  [[nodiscard]] status make_room(stream_ref stream) noexcept
  {
    may_run(progress::at_all_calls);
    stream_state const& state = streams_[stream.index];
    status const room = run_until(no_deadline, [&] { return lost_ || state.held < script_.queue_depth; });
    return lost_ ? status::device_lost : room == status::ok ? status::ok : status::busy;
  }

  task& push(stream_ref stream, task_kind kind, fate const& f, char const* name, observation* observed) noexcept
  {
    stream_state& state = streams_[stream.index];
    task& t = state.tasks.emplace_back();
    t.kind = kind;
    t.name = name;
    t.order = next_order_++;
    t.fails = f.fails;
    t.loses = f.loses;
    t.swallowed = f.swallowed;
    t.delay = f.delay;
    t.observed = observed;
    ++state.enqueued;
    state.held += kind == task_kind::mark ? 0U : 1U;
    return t;
  }

  void pop(stream_state& stream) noexcept
  {
    stream.held -= stream.tasks.front().kind == task_kind::mark ? 0U : 1U;
    stream.tasks.pop_front();
    ++stream.completed;
  }

  [[nodiscard]] bool reached(detail::stream_position until) const noexcept
  {
    return streams_[until.stream].completed >= until.completed;
  }

  [[nodiscard]] event_state state_of(event_ref event) const noexcept
  {
    if (!event_handles_.valid(event) || lost_) { return event_state::failed; }
    event_place const& place = events_[event.index];
    if (!reached(place.until)) { return event_state::pending; }
    return place.failed ? event_state::failed : event_state::done;
  }

  // Running -----------------------------------------------------------------------------------------------------------

  /// Whether the stream's front is a task that can run or be started now. Fronts that take no time are gone: see settle.
  [[nodiscard]] bool runnable(stream_state const& stream) const noexcept
  {
    return !lost_ && !stream.running && !stream.tasks.empty() && stream.tasks.front().works();
  }

  /// Passes records and waits at the front of streams and what a failure has taken with it; early writes write.
  void settle() noexcept
  {
    for (bool changed = true; changed && !lost_;) {
      changed = false;
      for (stream_state& stream : streams_) {
        while (pass_front(stream)) { changed = true; }
      }
    }
  }

  [[nodiscard]] bool pass_front(stream_state& stream) noexcept
  {
    if (stream.running || stream.tasks.empty()) { return false; }
    task& front = stream.tasks.front();
    if (front.kind == task_kind::mark) {
      pass_mark(stream, front);
      pop(stream);
      return true;
    }
    if (front.kind == task_kind::wait) {
      if (!reached(front.until)) { return false; }
      pop(stream);
      return true;
    }
    if (stream.broken) {
      ++counts_.skipped;
      pop(stream);
      return true;
    }
    if (
      script_.copies == copy_mode::early_write && !front.moved && !front.fails && !front.swallowed &&
      moves_link_bytes(front)) {
      work(front);
      front.moved = true;
    }
    return false;
  }

  void pass_mark(stream_state& stream, task const& mark) noexcept
  {
    if (!event_handles_.valid(mark.event)) {
      ++counts_.orphan_completions;
    } else if (event_place& place = events_[mark.event.index]; place.serial == mark.serial) {
      place.failed = stream.broken;
    }
    stream.broken = false;
  }

  [[nodiscard]] static bool moves_link_bytes(task const& t) noexcept
  {
    return t.kind == task_kind::copy ? t.direction != copy_direction::device_to_device
                                     : t.operation.cost().link_bytes > 0;
  }

  /// Does what the task does to memory.
  void work(task const& t) noexcept
  {
    if (t.kind == task_kind::copy) {
      for (copy_run const& run : t.runs) {
        if (run.bytes > 0) { std::memcpy(run.target, run.source, static_cast<std::size_t>(run.bytes)); }
      }
      return;
    }
    if (!scratch_) { scratch_ = std::make_unique_for_overwrite<std::byte[]>(script_.max_scratch_bytes + 64); }
    std::size_t const misaligned = reinterpret_cast<std::uintptr_t>(scratch_.get()) % 64;
    t.operation.run(scratch_.get() + (64 - misaligned) % 64);
  }

  /// Counts copies that have not completed and name memory which goes back.
  void watch(std::byte const* begin, std::size_t bytes) noexcept
  {
    auto const overlaps = [&](std::byte const* at, std::uint64_t count) {
      return at < begin + bytes && begin < at + count;
    };
    for (stream_state const& stream : streams_) {
      for (task const& t : stream.tasks) {
        bool const named = std::ranges::any_of(t.runs, [&](copy_run const& run) {
          return overlaps(run.source, run.bytes) || overlaps(run.target, run.bytes);
        });
        counts_.freed_under_copy += named ? 1U : 0U;
      }
    }
  }

  void run_front(std::uint32_t index) noexcept
  {
    stream_state& stream = streams_[index];
    task const& front = stream.tasks.front();
    if (front.delay > nanoseconds{0}) {
      stream.running = true;
      stream.due = later(now_, front.delay);
      return;
    }
    end_front(index);
  }

  void end_front(std::uint32_t index) noexcept
  {
    stream_state& stream = streams_[index];
    task const& front = stream.tasks.front();
    stream.running = false;
    if (script_.keep_history) { history_.push_back({front.name, index}); }
    if (front.fails) {
      ++counts_.failed;
      stream.broken = true;
      lost_ = lost_ || front.loses;
    } else if (front.swallowed) {
      ++counts_.swallowed;
    } else {
      if (front.observed != nullptr) { *front.observed = {now_, now_ + script_.task_time, cost_of(front)}; }
      if (!front.moved) { work(front); }
      ++counts_.completed;
    }
    pop(stream);
    now_ += script_.task_time;
    settle();
  }

  [[nodiscard]] static operation_cost cost_of(task const& t) noexcept
  {
    if (t.kind == task_kind::operation) { return t.operation.cost(); }
    std::uint64_t bytes = 0;
    for (copy_run const& run : t.runs) { bytes += run.bytes; }
    if (t.direction == copy_direction::device_to_device) { return {.device_bytes = 2 * bytes}; }
    return {.link_bytes = bytes, .link_runs = t.runs.size(), .to_host = t.direction == copy_direction::device_to_host};
  }

  /// Late tasks whose time has come, the earliest first.
  void end_due() noexcept
  {
    settle();
    for (std::uint32_t next = next_due(); next != none_index && streams_[next].due <= now_; next = next_due()) {
      end_front(next);
    }
  }

  static constexpr std::uint32_t none_index = 0xFFFFFFFFU;

  [[nodiscard]] std::uint32_t next_due() const noexcept
  {
    std::uint32_t next = none_index;
    for (std::uint32_t i = 0; i < streams_.size() && !lost_; ++i) {
      if (streams_[i].running && (next == none_index || streams_[i].due < streams_[next].due)) { next = i; }
    }
    return next;
  }

  /// Runnable streams, the one whose front was enqueued first in front.
  void list_runnable() noexcept
  {
    ways_.clear();
    for (std::uint32_t i = 0; i < streams_.size(); ++i) {
      if (runnable(streams_[i])) { ways_.push_back(i); }
    }
    std::ranges::sort(ways_, {}, [&](std::uint32_t stream) { return streams_[stream].tasks.front().order; });
  }

  [[nodiscard]] std::uint32_t choose_of(std::uint32_t ways) noexcept
  {
    if (ways == 1 || !choosing_) { return 0; }
    std::uint32_t taken = 0;
    if (script_.order == order_kind::seeded) { taken = static_cast<std::uint32_t>(order_random_.next() % ways); }
    if (script_.order == order_kind::given && choices_.size() < script_.choices.size()) {
      taken = std::min(script_.choices[choices_.size()], ways - 1);
    }
    choices_.push_back({.taken = taken, .ways = ways});
    return taken;
  }

  bool run_next() noexcept
  {
    list_runnable();
    if (ways_.empty()) { return false; }
    run_front(ways_[choose_of(static_cast<std::uint32_t>(ways_.size()))]);
    return true;
  }

  /// The device may have got on, as far as the script lets it here.
  void may_run(progress at) noexcept
  {
    if (!choosing_ || script_.runs < at || lost_) { return; }
    for (;;) {
      end_due();
      list_runnable();
      if (ways_.empty()) { return; }
      std::uint32_t const taken = choose_of(static_cast<std::uint32_t>(ways_.size()) + 1);
      if (taken == 0) { return; }
      run_front(ways_[taken - 1]);
    }
  }

  /// Runs tasks, and lets time go on where none can run, until `ready()`.
  template <class Ready>
  status run_until(nanoseconds deadline, Ready ready) noexcept
  {
    for (;;) {
      end_due();
      if (ready()) { return status::ok; }
      if (now_ >= deadline) { return status::drain_timeout; }
      if (run_next()) { continue; }
      std::uint32_t const next = next_due();
      if (next == none_index || streams_[next].due == never || streams_[next].due > deadline) {
        if (deadline != no_deadline) { now_ = deadline; }
        return status::drain_timeout;
      }
      now_ = streams_[next].due;
    }
  }

  script script_;
  memory_ledger ledger_;
  handle_table<stream_tag> stream_handles_;
  handle_table<event_tag> event_handles_;
  std::vector<stream_state> streams_;      // [max_streams]
  std::vector<event_place> events_;        // [max_events]
  std::vector<std::uint64_t> rules_seen_;  // [rules]
  std::vector<given> given_;               // memory that has not come back
  random_source order_random_;
  random_source fault_random_;
  std::vector<choice> choices_;
  std::vector<script_step> history_;
  std::vector<std::uint32_t> ways_;
  std::unique_ptr<std::byte[]> scratch_;  // [max_scratch_bytes + 64]
  script_counts counts_;
  nanoseconds now_{0};
  std::uint64_t next_order_ = 0;
  std::uint64_t records_ = 0;
  bool lost_ = false;
  bool choosing_ = true;
};

static_assert(observed_backend<scripted_backend>);

}  // namespace pulseinfer
