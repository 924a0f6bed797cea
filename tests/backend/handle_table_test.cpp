#include <pulseinfer/backend/handle_table.hpp>

#include <doctest/doctest.h>

#include <random>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;

namespace {
struct tag;
}

TEST_CASE("handle_table gives the lowest free index and tells an old holder from a new one")
{
  handle_table<tag> table{3};
  auto const a = table.acquire(), b = table.acquire(), c = table.acquire();
  REQUIRE((a && b && c));
  CHECK(a->index == 0);
  CHECK(c->index == 2);
  CHECK(!table.acquire());
  CHECK(table.live() == 3);
  CHECK(table.release(*b));
  CHECK_FALSE(table.release(*b));
  CHECK(table.release(*a));
  auto const again = table.acquire();
  REQUIRE(again);
  CHECK(again->index == 0);
  CHECK_FALSE(table.valid(*a));
  CHECK(table.valid(*again));
  CHECK_FALSE(table.valid(handle_ref<tag>{}));
  CHECK_FALSE(table.valid(handle_ref<tag>{3, 1}));
  CHECK(table.live() == 2);
}

TEST_CASE("handle_table keeps each live handle valid and each old one invalid over random use")
{
  std::mt19937 random{3};
  for (std::uint32_t const capacity : {1U, 2U, 7U, 64U}) {
    handle_table<tag> table{capacity};
    std::vector<handle_ref<tag>> live, old;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 2 == 0) {
        auto const handle = table.acquire();
        CHECK(handle.has_value() == (live.size() < capacity));
        if (handle) { live.push_back(*handle); }
      } else if (!live.empty()) {
        std::size_t const place = random() % live.size();
        CHECK(table.release(live[place]));
        old.push_back(live[place]);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(place));
      }
      REQUIRE(table.live() == live.size());
      for (auto const handle : live) { REQUIRE(table.valid(handle)); }
      if (!old.empty()) { REQUIRE_FALSE(table.valid(old[random() % old.size()])); }
    }
  }
}

TEST_SUITE_END();
