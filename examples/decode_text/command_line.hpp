/// How the programs here read their command lines and end.
#pragma once

#include <CLI/CLI.hpp>

#include <optional>

namespace decode_text {

inline constexpr int exit_failed = 1;  // what was asked for could not be done
inline constexpr int exit_usage = 2;   // the command line itself is wrong

/// Reads the command line into what the app's options name.
/// @return nothing: go on; else the program has said what it had to say and ends with this code, 0 after --help
[[nodiscard]] std::optional<int> read_command_line(CLI::App& app, int argc, char const* const* argv);

}  // namespace decode_text
