#include <pulseinfer/manager/list_arena.hpp>

#include <doctest/doctest.h>
#include <support/immediate_backend.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using pulseinfer_test::immediate_backend;

TEST_SUITE("manager")
{
  TEST_CASE("lists of a step do not overlap, and a step that asks for too much gets none")
  {
    immediate_backend backend;
    {
      list_arena<immediate_backend> arena{backend, 10};
      arena.next_step();
      row_id* const first = arena.take(4);
      row_id* const empty = arena.take(0);
      row_id* const second = arena.take(6);
      REQUIRE(first != nullptr);
      CHECK(empty == first + 4);
      CHECK(second == first + 4);
      CHECK(arena.take(1) == nullptr);
      CHECK(arena.take(0) != nullptr);
      arena.next_step();
      CHECK(arena.take(11) == nullptr);
      CHECK(arena.take(10) != nullptr);  // the refused one took nothing
    }
    CHECK(backend.allocated == 0);
  }

  TEST_CASE("a step's lists stay as they are for three more steps")
  {
    immediate_backend backend;
    list_arena<immediate_backend> arena{backend, 3};
    std::vector<row_id*> lists;
    for (std::int32_t step = 0; step < 12; ++step) {
      arena.next_step();
      lists.push_back(arena.take(3));
      for (int i = 0; i < 3; ++i) { lists.back()[i] = row_id{step}; }
      for (std::int32_t back = 0; back < 4 && back <= step; ++back) {
        row_id const* const earlier = lists[static_cast<std::size_t>(step - back)];
        for (int i = 0; i < 3; ++i) { CHECK(earlier[i] == row_id{step - back}); }
      }
    }
  }
}
