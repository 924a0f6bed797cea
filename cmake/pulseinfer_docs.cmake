# Target `docs`: the reference made by Doxygen from include/; a warning fails it.
find_package(Doxygen QUIET)
if(DOXYGEN_FOUND)
  configure_file("${PROJECT_SOURCE_DIR}/docs/Doxyfile.in" "${PROJECT_BINARY_DIR}/Doxyfile" @ONLY)
  add_custom_target(docs
    COMMAND Doxygen::doxygen "${PROJECT_BINARY_DIR}/Doxyfile"
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    COMMENT "Writing the reference into ${PROJECT_BINARY_DIR}/docs/html"
    VERBATIM)
endif()

# The pages keep to the code: what they show is what runs or compiles, and what they link to is there.
if(PULSEINFER_BUILD_TESTS AND PULSEINFER_BUILD_CONSUMER_TESTS)
  add_test(NAME docs/readme COMMAND "${CMAKE_COMMAND}"
    "-Dreadme=${PROJECT_SOURCE_DIR}/README.md"
    "-Dsource=${PROJECT_SOURCE_DIR}/examples/minimal_engine.cpp"
    -P "${PROJECT_SOURCE_DIR}/cmake/readme_code.cmake")
  add_test(NAME docs/integrating COMMAND "${CMAKE_COMMAND}"
    "-Dpage=${PROJECT_SOURCE_DIR}/docs/integrating.md"
    "-Dwork=${PROJECT_BINARY_DIR}/docs_code"
    "-Dcompiler=${CMAKE_CXX_COMPILER}"
    "-Dflags=${CMAKE_CXX20_STANDARD_COMPILE_OPTION};-I${PROJECT_SOURCE_DIR}/include"
    -P "${PROJECT_SOURCE_DIR}/cmake/docs_code.cmake")
  add_test(NAME docs/links COMMAND "${CMAKE_COMMAND}"
    "-Droot=${PROJECT_SOURCE_DIR}"
    -P "${PROJECT_SOURCE_DIR}/cmake/docs_links.cmake")
  set_tests_properties(docs/readme docs/integrating docs/links PROPERTIES LABELS docs TIMEOUT 300)
endif()
