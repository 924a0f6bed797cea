#pragma once

/// The host's changes of one step on their way into stream order: leases, words, exchanges.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/exchange_slots.hpp>
#include <pulseinfer/operation/install_lease.hpp>
#include <pulseinfer/operation/patch_words.hpp>
#include <pulseinfer/residency/device_books.hpp>
#include <pulseinfer/residency/staging_ring.hpp>

#include <cstdint>

namespace pulseinfer {

/// Collects changes in a staging place and launches them together: first leases, then words, then exchanges. A full place
/// is launched and the next one opened, so that no change is ever too large; that may wait for the device. A launch that
/// `flush` is refused stays collected, and the next `flush` tries again: flush before a change begins, so that nothing is
/// collected twice. A failure in the middle of collecting is kept and ends it; `flush` returns it.
template <class B, replacement Replacement>
class change_staging {
 public:
  using stream_ref = typename B::stream_ref;

  static constexpr std::uint32_t depth = 3;

  /// @param lane_slots most slots that one lane's lease change names
  change_staging(
    B& backend, device_books<B> const& books, slot_pool_ref pool, Replacement policy, std::uint32_t max_patches,
    std::uint32_t max_lanes, std::uint32_t lane_slots, nanoseconds wait_limit)
    : backend_{&backend},
      books_{&books},
      pool_{pool},
      policy_{policy},
      max_patches_{max_patches},
      max_lanes_{max_lanes},
      max_slots_{max_lanes * lane_slots},
      wait_limit_{wait_limit},
      ring_{
        backend, depth,
        std::uint64_t{max_patches} * sizeof(word_patch) + std::uint64_t{max_lanes} * sizeof(slot_exchange) +
          std::uint64_t{max_lanes} * sizeof(lease_change) + std::uint64_t{max_slots_} * sizeof(leased_slot) + 256}
  {}

  /// Sets a 32-bit word of device memory.
  template <class T>
  void patch(stream_ref stream, T* target, T value) noexcept
  {
    static_assert(sizeof(T) == sizeof(std::uint32_t) && std::is_trivially_copyable_v<T>);
    if (!room(stream, patch_count_ < max_patches_)) { return; }
    word_patch& p = patches_[patch_count_++];
    p.target = target;
    __builtin_memcpy(&p.value, &value, sizeof(value));
  }

  void exchange(stream_ref stream, slot_exchange const& change) noexcept
  {
    if (!room(stream, exchange_count_ < max_lanes_)) { return; }
    exchanges_[exchange_count_++] = change;
  }

  /// Opens one lane's lease change with room for `slots` slots; nullptr after a failure. The caller fills all of them.
  [[nodiscard]] leased_slot* lease(stream_ref stream, lease_change change) noexcept
  {
    std::uint32_t const slots = change.lease_count + change.held_count;
    if (!room(stream, lease_count_ < max_lanes_ && slot_count_ + slots <= max_slots_)) { return nullptr; }
    change.first = slot_count_;
    leases_[lease_count_++] = change;
    slot_count_ += slots;
    return slots_ + change.first;
  }

  /// Launches what was collected.
  status flush(stream_ref stream) noexcept
  {
    if (!open_ || failure_ != status::ok) { return failure_; }
    if (!sent_ && lease_count_ + patch_count_ + exchange_count_ == 0) {
      open_ = false;
      empty_place_ = true;
      return status::ok;
    }
    status const result = send(stream);
    if (result == status::ok) { open_ = sent_ = false; }
    if (result == status::device_lost) { failure_ = result; }
    return result;
  }

  /// Number of the staging place that is being filled, as `passed` takes it.
  [[nodiscard]] std::uint64_t serial() const noexcept { return ring_.serial() + 1; }
  [[nodiscard]] bool passed(std::uint64_t serial) noexcept { return ring_.passed(serial); }
  status wait(std::uint64_t serial) noexcept { return ring_.wait(serial, backend_->now() + wait_limit_); }
  [[nodiscard]] status failure() const noexcept { return failure_; }

 private:
  /// Launches what has not been launched yet, in its order.
  status send(stream_ref stream) noexcept
  {
    if (lease_count_ != 0) {
      status const installed = backend_->launch(
        stream,
        install_lease{
          .changes = leases_,
          .slots = slots_,
          .count = lease_count_,
          .residency = books_->residency(),
          .pool = pool_,
          .step = books_->step()});
      if (installed != status::ok) { return installed; }
      lease_count_ = 0;
      sent_ = true;
    }
    if (patch_count_ != 0) {
      status const patched = backend_->launch(stream, patch_words{.patches = patches_, .count = patch_count_});
      if (patched != status::ok) { return patched; }
      patch_count_ = 0;
      sent_ = true;
    }
    if (exchange_count_ != 0) {
      status const exchanged = backend_->launch(
        stream,
        exchange_slots<Replacement>{
          .exchanges = exchanges_,
          .count = exchange_count_,
          .residency = books_->residency(),
          .pool = pool_,
          .step = books_->step(),
          .policy = policy_});
      if (exchanged != status::ok) { return exchanged; }
      exchange_count_ = 0;
      sent_ = true;
    }
    return ring_.end(stream);
  }

  void keep(status result) noexcept
  {
    if (failure_ == status::ok) { failure_ = result; }
  }

  /// Sees to it that a place is open and, unless `fits`, that it is a fresh one.
  [[nodiscard]] bool room(stream_ref stream, bool fits) noexcept
  {
    // Where a part has been launched, nothing may be added.
    if (open_ && (!fits || sent_)) { keep(flush(stream)); }
    if (failure_ != status::ok) { return false; }
    if (!open_) {
      if (!empty_place_) { keep(ring_.begin(backend_->now() + wait_limit_)); }
      if (failure_ != status::ok) { return false; }
      if (!empty_place_) {
        patches_ = ring_.template take<word_patch>(max_patches_);
        exchanges_ = ring_.template take<slot_exchange>(max_lanes_);
        leases_ = ring_.template take<lease_change>(max_lanes_);
        slots_ = ring_.template take<leased_slot>(max_slots_);
      }
      empty_place_ = false;
      open_ = true;
      patch_count_ = exchange_count_ = lease_count_ = slot_count_ = 0;
    }
    return true;
  }

  B* backend_;
  device_books<B> const* books_;
  slot_pool_ref pool_;
  Replacement policy_;
  std::uint32_t max_patches_;
  std::uint32_t max_lanes_;
  std::uint32_t max_slots_;
  nanoseconds wait_limit_;
  staging_ring<B> ring_;
  word_patch* patches_ = nullptr;
  slot_exchange* exchanges_ = nullptr;
  lease_change* leases_ = nullptr;
  leased_slot* slots_ = nullptr;
  std::uint32_t patch_count_ = 0;
  std::uint32_t exchange_count_ = 0;
  std::uint32_t lease_count_ = 0;
  std::uint32_t slot_count_ = 0;
  bool open_ = false;
  bool sent_ = false;         // a part of the place's changes has been launched
  bool empty_place_ = false;  // the current place was opened and nothing was put into it
  status failure_ = status::ok;
};

}  // namespace pulseinfer
