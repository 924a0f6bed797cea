#include <pulseinfer/version.hpp>

#include <doctest/doctest.h>

#include <string>

TEST_SUITE("general")
{
  TEST_CASE("the version text is made of the three numbers")
  {
    std::string const expected = std::to_string(pulseinfer::version_major) + "." +
      std::to_string(pulseinfer::version_minor) + "." + std::to_string(pulseinfer::version_patch);
    CHECK(expected == pulseinfer::version_string);
  }

  TEST_CASE("the version macros and constants agree, so that both kinds of check see one version")
  {
    CHECK(pulseinfer::version_major == PULSEINFER_VERSION_MAJOR);
    CHECK(pulseinfer::version_minor == PULSEINFER_VERSION_MINOR);
    CHECK(pulseinfer::version_patch == PULSEINFER_VERSION_PATCH);
  }
}
