#pragma once

/// The simplest backend that does its work: everything runs, on the caller's thread, before the call that asks for it
/// returns. It counts what it is asked for and refuses what a test names.

#include <pulseinfer/concepts/backend.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <vector>

namespace pulseinfer_test {

class immediate_backend {
 public:
  struct stream_ref {};
  struct event_ref {};

  static constexpr bool host_reads_device_memory = true;
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  immediate_backend() = default;
  immediate_backend(immediate_backend&&) = delete;

  [[nodiscard]] stream_ref create_stream(pulseinfer::stream_priority)
  {
    ++streams;
    return {};
  }
  void destroy_stream(stream_ref) noexcept { --streams; }

  template <pulseinfer::operation Op>
  pulseinfer::status launch(stream_ref, Op const& op) noexcept
  {
    if (launches == refuse_launch && refused_launches > 0) {
      --refused_launches;
      return pulseinfer::status::resource_exhausted;
    }
    ++launches;
    scratch_.resize(op.scratch_bytes(1) + 16);
    pulseinfer::run_operation(op, {.data = scratch_.data(), .bytes = scratch_.size()});
    return pulseinfer::status::ok;
  }

  pulseinfer::status copy(stream_ref, pulseinfer::copy_list list) noexcept
  {
    if (copies == refuse_copy && refused_copies > 0) {
      --refused_copies;
      return pulseinfer::status::transfer_failed;
    }
    ++copies;
    for (std::uint32_t i = 0; i < list.count; ++i) {
      pulseinfer::copy_run const& run = list.runs[i];
      std::memcpy(run.target, run.source, run.bytes);
      runs.push_back(run);
    }
    return pulseinfer::status::ok;
  }

  [[nodiscard]] event_ref create_event()
  {
    ++events;
    return {};
  }
  void destroy_event(event_ref) noexcept { --events; }
  pulseinfer::status record(stream_ref, event_ref) noexcept { return pulseinfer::status::ok; }
  pulseinfer::status wait(stream_ref, event_ref) noexcept { return pulseinfer::status::ok; }
  [[nodiscard]] pulseinfer::event_state done(event_ref) noexcept { return pulseinfer::event_state::done; }
  pulseinfer::status wait_any(std::span<event_ref const>, pulseinfer::nanoseconds) noexcept
  {
    return pulseinfer::status::ok;
  }

  [[nodiscard]] void* allocate(pulseinfer::memory_space, std::size_t bytes)
  {
    if (bytes > allocation_limit) { throw pulseinfer::resource_error{"the test's limit"}; }
    allocated += bytes;
    return ::operator new(bytes, std::align_val_t{256});
  }
  void deallocate(pulseinfer::memory_space, void* pointer, std::size_t bytes) noexcept
  {
    allocated -= bytes;
    ::operator delete(pointer, std::align_val_t{256});
  }

  [[nodiscard]] pulseinfer::nanoseconds now() const noexcept { return pulseinfer::nanoseconds{0}; }

  std::uint64_t launches = 0;
  std::uint64_t copies = 0;                ///< calls of copy
  std::vector<pulseinfer::copy_run> runs;  ///< of all calls of copy
  std::uint64_t refuse_launch = never;     ///< launches refused once so many have been accepted
  std::uint64_t refused_launches = never;  ///< how many of them
  std::uint64_t refuse_copy = never;       ///< likewise for calls of copy
  std::uint64_t refused_copies = never;
  std::uint64_t allocated = 0;  ///< bytes not given back
  std::size_t allocation_limit = std::numeric_limits<std::size_t>::max();
  std::int64_t streams = 0;  ///< not destroyed
  std::int64_t events = 0;

 private:
  std::vector<std::byte> scratch_;
};

static_assert(pulseinfer::backend<immediate_backend>);

}  // namespace pulseinfer_test
