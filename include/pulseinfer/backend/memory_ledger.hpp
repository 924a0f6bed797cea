#pragma once

/// Counts the bytes that a backend has given out, per memory space.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/error.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace pulseinfer {

/// Most bytes that a backend gives out at any time.
struct memory_limits {
  static constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t device_bytes = unlimited;
  std::uint64_t pinned_bytes = unlimited;
};

[[nodiscard]] constexpr char const* name_of(memory_space space)
{
  return space == memory_space::device ? "device" : "pinned";
}

/// @thread_safety every member may be called from any thread
class memory_ledger {
 public:
  explicit memory_ledger(memory_limits limits = {}) noexcept
  {
    of(memory_space::device).limit = limits.device_bytes;
    of(memory_space::pinned).limit = limits.pinned_bytes;
  }

  /// Counts `bytes` as given out.
  /// @throws resource_error when they would pass the limit; nothing is counted then
  void take(memory_space space, std::uint64_t bytes)
  {
    account& books = of(space);
    std::uint64_t used = books.used.load();
    do {
      if (bytes > books.limit || used > books.limit - bytes) {
        throw resource_error{
          std::string{name_of(space)} + " memory: " + std::to_string(bytes) + " B asked for, " + std::to_string(used) +
          " of " + std::to_string(books.limit) + " B in use"};
      }
    } while (!books.used.compare_exchange_weak(used, used + bytes));
    std::uint64_t const reached = used + bytes;
    std::uint64_t peak = books.peak.load();
    while (peak < reached && !books.peak.compare_exchange_weak(peak, reached)) {}
  }

  void give_back(memory_space space, std::uint64_t bytes) noexcept { of(space).used.fetch_sub(bytes); }

  [[nodiscard]] std::uint64_t used_bytes(memory_space space) const noexcept { return of(space).used.load(); }
  [[nodiscard]] std::uint64_t peak_bytes(memory_space space) const noexcept { return of(space).peak.load(); }
  [[nodiscard]] std::uint64_t limit_bytes(memory_space space) const noexcept { return of(space).limit; }

  /// The peak starts anew from what is in use.
  void reset_peak(memory_space space) noexcept { of(space).peak.store(of(space).used.load()); }

 private:
  struct account {
    std::atomic<std::uint64_t> used{0};
    std::atomic<std::uint64_t> peak{0};
    std::uint64_t limit = memory_limits::unlimited;
  };

  [[nodiscard]] account& of(memory_space space) noexcept { return books_[static_cast<std::size_t>(space)]; }
  [[nodiscard]] account const& of(memory_space space) const noexcept { return books_[static_cast<std::size_t>(space)]; }

  account books_[2];
};

}  // namespace pulseinfer
