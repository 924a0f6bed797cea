#pragma once

/// The poorest models that still conform. Proof lines under policies use them, and tests instantiate bodies with them, so
/// that a policy asks for no more than its contract names.

#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace pulseinfer::archetype {

struct thread_group {
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t thread_rank() const { return 0; }
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t size() const { return 1; }
  PULSEINFER_HOST_DEVICE void sync() const {}
};

static_assert(pulseinfer::thread_group<thread_group>);

/// A tensor of no tokens.
struct tensor {};

/// Neither runs nor copies: every call reports success and leaves things as they are.
struct backend {
  struct stream_ref {};
  struct event_ref {};

  [[nodiscard]] stream_ref create_stream(stream_priority) { return {}; }
  void destroy_stream(stream_ref) noexcept {}
  template <pulseinfer::operation Op>
  status launch(stream_ref, Op const&) noexcept
  {
    return status::ok;
  }
  status copy(stream_ref, copy_list) noexcept { return status::ok; }
  [[nodiscard]] event_ref create_event() { return {}; }
  void destroy_event(event_ref) noexcept {}
  status record(stream_ref, event_ref) noexcept { return status::ok; }
  status wait(stream_ref, event_ref) noexcept { return status::ok; }
  [[nodiscard]] event_state done(event_ref) noexcept { return event_state::done; }
  status wait_any(std::span<event_ref const>, nanoseconds) noexcept { return status::ok; }
  [[nodiscard]] void* allocate(memory_space, std::size_t bytes) { return ::operator new(bytes, std::align_val_t{256}); }
  void deallocate(memory_space, void* pointer, std::size_t) noexcept
  {
    ::operator delete(pointer, std::align_val_t{256});
  }
  [[nodiscard]] nanoseconds now() const noexcept { return nanoseconds{0}; }
};

static_assert(pulseinfer::backend<backend>);

struct transfer_engine {
  static constexpr plan_place plans_on = plan_place::device;
  template <class B>
  struct bound {
    status recall_async(typename B::stream_ref, recall_plan_ref const&, landed_ref) noexcept { return status::ok; }
    status move_async(typename B::stream_ref, copy_list) noexcept { return status::ok; }
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, transfer_limits const&) const
  {
    return {};
  }
};

static_assert(transfer_engine_for<transfer_engine, backend>);

struct selector {
  template <class B>
  struct bound {
    [[nodiscard]] std::uint32_t budget_blocks(layer_id) const noexcept { return 1; }
    [[nodiscard]] std::uint32_t dense_tokens() const noexcept { return 0; }
    [[nodiscard]] std::uint64_t digest_bytes(layer_id) const noexcept { return 0; }
    status digest_async(typename B::stream_ref, digest_request const&) noexcept { return status::ok; }
    status select_async(typename B::stream_ref, select_request const&) noexcept { return status::ok; }
  };
  template <class B>
  [[nodiscard]] bound<B> bind(B&, selector_limits const&) const
  {
    return {};
  }
};

static_assert(selector_for<selector, backend>);

struct replacement {
  [[nodiscard]] PULSEINFER_HOST_DEVICE std::uint32_t key(slot_word const&, std::uint32_t) const noexcept { return 0; }
};

static_assert(pulseinfer::replacement<replacement>);

struct layer_scheduler {
  static constexpr bool hits_first = false;
  static constexpr bool reads_mailbox = true;
  decision decide(std::span<scheduler_row const>, link_state const&, nanoseconds, std::span<row_id>) noexcept
  {
    return {};
  }
};

static_assert(pulseinfer::layer_scheduler<layer_scheduler>);

struct admission_policy {
  void observe(step_sample const&) noexcept {}
  admission admit(demand const&, capacity const&) noexcept { return admission::admitted; }
};

static_assert(pulseinfer::admission_policy<admission_policy>);

}  // namespace pulseinfer::archetype

/// How any type becomes a host tensor.
template <>
struct pulseinfer::tensor_traits<pulseinfer::archetype::tensor> {
  [[nodiscard]] static tensor_view view(archetype::tensor const&) noexcept { return {}; }
};

static_assert(pulseinfer::host_tensor<pulseinfer::archetype::tensor>);
