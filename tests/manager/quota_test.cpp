#include <doctest/doctest.h>
#include <support/manager/chosen_blocks.hpp>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Selections of seven blocks, of which one is open: the floor of the quota is seven slots and the write-back depth.
rig_options seven_blocks(std::uint32_t quota, std::uint32_t depth = 0)
{
  return {
    .geometry = {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 4, .block_tokens = 1},
    .manager =
      {.max_rows = 1, .max_tokens = 80, .max_prefill_tokens = 8, .quota_tokens = quota, .write_back_depth = depth},
    .per_row = 8};
}

constexpr external_selector choice{.budget_tokens = 7, .dense_tokens = 7};

}  // namespace

TEST_SUITE("manager")
{
  // Report: sgl-project/sglang#22453
  TEST_CASE("at the floor two disjoint choices in turn miss every chosen block, and the sample says that they thrash")
  {
    for (std::uint32_t const depth : {0U, 1U, 2U}) {
      rig<chosen_manager> r{seven_blocks(7 + depth, depth), choice};
      row_id const row = r.open(1, 40, 80);
      r.engine.prefill(row, 40, 8);
      bool second = false;
      r.engine.before_enter = [&](layer_id layer, row_list rows) {
        for (row_id const id : rows) {
          if (r.kv.mode_of(id) != row_mode::sparse_offloaded) { continue; }
          std::uint32_t const blocks = r.engine.row(id).begin + r.engine.row(id).count;
          std::vector<block_id> ids;
          for (std::int32_t b = 0; b < 6; ++b) { ids.push_back(block_id{(second ? 20 : 4) + 2 * b}); }
          REQUIRE(r.kv.selector().import_selection(layer, lane_of(id, 0, 1), ids, blocks) == status::ok);
        }
      };
      for (int step = 0; step < 30; ++step) {
        second = step % 2 != 0;
        r.step({{.row = row}});
        step_sample const& sample = r.kv.finish_sample();
        REQUIRE(r.kv.audit() == "");
        if (step < 2) { continue; }
        CHECK(sample.recalled_blocks == 2 * 6);
        CHECK(sample.selected_blocks == 2 * 7);
        CHECK(sample.thrash_steps == 1);
      }
      // The same choice again and again: what still travels is the block whose slot a newly written one has taken.
      for (int step = 0; step < 4; ++step) {
        r.step({{.row = row}});
        static_cast<void>(r.kv.finish_sample());
        CHECK((r.kv.last_sample().thrash_steps == 0 || step == 0));
        CHECK((r.kv.last_sample().recalled_blocks <= 2 * 1 || step == 0));
      }
      r.close_all();
    }
  }

  TEST_CASE("a selection of the open block alone works, without any slot to lease")
  {
    for (std::uint32_t const depth : {0U, 2U}) {
      rig<lockstep_manager> r{
        {.geometry = {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 4, .block_tokens = 4},
         .manager =
           {.max_rows = 2,
            .max_tokens = 80,
            .max_prefill_tokens = 8,
            .quota_tokens = 4 * (1 + depth),
            .write_back_depth = depth}},
        {.budget_tokens = 4, .sink_tokens = 0, .recent_tokens = 0, .dense_tokens = 4}};
      CHECK(r.kv.budget().lease == 0);
      row_id const row = r.open(1, 10, 80);
      r.engine.prefill(row, 10, 8);
      for (int step = 0; step < 70; ++step) {
        r.step({{.row = row}});
        REQUIRE(r.kv.audit() == "");
        CHECK(r.kv.finish_sample().recalled_blocks == 0);
      }
      r.close_all();
    }
  }

  // Report: sgl-project/sglang#22453
  TEST_CASE("a request whose slots do not fit waits at admission, and one that never will is rejected with the numbers")
  {
    rig_options options = seven_blocks(8);
    options.manager.max_rows = 3;
    options.manager.slots = 100;  // two rows with a prompt of 24 take 2 layers x 25
    rig<lockstep_manager> r{options, {.budget_tokens = 7, .sink_tokens = 1, .recent_tokens = 1, .dense_tokens = 7}};
    row_id const a = r.open(1, 24, 80);
    static_cast<void>(r.open(2, 24, 80));
    row_id third{};
    CHECK(r.kv.open({.prompt_tokens = 24, .max_tokens = 80}, third) == admission::queued);
    CHECK(is_none(third));
    std::string const text = r.kv.explain_refusal({.prompt_tokens = 24, .max_tokens = 80});
    CHECK(text.starts_with("lacks slots: "));
    CHECK(text.find("50 slots (0 of 100 free)") != std::string::npos);
    CHECK(r.kv.open({.prompt_tokens = 60, .max_tokens = 80}, third) == admission::rejected);
    REQUIRE(r.kv.close(a) == status::ok);
    CHECK(r.kv.open({.prompt_tokens = 24, .max_tokens = 80}, third) == admission::admitted);
    r.engine.assign(third, 3);
    r.engine.prefill(third, 24, 8);
    for (int step = 0; step < 20; ++step) { r.step({{.row = third}}); }
    r.close_all();
  }
}
