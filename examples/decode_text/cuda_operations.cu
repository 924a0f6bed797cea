#define DECODE_TEXT_OPERATION(...)                                        \
  template cudaError_t pulseinfer::detail::launch_operation<__VA_ARGS__>( \
    __VA_ARGS__ const&, pulseinfer::detail::launch_plan const&, cudaStream_t) noexcept

#include "cuda_operations.cuh"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
