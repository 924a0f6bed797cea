#pragma once

/// Whether the hits of a row are attended before its misses have landed.

#include <cstdint>

namespace pulseinfer {

/// `whole`: a row attends once all its blocks are resident. `hits_first`: a visit for the resident blocks follows each
/// `enter` at once, and the row's next visit attends what has landed.
enum class visit_order : std::uint8_t { whole, hits_first };

}  // namespace pulseinfer
