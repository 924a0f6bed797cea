#include <pulseinfer/scheduler/lockstep_scheduler.hpp>

#include <doctest/doctest.h>
#include <scheduler/step_model.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("scheduler")
{
  TEST_CASE("lockstep_scheduler runs all rows of the lowest layer, whatever travels, and lets the stream wait")
  {
    lockstep_scheduler scheduler;
    std::vector<scheduler_row> const rows{
      {.row = row_id{7}, .layer = layer_id{3}, .phase = row_phase::ready},
      {.row = row_id{2}, .layer = layer_id{2}, .phase = row_phase::selecting},
      {.row = row_id{5}, .layer = layer_id{2}, .phase = row_phase::in_flight, .bytes = 1},
      {.row = row_id{1}, .layer = layer_id{2}, .phase = row_phase::ready}};
    std::vector<row_id> chosen(4);
    decision const made = scheduler.decide(rows, {}, nanoseconds{0}, chosen);
    CHECK(made.kind == decision_kind::run);
    CHECK(made.layer == layer_id{2});
    CHECK(made.enqueue_wait);
    REQUIRE(made.rows == 3);
    CHECK(chosen[0] == row_id{2});
    CHECK(chosen[1] == row_id{5});
    CHECK(chosen[2] == row_id{1});
  }

  // Report: sgl-project/sglang#23609
  TEST_CASE("lockstep_scheduler ends a step without rows")
  {
    lockstep_scheduler<visit_order::hits_first> scheduler;
    CHECK(scheduler.decide({}, {}, nanoseconds{0}, {}).kind == decision_kind::end_step);
  }

  TEST_CASE("lockstep_scheduler says what it needs: no mailbox, and hits visits where asked")
  {
    CHECK_FALSE(lockstep_scheduler<>::reads_mailbox);
    CHECK_FALSE(lockstep_scheduler<>::hits_first);
    CHECK(lockstep_scheduler<visit_order::hits_first>::hits_first);
  }

  TEST_CASE("lockstep_scheduler passes each layer once a step with all rows, sleeps never and leaves nobody late")
  {
    step_model model{lockstep_scheduler{}, 6, 5, [](std::uint32_t step, std::int32_t row, std::int32_t layer) {
                       return static_cast<std::uint64_t>((row * 7 + layer * 5 + static_cast<std::int32_t>(step)) % 4)
                         << 20U;
                     }};
    for (int step = 0; step < 10; ++step) { model.run_step(); }
    REQUIRE(model.passes.size() == 50);
    for (std::size_t i = 0; i < 50; ++i) {
      CHECK(to_index(model.passes[i].layer) == i % 5);
      CHECK(model.passes[i].rows == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5});
    }
    CHECK(model.waits == 0);
    CHECK(model.late_rows == 0);
  }
}
