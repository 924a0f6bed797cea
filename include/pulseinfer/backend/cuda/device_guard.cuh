#pragma once

/// Makes a device current for a scope.

#include <cuda_runtime_api.h>

namespace pulseinfer::detail {

/// The caller's device is current again at the end.
class device_guard {
 public:
  explicit device_guard(int device) noexcept
  {
    if (cudaGetDevice(&previous_) == cudaSuccess && previous_ != device) {
      changed_ = cudaSetDevice(device) == cudaSuccess;
    }
  }

  device_guard(device_guard const&) = delete;
  device_guard& operator=(device_guard const&) = delete;

  ~device_guard()
  {
    if (changed_) { static_cast<void>(cudaSetDevice(previous_)); }
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace pulseinfer::detail
