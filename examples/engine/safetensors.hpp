/// Reads tensors from a file in the safetensors format and checks that the file is what it says.
///
/// The format: 8 bytes with the header's length (little-endian), a JSON header that gives each tensor's dtype, shape and
/// place, then the data. Beyond the format, a file may carry checksums: `__metadata__` maps "crc32.<tensor>" to the CRC-32
/// of the tensor's bytes as hexadecimal text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace host_engine {

/// A model file that is missing, truncated, corrupt or not the expected one. The text carries the numbers.
class model_file_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class safetensors_file {
 public:
  struct tensor {
    std::string dtype;
    std::vector<std::uint64_t> shape;
    std::uint64_t first_byte;  // from the start of the file
    std::uint64_t bytes;
    std::optional<std::uint32_t> crc32;
  };

  /// Reads the header and checks it against the file's size.
  /// @throws model_file_error
  explicit safetensors_file(std::filesystem::path path);

  [[nodiscard]] std::map<std::string, tensor> const& tensors() const noexcept { return tensors_; }

  /// Reads a tensor of 32-bit floats.
  /// @param shape what the caller expects   @param out as many elements as the shape has
  /// @throws model_file_error if the tensor is missing, of another shape or type, or does not match its checksum
  void read(std::string const& name, std::span<std::uint64_t const> shape, std::span<float> out) const;

 private:
  std::filesystem::path path_;
  std::map<std::string, tensor> tensors_;
};

/// "[3, 4]"
[[nodiscard]] std::string shape_text(std::span<std::uint64_t const> shape);

}  // namespace host_engine
