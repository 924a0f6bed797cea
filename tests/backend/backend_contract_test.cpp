#include "backend/backend_contract.hpp"
#include "backend/fixtures.hpp"

#include <doctest/doctest.h>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer_test;
using pulseinfer::checked;
using pulseinfer::copy_mode;
using pulseinfer::order_kind;
using pulseinfer::progress;
using pulseinfer::traced;

TEST_CASE("cpu_backend keeps the backend contract, threaded") { backend_contract<cpu_threaded>(); }
TEST_CASE("cpu_backend keeps the backend contract, manual") { backend_contract<cpu_manual>(); }
TEST_CASE("sim_backend keeps the backend contract") { backend_contract<sim>(); }

TEST_CASE("checked keeps the backend contract over cpu_backend, threaded")
{
  backend_contract<cpu_threaded_with<checked>>();
}
TEST_CASE("checked keeps the backend contract over cpu_backend, manual")
{
  backend_contract<cpu_manual_with<checked>>();
}
TEST_CASE("checked keeps the backend contract over sim_backend") { backend_contract<sim_with<checked>>(); }
TEST_CASE("traced keeps the backend contract over cpu_backend, threaded")
{
  backend_contract<cpu_threaded_with<traced>>();
}
TEST_CASE("traced keeps the backend contract over cpu_backend, manual") { backend_contract<cpu_manual_with<traced>>(); }
TEST_CASE("traced over checked keeps the backend contract over sim_backend")
{
  backend_contract<sim_with<traced_and_checked>>();
}

TEST_CASE("scripted_backend keeps the backend contract as enqueued, with late reads")
{
  backend_contract<scripted_with<order_kind::enqueued, copy_mode::late_read>>();
}
TEST_CASE("scripted_backend keeps the backend contract in a random order, with early writes")
{
  backend_contract<scripted_with<order_kind::seeded, copy_mode::early_write, progress::at_all_calls>>();
}
TEST_CASE("traced over checked keeps the backend contract over scripted_backend")
{
  backend_contract<scripted_with<order_kind::seeded, copy_mode::late_read, progress::at_polls, traced_and_checked>>();
}

TEST_SUITE_END();
