#pragma once

/// The work of one stream in the order it was enqueued, with all memory taken at construction.

#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

namespace pulseinfer::detail {

/// How far a stream has come: reached when the queue `stream` has completed `completed` tasks since it was made.
struct stream_position {
  std::uint32_t stream = 0;
  std::uint64_t completed = 0;
};

enum class task_kind : std::uint8_t { operation, copy, wait };

struct task {
  task_kind kind = task_kind::wait;
  std::uint64_t order = 0;          ///< over all queues of a backend, in the order of enqueuing
  observation* observed = nullptr;  ///< operation and copy: may be nullptr

  stored_operation operation;

  std::uint64_t first_run = 0;  // copy: place in the ring of runs
  std::uint32_t runs = 0;
  copy_direction direction = copy_direction::host_to_device;

  stream_position until = {};  // wait
};

/// Sizes of a queue. One call of `copy` brings at most `copy_runs` runs.
struct queue_sizes {
  std::uint32_t tasks = 1024;
  std::uint32_t copy_runs = 16384;
  std::size_t scratch_bytes = std::size_t{1} << 20U;
};

/// Positions count from the queue's construction and never start anew, so they stay comparable when its stream's handle is
/// given to somebody else.
/// @thread_safety none; the front task may be read by one thread while another one pushes
class task_queue {
 public:
  /// @throws resource_error when there is no memory for it
  explicit task_queue(queue_sizes sizes) : sizes_{sizes}
  {
    tasks_.reset(new (std::nothrow) task[sizes.tasks]);
    runs_.reset(new (std::nothrow) copy_run[sizes.copy_runs]);
    scratch_.reset(static_cast<std::byte*>(
      ::operator new(round_up(sizes.scratch_bytes + 1, 64), std::align_val_t{64}, std::nothrow)));
    if (!tasks_ || !runs_ || !scratch_) {
      throw resource_error{
        "stream: no memory for a queue of " + std::to_string(sizes.tasks) + " tasks, " +
        std::to_string(sizes.copy_runs) + " runs and " + std::to_string(sizes.scratch_bytes) + " B of scratch"};
    }
  }

  [[nodiscard]] bool empty() const noexcept { return enqueued_ == completed_; }
  [[nodiscard]] std::uint64_t enqueued() const noexcept { return enqueued_; }
  [[nodiscard]] std::uint64_t completed() const noexcept { return completed_; }

  [[nodiscard]] bool has_place(std::uint32_t copy_runs = 0) const noexcept
  {
    return enqueued_ - completed_ < sizes_.tasks && runs_end_ - runs_begin_ + copy_runs <= sizes_.copy_runs;
  }

  /// Each push needs has_place().
  template <operation Op>
  void push_operation(std::uint64_t order, Op const& op, observation* observed) noexcept
  {
    task& place = push(task_kind::operation, order);
    place.operation.store(op);
    place.observed = observed;
  }

  void push_copy(std::uint64_t order, copy_list list, observation* observed) noexcept
  {
    task& place = push(task_kind::copy, order);
    place.observed = observed;
    place.first_run = runs_end_;
    place.runs = list.count;
    place.direction = list.direction;
    for (std::uint32_t i = 0; i < list.count; ++i) { runs_[(runs_end_ + i) % sizes_.copy_runs] = list.runs[i]; }
    runs_end_ += list.count;
  }

  void push_wait(std::uint64_t order, stream_position until) noexcept { push(task_kind::wait, order).until = until; }

  /// The oldest task that is not complete. Needs !empty().
  [[nodiscard]] task const& front() const noexcept { return tasks_[completed_ % sizes_.tasks]; }

  [[nodiscard]] copy_run const& run_of(task const& copy, std::uint32_t i) const noexcept
  {
    return runs_[(copy.first_run + i) % sizes_.copy_runs];
  }

  /// Moves the bytes of a copy task.
  void move_bytes(task const& copy) const noexcept
  {
    for (std::uint32_t i = 0; i < copy.runs; ++i) {
      copy_run const& run = run_of(copy, i);
      if (run.bytes > 0) { std::memcpy(run.target, run.source, run.bytes); }
    }
  }

  /// What a copy task moves, as the cost of an operation that would do the same.
  [[nodiscard]] operation_cost cost_of(task const& copy) const noexcept
  {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < copy.runs; ++i) { bytes += run_of(copy, i).bytes; }
    if (copy.direction == copy_direction::device_to_device) { return {.device_bytes = 2 * bytes}; }
    return {.link_bytes = bytes, .link_runs = copy.runs, .to_host = copy.direction == copy_direction::device_to_host};
  }

  [[nodiscard]] std::byte* scratch() const noexcept { return scratch_.get(); }

  /// The front task is complete.
  void pop() noexcept
  {
    task const& done = front();
    if (done.kind == task_kind::copy) { runs_begin_ += done.runs; }
    ++completed_;
  }

 private:
  struct free_scratch {
    void operator()(std::byte* pointer) const noexcept { ::operator delete(pointer, std::align_val_t{64}); }
  };

  task& push(task_kind kind, std::uint64_t order) noexcept
  {
    task& place = tasks_[enqueued_ % sizes_.tasks];
    place.kind = kind;
    place.order = order;
    ++enqueued_;
    return place;
  }

  queue_sizes sizes_;
  std::unique_ptr<task[]> tasks_;
  std::unique_ptr<copy_run[]> runs_;
  std::unique_ptr<std::byte, free_scratch> scratch_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t runs_begin_ = 0;
  std::uint64_t runs_end_ = 0;
};

/// @status invalid_argument for runs without an address; capacity_exceeded for more runs than a queue can hold
[[nodiscard]] inline status check_copy(copy_list list, queue_sizes sizes) noexcept
{
  if (list.count > sizes.copy_runs) { return status::capacity_exceeded; }
  if (list.count > 0 && list.runs == nullptr) { return status::invalid_argument; }
  for (std::uint32_t i = 0; i < list.count; ++i) {
    copy_run const& run = list.runs[i];
    if (run.bytes > 0 && (run.target == nullptr || run.source == nullptr)) { return status::invalid_argument; }
  }
  return status::ok;
}

/// True when no run of the list moves a byte.
[[nodiscard]] inline bool moves_nothing(copy_list list) noexcept
{
  for (std::uint32_t i = 0; i < list.count; ++i) {
    if (list.runs[i].bytes > 0) { return false; }
  }
  return true;
}

}  // namespace pulseinfer::detail
