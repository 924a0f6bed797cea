#pragma once

/// Brings the host's changes to the device's books into stream order.

#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/config.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One 32-bit word of device memory and its new value.
struct word_patch {
  void* target = nullptr;
  std::uint32_t value = 0;
  std::uint32_t reserved = 0;
};

static_assert(std::is_trivially_copyable_v<word_patch> && sizeof(word_patch) == 16);

/// Writes `count` words. No two patches of one launch name the same word.
struct patch_words {
  static constexpr char const* name = "patch_words";
  static constexpr operation_kind kind = operation_kind::metadata;
  static constexpr std::uint32_t patches_per_item = 1024;

  word_patch const* patches = nullptr;  // [count], memory that the device reads; unchanged until the launch has run
  std::uint32_t count = 0;

  [[nodiscard]] launch_shape shape() const
  {
    return {.items = (std::uint64_t{count} + patches_per_item - 1) / patches_per_item, .group_threads = 128};
  }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_bytes = std::uint64_t{count} * 20}; }

  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref) const
  {
    std::uint64_t const begin = item * patches_per_item;
    std::uint64_t const end = begin + patches_per_item < count ? begin + patches_per_item : count;
    for (std::uint64_t i = begin + group.thread_rank(); i < end; i += group.size()) {
      // The words behind the addresses have types of their own (ids, states, counts): their bytes are what is set.
      __builtin_memcpy(patches[i].target, &patches[i].value, sizeof(std::uint32_t));
    }
  }
};

static_assert(operation<patch_words>);

}  // namespace pulseinfer
