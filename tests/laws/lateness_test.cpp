#include <doctest/doctest.h>
#include <support/explore.hpp>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Two sequences decode under a scheduler that ends each step at once where it may.
struct impatient {
  std::uint32_t steps = 9;
  std::uint64_t* late_rows;
  bool careless = false;  ///< the control

  std::string operator()(scripted_backend& backend) const
  {
    late_scheduler::record log{.careless = careless};
    small_rig<device_planned> r{backend, {.rows = 2, .layers = 1}, late_scheduler{&log}};
    row_id const rows[] = {r.open(1, 8), r.open(2, 7)};
    log.decisions = 0;
    std::uint32_t history[] = {0, 0};  // bit i: late i steps ago
    for (std::uint32_t step = 0; step < steps; ++step) {
      std::vector<step_row> batch;
      for (row_id const row : rows) {
        if (!r.kv.is_late(row)) { batch.push_back({.row = row}); }
      }
      log.made = 0;
      need(r.engine.step(std::span<step_row const>{batch}), "begin_step");
      r.look();
      for (int i = 0; i < 2; ++i) {
        bool const late = r.kv.is_late(rows[i]);
        need(!late || (history[i] & 0x7FU) == 0, "a row is late twice in eight steps");
        history[i] = history[i] << 1U | (late ? 1U : 0U);
        *late_rows += late ? 1U : 0U;
      }
    }
    log.decisions = ~0U;
    r.engine.most_visits = ~0U;
    need(r.engine.step(std::span<step_row const>{}), "begin_step");
    r.look();
    for (row_id const row : rows) { need(!r.kv.is_late(row), "a row is late in a step that could finish it"); }
    r.finish();
    return {};
  }
};

}  // namespace

TEST_SUITE("laws")
{
  TEST_CASE("law 9: in bounded and drawn orders no row is late more than one step in eight, however soon steps end")
  {
    std::uint64_t late = 0;
    for (copy_mode const copies : {copy_mode::late_read, copy_mode::early_write}) {
      script const how{.runs = progress::at_polls, .copies = copies};
      exploration near = explore_orders(how, impatient{9, &late}, {.orders = 1000, .deviations = 2});
      near += draw_orders(how, impatient{11, &late}, 500);
      exploration const control = draw_orders(how, impatient{9, &late, true}, 200);
      MESSAGE(compared(near, control) << "; rows left late: " << late);
      CHECK(near.wrong == 0);
      CHECK(control.wrong > 0);
    }
    CHECK(late > 1000);
  }
}
