#include "cuda_dense_decoder.cuh"
#include "cuda_operations.cuh"
#include "cuda_paged_engine.cuh"
#include "device.hpp"
#include "offload_compositions.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/backend/traced.hpp>

#include <memory>
#include <string>
#include <utility>

namespace decode_text {
namespace {

class gpu_model : public loaded_model {
 public:
  explicit gpu_model(host_engine::llama_weights const& weights) : weights_{weights} {}

  [[nodiscard]] std::unique_ptr<reference_decoder> make_dense(
    std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk, std::uint32_t block_tokens) const override
  {
    return std::make_unique<cuda_dense_decoder>(weights_, rows, max_tokens, chunk, block_tokens);
  }
  [[nodiscard]] std::unique_ptr<offload_decoder> make_offload(
    offload_options const& options, std::span<row_lengths const> rows) const override
  {
    using engine = cuda_paged_engine<pulseinfer::traced<pulseinfer::cuda_backend>>;
    return offload_compositions<engine>{weights_, options, rows}.make();
  }

 private:
  host_engine::cuda_llama_weights weights_;
};

class gpu_device : public device {
 public:
  explicit gpu_device(std::string name) : name_{std::move(name)} {}

  [[nodiscard]] device_choice kind() const override { return device_choice::gpu; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::string details() const override { return "cuBLAS, 32-bit floats"; }
  [[nodiscard]] std::unique_ptr<loaded_model> load(host_engine::llama_weights const& weights) const override
  {
    return std::make_unique<gpu_model>(weights);
  }

 private:
  std::string name_;
};

__global__ void probe() {}

}  // namespace

std::unique_ptr<device> make_gpu_device(std::string& why_not)
{
  int devices = 0;
  cudaDeviceProp properties{};
  if (cudaError_t const code = cudaGetDeviceCount(&devices); code != cudaSuccess || devices == 0) {
    why_not = code == cudaSuccess ? "no GPU is visible" : std::string{"CUDA says: "} + cudaGetErrorString(code);
    return nullptr;
  }
  host_engine::require_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(&probe)) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    why_not = std::string{properties.name} + " is of compute capability " + std::to_string(properties.major) + "." +
      std::to_string(properties.minor) + ", for which this build has no kernels";
    return nullptr;
  }
  return std::make_unique<gpu_device>(properties.name);
}

}  // namespace decode_text
