#pragma once

/// What makes an upper bound of a block's scores, and of its part in attention, rigorous.

#include <pulseinfer/concepts/thread_group.hpp>
#include <pulseinfer/config.hpp>
#include <pulseinfer/device/key_range.hpp>
#include <pulseinfer/device/reduce.hpp>
#include <pulseinfer/device/widen.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// Of one KV head of one block; never smaller than the true values.
struct block_bounds {
  float key_radius = 0.0F;  ///< largest distance of a key from the digest's first part: centre or mean, as stored
  float value_norm = 0.0F;  ///< largest norm of a value
};

static_assert(std::is_trivially_copyable_v<block_bounds> && sizeof(block_bounds) == 8);

namespace device {

/// Largest distance of the first `tokens` rows from `origin`, rounded up.
/// @param rows row 0; rows are token_stride bytes apart   @param origin [dim], shared by the group; null: zero
/// @param temp_storage [group.size()], shared by the group   @return in every rank   @sync that of reduce
template <thread_group Group, class T>
[[nodiscard]] PULSEINFER_HOST_DEVICE float largest_distance(
  Group const& group, T const* rows, std::uint64_t token_stride, std::uint32_t tokens, std::uint32_t dim,
  float const* origin, float* temp_storage)
{
  float largest = 0.0F;
  for (std::uint32_t token = group.thread_rank(); token < tokens; token += group.size()) {
    T const* const row = key_row(rows, token_stride, token);
    float sum = 0.0F;
    for (std::uint32_t j = 0; j < dim; ++j) {
      float const difference = widen(row[j]) - (origin == nullptr ? 0.0F : origin[j]);
      sum += difference * difference;
    }
    largest = sum > largest ? sum : largest;
  }
  float const square = reduce(group, largest, temp_storage, maximum{});
  // dim sums and three roundings of each term, each off by 2^-24 at most; squares that vanish are below 2^-126 each.
  float const slack = 1.0F + static_cast<float>(dim + 8U) * 0x1p-24F;
  return __builtin_sqrtf(square * slack + static_cast<float>(dim) * 0x1p-126F) * (1.0F + 0x1p-22F);
}

}  // namespace device

}  // namespace pulseinfer
