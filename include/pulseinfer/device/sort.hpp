#pragma once

/// Small sorts in place by one thread, for lists of a few hundred words.

#include <pulseinfer/config.hpp>

#include <cstdint>

namespace pulseinfer::device {

namespace sort_detail {

template <class T>
PULSEINFER_HOST_DEVICE void sift_down(T* heap, std::uint32_t root, std::uint32_t count)
{
  T const value = heap[root];
  for (std::uint32_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
    if (child + 1 < count && heap[child] < heap[child + 1]) { ++child; }
    if (!(value < heap[child])) { break; }
    heap[root] = heap[child];
    root = child;
  }
  heap[root] = value;
}

template <class T>
PULSEINFER_HOST_DEVICE void swap_values(T& a, T& b)
{
  T const kept = a;
  a = b;
  b = kept;
}

}  // namespace sort_detail

/// Sorts values[0, count) ascending.   @complexity count log(count)
template <class T>
PULSEINFER_HOST_DEVICE void heap_sort(T* values, std::uint32_t count)
{
  for (std::uint32_t root = count / 2; root > 0; --root) { sort_detail::sift_down(values, root - 1, count); }
  for (std::uint32_t end = count; end > 1; --end) {
    sort_detail::swap_values(values[0], values[end - 1]);
    sort_detail::sift_down(values, 0, end - 1);
  }
}

/// Brings the `kept` smallest of values[0, count) to the front, ascending; the rest is in no order.
/// @complexity count log(kept)
template <class T>
PULSEINFER_HOST_DEVICE void partial_sort(T* values, std::uint32_t count, std::uint32_t kept)
{
  if (kept == 0) { return; }
  for (std::uint32_t root = kept / 2; root > 0; --root) { sort_detail::sift_down(values, root - 1, kept); }
  for (std::uint32_t i = kept; i < count; ++i) {
    if (values[i] < values[0]) {
      sort_detail::swap_values(values[i], values[0]);
      sort_detail::sift_down(values, 0, kept);
    }
  }
  heap_sort(values, kept);
}

}  // namespace pulseinfer::device
