#pragma once

/// One task of a stream as a timeline shows it.

#include <pulseinfer/backend/observation.hpp>

#include <cstdint>
#include <type_traits>

namespace pulseinfer {

struct trace_record {
  char const* name = nullptr;  ///< the operation's, or that of the copy's direction; lives as long as the program
  std::uint32_t stream = 0;    ///< number of the stream, see traced::name_of
  observation seen = {};       ///< begin is observation::never as long as it has not run
};

static_assert(std::is_trivially_copyable_v<trace_record>);

}  // namespace pulseinfer
