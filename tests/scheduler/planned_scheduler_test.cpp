// The interruptible scheduler with a profile: what it predicts and weighs.

#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/static_cohorts_scheduler.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <scheduler/step_model.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;
using namespace std::chrono_literals;

namespace {

/// A pass takes 100 us and 2 us a row, hits 2 us a row, a block of 64 KiB a microsecond.
constexpr decode_profile profile{
  .per_pass = 100us,
  .per_row = 2us,
  .per_row_hits = 2us,
  .per_recall = 4us,
  .link_bytes_per_second = 65536e6,
  .resume = 2us,
  .wake = 8us};

interruptible_scheduler<> make_scheduler(std::uint32_t layers = 8) { return {.profile = profile, .layers = layers}; }

/// Rows that entered `layer` at time 0 and whose plans have just come; those with misses travel.
std::vector<scheduler_row> planned(std::int32_t layer, std::vector<std::uint32_t> const& misses)
{
  std::vector<scheduler_row> rows;
  for (std::size_t i = 0; i < misses.size(); ++i) {
    rows.push_back(
      {.row = static_cast<row_id>(i),
       .layer = static_cast<layer_id>(layer),
       .phase = misses[i] == 0 ? row_phase::ready : row_phase::in_flight,
       .misses = misses[i],
       .bytes = std::uint64_t{misses[i]} * 65536,
       .entered = nanoseconds{0}});
  }
  return rows;
}

struct answer {
  decision made;
  std::vector<std::int32_t> rows;
};

answer ask(interruptible_scheduler<>& scheduler, std::vector<scheduler_row> const& rows, nanoseconds now)
{
  std::vector<row_id> chosen(rows.size(), none<row_id>);
  answer given;
  given.made = scheduler.decide(rows, {}, now, chosen);
  for (std::uint32_t i = 0; i < given.made.rows; ++i) { given.rows.push_back(to_number(chosen[i])); }
  return given;
}

using numbers = std::vector<std::int32_t>;

}  // namespace

TEST_SUITE("scheduler")
{
  TEST_CASE("with a profile, all rows go together before anything is known, once their plan has come")
  {
    auto scheduler = make_scheduler();
    std::vector<scheduler_row> rows = planned(0, {0, 0, 5, 20});
    rows[1].phase = row_phase::selecting;
    CHECK(ask(scheduler, rows, 8us).made.kind == decision_kind::wait);
    rows[1].phase = row_phase::ready;
    answer const given = ask(scheduler, rows, 9us);
    CHECK(given.made.kind == decision_kind::run);
    CHECK(given.made.enqueue_wait);
    CHECK(given.rows == numbers{0, 1, 2, 3});
  }

  TEST_CASE("with a profile, rows that do not stand where the plan has them go in lockstep until the next step")
  {
    auto scheduler = make_scheduler();
    std::vector<scheduler_row> rows = planned(0, {0, 0, 0, 900});
    REQUIRE(ask(scheduler, rows, 8us).rows.size() == 4);
    for (std::size_t i = 0; i < 3; ++i) { rows[i].layer = layer_id{1}; }
    rows[3].entered = 1us;  // its blocks were asked for again
    answer const behind = ask(scheduler, rows, 10us);
    CHECK(behind.made.layer == layer_id{0});
    CHECK(behind.rows == numbers{3});
    CHECK(behind.made.enqueue_wait);
    rows[3].layer = layer_id{1};
    CHECK(ask(scheduler, rows, 2ms).rows == numbers{0, 1, 2, 3});
  }

  TEST_CASE("with a profile, a heavy layer is split once it is known, and light ones are not")
  {
    interruptible_scheduler<> scheduler = make_scheduler(6);
    scheduler.profile.per_pass = 30us;
    scheduler.profile.per_row = 5us;
    scheduler.profile.per_row_hits = 5us;
    scheduler.profile.link_bytes_per_second = 50e9;
    auto const bytes_of = [](std::uint32_t, std::int32_t row, std::int32_t layer) {
      return layer == 3 ? std::uint64_t{2'000'000} * static_cast<std::uint64_t>(row) / 10 : std::uint64_t{0};
    };
    step_model model{scheduler, 10, 6, bytes_of};
    model.pass_time = 80'000;
    for (int step = 0; step < 400; ++step) { model.run_step(); }
    std::vector<pass> last;
    for (pass const& one : model.passes) {
      if (one.step == 400) { last.push_back(one); }
    }
    std::vector<std::size_t> passes(6, 0);
    for (pass const& one : last) { ++passes[pulseinfer::to_index(one.layer)]; }
    CHECK(passes[0] == 1);
    CHECK(passes[3] > 1);
    auto const first = std::ranges::find(last, layer_id{3}, &pass::layer);
    REQUIRE(first != last.end());
    CHECK(first->rows.size() < 10);
    CHECK(std::ranges::count(passes, std::size_t{1}) >= 3);
  }

  TEST_CASE("law 8: with a profile too, the same calls give the same decisions")
  {
    auto one = make_scheduler(), other = make_scheduler();
    for (int i = 0; i < 50; ++i) {
      std::vector<scheduler_row> rows = planned(i % 8, {0, 3U * static_cast<std::uint32_t>(i), 200, 77});
      for (scheduler_row& row : rows) { row.entered = nanoseconds{i}; }
      nanoseconds const now{i * 100'000};
      answer const a = ask(one, rows, now), b = ask(other, rows, now);
      CHECK(a.made.kind == b.made.kind);
      CHECK(a.made.until == b.made.until);
      CHECK(a.rows == b.rows);
    }
  }

  TEST_CASE(
    "law 9: with a profile, every row goes through every layer in every step and none is late, wrong as it may be")
  {
    bool const held = rc::check([](std::uint32_t seed) {
      std::uint32_t const rows = *rc::gen::inRange(1U, 13U);
      std::int32_t const layers = *rc::gen::inRange(1, 9);
      interruptible_scheduler<> scheduler = make_scheduler(static_cast<std::uint32_t>(layers));
      // Profiles that are true, and such that are far from it.
      scheduler.profile.per_pass = *rc::gen::element(1us, 20us, 500us);
      scheduler.profile.link_bytes_per_second = *rc::gen::element(1e9, 50e9, 1e12);
      scheduler.profile.smallest_first = *rc::gen::arbitrary<bool>();
      auto const bytes_of = [seed](std::uint32_t step, std::int32_t row, std::int32_t layer) {
        std::uint32_t mix = seed ^ (step * 2'654'435'761U) ^ (static_cast<std::uint32_t>(row) * 40'503U) ^
          (static_cast<std::uint32_t>(layer) * 2'246'822'519U);
        mix = (mix ^ (mix >> 15U)) * 2'246'822'519U;
        return (mix >> 20U) % 3U == 0 ? std::uint64_t{mix % 4'000'000U} : std::uint64_t{0};
      };
      step_model model{scheduler, rows, layers, bytes_of};
      for (int step = 0; step < 5; ++step) { model.run_step(); }
      std::vector<std::uint32_t> visits(rows, 0);
      for (pass const& one : model.passes) {
        for (std::int32_t const row : one.rows) { ++visits[static_cast<std::size_t>(row)]; }
      }
      for (std::uint32_t const count : visits) { RC_ASSERT(count == 5U * static_cast<std::uint32_t>(layers)); }
      RC_ASSERT(model.late_rows == 0U);
    });
    CHECK(held);
  }

  TEST_CASE("rows or layers beyond what a profile is kept for are scheduled without it")
  {
    interruptible_scheduler<> scheduler = make_scheduler(4);
    std::vector<scheduler_row> rows = planned(6, {0, 500});  // a layer that the model does not have
    CHECK(ask(scheduler, rows, 8us).rows == numbers{0});
    std::vector<std::uint32_t> const many(interruptible_scheduler<>::most_rows + 1, 0);
    CHECK(ask(scheduler, planned(1, many), 8us).rows.size() == many.size());
  }

  TEST_CASE("static cohorts take turns, the one that is behind first, and wait on the stream")
  {
    static_cohorts_scheduler<> scheduler{.cohorts = 2};
    std::vector<scheduler_row> rows = planned(2, {5, 5, 5, 5, 5});
    std::vector<row_id> chosen(rows.size(), none<row_id>);
    decision made = scheduler.decide(rows, {}, 0ns, chosen);
    CHECK(made.rows == 3);
    CHECK(made.enqueue_wait);
    CHECK(chosen[1] == row_id{2});
    for (std::size_t i = 0; i < rows.size(); i += 2) { rows[i].layer = layer_id{3}; }
    made = scheduler.decide(rows, {}, 0ns, chosen);
    CHECK(made.layer == layer_id{2});
    CHECK(made.rows == 2);
    CHECK(chosen[0] == row_id{1});
    CHECK(scheduler.decide({}, {}, 0ns, chosen).kind == decision_kind::end_step);
  }
}
