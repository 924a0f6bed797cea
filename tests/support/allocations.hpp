#pragma once

/// Counts what a program allocates, in all of its threads. The operators are replaced in allocations.cpp, which is
/// linked to the program of each folder that holds a step_path_test.cpp.

#include <cstdint>

namespace pulseinfer_test {

/// Allocations by any operator new since the program began.
[[nodiscard]] std::uint64_t allocations() noexcept;

}  // namespace pulseinfer_test
