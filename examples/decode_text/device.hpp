/// Where the decoders run: on the CPU, or on a GPU where the build has a CUDA toolkit and the machine a GPU.
#pragma once

#include "decoder.hpp"
#include "engine/llama_weights.hpp"
#include "offload_options.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace decode_text {

enum class device_choice : std::uint8_t { automatic, cpu, gpu };

/// The word for a choice on the command line.
[[nodiscard]] constexpr char const* name_of(device_choice choice)
{
  switch (choice) {
    case device_choice::cpu: return "cpu";
    case device_choice::gpu: return "gpu";
    case device_choice::automatic: break;
  }
  return "auto";
}

/// A model's weights where they are computed with, and the decoders that share them. Outlives these.
class loaded_model {
 public:
  virtual ~loaded_model() = default;

  /// @param max_tokens of the longest row
  [[nodiscard]] virtual std::unique_ptr<reference_decoder> make_dense(
    std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk, std::uint32_t block_tokens) const = 0;
  /// @throws pulseinfer::error, std::runtime_error with the numbers that don't fit
  [[nodiscard]] virtual std::unique_ptr<offload_decoder> make_offload(
    offload_options const& options, std::span<row_lengths const> rows) const = 0;
};

class device {
 public:
  virtual ~device() = default;

  [[nodiscard]] virtual device_choice kind() const = 0;   // cpu or gpu
  [[nodiscard]] virtual std::string name() const = 0;     // as the machine calls it
  [[nodiscard]] virtual std::string details() const = 0;  // what computes there

  /// @param weights borrowed for the model's life
  [[nodiscard]] virtual std::unique_ptr<loaded_model> load(host_engine::llama_weights const& weights) const = 0;
};

[[nodiscard]] std::unique_ptr<device> make_cpu_device();

/// The first GPU. @return nothing where there is none that this build can use, and the reason in `why_not`
[[nodiscard]] std::unique_ptr<device> make_gpu_device(std::string& why_not);

/// `automatic`: the GPU if it can be used, else the CPU with the reason in `why_not`.
/// @throws std::runtime_error with the reason if a GPU is asked for and can't be used
[[nodiscard]] std::unique_ptr<device> make_device(device_choice choice, std::string& why_not);

}  // namespace decode_text
