// Whatever a model file holds, its tensors are read or refused with model_file_error.

#include <engine/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <unistd.h>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
  static std::filesystem::path const path =
    std::filesystem::temp_directory_path() / ("pulseinfer_safetensors_fuzz_" + std::to_string(::getpid()));
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) { return 0; }
  std::fwrite(data, 1, size, file);
  std::fclose(file);
  try {
    host_engine::safetensors_file const model{path};
    for (auto const& [name, tensor] : model.tensors()) {
      if (tensor.bytes > size) { __builtin_trap(); }
      std::vector<float> values(tensor.bytes / sizeof(float));
      try {
        model.read(name, tensor.shape, values);
      } catch (host_engine::model_file_error const&) {}
    }
  } catch (host_engine::model_file_error const&) {}
  return 0;
}
