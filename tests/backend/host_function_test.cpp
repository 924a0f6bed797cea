#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>

#include <doctest/doctest.h>

#include <string>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;

TEST_CASE("host_function runs once in stream order")
{
  cpu_backend backend{{.mode = cpu_mode::manual}};
  auto const stream = backend.create_stream();
  std::string log;
  for (char const letter : {'a', 'b', 'c'}) {
    REQUIRE(backend.launch(stream, host_function{[&log, letter] { log += letter; }}) == status::ok);
  }
  CHECK(log.empty());
  backend.run_all();
  CHECK(log == "abc");
}

TEST_CASE("host_function carries a name and a kind, and names host-only operations")
{
  auto const plain = host_function{[] {}};
  auto const named = named_host_function<"attend", operation_kind::metadata>([] {});
  CHECK(std::string{plain.name} == "host_function");
  CHECK(plain.kind == operation_kind::data);
  CHECK(std::string{decltype(named)::name} == "attend");
  CHECK(named.kind == operation_kind::metadata);
  static_assert(operation<decltype(plain)> || operation<std::remove_const_t<decltype(plain)>>);
  static_assert(is_host_only<std::remove_const_t<decltype(named)>>);
  static_assert(!is_host_only<archetype::operation>);
}

TEST_CASE("host_function of kind data is charged and not called by a simulation that moves no data")
{
  for (bool const move_data : {false, true}) {
    sim_backend backend{{.move_data = move_data}};
    auto const stream = backend.create_stream();
    int data = 0, metadata = 0;
    operation_cost const cost{.flops = 690'000'000};  // 1 us at the default speed, and 2 us for the launch
    REQUIRE(backend.launch(stream, host_function{[&data] { ++data; }, cost}) == status::ok);
    REQUIRE(backend.launch(stream, named_host_function<"count", operation_kind::metadata>([&metadata] {
                             ++metadata;
                           })) == status::ok);
    REQUIRE(backend.synchronize() == status::ok);
    CHECK(data == (move_data ? 1 : 0));
    CHECK(metadata == 1);
    CHECK(backend.now() == nanoseconds{3000 + 2000});
  }
}

TEST_SUITE_END();
