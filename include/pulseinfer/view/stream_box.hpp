#pragma once

/// Words in which the device tells what came of a row's streamed blocks.

#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

/// One copy of neighbouring blocks of a row into a half of the stream's slots.
struct stream_chunk {
  layer_id layer = none<layer_id>;
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  std::uint32_t number = 0;  ///< of the row's chunks in its step, from 1 on
};

static_assert(std::is_trivially_copyable_v<stream_chunk> && sizeof(stream_chunk) == 16);

/// One row's words, in memory that host and device read. The device writes them in the order of the copies; the host sets
/// them back where nothing of the row flies.
struct stream_box {
  std::uint32_t seen = 0;  ///< number of the last chunk whose end was reached
  std::uint32_t failed = 0;
  stream_chunk lost = {};  ///< blocks that did not arrive; valid once `failed` is set
};

static_assert(std::is_trivially_copyable_v<stream_box>);

}  // namespace pulseinfer
