#pragma once

// The whole library without CUDA.
#include "pulseinfer/version.hpp"
