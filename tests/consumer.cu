// Proves that pulseinfer::cuda_backend brings C++20 to nvcc, the CUDA runtime and CCCL.
#include <pulseinfer/pulseinfer.hpp>

#include <cuda/std/cstdint>
#include <cuda_runtime_api.h>

static_assert(__cplusplus >= 202002L);

__global__ void fill(cuda::std::uint32_t* words, cuda::std::uint32_t value) { words[threadIdx.x] = value; }

void fill_async(cuda::std::uint32_t* words, cudaStream_t stream) { fill<<<1, 32, 0, stream>>>(words, 7); }
