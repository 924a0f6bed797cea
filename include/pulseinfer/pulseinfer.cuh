#pragma once

/// The whole library with the CUDA backend. Needs nvcc.

#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/pulseinfer.hpp>
