# Builds and runs one consumer of the library: find_package, add_subdirectory or include_path.
# Arguments: kind, library_source, library_build, consumer, work, compiler, standard_flag, version, generator,
# cuda_compiler (empty without a toolkit), cuda_architectures.
function(pulseinfer_run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

if(kind STREQUAL "include_path")
  pulseinfer_run("${compiler}" "${standard_flag}" "-I${library_source}/include" -pthread
    "${consumer}/main.cpp" -o "${work}/consumer")
  pulseinfer_run("${work}/consumer")
else()
  set(arguments "-DCMAKE_CXX_COMPILER=${compiler}" "-DPULSEINFER_EXPECTED_VERSION=${version}" -DCMAKE_BUILD_TYPE=Debug)
  if(cuda_compiler)
    list(APPEND arguments "-DCMAKE_CUDA_COMPILER=${cuda_compiler}" "-DCMAKE_CUDA_ARCHITECTURES=${cuda_architectures}"
      -DCONSUMER_CUDA=ON)
  endif()
  if(kind STREQUAL "find_package")
    pulseinfer_run("${CMAKE_COMMAND}" --install "${library_build}" --prefix "${work}/prefix")
    list(APPEND arguments "-DCMAKE_PREFIX_PATH=${work}/prefix")
  else()
    list(APPEND arguments "-DPULSEINFER_SOURCE=${library_source}")
  endif()
  pulseinfer_run("${CMAKE_COMMAND}" -G "${generator}" -S "${consumer}" -B "${work}/build" ${arguments})
  pulseinfer_run("${CMAKE_COMMAND}" --build "${work}/build")
  pulseinfer_run("${work}/build/consumer")
endif()

string(STRIP "${output}" output)
if(NOT output STREQUAL "pulseinfer ${version}")
  message(FATAL_ERROR "the consumer printed `${output}`, not `pulseinfer ${version}`")
endif()
