// In place of cuda_device.cu where there is no CUDA toolkit.
#include "device.hpp"

namespace decode_text {

std::unique_ptr<device> make_gpu_device(std::string& why_not)
{
  why_not = "this build was made without a CUDA toolkit";
  return nullptr;
}

}  // namespace decode_text
