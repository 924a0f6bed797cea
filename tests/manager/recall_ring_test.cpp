#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/manager/recall_ring.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

using namespace pulseinfer;

namespace {

using ring_type = recall_ring<cpu_backend>;

struct fixture {
  cpu_backend backend{{.mode = cpu_mode::manual}};
  cpu_backend::stream_ref stream = backend.create_stream(stream_priority::normal);

  /// Enqueues something and marks its end by `event`.
  void fly(cpu_backend::event_ref event)
  {
    REQUIRE(backend.launch(stream, host_function{[] {}}) == status::ok);
    REQUIRE(backend.record(stream, event) == status::ok);
  }
};

constexpr auto issue_nothing = [](recall<cpu_backend>&) {};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("a ring of no places, or for no rows, is refused with the numbers and leaves no event behind")
  {
    fixture f;
    for (auto const& [places, rows] : {std::pair{0U, 2U}, std::pair{3U, 0U}}) {
      std::string text;
      try {
        ring_type const ring{f.backend, places, rows, 8, plan_place::device};
      } catch (error const& thrown) {
        text = thrown.what();
      }
      CHECK(
        text ==
        "invalid_argument: recall ring of " + std::to_string(places) + " places for " + std::to_string(rows) + " rows");
      CHECK(f.backend.live_events() == 0);
    }
  }

  TEST_CASE("each place has lists of its own")
  {
    fixture f;
    constexpr std::uint32_t places = 3, rows = 5, entries = 7;
    ring_type ring{f.backend, places, rows, entries, plan_place::host};
    std::set<void const*> seen;
    for (std::uint32_t i = 0; i < places; ++i) {
      for (std::uint32_t r = 0; r < rows; ++r) {
        seen.insert(ring[i].rows + r);
        seen.insert(ring[i].sequence + r);
        seen.insert(ring[i].places + r);
        seen.insert(ring[i].row_begin + r);
      }
      seen.insert(ring[i].row_begin + rows);
      for (std::uint32_t e = 0; e < entries; ++e) {
        seen.insert(ring[i].entries + e);
        seen.insert(ring[i].failed + e);
        seen.insert(ring[i].failures + e);
      }
    }
    CHECK(seen.size() == places * (4 * rows + 1 + 3 * entries));
  }

  TEST_CASE("a ticket is good until its place is given out again, then it is stale for ever")
  {
    fixture f;
    ring_type ring{f.backend, 2, 1, 4, plan_place::device};
    ticket first, second, third;
    REQUIRE(ring.acquire(first, no_deadline, issue_nothing) == status::ok);
    REQUIRE(ring.acquire(second, no_deadline, issue_nothing) == status::ok);
    CHECK(first.index != second.index);
    CHECK(ring.find(first) == &ring[first.index]);
    REQUIRE(ring.acquire(third, no_deadline, issue_nothing) == status::ok);
    CHECK(third.index == first.index);
    CHECK(ring.find(first) == nullptr);
    CHECK(ring.find(third) != nullptr);
    CHECK(ring.find({.index = 2, .generation = 1}) == nullptr);
    CHECK(ring.find({.index = second.index, .generation = second.generation + 1}) == nullptr);
  }

  TEST_CASE("a place whose copies fly is waited for, one at which a row stands is never given out")
  {
    fixture f;
    ring_type ring{f.backend, 2, 1, 4, plan_place::device};
    ticket first, second, given;
    REQUIRE(ring.acquire(first, no_deadline, issue_nothing) == status::ok);
    REQUIRE(ring.acquire(second, no_deadline, issue_nothing) == status::ok);
    ring[first.index].users = 1;
    recall<cpu_backend>& flying = ring[second.index];
    flying.planned = flying.issued = true;
    f.fly(flying.landed_event);
    CHECK_FALSE(ring.copies_done(flying));
    REQUIRE(ring.acquire(given, no_deadline, issue_nothing) == status::ok);
    CHECK(f.backend.queued_tasks() == 0);
    CHECK(given.index == second.index);
    ring[second.index].users = 1;
    CHECK(ring.acquire(given, no_deadline, issue_nothing) == status::busy);
    ring[first.index].users = 0;
    CHECK(ring.acquire(given, no_deadline, issue_nothing) == status::ok);
    CHECK(given.index == first.index);
  }

  TEST_CASE("a recall that was planned and not issued is issued before its place is used again, the oldest first")
  {
    fixture f;
    ring_type ring{f.backend, 2, 1, 4, plan_place::host};
    ticket first, second, given;
    REQUIRE(ring.acquire(first, no_deadline, issue_nothing) == status::ok);
    REQUIRE(ring.acquire(second, no_deadline, issue_nothing) == status::ok);
    CHECK(ring.oldest_planned() == nullptr);
    for (ticket const t : {second, first}) {
      ring[t.index].planned = true;
      f.fly(ring[t.index].planned_event);
      CHECK_FALSE(ring.copies_done(ring[t.index]));
    }
    CHECK(ring.oldest_planned() == &ring[first.index]);
    int issued = 0;
    REQUIRE(ring.acquire(given, no_deadline, [&](recall<cpu_backend>& r) {
      if (!r.planned || r.issued || f.backend.done(r.planned_event) != event_state::done) { return; }
      r.issued = true;
      ++issued;
      f.fly(r.landed_event);
    }) == status::ok);
    CHECK(issued >= 1);
    CHECK(ring.oldest_planned() != &ring[given.index]);
  }

  TEST_CASE("a ring whose copies do not end says so at the deadline and gives nothing out")
  {
    fixture f;
    ring_type ring{f.backend, 1, 1, 4, plan_place::device};
    ticket first, given{.index = 9, .generation = 9};
    REQUIRE(ring.acquire(first, no_deadline, issue_nothing) == status::ok);
    ring[0].planned = ring[0].issued = true;
    f.fly(ring[0].landed_event);
    CHECK(ring.acquire(given, f.backend.now(), issue_nothing) == status::drain_timeout);
    CHECK(given.index == 9);
    CHECK(ring.find(first) != nullptr);
    CHECK(ring.acquire(given, no_deadline, issue_nothing) == status::ok);
  }
}
