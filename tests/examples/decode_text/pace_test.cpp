#include "decode_text/pace.hpp"

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

namespace {

using namespace decode_text;
using namespace std::chrono_literals;

// Steps of four rows: the first ones slow, as what is made at first use is, then all that are timed in lockstep.
pace measured(pulseinfer::nanoseconds step, double link_bytes_per_second = 4e10)
{
  pace made{true, 4, 10, 4096, link_bytes_per_second};
  made.note_single(700us);
  made.note_single(400us);
  for (std::uint32_t i = 0; i < pace::first_steps; ++i) made.note_step(50ms);
  for (std::uint32_t i = 0; i < pace::timed_steps; ++i) {
    CHECK(made.chosen() == pace::way::lockstep);
    made.note_step(step + (i == 0 ? 300us : 0us));  // one that is disturbed
  }
  return made;
}

void go_on(pace& with, pulseinfer::nanoseconds step)
{
  for (std::uint32_t i = 0; i < pace::planned_steps; ++i) with.note_step(20ms);
  for (std::uint32_t i = 0; i < pace::timed_steps; ++i) {
    CHECK(with.chosen() == pace::way::interruptible);
    with.note_step(step);
  }
}

}  // namespace

TEST_CASE("a pass is taken to cost what a step in lockstep took, what rows add to a single one's apart")
{
  pace const made = measured(1000us);
  CHECK(made.chosen() == pace::way::interruptible);
  // 100 us a layer with four rows and 40 us with one.
  CHECK(made.profile().per_row == 20us);
  CHECK(made.profile().per_pass == 20us);
  CHECK(made.profile().selected_bytes == 4096);
  CHECK(made.profile().link_bytes_per_second == 4e10);
  CHECK(made.description().find("20 us and 20 us a row") != std::string::npos);

  // Where four rows take no longer than one, a pass is all that there is.
  CHECK(measured(390us).profile().per_row == 0us);
  CHECK(measured(390us).profile().per_pass == 39us);
}

TEST_CASE("rows go on being parked where that was faster, else they return to lockstep")
{
  pace faster = measured(1000us), slower = measured(1000us);
  go_on(faster, 900us);
  go_on(slower, 1100us);
  CHECK(faster.chosen() == pace::way::interruptible);
  CHECK(slower.chosen() == pace::way::lockstep);
  for (int i = 0; i < 40; ++i) {
    faster.note_step(5ms);
    slower.note_step(1us);
  }
  CHECK(faster.chosen() == pace::way::interruptible);
  CHECK(slower.chosen() == pace::way::lockstep);
}

TEST_CASE("rows stay in lockstep where they are fewer than three, and where that was asked for")
{
  for (pace made : {pace{true, 2, 10, 4096, 4e10}, pace{false, 8, 10, 4096, 4e10}}) {
    for (int i = 0; i < 40; ++i) made.note_step(1ms);
    CHECK(made.chosen() == pace::way::lockstep);
    CHECK(!made.profile().known());
    CHECK(made.description() == "lockstep, hits first");
  }
}

TEST_CASE("a scheduler follows what its pace has chosen")
{
  pace asked{true, 2, 10, 4096, 4e10};
  paced_scheduler scheduler{&asked};
  std::array<pulseinfer::scheduler_row, 2> const rows{
    {{.row = pulseinfer::row_id{0}, .layer = pulseinfer::layer_id{1}, .phase = pulseinfer::row_phase::ready},
     {.row = pulseinfer::row_id{1}, .layer = pulseinfer::layer_id{1}, .phase = pulseinfer::row_phase::in_flight}}};
  std::array<pulseinfer::row_id, 2> chosen{};
  pulseinfer::decision const said = scheduler.decide(rows, {}, 0ns, chosen);
  CHECK(said.kind == pulseinfer::decision_kind::run);
  CHECK(said.rows == 2);
  CHECK(said.enqueue_wait);

  pace parked = measured(1000us, 0.0);  // without a rate there is no plan: whoever is ready runs
  pulseinfer::decision const apart = paced_scheduler{&parked}.decide(rows, {}, 0ns, chosen);
  CHECK(apart.rows == 1);
  CHECK(chosen[0] == pulseinfer::row_id{0});
}
