// The order that the planner finds, against all orders there are.

#include <pulseinfer/scheduler/cohort_planner.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

using namespace pulseinfer;

namespace {

constexpr std::uint32_t cohorts = cohort_plan::cohorts;

/// A step under way, pass by pass.
struct step {
  cohort_costs const* costs = nullptr;
  double device = 0.0, link = 0.0;
  std::array<std::uint32_t, cohorts> layer = {};
  std::array<double, cohorts> lands = {};
  std::array<std::uint32_t, cohorts> recall = {};  ///< cohorts that it shares its recall with

  explicit step(cohort_costs const& c) : costs{&c}
  {
    double rows = 0.0;
    link = double{c.per_recall};
    for (std::uint32_t i = 0; i < cohorts; ++i) {
      rows += double{c.rows[i]};
      link += double{c.travel[0]} * double{c.first_part[i]};
      lands[i] = link;
      recall[i] = cohort_plan::all;
    }
    device = double{c.per_hits} + double{c.per_row_hits} * rows * (1.0 - double{c.missing[0]});
  }

  [[nodiscard]] bool over() const
  {
    return std::ranges::all_of(layer, [&](std::uint32_t l) { return l == costs->layers; });
  }

  /// @return false where the cohorts do not stand at one layer, or one would be too far ahead
  bool go(std::uint32_t mask)
  {
    cohort_costs const& c = *costs;
    std::uint32_t own = ~0U;
    double rows = 0.0, whole = 0.0, first = 0.0;
    for (std::uint32_t i = 0; i < cohorts; ++i) {
      if ((mask >> i & 1U) == 0) { continue; }
      if (own != ~0U && layer[i] != own) { return false; }
      own = layer[i];
      rows += double{c.rows[i]};
      whole += double{c.later_part[i]};
      first += double{c.first_part[i]};
    }
    if (own == c.layers) { return false; }
    for (std::uint32_t i = 0; i < cohorts; ++i) {
      if ((mask >> i & 1U) == 0) { continue; }
      bool others_later = false;
      for (std::uint32_t j = i + 1; j < cohorts; ++j) {
        others_later = others_later || ((recall[i] >> j & 1U) != 0 && (mask >> j & 1U) == 0);
      }
      device = std::max(device, lands[i] + double{others_later ? c.wake : c.resume});
    }
    device += double{c.per_pass} + (double{c.per_row} + double{c.per_row_hits} * double{c.missing[own]}) * rows;
    bool const last = own + 1 == c.layers;
    if (!last) {
      link = std::max(link, device) + double{c.per_recall};
      device += double{c.per_hits} + double{c.per_row_hits} * (1.0 - double{c.missing[own + 1]}) * rows;
    }
    bool const alone = (mask & (mask - 1)) == 0;
    for (std::uint32_t i = 0; i < cohorts; ++i) {
      if ((mask >> i & 1U) == 0) { continue; }
      ++layer[i];
      recall[i] = last ? 0 : mask;
      if (last) {
        lands[i] = 0.0;
        continue;
      }
      double const part = alone ? double{c.later_part[i]} : double{c.first_part[i]} / first * whole;
      link += double{c.travel[own + 1]} * part;
      lands[i] = link;
    }
    return std::ranges::max(layer) - std::ranges::min(layer) <= cohort_planner::most_lead;
  }
};

double best_of_all(step const& from)
{
  if (from.over()) { return from.device; }
  double best = 1e300;
  for (std::uint32_t mask = 1; mask <= cohort_plan::all; ++mask) {
    step to = from;
    if (to.go(mask)) { best = std::min(best, best_of_all(to)); }
  }
  return best;
}

cohort_costs any_costs(std::uint32_t layers)
{
  auto const number = [](int low, int high) { return static_cast<float>(*rc::gen::inRange(low, high)); };
  cohort_costs c{
    .rows = {number(1, 9), number(1, 9), number(1, 9)},
    .first_part = {0.2F, 0.3F, 0.5F},
    .later_part = {0.3F, 0.3F, 0.4F},
    .layers = layers,
    .per_pass = number(1, 60),
    .per_row = number(1, 8),
    .per_hits = number(0, 4),
    .per_row_hits = number(0, 8),
    .per_recall = number(0, 8),
    .resume = 2,
    .wake = 8};
  for (std::uint32_t l = 0; l < layers; ++l) {
    c.travel[l] = number(0, 400);
    c.missing[l] = number(0, 50) / 100.0F;
  }
  return c;
}

struct found {
  cohort_plan plan;
  float time = 0;
};

found search(cohort_costs const& costs, std::uint32_t states)
{
  static cohort_planner planner;
  planner.begin(costs);
  for (int calls = 0; planner.active(); ++calls) {
    REQUIRE(calls < 100'000);
    static_cast<void>(planner.work(states));
  }
  found f;
  f.plan = planner.take(f.time);
  return f;
}

}  // namespace

TEST_SUITE("scheduler")
{
  TEST_CASE("a planner's order takes the time that it says, and little more than the best of all orders")
  {
    double worst = 1.0, sum = 0.0;
    int count = 0;
    bool const held = rc::check([&] {
      cohort_costs const costs = any_costs(*rc::gen::inRange(1U, 4U));
      found const f = search(costs, 8);
      step all{costs};
      for (std::uint32_t i = 0; i < f.plan.count; ++i) { RC_ASSERT(all.go(f.plan.passes[i])); }
      RC_ASSERT(all.over());
      RC_ASSERT(std::abs(all.device - double{f.time}) < 1e-3 * all.device);
      double const ratio = all.device / best_of_all(step{costs});
      worst = std::max(worst, ratio);
      sum += ratio;
      ++count;
    });
    CHECK(held);
    CHECK(worst < 1.2);
    CHECK(sum / count < 1.004);
  }

  TEST_CASE(
    "a planner is never behind the lockstep of the same costs, and finds the same in large steps and small ones")
  {
    bool const held = rc::check([] {
      cohort_costs const costs = any_costs(*rc::gen::inRange(1U, 65U));
      found const f = search(costs, 1);
      step together{costs};
      while (!together.over()) { RC_ASSERT(together.go(cohort_plan::all)); }
      RC_ASSERT(double{f.time} <= together.device * 1.0001);
      found const again = search(costs, 1'000'000);
      RC_ASSERT(again.time == f.time);
      RC_ASSERT(again.plan.passes == f.plan.passes);
    });
    CHECK(held);
  }

  TEST_CASE("with nothing to travel a plan takes all cohorts through every layer together")
  {
    cohort_costs costs{.rows = {4, 3, 3}, .layers = 12, .per_pass = 30, .per_row = 5};
    found const f = search(costs, 16);
    CHECK(f.plan.count == 12);
    CHECK(std::ranges::count(f.plan.passes, cohort_plan::all) == 12);
  }

  TEST_CASE("more layers than a plan holds are not searched")
  {
    static cohort_planner planner;
    planner.begin({.rows = {1, 1, 1}, .layers = cohort_plan::most_layers + 1});
    CHECK_FALSE(planner.active());
    CHECK(cohort_plan::together(1000).count == cohort_plan::most_layers);
  }
}
