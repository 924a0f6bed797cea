# What both CMake consumers check: the targets bring nothing that a consumer did not ask for.
get_target_property(options pulseinfer::pulseinfer INTERFACE_COMPILE_OPTIONS)
if(options)
  message(FATAL_ERROR "pulseinfer::pulseinfer gives its users compile options: ${options}")
endif()

add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE pulseinfer::pulseinfer)

if(CONSUMER_CUDA)
  enable_language(CUDA)
  if(NOT TARGET pulseinfer::cuda_backend)
    message(FATAL_ERROR "there is a CUDA toolkit, but no target pulseinfer::cuda_backend")
  endif()
  add_library(cuda_consumer OBJECT "${CMAKE_CURRENT_LIST_DIR}/consumer.cu")
  target_link_libraries(cuda_consumer PRIVATE pulseinfer::cuda_backend)
endif()
