#include <pulseinfer/backend/host_function.hpp>

#include <doctest/doctest.h>
#include <support/explore.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Streams of so many tasks each; every order is noted.
struct chains {
  std::vector<std::uint32_t> lengths;
  std::set<std::string>* orders;

  std::string operator()(scripted_backend& backend) const
  {
    std::string order;
    std::string* const log = &order;
    for (std::uint32_t s = 0; s < lengths.size(); ++s) {
      auto const stream = backend.create_stream();
      for (std::uint32_t i = 0; i < lengths[s]; ++i) {
        REQUIRE(backend.launch(stream, host_function{[log, s] { *log += static_cast<char>('a' + s); }}) == status::ok);
      }
    }
    REQUIRE(backend.synchronize() == status::ok);
    orders->insert(order);
    return order.substr(0, 2) == "cc" ? "c came first" : "";
  }
};

}  // namespace

TEST_SUITE("laws")
{
  TEST_CASE("every order of independent chains is run once, and no other")
  {
    std::set<std::string> orders;
    exploration const all = explore_orders({}, chains{{2, 1, 3}, &orders});
    CHECK(all.complete);
    CHECK(all.orders == 60);  // 6! / (2! 1! 3!)
    CHECK(orders.size() == 60);
    CHECK(all.wrong == 12);  // 4! / (2! 1! 1!) that go on behind cc
    CHECK(all.fault == "c came first");

    orders.clear();
    script again{.order = order_kind::given};
    again.choices = choices_from(all.choices);
    scripted_backend backend{again};
    CHECK(chains{{2, 1, 3}, &orders}(backend) == "c came first");
  }

  TEST_CASE("bounds and draws run some of the orders, each once within a bound")
  {
    std::set<std::string> orders;
    exploration const few = explore_orders({}, chains{{2, 1, 3}, &orders}, {.orders = 7});
    CHECK_FALSE(few.complete);
    CHECK(few.orders == 7);
    CHECK(orders.size() == 7);

    orders.clear();
    exploration const enqueued = explore_orders({}, chains{{2, 1, 3}, &orders}, {.deviations = 0});
    CHECK(enqueued.complete);
    CHECK(orders == std::set<std::string>{"aabccc"});
    orders.clear();
    exploration const near = explore_orders({}, chains{{2, 1, 3}, &orders}, {.deviations = 1});
    CHECK(near.complete);
    CHECK(orders.size() == near.orders);
    CHECK(near.orders > 1);
    CHECK(near.orders < 60);

    orders.clear();
    exploration const drawn = draw_orders({}, chains{{2, 1, 3}, &orders}, 500);
    CHECK(drawn.orders == 500);
    CHECK(orders.size() > 40);
  }

  TEST_CASE("what a program throws counts as wrong")
  {
    exploration const seen = explore_orders({}, [](scripted_backend&) -> std::string { throw resource_error{"none"}; });
    CHECK(seen.orders == 1);
    CHECK(seen.wrong == 1);
    CHECK(seen.fault.find("none") != std::string::npos);
  }

  TEST_CASE("a script answers for events that are not done, where it is told to")
  {
    for (bool const fails : {false, true}) {
      scripted_backend backend;
      auto const stream = backend.create_stream();
      auto const event = backend.create_event();
      std::size_t const rule = backend.add_rule({.effect = script_effect::hurry, .call = script_call::done});
      if (fails) { backend.add_rule({.effect = script_effect::fail, .call = script_call::launch}); }
      REQUIRE(backend.launch(stream, host_function{[] {}}) == status::ok);
      REQUIRE(backend.record(stream, event) == status::ok);
      CHECK(backend.done(event) == event_state::done);
      CHECK(backend.counts().hurried == 1);
      backend.remove_rule(rule);
      CHECK(backend.done(event) == event_state::pending);
      REQUIRE(backend.synchronize() == status::ok);
      CHECK(backend.done(event) == (fails ? event_state::failed : event_state::done));
      CHECK(backend.counts().hurried == 1);
    }
  }
}
