#pragma once

/// What all benchmarks on a GPU share.

#include <pulseinfer/error.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace pulseinfer_bench {

inline void require(cudaError_t code, char const* what)
{
  if (code == cudaSuccess) { return; }
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
inline void require(pulseinfer::status code, char const* what)
{
  if (code == pulseinfer::status::ok) { return; }
  std::fprintf(stderr, "%s: %s\n", what, name_of(code));
  std::exit(1);
}

/// One thread that keeps a stream busy for so many nanoseconds, while the host enqueues what follows.
static __global__ void keep_busy(std::uint64_t nanoseconds)
{
  std::uint64_t begin = 0;
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace pulseinfer_bench
