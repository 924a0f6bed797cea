/// The program's command line.
#pragma once

#include "device.hpp"
#include "offload_options.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace decode_text {

struct run_options {
  std::string model = "build/models/smollm2-135m";  // or "synthetic"
  std::uint32_t context_tokens = 4096;
  std::uint32_t decode_tokens = 512;
  std::uint32_t generate_tokens = 64;
  std::uint32_t batch = 1;
  std::uint64_t seed = 1;
  device_choice device = device_choice::automatic;
  std::string json_path, timeline_path;
  std::vector<std::pair<std::string, std::string>> notes = {};  // further entries of the JSON file
  std::optional<std::vector<std::uint32_t>> dense_layers = {};  // absent: those of the calibration
  std::optional<std::string> calibration_path = {};  // absent: the one that is shipped, where it is of this model
  offload_options offload;
};

/// @return nothing if the program has said what it had to say, with its exit code in `exit_code`
[[nodiscard]] std::optional<run_options> parse_options(int argc, char const* const* argv, int& exit_code);

}  // namespace decode_text
