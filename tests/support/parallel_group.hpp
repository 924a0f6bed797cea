#pragma once

/// Runs an operation's items with several threads as the ranks of one group, as a GPU does.

#include <pulseinfer/concepts/operation.hpp>

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace pulseinfer_test {

class parallel_group {
 public:
  parallel_group(std::uint32_t rank, std::uint32_t size, std::barrier<>& barrier)
    : rank_{rank}, size_{size}, barrier_{&barrier}
  {}

  [[nodiscard]] std::uint32_t thread_rank() const { return rank_; }
  [[nodiscard]] std::uint32_t size() const { return size_; }
  void sync() const { barrier_->arrive_and_wait(); }

 private:
  std::uint32_t rank_;
  std::uint32_t size_;
  std::barrier<>* barrier_;
};

static_assert(pulseinfer::thread_group<parallel_group>);

/// Calls body(group) on `threads` threads.
template <class Body>
void run_group(std::uint32_t threads, Body const& body)
{
  std::barrier<> barrier{threads};
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < threads; ++rank) {
    ranks.emplace_back([&, rank] { body(parallel_group{rank, threads, barrier}); });
  }
  for (std::thread& rank : ranks) { rank.join(); }
}

/// Runs all items with groups of `threads` ranks, last item first, in scratch of exactly the stated size that holds NaN.
template <pulseinfer::operation Op>
void run_parallel(Op const& op, std::uint32_t threads)
{
  std::vector<std::byte> scratch(op.scratch_bytes(threads));
  std::uint64_t const items = op.shape().items;
  run_group(threads, [&](parallel_group const& group) {
    for (std::uint64_t i = items; i > 0; --i) {
      if (group.thread_rank() == 0 && !scratch.empty()) { std::memset(scratch.data(), 0xFF, scratch.size()); }
      group.sync();
      op(group, i - 1, pulseinfer::scratch_ref{.data = scratch.data(), .bytes = scratch.size()});
      group.sync();
    }
  });
}

/// Runs all items on this thread, in scratch of exactly the stated size that holds NaN at each item's begin.
template <pulseinfer::operation Op>
void run_solo(Op const& op)
{
  std::vector<std::byte> scratch(op.scratch_bytes(1));
  for (std::uint64_t item = 0; item < op.shape().items; ++item) {
    if (!scratch.empty()) { std::memset(scratch.data(), 0xFF, scratch.size()); }
    op(
      pulseinfer::device::solo_group{}, item, pulseinfer::scratch_ref{.data = scratch.data(), .bytes = scratch.size()});
  }
}

}  // namespace pulseinfer_test
