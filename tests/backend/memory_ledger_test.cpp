#include <pulseinfer/backend/memory_ledger.hpp>

#include <doctest/doctest.h>

#include <string>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;

TEST_CASE("memory_ledger counts each space by itself and keeps its peak")
{
  memory_ledger ledger{{100, 1000}};
  ledger.take(memory_space::device, 60);
  ledger.take(memory_space::pinned, 900);
  ledger.give_back(memory_space::device, 50);
  ledger.take(memory_space::device, 90);
  CHECK(ledger.used_bytes(memory_space::device) == 100);
  CHECK(ledger.peak_bytes(memory_space::device) == 100);
  ledger.give_back(memory_space::device, 99);
  CHECK(ledger.peak_bytes(memory_space::device) == 100);
  ledger.reset_peak(memory_space::device);
  CHECK(ledger.peak_bytes(memory_space::device) == 1);
  CHECK(ledger.used_bytes(memory_space::pinned) == 900);
  CHECK(ledger.peak_bytes(memory_space::pinned) == 900);
}

TEST_CASE("memory_ledger refuses what passes its limit, with the numbers, and counts nothing")
{
  memory_ledger ledger{{100, memory_limits::unlimited}};
  ledger.take(memory_space::device, 60);
  for (std::uint64_t const bytes : {std::uint64_t{41}, std::uint64_t{101}, ~std::uint64_t{0}}) {
    try {
      ledger.take(memory_space::device, bytes);
      FAIL("took ", bytes);
    } catch (resource_error const& error) {
      CHECK(error.code() == status::resource_exhausted);
      CHECK(
        std::string{error.what()} ==
        "resource_exhausted: device memory: " + std::to_string(bytes) + " B asked for, 60 of 100 B in use");
    }
  }
  CHECK(ledger.used_bytes(memory_space::device) == 60);
  CHECK(ledger.peak_bytes(memory_space::device) == 60);
  ledger.take(memory_space::device, 40);
  // Without a limit the sum itself must not wrap round.
  ledger.take(memory_space::pinned, ~std::uint64_t{0} - 1);
  CHECK_THROWS_AS(ledger.take(memory_space::pinned, 2), resource_error);
}

TEST_SUITE_END();
