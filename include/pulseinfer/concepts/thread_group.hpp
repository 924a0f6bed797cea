#pragma once

/// The threads that run one item of an operation together. Meanings: docs/concepts.md#thread-group.

#include <concepts>
#include <cstdint>

namespace pulseinfer {

template <class G>
concept group_ranks_threads = requires(G const& group) {
  { group.thread_rank() } -> std::convertible_to<std::uint32_t>;
};

template <class G>
concept group_has_size = requires(G const& group) {
  { group.size() } -> std::convertible_to<std::uint32_t>;
};

template <class G>
concept group_synchronizes = requires(G const& group) { group.sync(); };

/// `sync()` makes what any rank wrote before it visible to every rank after it. cooperative_groups' types conform.
template <class G>
concept thread_group = group_ranks_threads<G> && group_has_size<G> && group_synchronizes<G>;

/// One sentence for each requirement that `G` misses.
template <class G>
consteval bool explain_thread_group()
{
  static_assert(group_ranks_threads<G>, "a thread group must return the thread's number from thread_rank() const");
  static_assert(group_has_size<G>, "a thread group must return the number of its threads from size() const");
  static_assert(group_synchronizes<G>, "a thread group must make writes visible to all of its threads in sync() const");
  return thread_group<G>;
}

}  // namespace pulseinfer
