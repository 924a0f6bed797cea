# What our own programs (tests, examples, benchmarks) share. Nothing here reaches a consumer.

option(PULSEINFER_WARNINGS_AS_ERRORS "Treat warnings as errors in our own programs" ON)

option(PULSEINFER_FAST_DEVICE_CODE "Compile our own CUDA programs quickly to code that runs slowly (where none can run)" OFF)

add_library(pulseinfer_warnings INTERFACE)
target_compile_options(pulseinfer_warnings INTERFACE
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow>"
  "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Xcompiler=-Wall,-Wextra,-Wshadow>")
if(PULSEINFER_WARNINGS_AS_ERRORS)
  target_compile_options(pulseinfer_warnings INTERFACE
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:-Werror>"
    # What GCC says here depends on how far it optimises.
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=maybe-uninitialized>"
    "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:--Werror=all-warnings;-Xcompiler=-Werror>")
endif()
# An option of nvcc from CUDA 12.9 on.
if(PULSEINFER_FAST_DEVICE_CODE AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
  target_compile_options(pulseinfer_warnings INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:--Ofast-compile=max>")
endif()

# pulseinfer_setup_program(<target> [CUDA])
#   Links the library and applies the warnings.
function(pulseinfer_setup_program target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUDA" "" "")
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  target_link_libraries(${target} PRIVATE pulseinfer_warnings pulseinfer::pulseinfer)
  if(arg_CUDA)
    target_link_libraries(${target} PRIVATE pulseinfer::cuda_backend)
  endif()
endfunction()

# pulseinfer_group_by_folder(<root> <result> <file>...)
#   Sets <result> to the folders (relative to <root>, "." for the root itself) that hold the files, and
#   <result>_<folder> to the files of each.
function(pulseinfer_group_by_folder root result)
  set(folders "")
  foreach(file IN LISTS ARGN)
    cmake_path(GET file PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY "${root}")
    list(APPEND folders "${folder}")
    list(APPEND files_${folder} "${file}")
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    set(${result}_${folder} "${files_${folder}}" PARENT_SCOPE)
  endforeach()
  set(${result} "${folders}" PARENT_SCOPE)
endfunction()
