# How tests are made. Each kind below is found by its file name, so that a new test is a new file and nothing else.

set(PULSEINFER_SKIP_CODE 77)

# How many test files one compilation holds with PULSEINFER_UNITY_TESTS. More cost less together, but leave a core idle at
# the end of a build.
set(PULSEINFER_UNITY_SIZE 12)

# pulseinfer_unity_sources(<result> <name> <file>...)
#   With PULSEINFER_UNITY_TESTS, sets <result> to generated sources that hold PULSEINFER_UNITY_SIZE of the files each, so
#   that what they instantiate alike is compiled once; else to the files. Every file stands in a namespace of its own, since
#   files use the same names. Its includes stand before all of these, where #pragma once makes the file's own ones empty.
#   Those of tests/support, which instantiate templates of other namespaces, stand in none.
function(pulseinfer_unity_sources result name)
  if(NOT PULSEINFER_UNITY_TESTS)
    set(${result} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  string(REPLACE "/" "_" stem "${name}")
  set(generated "")
  set(batch ${ARGN})
  while(batch)
    list(SUBLIST batch 0 ${PULSEINFER_UNITY_SIZE} files)
    list(REMOVE_ITEM batch ${files})
    set(includes "")
    set(bodies "")
    foreach(file IN LISTS files)
      cmake_path(GET file PARENT_PATH folder)
      cmake_path(GET file STEM file_name)
      file(STRINGS "${file}" lines REGEX "^#include ")
      foreach(line IN LISTS lines)
        if(line MATCHES "^#include \"(.+)\"")
          cmake_path(SET header NORMALIZE "${folder}/${CMAKE_MATCH_1}")
          if(EXISTS "${header}")
            set(line "#include \"${header}\"")
          endif()
        endif()
        list(APPEND includes "${line}")
      endforeach()
      if(file MATCHES "_test\\.cpp$")
        string(APPEND bodies "namespace unity_${file_name} {\n#include \"${file}\"\n}\n")
      else()
        string(APPEND bodies "#include \"${file}\"\n")
      endif()
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
    endforeach()
    list(REMOVE_DUPLICATES includes)
    list(JOIN includes "\n" includes)
    list(LENGTH generated number)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/unity/${stem}_${number}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "${includes}\n\n${bodies}" @ONLY)
    list(APPEND generated "${source}")
  endwhile()
  set(${result} ${generated} PARENT_SCOPE)
endfunction()

# pulseinfer_add_test_program(<name> [CUDA] LABELS <label>... SOURCES <file>...)
#   One doctest program and one ctest test of the same name.
function(pulseinfer_add_test_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUDA" "" "LABELS;SOURCES")
  string(REPLACE "/" "_" target "test_${name}")
  if(arg_CUDA)
    set(sources ${arg_SOURCES})
  else()
    pulseinfer_unity_sources(sources "${name}" ${arg_SOURCES})
  endif()
  add_executable(${target} ${sources})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests/bin")
  if(arg_CUDA)
    pulseinfer_setup_program(${target} CUDA)
    target_link_libraries(${target} PRIVATE pulseinfer_test_main_cuda)
  else()
    pulseinfer_setup_program(${target})
    target_link_libraries(${target} PRIVATE pulseinfer_test_main)
  endif()
  if(name MATCHES "^examples")
    target_link_libraries(${target} PRIVATE pulseinfer_example_engine)
  endif()
  add_test(NAME ${name} COMMAND ${target} --no-intro=true)
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}"
    ENVIRONMENT "RC_PARAMS=seed=1 max_success=200"  # properties see the same values in each run
    SKIP_RETURN_CODE ${PULSEINFER_SKIP_CODE}
    TIMEOUT 600)
  # ctest begins with the longest where several run at a time.
  if(name MATCHES "^(laws|manager|operation|selector|transfer|examples/decode_text)$")
    set_tests_properties(${name} PROPERTIES COST 100)
  endif()
  foreach(label IN LISTS arg_LABELS)
    if(NOT TARGET ${label}_tests)
      add_custom_target(${label}_tests)
    endif()
    add_dependencies(${label}_tests ${target})
  endforeach()
endfunction()

# pulseinfer_link_test_support(<program> <folder>)
#   Links what tests/support/<folder>/*.cpp hold, compiled once for all programs of the folder.
function(pulseinfer_link_test_support name folder)
  string(REPLACE "/" "_" support "test_support_${folder}")
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/support/${folder}/*.cpp")
  if(NOT sources)
    return()
  endif()
  if(NOT TARGET ${support})
    pulseinfer_unity_sources(sources "support/${folder}" ${sources})
    add_library(${support} OBJECT ${sources})
    target_include_directories(${support} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_link_libraries(${support} PRIVATE pulseinfer_test_main)
    pulseinfer_setup_program(${support})
  endif()
  string(REPLACE "/" "_" target "test_${name}")
  target_link_libraries(${target} PRIVATE ${support})
endfunction()

# pulseinfer_count_allocations(<program> <file>...)
#   Where one of the files is a step_path_test.cpp, the program counts what it allocates (tests/support/allocations.hpp).
function(pulseinfer_count_allocations name)
  set(sources ${ARGN})
  list(FILTER sources INCLUDE REGEX "/step_path_test\\.cpp$")
  if(sources)
    string(REPLACE "/" "_" target "test_${name}")
    target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support/allocations.cpp")
  endif()
endfunction()

# pulseinfer_add_folder_tests(<root>)
#   For each folder below <root>: its *_test.cpp make one program, its *_concurrent_test.cpp another with the label
#   `concurrent`, its *_test.cu and *_gpu_test.cpp (which need a GPU, but not nvcc) a third with the label `gpu`, which is
#   skipped where there is no GPU. The first two link <root>/support/<folder>/*.cpp too.
#   The tests of <root>/examples/ are built with the examples only, and link the library of examples/engine; those of
#   <root>/benchmarks/ are built with the benchmarks only.
function(pulseinfer_add_folder_tests root)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${root}/*_test.cpp")
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS "${root}/*_test.cu" "${root}/*_gpu_test.cpp")
  list(FILTER sources EXCLUDE REGEX "_gpu_test\\.cpp$")
  if(NOT PULSEINFER_BUILD_EXAMPLES)
    list(FILTER sources EXCLUDE REGEX "^${root}/examples/")
    list(FILTER cuda_sources EXCLUDE REGEX "^${root}/examples/")
  endif()
  if(NOT PULSEINFER_BUILD_BENCHMARKS)
    list(FILTER sources EXCLUDE REGEX "^${root}/benchmarks/")
  endif()
  set(concurrent_sources ${sources})
  list(FILTER concurrent_sources INCLUDE REGEX "_concurrent_test\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_concurrent_test\\.cpp$")

  pulseinfer_group_by_folder("${root}" unit ${sources})
  foreach(folder IN LISTS unit)
    string(REGEX REPLACE "^\\.$" "general" name "${folder}")
    pulseinfer_add_test_program(${name} LABELS unit SOURCES ${unit_${folder}})
    pulseinfer_link_test_support(${name} "${folder}")
    pulseinfer_count_allocations(${name} ${unit_${folder}})
  endforeach()

  add_custom_target(concurrent_tests)
  pulseinfer_group_by_folder("${root}" concurrent ${concurrent_sources})
  foreach(folder IN LISTS concurrent)
    string(REGEX REPLACE "^\\.$" "general" name "${folder}")
    pulseinfer_add_test_program(${name}_concurrent LABELS concurrent SOURCES ${concurrent_${folder}})
    pulseinfer_link_test_support(${name}_concurrent "${folder}")
  endforeach()

  if(PULSEINFER_HAS_NVCC)
    pulseinfer_group_by_folder("${root}" gpu ${cuda_sources})
    foreach(folder IN LISTS gpu)
      string(REGEX REPLACE "^\\.$" "general" name "${folder}")
      pulseinfer_add_test_program(${name}_gpu CUDA LABELS gpu SOURCES ${gpu_${folder}})
    endforeach()
  endif()
endfunction()

# pulseinfer_add_header_tests(<name> <extension> <include root> <header>...)
#   Compiles each header alone, as the only include of a generated source: .cpp without any CUDA include path, or .cu.
#   CMake's own check (VERIFY_INTERFACE_HEADER_SETS) is not used: it skips .cuh without a word, and its sources don't
#   get our warnings.
function(pulseinfer_add_header_tests name extension root)
  set(generated "")
  foreach(header IN LISTS ARGN)
    cmake_path(RELATIVE_PATH header BASE_DIRECTORY "${root}" OUTPUT_VARIABLE relative)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/${name}/${relative}.${extension}")
    set(text "#include \"${relative}\"\n")
    if(extension STREQUAL "cpp")
      string(APPEND text
        "#if defined(CUDA_VERSION) || defined(CUDART_VERSION) || defined(__CUDACC__)\n"
        "#error \"${relative} is a .hpp and includes a CUDA header\"\n"
        "#endif\n")
    endif()
    file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY)
    list(APPEND generated "${source}")
  endforeach()
  if(NOT generated)
    return()
  endif()

  add_library(${name} OBJECT ${generated})
  # Only the front end matters here.
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O0;-g0>")
  if(extension STREQUAL "cu")
    pulseinfer_setup_program(${name} CUDA)
  else()
    pulseinfer_setup_program(${name})
  endif()
  get_target_property(sources ${name} SOURCES)
  list(LENGTH sources source_count)
  list(LENGTH ARGN header_count)
  if(NOT source_count EQUAL header_count)
    message(FATAL_ERROR "${name}: ${header_count} headers, but ${source_count} sources that compile one each")
  endif()
endfunction()

# pulseinfer_add_alone_tests(<root>)
#   Compiles each test file alone, as far as errors go: the sources of PULSEINFER_UNITY_TESTS, which give the warnings,
#   don't show what a file fails to include.
function(pulseinfer_add_alone_tests root)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${root}/*_test.cpp")
  list(FILTER sources EXCLUDE REGEX "_gpu_test\\.cpp$")
  if(NOT PULSEINFER_BUILD_EXAMPLES)
    list(FILTER sources EXCLUDE REGEX "^${root}/(examples|benchmarks)/")
  endif()
  set(include_dirs "${PROJECT_SOURCE_DIR}/include" "${root}" "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_SOURCE_DIR}/benchmarks")
  list(TRANSFORM include_dirs PREPEND "-I")
  set(stamps "")
  foreach(source IN LISTS sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${root}" OUTPUT_VARIABLE name)
    set(stamp "${CMAKE_CURRENT_BINARY_DIR}/alone/${name}.stamp")
    cmake_path(GET stamp PARENT_PATH folder)
    file(MAKE_DIRECTORY "${folder}")
    add_custom_command(OUTPUT "${stamp}"
      COMMAND "${CMAKE_CXX_COMPILER}" ${CMAKE_CXX20_STANDARD_COMPILE_OPTION} ${include_dirs} -DNDEBUG
        -DPULSEINFER_CHECK_PRECONDITIONS "-DPULSEINFER_CALIBRATIONS=\"\""
        -fsyntax-only -MD -MF "${stamp}.d" -MT "${stamp}" "${source}"
      COMMAND "${CMAKE_COMMAND}" -E touch "${stamp}"
      DEPENDS "${source}" DEPFILE "${stamp}.d"
      COMMENT "Compiling tests/${name} alone"
      VERBATIM)
    list(APPEND stamps "${stamp}")
  endforeach()
  add_custom_target(alone_tests ALL DEPENDS ${stamps})
endfunction()

# pulseinfer_add_compile_fail_tests(<root>)
#   Each *_fail_*.cpp must not compile, and the compiler must say the text of each of its `// expect-error: text` lines.
#   With PULSEINFER_COMPILE_FAIL_CONTROL defined, a file that mentions this macro must compile: it then leaves the bad
#   lines out, which proves that nothing else in it was wrong.
function(pulseinfer_add_compile_fail_tests root)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${root}/*_fail_*.cpp")
  foreach(source IN LISTS sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${root}" OUTPUT_VARIABLE name)
    cmake_path(REMOVE_EXTENSION name)
    add_test(NAME ${name} COMMAND "${CMAKE_COMMAND}"
      "-Dcompiler=${CMAKE_CXX_COMPILER}"
      "-Dcompiler_id=${CMAKE_CXX_COMPILER_ID}"
      "-Dflags=${CMAKE_CXX20_STANDARD_COMPILE_OPTION};-I${PROJECT_SOURCE_DIR}/include;-I${PROJECT_SOURCE_DIR}/tests"
      "-Dsource=${source}"
      -P "${PROJECT_SOURCE_DIR}/cmake/compile_fail.cmake")
    set_tests_properties(${name} PROPERTIES LABELS compile_fail TIMEOUT 300)
  endforeach()
endfunction()

# pulseinfer_add_consumer_test(<name> <argument>...)
#   Runs cmake/consumer.cmake on tests/<name>, a project that uses the library as its users do.
function(pulseinfer_add_consumer_test name)
  add_test(NAME consumer/${name} COMMAND "${CMAKE_COMMAND}"
    "-Dkind=${name}"
    "-Dlibrary_source=${PROJECT_SOURCE_DIR}"
    "-Dlibrary_build=${PROJECT_BINARY_DIR}"
    "-Dconsumer=${PROJECT_SOURCE_DIR}/tests/${name}"
    "-Dwork=${CMAKE_CURRENT_BINARY_DIR}/consumer/${name}"
    "-Dcompiler=${CMAKE_CXX_COMPILER}"
    "-Dstandard_flag=${CMAKE_CXX20_STANDARD_COMPILE_OPTION}"
    "-Dversion=${PROJECT_VERSION}"
    "-Dgenerator=${CMAKE_GENERATOR}"
    "-Dcuda_compiler=$<$<BOOL:${PULSEINFER_HAS_NVCC}>:${CMAKE_CUDA_COMPILER}>"
    "-Dcuda_architectures=${CMAKE_CUDA_ARCHITECTURES}"
    -P "${PROJECT_SOURCE_DIR}/cmake/consumer.cmake")
  set_tests_properties(consumer/${name} PROPERTIES LABELS consumer TIMEOUT 600)
endfunction()
