#pragma once

/// An operation of any type, kept by bytes in a place of fixed size until it runs on the host.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pulseinfer::detail {

inline constexpr std::size_t stored_operation_alignment = 64;

/// Most threads of a group on any backend.
inline constexpr std::uint32_t max_group_threads = 1024;

class stored_operation {
 public:
  /// @status invalid_argument when a group has no thread or more than max_group_threads, or an item needs more scratch than
  /// `max_scratch_bytes`
  template <operation Op>
  [[nodiscard]] static status check(Op const& op, std::size_t max_scratch_bytes) noexcept
  {
    launch_shape const shape = op.shape();
    if (shape.group_threads == 0 || shape.group_threads > max_group_threads) { return status::invalid_argument; }
    return op.scratch_bytes(1) > max_scratch_bytes ? status::invalid_argument : status::ok;
  }

  /// The shape is read here, as a device's launch does, and not when the operation runs.
  template <operation Op>
  void store(Op const& op) noexcept
  {
    static_assert(alignof(Op) <= stored_operation_alignment, "an operation must not be aligned to more than 64 bytes");
    std::memcpy(bytes_, &op, sizeof(Op));
    items_ = op.shape().items;
    scratch_bytes_ = op.scratch_bytes(1);
    calls_ = &calls_of<Op>;
  }

  /// Runs every item on one thread, in ascending order.
  void run(std::byte* scratch) const noexcept { calls_->run(bytes_, items_, scratch_ref{scratch, scratch_bytes_}); }

  [[nodiscard]] operation_cost cost() const noexcept { return calls_->cost(bytes_); }
  [[nodiscard]] operation_kind kind() const noexcept { return calls_->kind; }

 private:
  struct calls {
    void (*run)(void const*, std::uint64_t, scratch_ref) noexcept;
    operation_cost (*cost)(void const*) noexcept;
    operation_kind kind;
  };

  template <operation Op>
  static void run_items(void const* bytes, std::uint64_t items, scratch_ref scratch) noexcept
  {
    Op const& op = *static_cast<Op const*>(bytes);
    for (std::uint64_t item = 0; item < items; ++item) { op(device::solo_group{}, item, scratch); }
  }

  template <operation Op>
  static operation_cost cost_of(void const* bytes) noexcept
  {
    return static_cast<Op const*>(bytes)->cost();
  }

  template <operation Op>
  static constexpr calls calls_of{&run_items<Op>, &cost_of<Op>, Op::kind};

  alignas(stored_operation_alignment) std::byte bytes_[max_operation_bytes];
  std::uint64_t items_ = 0;
  std::size_t scratch_bytes_ = 0;
  calls const* calls_ = nullptr;
};

/// True when an operation of no items was given: it is complete where it stands and takes no place in a queue.
template <operation Op>
[[nodiscard]] bool has_no_items(Op const& op) noexcept
{
  return op.shape().items == 0;
}

}  // namespace pulseinfer::detail
