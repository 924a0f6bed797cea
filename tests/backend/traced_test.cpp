#include "backend/fixtures.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/backend/traced.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;
using namespace pulseinfer_test;

static_assert(backend<traced<cpu_backend>>);

TEST_CASE("traced writes down name, stream, time and bytes of each launch and copy")
{
  traced<sim_backend> backend{contract_sim_options()};  // one byte a nanosecond in the device, 10 ns a launch
  auto const compute = backend.create_stream("compute"), transfer = backend.create_stream(stream_priority::high);
  std::vector<std::byte> memory(5530);
  copy_run const runs[2] = {
    {memory.data(), memory.data() + 2765, 1000}, {memory.data() + 1000, memory.data() + 3765, 1765}};
  REQUIRE(backend.launch(compute, named_host_function<"attend">([] {}, {.device_bytes = 300})) == status::ok);
  REQUIRE(backend.copy(transfer, {runs, 2, copy_direction::host_to_device}) == status::ok);
  REQUIRE(
    backend.launch(compute, named_host_function<"merge">([] {}, {.device_bytes = 50, .flops = 70})) == status::ok);
  REQUIRE(backend.launch(compute, append_operation{.items = 0}) == status::ok);
  REQUIRE(backend.copy(transfer, {}) == status::ok);
  CHECK(backend.records()[0].seen.begin == nanoseconds{0});
  REQUIRE(backend.synchronize() == status::ok);
  auto const records = backend.records();
  REQUIRE(records.size() == 3);  // nothing of what had nothing to do
  CHECK(std::string{records[0].name} == "attend");
  CHECK(records[0].stream == 0);
  CHECK(records[0].seen.end == nanoseconds{310});
  CHECK(records[0].seen.cost.device_bytes == 300);
  CHECK(std::string{records[1].name} == "copy to device");
  CHECK(records[1].stream == 1);
  CHECK(records[1].seen.end - records[1].seen.begin == nanoseconds{3000 + 2 * 600 + 50});
  CHECK(records[1].seen.cost.link_bytes == 2765);
  CHECK(std::string{records[2].name} == "merge");
  CHECK(records[2].seen.begin == nanoseconds{310});
  CHECK(records[2].seen.end == nanoseconds{310 + 80});
  CHECK(backend.stream_names() == std::vector<std::string>{"compute", "stream 1"});
  backend.clear();
  CHECK(backend.records().empty());
}

TEST_CASE("traced changes no order: the same seed gives the same interleaving with and without it")
{
  auto const order_of = [](auto& backend, cpu_backend& cpu, std::uint64_t seed) {
    auto const first = backend.create_stream(), second = backend.create_stream();
    std::string log;
    for (char const letter : {'a', 'b', 'c', 'd'}) {
      REQUIRE(backend.launch(first, host_function{[&log, letter] { log += letter; }}) == status::ok);
      char const upper = static_cast<char>(letter - 'a' + 'A');
      REQUIRE(backend.launch(second, host_function{[&log, upper] { log += upper; }}) == status::ok);
    }
    cpu.run_seeded(seed);
    return log;
  };
  for (std::uint64_t seed = 1; seed < 50; ++seed) {
    cpu_backend bare{contract_options(cpu_mode::manual)};
    traced<cpu_backend> with{contract_options(cpu_mode::manual)};
    CHECK(order_of(bare, bare, seed) == order_of(with, with.base(), seed));
    // Tasks of a stream don't overlap in their records.
    for (auto const& a : with.records()) {
      for (auto const& b : with.records()) {
        if (&a < &b && a.stream == b.stream) { CHECK(a.seen.end <= b.seen.begin); }
      }
    }
  }
}

TEST_CASE("traced counts what comes when the records are full, and still runs it")
{
  traced<cpu_backend> backend{trace_options{.max_records = 3}, contract_options(cpu_mode::threaded)};
  auto const stream = backend.create_stream();
  std::uint32_t log[11] = {}, count = 0;
  for (std::uint32_t i = 0; i < 10; ++i) {
    REQUIRE(backend.launch(stream, append_operation{log, &count, i}) == status::ok);
  }
  REQUIRE(backend.synchronize(stream) == status::ok);
  CHECK(count == 10);
  CHECK(backend.records().size() == 3);
  CHECK(backend.dropped() == 7);
  backend.clear();
  CHECK(backend.dropped() == 0);
  REQUIRE(backend.launch(stream, append_operation{log, &count, 0}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
  CHECK(backend.records().size() == 1);
}

TEST_CASE("traced keeps refused calls as never run, and few rows for many streams")
{
  traced<cpu_backend> backend{contract_options(cpu_mode::manual)};
  auto const named = backend.create_stream("compute");
  for (int i = 0; i < 100; ++i) {
    auto const stream = backend.create_stream();
    std::uint32_t log = 0, count = 0;
    REQUIRE(backend.launch(stream, append_operation{&log, &count, 0}) == status::ok);
    backend.destroy_stream(stream);
    CHECK(backend.records().back().stream == 1);
    CHECK(backend.launch(stream, append_operation{&log, &count, 0}) == status::invalid_argument);
    CHECK(backend.records().back().seen.begin == observation::never);
  }
  CHECK(backend.stream_names() == std::vector<std::string>{"compute", "stream 1"});
  backend.destroy_stream(named);
}

namespace {

struct unobserved : cpu_backend {
  using cpu_backend::cpu_backend;
  template <operation Op>
  status launch(stream_ref stream, Op const& op) noexcept
  {
    return cpu_backend::launch(stream, op);
  }
  status copy(stream_ref stream, copy_list runs) noexcept { return cpu_backend::copy(stream, runs); }
};

}  // namespace

TEST_CASE("traced falls back to the host's own times where a backend does not observe")
{
  static_assert(backend<unobserved> && !observed_backend<unobserved>);
  traced<unobserved> backend{contract_options(cpu_mode::threaded)};
  auto const stream = backend.create_stream();
  std::uint32_t log = 0, count = 0;
  nanoseconds const before = backend.now();
  REQUIRE(backend.launch(stream, append_operation{&log, &count, 0}) == status::ok);
  CHECK(backend.records()[0].seen.begin >= before);
  CHECK(backend.records()[0].seen.end <= backend.now());
  REQUIRE(backend.synchronize(stream) == status::ok);
}

TEST_SUITE_END();
