#pragma once

/// The slot that was selected longest ago leaves first.

#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/view/residency.hpp>

#include <cstdint>

namespace pulseinfer {

/// Least recently used. Orders by last_used; the age is taken from `now`, so that the order survives a step count that has
/// passed its largest value.
struct lru {
  [[nodiscard]] PULSEINFER_HOST_DEVICE constexpr std::uint32_t key(
    slot_word const& word, std::uint32_t now) const noexcept
  {
    return ~(now - word.last_used);
  }
};

static_assert(replacement<lru>);

}  // namespace pulseinfer
