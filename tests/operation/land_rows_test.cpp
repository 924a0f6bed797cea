#include <pulseinfer/operation/land_rows.hpp>

#include <doctest/doctest.h>
#include <support/rank_group.hpp>
#include <support/recall_scene.hpp>

#include <cstdint>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("operation")
{
  TEST_CASE("land_rows makes the slots of its rows clean and posts the rows; the other rows stay in flight")
  {
    for (std::uint32_t ranks : {1U, 3U, 32U}) {
      recall_scene scene{{}};
      plan_three_rows(scene, 1);
      run_with_ranks(land_rows{.plan = scene.plan(), .landed = scene.landed(), .first_row = 1, .row_count = 2}, ranks);
      CHECK(scene.is_in_flight(0));
      CHECK(scene.has_landed(1));
      CHECK(scene.has_landed(2));
      run_with_ranks(land_rows{.plan = scene.plan(), .landed = scene.landed(), .first_row = 0, .row_count = 1}, ranks);
      CHECK(scene.has_landed(0));
    }
  }

  TEST_CASE("law 10: land_rows that failed empties the slots of its rows, makes their blocks misses and says so")
  {
    for (std::uint32_t ranks : {1U, 3U, 32U}) {
      recall_scene scene{{}};
      plan_three_rows(scene, 1);
      run_with_ranks(
        land_rows{
          .plan = scene.plan(), .landed = scene.landed(), .first_row = 0, .row_count = 2, .how = landing::failed},
        ranks);
      CHECK(scene.has_failed(0));
      CHECK(scene.has_failed(1));
      CHECK(scene.is_in_flight(2));
    }
  }

  TEST_CASE("land_rows of no rows has no items")
  {
    recall_scene scene{{}};
    plan_three_rows(scene, 1);
    CHECK(land_rows{.plan = scene.plan(), .landed = scene.landed(), .first_row = 2, .row_count = 0}.shape().items == 0);
  }
}
