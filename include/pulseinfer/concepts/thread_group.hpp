#pragma once

/// The threads that run one item of an operation together.

#include <concepts>
#include <cstdint>

namespace pulseinfer {

/// `sync()` makes what any rank wrote before it visible to every rank after it. cooperative_groups' types conform.
template <class G>
concept thread_group = requires(G const& group) {
  { group.thread_rank() } -> std::convertible_to<std::uint32_t>;
  { group.size() } -> std::convertible_to<std::uint32_t>;
  group.sync();
};

}  // namespace pulseinfer
