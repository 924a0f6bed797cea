#pragma once

/// Copies of the copy engine.

#include <pulseinfer/backend/cuda/stream.cuh>
#include <pulseinfer/view/copy_list.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace pulseinfer::detail {

/// Runs of one batched call: more of them would delay the begin of the copying by the time that the host needs to submit them.
inline constexpr std::uint32_t copy_batch_runs = 64;

[[nodiscard]] constexpr cudaMemcpyKind kind_of(copy_direction direction) noexcept
{
  switch (direction) {
    case copy_direction::host_to_device: return cudaMemcpyHostToDevice;
    case copy_direction::device_to_host: return cudaMemcpyDeviceToHost;
    case copy_direction::device_to_device: return cudaMemcpyDeviceToDevice;
  }
  return cudaMemcpyDefault;
}

/// Where a copy may stop.
struct copy_result {
  char const* call = "";
  cudaError_t code = cudaSuccess;
};

/// Host memory that is registered in pieces of `chunk_bytes`: CUDA refuses a copy that lies in two of them.
struct chunked_region {
  std::byte const* begin = nullptr;
  std::size_t bytes = 0;
  std::size_t chunk_bytes = 0;
};

/// Bytes from `at` on that one copy may take.
[[nodiscard]] inline std::size_t bytes_of_one_copy(
  std::span<chunked_region const> regions, std::byte const* at, std::size_t bytes) noexcept
{
  for (chunked_region const& region : regions) {
    if (at < region.begin || at >= region.begin + region.bytes) { continue; }
    std::size_t const rest = region.chunk_bytes - static_cast<std::size_t>(at - region.begin) % region.chunk_bytes;
    return bytes < rest ? bytes : rest;
  }
  return bytes;
}

/// Calls put(run) for each run, cut where its host side goes from one registration to the next.
/// @return the first result that says no
template <class Put>
[[nodiscard]] copy_result for_each_piece(copy_list runs, std::span<chunked_region const> regions, Put put) noexcept
{
  for (std::uint32_t i = 0; i < runs.count; ++i) {
    copy_run rest = runs.runs[i];
    while (rest.bytes > 0) {
      std::byte const* const host = runs.direction == copy_direction::device_to_host ? rest.target : rest.source;
      std::size_t const piece =
        runs.direction == copy_direction::device_to_device ? rest.bytes : bytes_of_one_copy(regions, host, rest.bytes);
      copy_result const done = put(copy_run{.target = rest.target, .source = rest.source, .bytes = piece});
      if (done.code != cudaSuccess) { return done; }
      rest = {.target = rest.target + piece, .source = rest.source + piece, .bytes = rest.bytes - piece};
    }
  }
  return {};
}

[[nodiscard]] inline copy_result copy_one_by_one(
  cuda_stream_ref stream, copy_list runs, std::span<chunked_region const> regions) noexcept
{
  return for_each_piece(runs, regions, [&](copy_run const& run) {
    return copy_result{
      "cudaMemcpyAsync", cudaMemcpyAsync(run.target, run.source, run.bytes, kind_of(runs.direction), stream.stream)};
  });
}

[[nodiscard]] inline copy_result copy_in_batches(
  cuda_stream_ref stream, copy_list runs, std::span<chunked_region const> regions) noexcept
{
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first_of_attributes = 0;
  void* targets[copy_batch_runs];
  void const* sources[copy_batch_runs];
  std::size_t sizes[copy_batch_runs];
  std::uint32_t filled = 0;
  auto const flush = [&] {
    copy_result result{"cudaMemcpyBatchAsync", cudaSuccess};
    if (filled > 0) {
      result.code =
        cudaMemcpyBatchAsync(targets, sources, sizes, filled, &attributes, &first_of_attributes, 1, stream.stream);
    }
    filled = 0;
    return result;
  };
  copy_result const put = for_each_piece(runs, regions, [&](copy_run const& run) {
    targets[filled] = run.target;
    sources[filled] = run.source;
    sizes[filled] = run.bytes;
    return ++filled == copy_batch_runs ? flush() : copy_result{};
  });
  return put.code == cudaSuccess ? flush() : put;
}

/// Enqueues the runs. Batched copies are left out where they are not sound: under capture they can be lost without an error, and
/// the legacy default stream refuses them.
[[nodiscard]] inline copy_result copy_runs(
  cuda_stream_ref stream, copy_list runs, std::span<chunked_region const> regions) noexcept
{
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t const code = cudaStreamIsCapturing(stream.stream, &capture);
  if (code != cudaSuccess) { return {"cudaStreamIsCapturing", code}; }
  if (capture == cudaStreamCaptureStatusInvalidated) {
    return {"cudaStreamIsCapturing", cudaErrorStreamCaptureInvalidated};
  }
  bool const batched = runs.count > 1 && capture == cudaStreamCaptureStatusNone && !stream.is_legacy_default();
  return batched ? copy_in_batches(stream, runs, regions) : copy_one_by_one(stream, runs, regions);
}

}  // namespace pulseinfer::detail
