#pragma once

/// Who holds which block of a pool: references, pins of copies in flight, reservations.

#include <pulseinfer/error.hpp>
#include <pulseinfer/store/free_list.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// Blocks by state; a block that several hold counts once. The three add up to the pool's size.
struct block_counts {
  std::uint32_t free = 0;
  std::uint32_t held = 0;       ///< referenced, no copy names it
  std::uint32_t in_flight = 0;  ///< named by a copy, whether still referenced or not
};

/// A block is free again once its last reference and its last pin are gone. Every call that is refused changes nothing.
/// Allocates at construction only. One thread.
template <strong_id Id>
class block_book {
 public:
  /// @param most blocks that the pool may be extended to, where that is more
  explicit block_book(std::uint32_t size = 0, std::uint32_t most = 0)
    : free_{size, most}, references_(std::max(size, most), 0), pins_(std::max(size, most), 0)
  {}

  /// Blocks from size() up to below `size` come to be, free.   @pre at most as many as it was made for
  void extend(std::uint32_t size) noexcept { free_.extend(size); }

  /// Takes a block that nobody has reserved, with one reference; see free_list::acquire for `hint` and `run`.
  /// @return none where there is none
  [[nodiscard]] Id acquire(Id hint = none<Id>, std::uint32_t run = 1) noexcept
  {
    return available() == 0 ? none<Id> : take(hint, run);
  }

  /// Takes one of the reserved blocks, with one reference; the reservation shrinks by one.
  /// @return none where nothing is reserved
  [[nodiscard]] Id acquire_reserved(Id hint = none<Id>, std::uint32_t run = 1) noexcept
  {
    if (reserved_ == 0) { return none<Id>; }
    --reserved_;
    return take(hint, run);
  }

  /// Keeps `count` free blocks back for acquire_reserved.
  /// @return busy where fewer are available now, capacity_exceeded where the pool never has so many
  status reserve(std::uint32_t count) noexcept
  {
    if (count > size()) { return status::capacity_exceeded; }
    if (count > available()) { return status::busy; }
    reserved_ += count;
    return status::ok;
  }

  /// @return invalid_argument where fewer are reserved
  status unreserve(std::uint32_t count) noexcept
  {
    if (count > reserved_) { return status::invalid_argument; }
    reserved_ -= count;
    return status::ok;
  }

  /// Adds a reference. @return out_of_range, or invalid_state for a block without one
  status share(Id id) noexcept
  {
    if (!free_.contains(id)) { return status::out_of_range; }
    if (references_[to_index(id)] == 0) { return status::invalid_state; }
    ++references_[to_index(id)];
    return status::ok;
  }

  /// Takes a reference away.
  /// @return out_of_range, or invalid_state for a block without one: a double release, told by refused_release()
  status release(Id id) noexcept
  {
    if (!free_.contains(id)) { return status::out_of_range; }
    if (references_[to_index(id)] == 0) {
      refused_ = id;
      return status::invalid_state;
    }
    if (--references_[to_index(id)] == 0) { leave(id); }
    return status::ok;
  }

  /// Names the block in one more copy. @return out_of_range, or invalid_state for a free block
  status pin(Id id) noexcept
  {
    if (!free_.contains(id)) { return status::out_of_range; }
    if (free_.is_free(id)) { return status::invalid_state; }
    if (pins_[to_index(id)]++ == 0) { ++in_flight_; }
    return status::ok;
  }

  /// One of the copies is complete. @return out_of_range, or invalid_state for a block that is not pinned (pin underflow)
  status unpin(Id id) noexcept
  {
    if (!free_.contains(id)) { return status::out_of_range; }
    if (pins_[to_index(id)] == 0) { return status::invalid_state; }
    if (--pins_[to_index(id)] == 0) {
      --in_flight_;
      if (references_[to_index(id)] == 0) { leave(id); }
    }
    return status::ok;
  }

  [[nodiscard]] bool contains(Id id) const noexcept { return free_.contains(id); }
  /// References of a block of the pool; 0 for a free one and for one that only copies still name.
  [[nodiscard]] std::uint32_t references(Id id) const noexcept { return references_[to_index(id)]; }
  [[nodiscard]] std::uint32_t pins(Id id) const noexcept { return pins_[to_index(id)]; }
  [[nodiscard]] std::uint32_t size() const noexcept { return free_.size(); }
  [[nodiscard]] std::uint32_t reserved() const noexcept { return reserved_; }
  /// Free and not reserved.
  [[nodiscard]] std::uint32_t available() const noexcept { return free_.free_count() - reserved_; }
  [[nodiscard]] block_counts counts() const noexcept
  {
    return {.free = free_.free_count(), .held = size() - free_.free_count() - in_flight_, .in_flight = in_flight_};
  }

  /// The last double release, "double_release: block 7"; empty where there was none.
  [[nodiscard]] std::string refused_release() const
  {
    return is_none(refused_) ? std::string{} : "double_release: block " + std::to_string(to_number(refused_));
  }

  /// Recounts everything. @return what is wrong, empty where nothing is   @complexity size
  [[nodiscard]] std::string audit() const
  {
    if (std::string text = free_.audit(); !text.empty()) { return text; }
    std::uint32_t in_flight = 0;
    for (std::uint32_t i = 0; i < size(); ++i) {
      bool const used = references_[i] > 0 || pins_[i] > 0;
      if (used == free_.is_free(static_cast<Id>(i))) {
        return "block " + std::to_string(i) + " is " + (used ? "free" : "taken") + " with " +
          std::to_string(references_[i]) + " references and " + std::to_string(pins_[i]) + " pins";
      }
      in_flight += pins_[i] > 0 ? 1U : 0U;
    }
    if (in_flight != in_flight_) {
      return std::to_string(in_flight) + " blocks are in flight, " + std::to_string(in_flight_) + " are counted";
    }
    if (reserved_ > free_.free_count()) {
      return std::to_string(reserved_) + " blocks are reserved, " + std::to_string(free_.free_count()) + " are free";
    }
    return {};
  }

 private:
  [[nodiscard]] Id take(Id hint, std::uint32_t run) noexcept
  {
    Id const id = free_.acquire(hint, run);
    references_[to_index(id)] = 1;
    return id;
  }

  void leave(Id id) noexcept
  {
    if (pins_[to_index(id)] == 0) { static_cast<void>(free_.release(id)); }
  }

  free_list<Id> free_;
  std::vector<std::uint32_t> references_;  // [most]
  std::vector<std::uint32_t> pins_;        // [most]
  std::uint32_t reserved_ = 0;             // never more than are free
  std::uint32_t in_flight_ = 0;
  Id refused_ = none<Id>;
};

}  // namespace pulseinfer
