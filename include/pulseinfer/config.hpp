#pragma once

/// Compiler and build switches. Nothing here changes the layout of a type.

#include <cstdio>
#include <cstdlib>

#if defined(__CUDACC__)
#  define PULSEINFER_HOST_DEVICE __host__ __device__
#else
#  define PULSEINFER_HOST_DEVICE
#endif

namespace pulseinfer::detail {

[[noreturn]] inline void precondition_failed(char const* condition, char const* sentence, char const* file, int line)
{
  std::fprintf(stderr, "pulseinfer: %s (%s) at %s:%d\n", sentence, condition, file, line);
  std::abort();
}

}  // namespace pulseinfer::detail

/// States a precondition. Checked where NDEBUG is not defined, and in any build that defines PULSEINFER_CHECK_PRECONDITIONS.
#if (defined(PULSEINFER_CHECK_PRECONDITIONS) || !defined(NDEBUG)) && !defined(__CUDA_ARCH__)
#  define PULSEINFER_EXPECTS(condition, sentence) \
    ((condition) ? static_cast<void>(0)           \
                 : ::pulseinfer::detail::precondition_failed(#condition, sentence, __FILE__, __LINE__))
#else
#  define PULSEINFER_EXPECTS(condition, sentence) static_cast<void>(0)
#endif
