#pragma once

/// Who leaves a slot. Meanings: docs/concepts.md#replacement.

#include <pulseinfer/view/residency.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

template <class R>
concept replacement_gives_keys = requires(R const& policy, slot_word const& word, std::uint32_t now) {
  { policy.key(word, now) } noexcept -> std::same_as<std::uint32_t>;
};

/// A key from a slot's words: among clean slots that this step does not use, the lowest key leaves first, ties by the
/// lower slot id. Empty slots go before any of them. Called on the device, hence trivially copyable and without state.
template <class R>
concept replacement = std::is_trivially_copyable_v<R> && replacement_gives_keys<R>;

/// One sentence for each requirement that `R` misses.
template <class R>
consteval bool explain_replacement()
{
  static_assert(
    std::is_trivially_copyable_v<R>, "a replacement policy must be trivially copyable: it runs on the device");
  static_assert(
    replacement_gives_keys<R>,
    "a replacement policy must return std::uint32_t, noexcept, from key(slot_word, now) const");
  return replacement<R>;
}

}  // namespace pulseinfer
