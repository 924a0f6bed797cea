#pragma once

/// Runs operations as kernels of one CUDA device.

#include <pulseinfer/backend/cuda/copy.cuh>
#include <pulseinfer/backend/cuda/device_guard.cuh>
#include <pulseinfer/backend/cuda/error.cuh>
#include <pulseinfer/backend/cuda/kernel/choose_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel/gather_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel/join_entries.cuh>
#include <pulseinfer/backend/cuda/kernel/land_rows.cuh>
#include <pulseinfer/backend/cuda/kernel/move_runs.cuh>
#include <pulseinfer/backend/cuda/kernel/order_entries.cuh>
#include <pulseinfer/backend/cuda/kernel/paged_attention.cuh>
#include <pulseinfer/backend/cuda/kernel/plan_recall.cuh>
#include <pulseinfer/backend/cuda/kernel/resolve_background.cuh>
#include <pulseinfer/backend/cuda/kernel/resolve_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel/score_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel/select_top_k.cuh>
#include <pulseinfer/backend/cuda/kernel/share_blocks.cuh>
#include <pulseinfer/backend/cuda/kernel/vote_blocks.cuh>
#include <pulseinfer/backend/cuda/launch.cuh>
#include <pulseinfer/backend/cuda/memory.cuh>
#include <pulseinfer/backend/cuda/options.cuh>
#include <pulseinfer/backend/cuda/stream.cuh>
#include <pulseinfer/backend/growing_memory.hpp>
#include <pulseinfer/backend/handle_table.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/memory_ledger.hpp>
#include <pulseinfer/backend/stored_operation.hpp>
#include <pulseinfer/backend/task_queue.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// Streams and events are CUDA's, so stream order, events and full queues are those of CUDA. The caller's current device is left
/// as it was. Every code that CUDA returns is kept: last_error() has the text of the last failure, and after an error that outlives
/// its call every later call returns device_lost.
///
/// Streams that the host engine lends (a cudaStream_t, a ::cuda::stream_ref) may be used wherever a stream is asked for, also while
/// they are captured, but not destroyed here. An event of this backend belongs to its device.
/// @thread_safety every member may be called from any thread
class cuda_backend {
  struct stream_tag;
  struct event_tag;

 public:
  using stream_ref = cuda_stream_ref;
  using event_ref = handle_ref<event_tag>;

  static constexpr bool prefers_few_launches = true;

  /// @throws configuration_error for sizes of 0, a device that is not there or scratch that its blocks can't have; cuda_error
  explicit cuda_backend(cuda_options options = {})
    : options_{options},
      ledger_{options.memory},
      stream_handles_{options.max_streams},
      event_handles_{options.max_events},
      streams_(options.max_streams, nullptr),
      events_(options.max_events, nullptr)
  {
    if (options.max_streams == 0 || options.max_events == 0 || options.max_copy_runs == 0 || options.max_blocks == 0) {
      throw configuration_error{
        "cuda_options: max_streams " + std::to_string(options.max_streams) + ", max_events " +
        std::to_string(options.max_events) + ", max_copy_runs " + std::to_string(options.max_copy_runs) +
        ", max_blocks " + std::to_string(options.max_blocks) + "; none may be 0"};
    }
    if (options.pinned_chunk_bytes == 0 || options.pinned_chunk_bytes % detail::huge_page_bytes != 0) {
      throw configuration_error{
        "cuda_options: pinned_chunk_bytes " + std::to_string(options.pinned_chunk_bytes) + " is no multiple of " +
        std::to_string(detail::huge_page_bytes)};
    }
    int devices = 0;
    errors_.require("cudaGetDeviceCount", cudaGetDeviceCount(&devices));
    if (options.device < 0 || options.device >= devices) {
      throw configuration_error{
        "cuda_options: device " + std::to_string(options.device) + " of " + std::to_string(devices)};
    }
    int block_scratch = 0;
    errors_.require(
      "cudaDeviceGetAttribute",
      cudaDeviceGetAttribute(&block_scratch, cudaDevAttrMaxSharedMemoryPerBlockOptin, options.device));
    auto const most = static_cast<std::size_t>(block_scratch);
    if (options.max_scratch_bytes > most) {
      throw configuration_error{
        "cuda_options: max_scratch_bytes " + std::to_string(options.max_scratch_bytes) + ", but a block of device " +
        std::to_string(options.device) + " can have " + std::to_string(most)};
    }
    if (options_.max_scratch_bytes == 0) { options_.max_scratch_bytes = most; }
  }

  cuda_backend(cuda_backend const&) = delete;
  cuda_backend& operator=(cuda_backend const&) = delete;

  /// Waits for its own streams. Tolerates a runtime that is already unloaded.
  ~cuda_backend()
  {
    detail::device_guard const guard{options_.device};
    for (cudaStream_t const stream : streams_) {
      if (stream == nullptr) { continue; }
      static_cast<void>(cudaStreamSynchronize(stream));
      static_cast<void>(cudaStreamDestroy(stream));
    }
    for (cudaEvent_t const event : events_) {
      if (event != nullptr) { static_cast<void>(cudaEventDestroy(event)); }
    }
  }

  // Streams -----------------------------------------------------------------------------------------------------------

  /// The stream does not wait for the legacy default stream.
  /// @throws resource_error when max_streams are in use; resource_error or cuda_error when CUDA refuses
  [[nodiscard]] stream_ref create_stream(stream_priority priority = stream_priority::normal)
  {
    detail::device_guard const guard{options_.device};
    int least = 0, greatest = 0;
    errors_.require("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&least, &greatest));
    int const number = priority == stream_priority::low ? least
      : priority == stream_priority::high               ? greatest
                                                        : (least + greatest) / 2;
    std::unique_lock lock{mutex_};
    std::optional<handle_ref<stream_tag>> const handle = stream_handles_.acquire();
    if (!handle) { throw resource_error{"streams: all " + std::to_string(options_.max_streams) + " are in use"}; }
    cudaStream_t stream = nullptr;
    if (cudaError_t const code = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, number);
        code != cudaSuccess) {
      stream_handles_.release(*handle);
      errors_.require("cudaStreamCreateWithPriority", code);
    }
    streams_[handle->index] = stream;
    return {stream, handle->index, handle->generation};
  }

  /// Runs out what the stream holds, then gives it back. Lent streams are left alone.
  void destroy_stream(stream_ref stream) noexcept
  {
    detail::device_guard const guard{options_.device};
    if (stream.foreign || !valid(stream)) { return; }
    static_cast<void>(errors_.note("cudaStreamSynchronize", cudaStreamSynchronize(stream.stream)));
    std::unique_lock lock{mutex_};
    if (!stream_handles_.release({stream.index, stream.generation})) { return; }
    streams_[stream.index] = nullptr;
    static_cast<void>(errors_.note("cudaStreamDestroy", cudaStreamDestroy(stream.stream)));
  }

  /// @status invalid_argument, also for an operation whose item needs more scratch than a block can have; device_lost;
  /// capture_unsupported; resource_exhausted
  template <operation Op>
  status launch(stream_ref stream, Op const& op) noexcept
  {
    static_assert(!is_host_only<Op>, "a host function can't run on a CUDA device");
    launch_shape const shape = op.shape();
    if (shape.group_threads == 0 || shape.group_threads > detail::max_group_threads) {
      return status::invalid_argument;
    }
    std::size_t const scratch = op.scratch_bytes(detail::threads_of_group(shape.group_threads));
    if (scratch > options_.max_scratch_bytes) { return status::invalid_argument; }
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    if (shape.items == 0) { return status::ok; }
    detail::device_guard const guard{options_.device};
    // Small groups together stay below what a block gets without asking; one that needs more has a block for itself.
    auto const plan = detail::plan_launch(shape, scratch, detail::default_block_scratch_bytes, options_.max_blocks);
    return errors_.note(
      "cudaLaunchKernel", detail::launch_operation(op, plan, stream.stream), status::invalid_state, Op::name,
      &stream.stream);
  }

  /// @status invalid_argument; capacity_exceeded for more than max_copy_runs runs; device_lost; capture_unsupported;
  /// transfer_failed when CUDA refused a copy: runs before it may have been enqueued
  status copy(stream_ref stream, copy_list runs) noexcept
  {
    if (status const sound = detail::check_copy(runs, {.copy_runs = options_.max_copy_runs}); sound != status::ok) {
      return sound;
    }
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    if (detail::moves_nothing(runs)) { return status::ok; }
    detail::device_guard const guard{options_.device};
    std::shared_lock const lock{regions_mutex_};
    detail::copy_result const result = detail::copy_runs(stream, runs, regions_);
    return errors_.note(result.call, result.code, status::transfer_failed, nullptr, &stream.stream);
  }

  /// Whether calls on the stream become nodes of a graph.
  [[nodiscard]] bool is_capturing(stream_ref stream) const noexcept
  {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    return valid(stream) && cudaStreamIsCapturing(stream.stream, &capture) == cudaSuccess &&
      capture != cudaStreamCaptureStatusNone;
  }

  // Events ------------------------------------------------------------------------------------------------------------

  /// Without timing, which makes it cheap to record.
  /// @throws resource_error when max_events are in use; resource_error or cuda_error when CUDA refuses
  [[nodiscard]] event_ref create_event()
  {
    detail::device_guard const guard{options_.device};
    std::unique_lock lock{mutex_};
    std::optional<event_ref> const handle = event_handles_.acquire();
    if (!handle) { throw resource_error{"events: all " + std::to_string(options_.max_events) + " are in use"}; }
    cudaEvent_t event = nullptr;
    if (cudaError_t const code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming); code != cudaSuccess) {
      event_handles_.release(*handle);
      errors_.require("cudaEventCreateWithFlags", code);
    }
    events_[handle->index] = event;
    return *handle;
  }

  void destroy_event(event_ref event) noexcept
  {
    detail::device_guard const guard{options_.device};
    std::unique_lock lock{mutex_};
    if (!event_handles_.release(event)) { return; }
    static_cast<void>(errors_.note("cudaEventDestroy", cudaEventDestroy(events_[event.index])));
    events_[event.index] = nullptr;
  }

  status record(stream_ref stream, event_ref event) noexcept
  {
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    detail::device_guard const guard{options_.device};
    std::unique_lock lock{mutex_};
    if (!event_handles_.valid(event)) { return status::invalid_argument; }
    return record_on(stream, events_[event.index]);
  }
  /// An event of the host engine's own, on its own terms: of this backend's device, alive until its use is over.
  status record(stream_ref stream, cudaEvent_t lent) noexcept
  {
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    detail::device_guard const guard{options_.device};
    return record_on(stream, lent);
  }

  status wait(stream_ref stream, event_ref event) noexcept
  {
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    detail::device_guard const guard{options_.device};
    std::unique_lock lock{mutex_};
    if (!event_handles_.valid(event)) { return status::invalid_argument; }
    return wait_on(stream, events_[event.index]);
  }
  /// As record, for an event of the host engine's own.
  status wait(stream_ref stream, cudaEvent_t lent) noexcept
  {
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    detail::device_guard const guard{options_.device};
    return wait_on(stream, lent);
  }

  /// `failed` for a handle that is not valid and once the device is lost.
  [[nodiscard]] event_state done(event_ref event) noexcept
  {
    std::unique_lock lock{mutex_};
    return event_handles_.valid(event) ? state_of(events_[event.index]) : event_state::failed;
  }
  /// As record, for an event of the host engine's own.
  [[nodiscard]] event_state done(cudaEvent_t lent) noexcept { return state_of(lent); }

  /// Returns ok as soon as `done` of one of the events is not pending. Looks at them again after sleeps that grow from 5 us to
  /// 100 us, since CUDA can't wait for one of many.
  /// @param deadline on this backend's clock: now() + patience, or no_deadline
  /// @status drain_timeout at the deadline; invalid_argument without events; device_lost
  status wait_any(std::span<event_ref const> events, nanoseconds deadline) noexcept
  {
    if (events.empty()) { return status::invalid_argument; }
    std::int64_t pause = 5000;
    for (;;) {
      for (event_ref const event : events) {
        if (done(event) != event_state::pending) { return errors_.device_lost() ? status::device_lost : status::ok; }
      }
      nanoseconds const time = now();
      if (time >= deadline) { return status::drain_timeout; }
      std::int64_t const left =
        deadline == no_deadline ? std::numeric_limits<std::int64_t>::max() : (deadline - time).count();
      timespec const sleep{0, static_cast<long>(std::min(pause, left))};
      static_cast<void>(nanosleep(&sleep, nullptr));
      pause = std::min<std::int64_t>(pause * 2, 100000);
    }
  }

  // Memory ------------------------------------------------------------------------------------------------------------

  /// @return 256-byte aligned, contents undefined; nullptr for 0 bytes   @throws resource_error with the numbers; cuda_error
  [[nodiscard]] void* allocate(memory_space space, std::size_t bytes)
  {
    detail::device_guard const guard{options_.device};
    bool mapped = false;
    void* const memory = detail::allocate_cuda_memory(
      ledger_, errors_, space, bytes, options_.pinned_chunk_bytes, options_.pinned_may_spill, placement_, mapped);
    if (mapped) {
      std::unique_lock const lock{regions_mutex_};
      regions_.push_back({static_cast<std::byte*>(memory), bytes, options_.pinned_chunk_bytes});
    }
    return memory;
  }

  void deallocate(memory_space space, void* pointer, std::size_t bytes) noexcept
  {
    detail::device_guard const guard{options_.device};
    bool mapped = false;
    if (space == memory_space::pinned) {
      std::unique_lock const lock{regions_mutex_};
      mapped =
        std::erase_if(regions_, [&](detail::chunked_region const& region) { return region.begin == pointer; }) != 0;
    }
    auto const begin = clock::now();
    detail::deallocate_cuda_memory(ledger_, errors_, space, pointer, bytes, options_.pinned_chunk_bytes, mapped);
    if (mapped) {
      std::unique_lock const lock{regions_mutex_};
      teardown_ = std::chrono::duration_cast<nanoseconds>(clock::now() - begin);
    }
  }

  /// Addresses without memory, see growing_slab: what is added is registered in chunks. Copies are cut at every 2 MiB of them.
  /// @throws resource_error
  [[nodiscard]] void* reserve_pinned(std::size_t bytes)
  {
    std::byte* const begin = growing_.reserve(bytes);
    std::unique_lock const lock{regions_mutex_};
    regions_.push_back({begin, bytes, detail::huge_page_bytes});
    return begin;
  }
  /// Makes and registers a piece near the device, also while streams are captured.
  /// @thread_safety any thread   @throws resource_error past the ledger's limit
  [[nodiscard]] std::string add_pinned(void* begin, std::size_t bytes, std::size_t threads)
  {
    detail::device_guard const guard{options_.device};
    // A capture elsewhere refuses calls of other threads that might disturb it; this one does not.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    detail::cuda_page_registrar registrar;
    detail::system_page_placer placer;
    std::string refusal;
    try {
      refusal = growing_.add(
        ledger_, registrar, placer, detail::node_of_current_device(), options_.pinned_may_spill,
        options_.pinned_chunk_bytes, static_cast<std::byte*>(begin), bytes, threads);
    } catch (...) {
      static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
      throw;
    }
    void* seen_by_device = nullptr;
    if (
      refusal.empty() &&
      (cudaHostGetDevicePointer(&seen_by_device, begin, 0) != cudaSuccess || seen_by_device != begin)) {
      static_cast<void>(cudaGetLastError());
      refusal = "pinned memory has another address on the device: unified addressing is needed";
    }
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    return refusal;
  }
  void release_pinned(void* begin) noexcept
  {
    detail::device_guard const guard{options_.device};
    detail::cuda_page_registrar registrar;
    auto const from = clock::now();
    growing_.release(ledger_, registrar, static_cast<std::byte*>(begin));
    std::unique_lock const lock{regions_mutex_};
    static_cast<void>(
      std::erase_if(regions_, [&](detail::chunked_region const& region) { return region.begin == begin; }));
    teardown_ = std::chrono::duration_cast<nanoseconds>(clock::now() - from);
  }

  [[nodiscard]] std::uint64_t device_bytes() const noexcept { return ledger_.used_bytes(memory_space::device); }
  [[nodiscard]] std::uint64_t device_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::device); }
  /// The memory node on which the last large pinned memory was asked for, that of the device; -1 where it is not known.
  [[nodiscard]] int host_pool_node() const noexcept { return placement_.node; }
  /// Why it could not be asked for there, or was not registered but left to the runtime (a limit on locked memory); empty where
  /// nothing was refused, and on machines of one node.
  [[nodiscard]] std::string const& host_pool_warning() const noexcept { return placement_.warning; }
  /// How long the last large pinned memory took to unregister and unmap; 0 before. About as long as to pin it.
  [[nodiscard]] nanoseconds host_pool_teardown() const noexcept
  {
    std::shared_lock const lock{regions_mutex_};
    return teardown_;
  }
  [[nodiscard]] std::uint64_t pinned_bytes() const noexcept { return ledger_.used_bytes(memory_space::pinned); }
  [[nodiscard]] std::uint64_t pinned_bytes_peak() const noexcept { return ledger_.peak_bytes(memory_space::pinned); }

  // Time --------------------------------------------------------------------------------------------------------------

  /// The host's steady time since construction.
  [[nodiscard]] nanoseconds now() const noexcept
  {
    return std::chrono::duration_cast<nanoseconds>(clock::now() - start_);
  }

  // Failures, set-up and tests ----------------------------------------------------------------------------------------

  /// Call, name and code of the last failure; empty when nothing has failed.
  [[nodiscard]] std::string last_error() const { return errors_.last_error(); }
  [[nodiscard]] bool device_lost() const noexcept { return errors_.device_lost(); }

  /// Returns when the stream holds no work.
  status synchronize(stream_ref stream) noexcept
  {
    if (status const usable = check(stream); usable != status::ok) { return usable; }
    detail::device_guard const guard{options_.device};
    return errors_.note(
      "cudaStreamSynchronize", cudaStreamSynchronize(stream.stream), status::invalid_state, nullptr, &stream.stream);
  }

  /// Returns when the device holds no work, that of others included.
  status synchronize() noexcept
  {
    if (errors_.device_lost()) { return status::device_lost; }
    detail::device_guard const guard{options_.device};
    return errors_.note("cudaDeviceSynchronize", cudaDeviceSynchronize());
  }

  [[nodiscard]] cuda_options const& options() const noexcept { return options_; }

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

 private:
  using clock = std::chrono::steady_clock;

  [[nodiscard]] bool valid(stream_ref stream) const noexcept
  {
    if (stream.foreign) { return true; }
    std::unique_lock lock{mutex_};
    return stream_handles_.valid({stream.index, stream.generation});
  }

  status record_on(stream_ref stream, cudaEvent_t event) noexcept
  {
    return errors_.note(
      "cudaEventRecord", cudaEventRecord(event, stream.stream), status::invalid_state, nullptr, &stream.stream);
  }
  status wait_on(stream_ref stream, cudaEvent_t event) noexcept
  {
    return errors_.note(
      "cudaStreamWaitEvent", cudaStreamWaitEvent(stream.stream, event, 0), status::invalid_state, nullptr,
      &stream.stream);
  }
  [[nodiscard]] event_state state_of(cudaEvent_t event) noexcept
  {
    if (errors_.device_lost()) { return event_state::failed; }
    cudaError_t const code = cudaEventQuery(event);
    if (code == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // no error, and nobody should take it for one
      return event_state::pending;
    }
    return errors_.note("cudaEventQuery", code) == status::ok ? event_state::done : event_state::failed;
  }

  [[nodiscard]] status check(stream_ref stream) const noexcept
  {
    if (!valid(stream)) { return status::invalid_argument; }
    return errors_.device_lost() ? status::device_lost : status::ok;
  }

  cuda_options options_;
  clock::time_point start_ = clock::now();
  memory_ledger ledger_;
  detail::growing_memory growing_;
  cuda_error_log errors_;

  mutable std::mutex mutex_;
  handle_table<stream_tag> stream_handles_;
  handle_table<event_tag> event_handles_;
  std::vector<cudaStream_t> streams_;  // [max_streams] by index of the handle
  std::vector<cudaEvent_t> events_;    // [max_events]

  mutable std::shared_mutex regions_mutex_;
  detail::page_placement placement_ = {};
  nanoseconds teardown_{0};
  std::vector<detail::chunked_region> regions_;  // large pinned memory, in one or more registrations
};

static_assert(backend<cuda_backend>);

}  // namespace pulseinfer
