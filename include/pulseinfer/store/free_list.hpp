#pragma once

/// The free ids of a pool, kept so that neighbours of a sequence stay neighbours in memory.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

/// Ids 0 .. size - 1, all free at first. Allocates at construction only.
template <strong_id Id>
class free_list {
 public:
  /// @param most ids that it may be extended to, where that is more
  explicit free_list(std::uint32_t size = 0, std::uint32_t most = 0)
    : words_(divide_up(std::uint64_t{std::max(size, most)}, bits), 0)
  {
    extend(size);
  }

  /// Ids from size() up to below `size` come to be, free.   @pre at most as many as it was made for
  void extend(std::uint32_t size) noexcept
  {
    if (size <= size_) { return; }
    free_ += size - size_;
    for (; size_ < size && size_ % bits != 0; ++size_) { words_[size_ / bits] |= bit(size_); }
    for (; size_ + bits <= size; size_ += bits) { words_[size_ / bits] = ~std::uint64_t{0}; }
    for (; size_ < size; ++size_) { words_[size_ / bits] |= bit(size_); }
  }

  /// Takes `hint` where it is free, else the first id of the lowest run of at least `run` free ids, else of the longest
  /// run there is (the lowest of equals).
  /// @return none where nothing is free   @complexity constant for a free hint, else size / 64 plus the runs passed
  [[nodiscard]] Id acquire(Id hint = none<Id>, std::uint32_t run = 1) noexcept
  {
    if (free_ == 0) { return none<Id>; }
    std::uint32_t const id = is_free(hint) ? static_cast<std::uint32_t>(to_index(hint)) : lowest_run(run);
    words_[id / bits] &= ~bit(id);
    --free_;
    return static_cast<Id>(id);
  }

  /// Gives `id` back.
  /// @return out_of_range for an id that is none of the list's, invalid_state for one that is free already (a double
  ///         release); nothing changed in either case
  status release(Id id) noexcept
  {
    if (!contains(id)) { return status::out_of_range; }
    if (is_free(id)) { return status::invalid_state; }
    std::uint32_t const number = static_cast<std::uint32_t>(to_index(id));
    words_[number / bits] |= bit(number);
    first_word_ = std::min(first_word_, number / bits);
    ++free_;
    return status::ok;
  }

  [[nodiscard]] bool contains(Id id) const noexcept { return !is_none(id) && to_index(id) < size_; }
  [[nodiscard]] bool is_free(Id id) const noexcept
  {
    if (!contains(id)) { return false; }
    std::uint32_t const number = static_cast<std::uint32_t>(to_index(id));
    return (words_[number / bits] & bit(number)) != 0;
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
  [[nodiscard]] std::uint32_t free_count() const noexcept { return free_; }

  /// Recounts. @return what is wrong, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    std::uint64_t counted = 0;
    for (std::uint64_t const word : words_) { counted += static_cast<std::uint64_t>(std::popcount(word)); }
    if (counted != free_) {
      return std::to_string(counted) + " ids are marked free, " + std::to_string(free_) + " are counted";
    }
    for (std::uint32_t word = 0; word < first_word_; ++word) {
      if (words_[word] != 0) {
        return "a free id lies below word " + std::to_string(first_word_) + ", the first with one";
      }
    }
    return {};
  }

 private:
  static constexpr std::uint32_t bits = 64;

  [[nodiscard]] static constexpr std::uint64_t bit(std::uint32_t id) { return std::uint64_t{1} << (id % bits); }

  /// First id in [from, until) whose bit in (words ^ flip) is set; `until` or a later one, or size_, where there is none.
  [[nodiscard]] std::uint32_t next(std::uint32_t from, std::uint64_t flip, std::uint32_t until) const noexcept
  {
    if (from >= size_) { return size_; }
    std::uint32_t word = from / bits;
    std::uint64_t value = (words_[word] ^ flip) & (~std::uint64_t{0} << (from % bits));
    while (value == 0) {
      if (++word == words_.size()) { return size_; }
      if (word * bits >= until) { return until; }
      value = words_[word] ^ flip;
    }
    return std::min(size_, word * bits + static_cast<std::uint32_t>(std::countr_zero(value)));
  }

  /// Something must be free.
  [[nodiscard]] std::uint32_t lowest_run(std::uint32_t run) noexcept
  {
    run = std::max(run, 1U);
    while (words_[first_word_] == 0) { ++first_word_; }
    std::uint32_t best = size_;
    std::uint32_t best_length = 0;
    for (std::uint32_t begin = next(first_word_ * bits, 0, size_); begin < size_;) {
      // A run that is long enough is not followed to its end.
      std::uint32_t const end = next(begin, ~std::uint64_t{0}, run < size_ - begin ? begin + run : size_);
      if (end - begin > best_length) {
        best = begin;
        best_length = end - begin;
        if (best_length >= run) { break; }
      }
      begin = next(end, 0, size_);
    }
    return best;
  }

  std::vector<std::uint64_t> words_;  // bit set: free
  std::uint32_t size_ = 0;
  std::uint32_t free_ = 0;
  std::uint32_t first_word_ = 0;  // no word before it has a free id
};

}  // namespace pulseinfer
