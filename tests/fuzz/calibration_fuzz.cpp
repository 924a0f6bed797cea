// Whatever a calibration's file holds, it is read or refused with argument_error; what is read is written as it was read.

#include <pulseinfer/error.hpp>
#include <pulseinfer/selector/calibration.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
  std::istringstream in{std::string{reinterpret_cast<char const*>(data), size}};
  pulseinfer::calibration read;
  try {
    read = pulseinfer::read_calibration(in);
  } catch (pulseinfer::argument_error const&) {
    return 0;
  }
  std::stringstream once;
  pulseinfer::write_calibration(once, read);
  if (!(pulseinfer::read_calibration(once) == read)) { std::abort(); }  // a refusal ends the program too
  return 0;
}
