#include <pulseinfer/admission/adaptive_admission.hpp>
#include <pulseinfer/admission/working_set_admission.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

using namespace pulseinfer;

namespace {

row_figures offloaded(std::uint32_t row, double recalls, std::uint32_t left = 400)
{
  return {
    .row = static_cast<row_id>(row),
    .recalls = true,
    .measured = true,
    .recalled_blocks = recalls,
    .tokens = 1000,
    .max_tokens = 1000 + left,
    .slots_now = 100,
    .slots_all = 600,
    .slots_lease = 100};
}

row_figures resident(std::uint32_t row, std::uint64_t slots, double recalls = 0.0)
{
  return {
    .row = static_cast<row_id>(row),
    .measured = recalls > 0.0,
    .recalled_blocks = recalls,
    .tokens = 1000,
    .max_tokens = 1400,
    .slots_now = slots,
    .slots_all = slots,
    .slots_lease = 100};
}

capacity with_free(std::uint64_t slots)
{
  return {.rows_total = 16, .rows_running = 4, .slots_free = slots, .slots_total = 4000};
}

balance_answer ask(std::vector<row_figures> const& rows, std::uint64_t free, bool waits, adaptive_admission policy = {})
{
  demand const first{.slots_prefill = 300, .slots_decode = 100};
  std::vector<std::uint32_t> slots;
  return policy.plan({.rows = rows, .waiting = waits ? &first : nullptr, .free = with_free(free)}, slots);
}

std::vector<layer_figures> layers_of(
  std::vector<double> const& shares, std::vector<std::uint32_t> const& slots, double exponent)
{
  std::vector<layer_figures> layers;
  for (std::size_t l = 0; l < shares.size(); ++l) {
    double const missed = shares[l] * std::pow(slots[l] / 96.0, -exponent);
    layers.push_back(
      {.selects = true,
       .selected_blocks = 1e6,
       .missed_blocks = 1e6 * missed,
       .slots = 1.0 * slots[l],
       .next_slots = slots[l]});
  }
  return layers;
}

}  // namespace

TEST_SUITE("admission")
{
  TEST_CASE("where slots are lacking, the row offloads that recalls least for each slot it frees")
  {
    // Nobody of them has been measured: the longest frees the most.
    CHECK(ask({resident(1, 600), resident(2, 900), resident(3, 700)}, 50, true).demote == row_id{2});
    CHECK(ask({resident(1, 600, 10.0), resident(2, 900, 50.0), resident(3, 700, 40.0)}, 50, true).demote == row_id{1});
    CHECK(is_none(ask({resident(1, 600)}, 400, true).demote));
    CHECK(is_none(ask({resident(1, 600)}, 50, false).demote));
    CHECK(is_none(ask({offloaded(1, 5.0)}, 50, true).demote));
    // Its slots would serve nobody: no further row pays.
    adaptive_admission full;
    full.limit_rows = 4;
    CHECK(is_none(ask({resident(1, 600)}, 50, true, full).demote));
  }

  TEST_CASE("where slots are free and nobody waits, the row comes back that recalls most for each slot it needs")
  {
    CHECK(ask({offloaded(1, 5.0), offloaded(2, 8.0), offloaded(3, 6.0)}, 500, false).promote == row_id{2});
    CHECK(is_none(ask({offloaded(1, 5.0), offloaded(2, 8.0)}, 499, false).promote));
    CHECK(is_none(ask({offloaded(1, 5.0), offloaded(2, 8.0)}, 500, true).promote));
    // What it recalls until its end is less than what must be brought.
    CHECK(is_none(ask({offloaded(1, 8.0, 200)}, 500, false).promote));
    CHECK(ask({offloaded(1, 8.0, 300)}, 500, false).promote == row_id{1});
  }

  TEST_CASE("a row that recalls far more than the others comes back, and another makes room where that is needed")
  {
    std::vector<row_figures> rows{offloaded(1, 5.0), offloaded(2, 60.0), offloaded(3, 7.0), resident(4, 700)};
    balance_answer answer = ask(rows, 600, true);
    CHECK(answer.promote == row_id{2});
    CHECK(is_none(answer.demote));
    answer = ask(rows, 0, true);
    CHECK(answer.promote == row_id{2});
    CHECK(answer.demote == row_id{4});
    rows[3] = resident(4, 500);  // frees 400 of 500
    answer = ask(rows, 0, true);
    CHECK(is_none(answer.promote));
    CHECK(is_none(answer.demote));
  }

  TEST_CASE("slots go to the layers where one more saves most, within what a lane may have, and no more than there are")
  {
    for (double const exponent : {0.7, 0.9, 1.2}) {
      std::vector<double> const shares{0.01, 0.05, 0.08, 0.3, 0.02};
      std::vector<std::uint32_t> slots(5, 96), next(5, 0);
      adaptive_admission policy{.miss_exponent = exponent};
      std::vector<layer_figures> const layers = layers_of(shares, slots, exponent);
      balance_question asked{.layers = layers, .least_slots = 40, .most_slots = 240, .mean_slots = 96};
      REQUIRE(policy.plan(asked, next).spread);
      CHECK(std::accumulate(next.begin(), next.end(), 0U) <= 5 * 96);
      CHECK(std::accumulate(next.begin(), next.end(), 0U) >= 5 * 96 - 5);
      for (std::uint32_t const n : next) { CHECK((n >= 40 && n <= 240)); }
      auto const misses = [&](std::vector<std::uint32_t> const& h) {
        double sum = 0.0;
        for (std::size_t l = 0; l < 5; ++l) { sum += shares[l] * std::pow(h[l] / 96.0, -exponent); }
        return sum;
      };
      // No exchange of two slots between two layers is better.
      for (std::size_t from = 0; from < 5; ++from) {
        for (std::size_t to = 0; to < 5; ++to) {
          std::vector<std::uint32_t> other = next;
          if (from == to || other[from] < 42 || other[to] > 238) { continue; }
          other[from] -= 2;
          other[to] += 2;
          CHECK(misses(other) >= misses(next) * (1.0 - 1e-9));
        }
      }
      // What is dealt out so stays.
      std::vector<layer_figures> const after = layers_of(shares, next, exponent);
      asked.layers = after;
      std::vector<std::uint32_t> again(5, 0);
      CHECK_FALSE(policy.plan(asked, again).spread);
    }
  }

  TEST_CASE("how misses fall with slots is fitted to what was measured before and after")
  {
    // Told 0.9; the layers behave by 1.6.
    std::vector<double> const shares{0.02, 0.2};
    std::vector<std::uint32_t> const moved{60, 132};
    std::vector<layer_figures> layers = layers_of(shares, moved, 1.6);
    for (std::size_t l = 0; l < 2; ++l) {
      layers[l].missed_share_before = shares[l];
      layers[l].slots_before = 96.0;
    }
    auto const second_layer = [&](adaptive_admission policy) {
      std::vector<std::uint32_t> next(2, 0);
      static_cast<void>(policy.plan({.layers = layers, .least_slots = 10, .most_slots = 240, .mean_slots = 96}, next));
      return next[1];
    };
    std::uint32_t const fitted = second_layer({});
    for (layer_figures& layer : layers) { layer.missed_share_before = 0.0; }
    std::uint32_t const told_right = second_layer({.miss_exponent = 1.6});
    std::uint32_t const told_wrong = second_layer({});
    // A larger exponent wants slots spread more evenly.
    CHECK(told_right != told_wrong);
    CHECK(std::abs(double(fitted) - told_right) < std::abs(double(told_wrong) - told_right));
  }

  TEST_CASE("nothing is dealt out where leases cannot differ, or too little was missed to say where")
  {
    std::vector<std::uint32_t> next(2, 0);
    std::vector<layer_figures> layers = layers_of({0.02, 0.2}, {96, 96}, 0.9);
    adaptive_admission policy;
    CHECK_FALSE(policy.plan({.layers = layers, .least_slots = 96, .most_slots = 96, .mean_slots = 96}, next).spread);
    for (layer_figures& layer : layers) {
      layer.selected_blocks /= 1e5;
      layer.missed_blocks /= 1e5;
    }
    CHECK_FALSE(policy.plan({.layers = layers, .least_slots = 10, .most_slots = 240, .mean_slots = 96}, next).spread);
  }

  TEST_CASE("a row keeps its blocks while slots for all of them are free")
  {
    adaptive_admission const policy;
    CHECK(policy.keeps_resident({.slots_prefill = 300, .slots_decode = 400}, with_free(400)));
    CHECK_FALSE(policy.keeps_resident({.slots_prefill = 300, .slots_decode = 400}, with_free(399)));
    // Somebody waits for slots.
    adaptive_admission crowded;
    std::vector<row_figures> const rows{resident(1, 600)};
    demand const first{.slots_prefill = 300, .slots_decode = 100};
    static_cast<void>(crowded.plan({.rows = rows, .waiting = &first, .free = with_free(50)}, {}));
    CHECK_FALSE(crowded.keeps_resident({.slots_prefill = 300, .slots_decode = 400}, with_free(400)));
  }

  TEST_CASE("working_set_admission lets rows in while what all selected in the last twelve steps fits the slots")
  {
    working_set_admission policy;
    capacity free{.rows_total = 100, .slots_free = 1000, .slots_total = 1000};
    CHECK(policy.admit({}, free) == admission::admitted);
    CHECK(policy.working_set() == 0.0);
    // Each of four rows selects 50 blocks, of which 5 are new in every step.
    for (int step = 0; step < 40; ++step) {
      policy.observe({.rows = 4, .selected_blocks = 200, .recalled_blocks = 20});
      CHECK(policy.working_set() == doctest::Approx(50.0 + 5.0 * std::min(step, 11)));
    }
    free.rows_running = 8;
    CHECK(policy.admit({}, free) == admission::admitted);  // 9 x 105
    free.rows_running = 9;
    CHECK(policy.admit({}, free) == admission::queued);
    CHECK(policy.admit({.slots_decode = 1001}, free) == admission::rejected);
    // Steps without rows say nothing.
    policy.observe({});
    CHECK(policy.working_set() == doctest::Approx(105.0));
  }
}
