#pragma once

/// Blocks of threads that read one another's shared memory.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pulseinfer::detail {

/// All threads of the cluster have come here, and see what the others wrote to shared memory before.
__device__ inline void sync_cluster()
{
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// What the cluster's block `rank` has where this block has `own`.
[[nodiscard]] __device__ inline float load_of_block(float const* own, std::uint32_t rank)
{
  auto const here = static_cast<std::uint32_t>(__cvta_generic_to_shared(own));
  std::uint32_t there = 0;
  float value = 0.0F;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
}

[[nodiscard]] __device__ inline std::uint32_t load_of_block(std::uint32_t const* own, std::uint32_t rank)
{
  auto const here = static_cast<std::uint32_t>(__cvta_generic_to_shared(own));
  std::uint32_t there = 0;
  std::uint32_t value = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}

/// Writes where the cluster's block `rank` has what this block has as `own`.
__device__ inline void store_of_block(std::uint32_t* own, std::uint32_t rank, std::uint32_t value)
{
  auto const here = static_cast<std::uint32_t>(__cvta_generic_to_shared(own));
  std::uint32_t there = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
}

}  // namespace pulseinfer::detail
