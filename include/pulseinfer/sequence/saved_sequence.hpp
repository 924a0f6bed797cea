#pragma once

/// Sequences that are on the host alone: preempted ones, and prefixes that a host engine keeps for reuse.

#include <pulseinfer/types.hpp>

#include <cstdint>
#include <vector>

namespace pulseinfer {

/// Names a saved sequence: its place and the generation in which the place was given out.
struct saved_id {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;

  friend bool operator==(saved_id const&, saved_id const&) = default;
};

/// What brings a sequence back. Holds one reference of each host block it names.
struct saved_sequence {
  std::uint32_t generation = 0;
  bool used = false;
  std::uint32_t tokens = 0;
  std::uint32_t blocks = 0;  ///< blocks that hold the tokens; the last is partial where tokens do not fill it
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;
  bool offloads = false;  ///< its digests are saved too
  bool keeps = false;     ///< the row kept every block in a slot
  bool streams = false;   ///< its prompt came in without staying resident
  bool goes_on = false;   ///< the sequence as it was: its previous selections are saved too
  std::uint32_t place = 0;
  std::vector<host_block_id> host_blocks = {};   ///< [max_blocks], the first `blocks` named
  std::vector<std::int32_t> digest_places = {};  ///< [max_extents] places of the digests' home, the first of them used
  std::uint32_t digest_count = 0;
};

/// A bounded registry of saved sequences. Nothing allocates after construction.
class saved_book {
 public:
  saved_book(std::uint32_t places, std::uint32_t max_blocks, std::uint32_t max_extents) : places_(places)
  {
    for (saved_sequence& place : places_) {
      place.host_blocks.assign(max_blocks, none<host_block_id>);
      place.digest_places.assign(max_extents, -1);
    }
  }

  /// A free place, marked used; nullptr where there is none.
  [[nodiscard]] saved_sequence* take(saved_id& id) noexcept
  {
    for (std::uint32_t i = 0; i < places_.size(); ++i) {
      saved_sequence& place = places_[i];
      if (place.used) { continue; }
      place.used = true;
      place.place = i;
      ++place.generation;
      place.tokens = place.blocks = place.digest_count = 0;
      id = {.index = i, .generation = place.generation};
      return &place;
    }
    return nullptr;
  }

  /// nullptr where the id is stale or was never given.
  [[nodiscard]] saved_sequence* find(saved_id id) noexcept
  {
    if (id.index >= places_.size()) { return nullptr; }
    saved_sequence& place = places_[id.index];
    return place.used && place.generation == id.generation ? &place : nullptr;
  }

  void give_back(saved_sequence& place) noexcept { place.used = false; }

  [[nodiscard]] std::uint32_t used() const noexcept
  {
    std::uint32_t count = 0;
    for (saved_sequence const& place : places_) { count += place.used ? 1U : 0U; }
    return count;
  }
  [[nodiscard]] std::vector<saved_sequence> const& places() const noexcept { return places_; }

 private:
  std::vector<saved_sequence> places_;
};

}  // namespace pulseinfer
