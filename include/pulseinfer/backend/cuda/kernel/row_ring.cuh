#pragma once

/// Rows of device memory that a warp streams through shared memory, and their inner products with a few vectors: what
/// attention and the scores of blocks have in common.
///
/// A row is cut into pieces of 16 bytes. `Lanes` threads of a warp share a row and take its pieces in turn, so that a warp
/// reads 32 / Lanes rows with one instruction; a tile is `ring_steps` such reads. Each thread fetches the very pieces that it
/// reads back, so that nobody waits for another thread.

#include <pulseinfer/device/widen.hpp>
#include <pulseinfer/numeric.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pulseinfer::detail {

inline constexpr std::uint32_t all_lanes = 0xFFFFFFFFU;
inline constexpr std::uint32_t piece_bytes = 16;
/// Rows of a tile that one thread works on.
inline constexpr std::uint32_t ring_steps = 4;

/// Elements of a piece.
template <class T>
inline constexpr std::uint32_t piece_elements = piece_bytes / sizeof(T);

/// Copies a piece into shared memory behind the thread's back; zeros where it is not `there`, and nothing is read then.
__device__ inline void fetch_piece(uint4* to, std::byte const* from, bool there)
{
  auto const target = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  std::uint32_t const bytes = there ? piece_bytes : 0U;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes)
               : "memory");
}

/// Ends a group of fetches of this thread.
__device__ inline void end_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Returns when all groups of this thread but the last `Pending` have arrived.
template <int Pending>
__device__ void await_fetches()
{
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

template <class T>
__device__ void widen_piece(uint4 const& piece, float (&values)[piece_elements<T>])
{
  std::uint32_t const words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (std::uint32_t i = 0; i < 4U; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      values[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, bfloat16>) {
      values[2U * i] = __uint_as_float(words[i] << 16U);
      values[2U * i + 1U] = __uint_as_float(words[i] & 0xFFFF0000U);
    } else {
      static_assert(std::is_same_v<T, half>);
      asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
          : "=f"(values[2U * i]), "=f"(values[2U * i + 1U])
          : "r"(words[i]));
    }
  }
}

/// This thread's part of the inner products of its rows with the vectors.
/// @param own pieces of the thread, (piece, step) at own[(piece * ring_steps + step) * 32]
/// @param sums [vector, step], added to
template <class T, std::uint32_t Pieces, std::uint32_t Vectors>
__device__ void add_products(
  uint4 const* own, float const (&vectors)[Vectors][Pieces * piece_elements<T>], float (&sums)[Vectors * ring_steps])
{
  constexpr std::uint32_t elements = piece_elements<T>;
#pragma unroll
  for (std::uint32_t piece = 0; piece < Pieces; ++piece) {
#pragma unroll
    for (std::uint32_t step = 0; step < ring_steps; ++step) {
      float values[elements];
      widen_piece<T>(own[(piece * ring_steps + step) * 32U], values);
#pragma unroll
      for (std::uint32_t vector = 0; vector < Vectors; ++vector) {
        float sum = sums[vector * ring_steps + step];
#pragma unroll
        for (std::uint32_t i = 0; i < elements; ++i) { sum += vectors[vector][piece * elements + i] * values[i]; }
        sums[vector * ring_steps + step] = sum;
      }
    }
  }
}

/// Sums `Count` values over groups of 2 * Width lanes, in a fixed order, and leaves each lane its share of the sums: while
/// there is more than one, a lane keeps half of them and gives its partner's half away.
template <std::uint32_t Count, std::uint32_t Width, std::uint32_t Size>
__device__ void scatter_sums(float (&values)[Size], std::uint32_t lane)
{
  if constexpr (Width > 0U) {
    if constexpr (Count > 1U) {
      bool const upper = (lane & Width) != 0U;
#pragma unroll
      for (std::uint32_t i = 0; i < Count / 2U; ++i) {
        float const low = values[i];
        float const high = values[i + Count / 2U];
        values[i] = (upper ? high : low) + __shfl_xor_sync(all_lanes, upper ? low : high, Width);
      }
      scatter_sums<Count / 2U, Width / 2U>(values, lane);
    } else {
      values[0] += __shfl_xor_sync(all_lanes, values[0], Width);
      scatter_sums<1U, Width / 2U>(values, lane);
    }
  }
}

/// Which of the sums a lane has after `scatter_sums` of [Vectors, ring_steps] values over `Lanes` lanes: `count` steps from
/// `step` on, of `vector`.
template <std::uint32_t Lanes, std::uint32_t Vectors>
struct scattered_place {
  static constexpr std::uint32_t values = Vectors * ring_steps;
  static constexpr std::uint32_t count = values > Lanes ? values / Lanes : 1U;
  /// Lanes that have the same sums.
  static constexpr std::uint32_t copies = Lanes > values ? Lanes / values : 1U;
  /// Neighbouring lanes that have sums of one vector.
  static constexpr std::uint32_t vector_lanes = Lanes / Vectors;
  static_assert(count <= ring_steps && vector_lanes >= 1U);

  __device__ explicit scattered_place(std::uint32_t lane)
    : group{lane / Lanes},
      vector{lane % Lanes / copies * count / ring_steps},
      step{lane % Lanes / copies * count % ring_steps},
      is_first{lane % copies == 0U}
  {}

  std::uint32_t group;  ///< of `Lanes` lanes
  std::uint32_t vector;
  std::uint32_t step;
  bool is_first;  ///< of the lanes with the same sums
};

}  // namespace pulseinfer::detail
