// Whatever a decision file holds, it is read or refused with argument_error; what is read is written as it was read.

#include <pulseinfer/error.hpp>
#include <pulseinfer/observe/decision_file.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
  std::istringstream in{std::string{reinterpret_cast<char const*>(data), size}};
  try {
    std::ostringstream once;
    pulseinfer::write_decisions(once, pulseinfer::read_decisions(in));
    std::istringstream again{once.str()};
    std::ostringstream twice;
    pulseinfer::write_decisions(twice, pulseinfer::read_decisions(again));
    if (once.str() != twice.str()) { std::abort(); }
  } catch (pulseinfer::argument_error const&) {}
  return 0;
}
