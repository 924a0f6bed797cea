#pragma once

/// Handles of streams and events: an index that a bounded table gives out, with the generation of that index.

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

namespace pulseinfer {

/// Names an entry of a handle_table. A handle that was given back stays invalid, also when its index is used again.
template <class Tag>
struct handle_ref {
  static constexpr std::uint32_t no_index = 0xFFFFFFFFU;

  std::uint32_t index = no_index;
  std::uint32_t generation = 0;

  friend bool operator==(handle_ref const&, handle_ref const&) = default;
};

static_assert(std::is_trivially_copyable_v<handle_ref<void>>);

/// The indices [0, capacity) and who holds them. Gives the lowest free index first. All memory is taken at construction.
/// @thread_safety none: the owner locks
template <class Tag>
class handle_table {
 public:
  explicit handle_table(std::uint32_t capacity) : entries_(capacity) {}

  /// @return no handle when all are taken
  [[nodiscard]] std::optional<handle_ref<Tag>> acquire() noexcept
  {
    for (std::uint32_t i = lowest_free_; i < capacity(); ++i) {
      if (entries_[i].live) { continue; }
      entries_[i].live = true;
      lowest_free_ = i + 1;
      ++live_;
      return handle_ref<Tag>{i, entries_[i].generation};
    }
    return std::nullopt;
  }

  /// @return false, and nothing changed, when the handle is not valid
  bool release(handle_ref<Tag> handle) noexcept
  {
    if (!valid(handle)) { return false; }
    entry& place = entries_[handle.index];
    place.live = false;
    ++place.generation;
    if (handle.index < lowest_free_) { lowest_free_ = handle.index; }
    --live_;
    return true;
  }

  [[nodiscard]] bool valid(handle_ref<Tag> handle) const noexcept
  {
    return handle.index < capacity() && entries_[handle.index].live &&
      entries_[handle.index].generation == handle.generation;
  }

  [[nodiscard]] std::uint32_t capacity() const noexcept { return static_cast<std::uint32_t>(entries_.size()); }
  [[nodiscard]] std::uint32_t live() const noexcept { return live_; }

 private:
  struct entry {
    std::uint32_t generation = 1;
    bool live = false;
  };

  std::vector<entry> entries_;
  std::uint32_t lowest_free_ = 0;
  std::uint32_t live_ = 0;
};

}  // namespace pulseinfer
