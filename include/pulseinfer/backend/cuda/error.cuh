#pragma once

/// What the CUDA runtime says, as the library's status and exceptions.

#include <pulseinfer/error.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>

namespace pulseinfer {

/// A CUDA call that failed at set-up. The text names the call, the code and what the runtime says about it.
class cuda_error : public error {
 public:
  cuda_error(status code, cudaError_t cause, std::string const& text) : error{code, text}, cause_{cause} {}

  [[nodiscard]] cudaError_t cause() const noexcept { return cause_; }

 private:
  cudaError_t cause_;
};

/// True for errors after which every later call of the context fails too.
[[nodiscard]] constexpr bool is_sticky(cudaError_t code) noexcept
{
  switch (code) {
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorExternalDevice: return true;
    default: return false;
  }
}

/// @param otherwise for codes that have no status of their own
[[nodiscard]] constexpr status status_of(cudaError_t code, status otherwise) noexcept
{
  if (code == cudaSuccess) { return status::ok; }
  if (is_sticky(code)) { return status::device_lost; }
  switch (code) {
    case cudaErrorMemoryAllocation:
    case cudaErrorLaunchOutOfResources: return status::resource_exhausted;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidResourceHandle: return status::invalid_argument;
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread: return status::capture_unsupported;
    default: return otherwise;
  }
}

/// The last error of a backend, and whether its device is lost.
/// @thread_safety every member may be called from any thread
class cuda_error_log {
 public:
  /// Keeps a code that is not cudaSuccess and clears it from the runtime, so that calls of others don't trip over it.
  /// @param subject what the call was about; may be nullptr   @param stream on which, where the call has one
  status note(
    char const* call, cudaError_t code, status otherwise = status::invalid_state, char const* subject = nullptr,
    cudaStream_t const* stream = nullptr) noexcept
  {
    if (code == cudaSuccess) { return status::ok; }
    static_cast<void>(cudaGetLastError());
    std::unique_lock lock{mutex_};
    char on[40] = "";
    if (stream != nullptr) { std::snprintf(on, sizeof(on), " on stream %p", static_cast<void*>(*stream)); }
    std::snprintf(
      text_, sizeof(text_), "%s(%s)%s: %s (%d), %s", call, subject == nullptr ? "" : subject, on,
      cudaGetErrorName(code), static_cast<int>(code), cudaGetErrorString(code));
    if (is_sticky(code)) { lost_.store(true); }
    return status_of(code, otherwise);
  }

  /// @throws resource_error when the runtime has no memory or handle, cuda_error for other codes
  void require(char const* call, cudaError_t code)
  {
    if (code == cudaSuccess) { return; }
    status const result = note(call, code, status::resource_exhausted);
    if (result == status::resource_exhausted) { throw resource_error{last_error()}; }
    throw cuda_error{result, code, last_error()};
  }

  [[nodiscard]] bool device_lost() const noexcept { return lost_.load(); }

  /// Call, name and code; empty when nothing has failed.
  [[nodiscard]] std::string last_error() const
  {
    std::unique_lock lock{mutex_};
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  char text_[256] = {};
  std::atomic<bool> lost_{false};
};

}  // namespace pulseinfer
