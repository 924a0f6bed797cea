#pragma once

/// One rank of a thread group of any size, for bodies that do not synchronise: the ranks run one after another.

#include <pulseinfer/concepts/operation.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pulseinfer_test {

struct rank_group {
  std::uint32_t rank = 0;
  std::uint32_t count = 1;

  [[nodiscard]] std::uint32_t thread_rank() const { return rank; }
  [[nodiscard]] std::uint32_t size() const { return count; }
  void sync() const {}
};

/// Runs all items of `op` with groups of `ranks` threads, the last rank and the last item first.
template <pulseinfer::operation Op>
void run_with_ranks(Op const& op, std::uint32_t ranks)
{
  std::vector<std::byte> scratch(op.scratch_bytes(ranks) + 16);
  for (std::uint64_t item = op.shape().items; item-- > 0;) {
    for (std::uint32_t rank = ranks; rank-- > 0;) {
      op(rank_group{rank, ranks}, item, pulseinfer::scratch_ref{scratch.data(), scratch.size()});
    }
  }
}

}  // namespace pulseinfer_test
