# Passes when `source` does not compile and the compiler says the text of each of its `// expect-error: text` lines.
# Arguments: compiler, flags, source.
file(STRINGS "${source}" lines)
set(expected "")
set(has_control FALSE)
foreach(line IN LISTS lines)
  if(line MATCHES "// expect-error: (.+)$")
    list(APPEND expected "${CMAKE_MATCH_1}")
  endif()
  if(line MATCHES "PULSEINFER_COMPILE_FAIL_CONTROL")
    set(has_control TRUE)
  endif()
endforeach()
if(NOT expected)
  message(FATAL_ERROR "${source} has no line with `// expect-error: text`")
endif()

# Without the source line under each message: it would repeat the expected text.
set(command "${compiler}" ${flags} -fno-diagnostics-show-caret -fsyntax-only "${source}")
execute_process(COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C ${command}
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "${source} compiles, but must not")
endif()
string(REGEX REPLACE "[^\n]*// expect-error:[^\n]*" "" output "${output}")
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
