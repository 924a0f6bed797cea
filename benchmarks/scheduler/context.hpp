#pragma once

/// What a file of results says of the run that made it.

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

namespace pulseinfer_bench {

/// @param machine that was simulated
[[nodiscard]] inline nlohmann::json context_of(
  int count, char* const* arguments, std::string const& machine, std::uint64_t seeds)
{
  std::string command = "scripts/bench scheduler";
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--json") == 0) {
      ++i;
      continue;
    }
    command += std::string{" "} + arguments[i];
  }
  std::string processor = "unknown";
  std::ifstream in{"/proc/cpuinfo"};
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("model name")) {
      processor = line.substr(line.find(':') + 2);
      break;
    }
  }
  char const* const commit = std::getenv("PULSEINFER_COMMIT");
  return {
    {"commit", commit != nullptr ? commit : "unknown"},
    {"command", command},
    {"seeds", seeds},
    {"simulated", machine},
    {"processor", processor},
    {"threads", std::thread::hardware_concurrency()}};
}

}  // namespace pulseinfer_bench
