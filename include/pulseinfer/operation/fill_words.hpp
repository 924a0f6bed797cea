#pragma once

/// Sets device memory to one 32-bit pattern, in stream order.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>

#include <cstddef>
#include <cstdint>

namespace pulseinfer {

struct fill_words {
  static constexpr char const* name = "fill_words";
  static constexpr operation_kind kind = operation_kind::metadata;
  static constexpr std::uint64_t words_per_item = 4096;

  void* target = nullptr;  // [count * 4 bytes], 4-byte aligned
  std::uint64_t count = 0;
  std::uint32_t value = 0;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = (count + words_per_item - 1) / words_per_item, .group_threads = 128};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = count * 4}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint64_t const begin = item * words_per_item;
    std::uint64_t const end = begin + words_per_item < count ? begin + words_per_item : count;
    for (std::uint64_t i = begin + group.thread_rank(); i < end; i += group.size()) {
      __builtin_memcpy(static_cast<std::byte*>(target) + i * 4, &value, sizeof(value));
    }
  }
};

static_assert(operation<fill_words>);

}  // namespace pulseinfer
