#pragma once

#include <string_view>

// The version of the library. This is its only place: CMake reads the three numbers from here.
#define PULSEINFER_VERSION_MAJOR 0
#define PULSEINFER_VERSION_MINOR 1
#define PULSEINFER_VERSION_PATCH 0

#define PULSEINFER_DETAIL_TEXT_OF(x) #x
#define PULSEINFER_DETAIL_VERSION_TEXT(major, minor, patch) \
  PULSEINFER_DETAIL_TEXT_OF(major) "." PULSEINFER_DETAIL_TEXT_OF(minor) "." PULSEINFER_DETAIL_TEXT_OF(patch)

namespace pulseinfer {

inline constexpr int version_major = PULSEINFER_VERSION_MAJOR;
inline constexpr int version_minor = PULSEINFER_VERSION_MINOR;
inline constexpr int version_patch = PULSEINFER_VERSION_PATCH;

/// The version as text: "major.minor.patch".
inline constexpr std::string_view version_string =
  PULSEINFER_DETAIL_VERSION_TEXT(PULSEINFER_VERSION_MAJOR, PULSEINFER_VERSION_MINOR, PULSEINFER_VERSION_PATCH);

}  // namespace pulseinfer

#undef PULSEINFER_DETAIL_VERSION_TEXT
#undef PULSEINFER_DETAIL_TEXT_OF
