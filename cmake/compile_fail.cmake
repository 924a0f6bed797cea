# Passes when `source` does not compile and the compiler says the text of each of its `// expect-error: text` lines.
# Arguments: compiler, compiler_id, flags, source.
file(STRINGS "${source}" lines REGEX "// expect-error: ")
set(expected "")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^.*// expect-error: " "" text "${line}")
  list(APPEND expected "${text}")
endforeach()
file(STRINGS "${source}" has_control REGEX "PULSEINFER_COMPILE_FAIL_CONTROL")
if(NOT expected)
  message(FATAL_ERROR "${source} has no line with `// expect-error: text`")
endif()

# Without the source line under each message: it would repeat the expected text.
if(compiler_id MATCHES "Clang")
  set(no_source -fno-caret-diagnostics)
else()
  set(no_source -fno-diagnostics-show-caret)
endif()
set(command "${CMAKE_COMMAND}" -E env LC_ALL=C "${compiler}" ${flags} ${no_source} -fsyntax-only "${source}")
execute_process(COMMAND ${command}
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "${source} compiles, but must not")
endif()
foreach(text IN LISTS expected)
  string(FIND "${output}" "${text}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "${source}: the compiler does not say `${text}`. It says:\n${output}")
  endif()
endforeach()

if(has_control)
  execute_process(COMMAND ${command} -DPULSEINFER_COMPILE_FAIL_CONTROL
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${source} must compile with PULSEINFER_COMPILE_FAIL_CONTROL defined, but:\n${output}")
  endif()
endif()
