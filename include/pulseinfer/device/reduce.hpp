#pragma once

/// Reductions over a thread group with a fixed order, so that the same inputs give the same bits at any time.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer::device {

/// Combines one value per rank as a binary tree over ranks.
/// @param temp_storage [group.size()] shared by the group; free again after return
/// @return the result, in every rank   @sync two to begin and end, and log2(size) between
template <thread_group Group, class T, class Combine>
[[nodiscard]] PULSEINFER_HOST_DEVICE T reduce(Group const& group, T value, T* temp_storage, Combine combine)
{
  std::uint32_t const rank = group.thread_rank();
  std::uint32_t const size = group.size();
  if (size == 1) { return value; }
  temp_storage[rank] = value;
  group.sync();
  for (std::uint32_t width = 1; width < size; width *= 2) {
    if (rank % (2 * width) == 0 && rank + width < size) {
      temp_storage[rank] = combine(temp_storage[rank], temp_storage[rank + width]);
    }
    group.sync();
  }
  T const result = temp_storage[0];
  group.sync();
  return result;
}

struct plus {
  template <class T>
  PULSEINFER_HOST_DEVICE constexpr T operator()(T a, T b) const
  {
    return a + b;
  }
};

struct maximum {
  template <class T>
  PULSEINFER_HOST_DEVICE constexpr T operator()(T a, T b) const
  {
    return b > a ? b : a;
  }
};

}  // namespace pulseinfer::device
