#include "backend/backend_contract.hpp"
#include "backend/fixtures.hpp"

#include <doctest/doctest.h>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer::test;

TEST_CASE("cpu_backend keeps the backend contract, threaded") { backend_contract<cpu_threaded>(); }
TEST_CASE("cpu_backend keeps the backend contract, manual") { backend_contract<cpu_manual>(); }
TEST_CASE("sim_backend keeps the backend contract") { backend_contract<sim>(); }

TEST_SUITE_END();
