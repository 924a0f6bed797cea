# Adds the target pulseinfer::cuda_backend when a CUDA toolkit is found. The build tree and the installed package both
# include this file, so a package that was installed on a machine without CUDA still offers the target where there is one.
#
# pulseinfer_add_cuda_backend([IMPORTED])
#   PULSEINFER_CUDA_RUNTIME (static | shared, default static) chooses the runtime library that users are linked with.
function(pulseinfer_add_cuda_backend)
  cmake_parse_arguments(PARSE_ARGV 0 arg "IMPORTED" "" "")
  if(TARGET pulseinfer::cuda_backend)
    return()
  endif()
  # CMake 3.25 marks CUDA::nvToolsExt as deprecated for projects that ask for 3.25, and fails on CUDA 13, which no longer has
  # it. Within this function only, ask for less.
  set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    return()
  endif()

  if(arg_IMPORTED)
    set(backend pulseinfer::cuda_backend)
    add_library(${backend} INTERFACE IMPORTED GLOBAL)
  else()
    set(backend pulseinfer_cuda_backend)
    add_library(${backend} INTERFACE)
    add_library(pulseinfer::cuda_backend ALIAS ${backend})
  endif()

  if(PULSEINFER_CUDA_RUNTIME STREQUAL "shared" OR NOT TARGET CUDA::cudart_static)
    set(runtime CUDA::cudart)
  else()
    set(runtime CUDA::cudart_static)
  endif()
  target_link_libraries(${backend} INTERFACE pulseinfer::pulseinfer CUDA::toolkit ${runtime})

  # CUDA 13 moved CCCL below include/cccl: nvcc knows, a host compiler has to be told.
  foreach(dir IN LISTS CUDAToolkit_INCLUDE_DIRS)
    if(EXISTS "${dir}/cccl/cuda/std/version")
      target_include_directories(${backend} SYSTEM INTERFACE "${dir}/cccl")
    endif()
  endforeach()

  # Some CMake versions drop the standard 20 for CUDA without a word, so the flag is given by hand.
  target_compile_options(${backend} INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:--std=c++20>")
endfunction()
