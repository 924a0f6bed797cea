#pragma once

/// A block that could not be brought.

#include <pulseinfer/error.hpp>
#include <pulseinfer/types.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

struct failure_record {
  sequence_id sequence = none<sequence_id>;
  row_id row = none<row_id>;
  layer_id layer = none<layer_id>;
  block_id block = none<block_id>;
  status code = status::ok;
  std::uint32_t tries = 0;
};

static_assert(std::is_trivially_copyable_v<failure_record>);

}  // namespace pulseinfer
