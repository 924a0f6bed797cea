#include "backend/fixtures.hpp"
#include "support/allocations.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE_BEGIN("backend");

TEST_CASE("law 7: launches, copies, events and waits of cpu_backend allocate nothing, also when a queue is full")
{
  for (cpu_mode const mode : {cpu_mode::threaded, cpu_mode::manual}) {
    cpu_backend backend{contract_options(mode)};
    auto const first = backend.create_stream(), second = backend.create_stream();
    auto const event = backend.create_event();
    std::vector<std::byte> source(4096), target(4096);
    std::vector<copy_run> runs;
    for (std::size_t i = 0; i < 64; ++i) { runs.push_back({&target[i * 64], &source[i * 64], 64}); }
    std::uint32_t log[64] = {}, count = 0;
    status worst = status::ok;
    auto const note = [&worst](status result) { worst = result != status::ok ? result : worst; };
    std::uint64_t const before = pulseinfer_test::allocations();
    for (int step = 0; step < 100; ++step) {
      count = 0;
      for (std::uint32_t i = 0; i < 20; ++i) { note(backend.launch(first, append_operation{log, &count, i})); }
      note(backend.copy(first, {runs.data(), 64}));
      note(backend.record(first, event));
      note(backend.wait(second, event));
      note(backend.copy(second, {runs.data(), 64}));
      note(backend.record(second, event));
      if (step % 3 == 0) { note(backend.wait_any({&event, 1}, no_deadline)); }
      note(backend.synchronize(first));
    }
    std::uint64_t const after = pulseinfer_test::allocations();
    REQUIRE(backend.synchronize() == status::ok);
    CHECK(worst == status::ok);
    CHECK(after == before);
  }
  // The counter itself counts.
  std::uint64_t const before = pulseinfer_test::allocations();
  delete new int{3};
  CHECK(pulseinfer_test::allocations() > before);
}

TEST_SUITE_END();
