#pragma once

/// Copies of the copy engine.

#include <pulseinfer/backend/cuda/stream.cuh>
#include <pulseinfer/view/copy_list.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

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

[[nodiscard]] inline copy_result copy_one_by_one(cuda_stream_ref stream, copy_list runs) noexcept
{
  for (std::uint32_t i = 0; i < runs.count; ++i) {
    copy_run const& run = runs.runs[i];
    if (run.bytes == 0) { continue; }
    cudaError_t const code = cudaMemcpyAsync(run.target, run.source, run.bytes, kind_of(runs.direction), stream.stream);
    if (code != cudaSuccess) { return {"cudaMemcpyAsync", code}; }
  }
  return {};
}

[[nodiscard]] inline copy_result copy_in_batches(cuda_stream_ref stream, copy_list runs) noexcept
{
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first_of_attributes = 0;
  void* targets[copy_batch_runs];
  void const* sources[copy_batch_runs];
  std::size_t sizes[copy_batch_runs];
  std::uint32_t filled = 0;
  for (std::uint32_t i = 0; i < runs.count; ++i) {
    copy_run const& run = runs.runs[i];
    if (run.bytes > 0) {
      targets[filled] = run.target;
      sources[filled] = run.source;
      sizes[filled] = run.bytes;
      ++filled;
    }
    if (filled > 0 && (filled == copy_batch_runs || i + 1 == runs.count)) {
      cudaError_t const code =
        cudaMemcpyBatchAsync(targets, sources, sizes, filled, &attributes, &first_of_attributes, 1, stream.stream);
      if (code != cudaSuccess) { return {"cudaMemcpyBatchAsync", code}; }
      filled = 0;
    }
  }
  return {};
}

/// Enqueues the runs. Batched copies are left out where they are not sound: under capture they can be lost without an error, and
/// the legacy default stream refuses them.
[[nodiscard]] inline copy_result copy_runs(cuda_stream_ref stream, copy_list runs) noexcept
{
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t const code = cudaStreamIsCapturing(stream.stream, &capture);
  if (code != cudaSuccess) { return {"cudaStreamIsCapturing", code}; }
  if (capture == cudaStreamCaptureStatusInvalidated) {
    return {"cudaStreamIsCapturing", cudaErrorStreamCaptureInvalidated};
  }
  bool const batched = runs.count > 1 && capture == cudaStreamCaptureStatusNone && !stream.is_legacy_default();
  return batched ? copy_in_batches(stream, runs) : copy_one_by_one(stream, runs);
}

}  // namespace pulseinfer::detail
