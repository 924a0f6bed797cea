#pragma once

/// Names one recall of some rows at one layer.

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// A place in the ring of recalls and the generation that it was given out in; a ticket of an earlier generation is stale.
struct ticket {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;

  friend bool operator==(ticket const&, ticket const&) = default;
};

static_assert(std::is_trivially_copyable_v<ticket>);

}  // namespace pulseinfer
