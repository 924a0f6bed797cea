/// What a stream was given, to be launched again as one graph.
#pragma once

#include "cuda_llama_engine.cuh"

#include <cuda_runtime_api.h>

#include <utility>

namespace host_engine {

class cuda_graph {
 public:
  /// Captures what `enqueue` gives `stream`; nothing of it runs. Where it throws, the capture ends and its exception goes on.
  /// @throws cuda_engine_error
  template <class Enqueue>
  cuda_graph(cudaStream_t stream, Enqueue enqueue)
  {
    require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t recorded = nullptr;
    try {
      enqueue();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &recorded));
      if (recorded != nullptr) static_cast<void>(cudaGraphDestroy(recorded));
      throw;
    }
    require_cuda(cudaStreamEndCapture(stream, &recorded), "cudaStreamEndCapture");
    cudaError_t const made = cudaGraphInstantiate(&runnable_, recorded, 0);
    static_cast<void>(cudaGraphDestroy(recorded));
    require_cuda(made, "cudaGraphInstantiate");
  }
  cuda_graph(cuda_graph&& other) noexcept : runnable_{std::exchange(other.runnable_, nullptr)} {}
  cuda_graph& operator=(cuda_graph&&) = delete;
  /// @pre what was launched has run
  ~cuda_graph()
  {
    if (runnable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(runnable_));
  }

  [[nodiscard]] cudaError_t launch(cudaStream_t stream) const { return cudaGraphLaunch(runnable_, stream); }

 private:
  cudaGraphExec_t runnable_ = nullptr;
};

}  // namespace host_engine
