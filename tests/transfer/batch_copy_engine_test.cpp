#include <pulseinfer/transfer/batch_copy_engine.hpp>

#include <doctest/doctest.h>
#include <support/immediate_backend.hpp>
#include <support/recall_scene.hpp>
#include <transfer/transfer_engine_contract.hpp>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("transfer")
{
  TEST_CASE("law 1: batch_copy_engine brings every block to its slot and moves runs both ways, whatever the layout")
  {
    recalls_any_layout(batch_copy_engine{});
    moves_runs_both_ways(batch_copy_engine{});
    moves_runs_both_ways(batch_copy_engine{.fragments_per_copy = 3});
  }

  TEST_CASE("batch_copy_engine hands a row's fragments over in one call and posts all rows at once")
  {
    immediate_backend backend;
    recall_scene scene{{.layout = layout_of_pitch(64, 16, 3)}};
    plan_three_rows(scene, 1);
    auto bound = batch_copy_engine{}.bind(backend, limits_of(scene));
    REQUIRE(bound.recall_async({}, scene.plan(), scene.landed()) == status::ok);
    CHECK(backend.runs.size() == 36);
    CHECK(backend.copies == 2);  // two of the rows have misses
    CHECK(backend.launches == 1);
  }

  TEST_CASE("batch_copy_engine refuses what it cannot do before it enqueues anything")
  {
    empty_recalls_ask_for_nothing(batch_copy_engine{});
    more_rows_than_the_limit_are_refused(batch_copy_engine{});
    immediate_backend backend;
    CHECK_THROWS_AS(
      static_cast<void>(batch_copy_engine{.fragments_per_copy = 0}.bind(backend, transfer_limits{})),
      configuration_error);
  }
}
