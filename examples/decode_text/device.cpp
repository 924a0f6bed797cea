#include "device.hpp"

#include "dense_decoder.hpp"

#include <stdexcept>

namespace decode_text {
namespace {

class cpu_model : public loaded_model {
 public:
  explicit cpu_model(host_engine::llama_weights const& weights) : weights_{weights} {}

  [[nodiscard]] std::unique_ptr<reference_decoder> make_dense(
    std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk, std::uint32_t block_tokens) const override
  {
    return std::make_unique<dense_decoder>(weights_, rows, max_tokens, chunk, block_tokens);
  }
  [[nodiscard]] std::unique_ptr<offload_decoder> make_offload(
    offload_options const& options, std::span<row_lengths const> rows) const override
  {
    return make_offload_decoder(weights_, options, rows);
  }

 private:
  host_engine::llama_weights const& weights_;
};

class cpu_device : public device {
 public:
  [[nodiscard]] device_choice kind() const override { return device_choice::cpu; }
  [[nodiscard]] std::string name() const override { return "CPU"; }
  [[nodiscard]] std::string details() const override { return "OpenBLAS, 32-bit floats"; }
  [[nodiscard]] std::unique_ptr<loaded_model> load(host_engine::llama_weights const& weights) const override
  {
    return std::make_unique<cpu_model>(weights);
  }
};

}  // namespace

std::unique_ptr<device> make_cpu_device() { return std::make_unique<cpu_device>(); }

std::unique_ptr<device> make_device(device_choice choice, std::string& why_not)
{
  if (choice == device_choice::cpu) return make_cpu_device();
  if (std::unique_ptr<device> gpu = make_gpu_device(why_not)) return gpu;
  if (choice == device_choice::gpu) throw std::runtime_error{"a GPU was asked for: " + why_not};
  return make_cpu_device();
}

}  // namespace decode_text
