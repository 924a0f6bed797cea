#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("manager")
{
  TEST_CASE("a ticket whose row has no slot left for what it selects says that it stalls, and never that it has landed")
  {
    // Five blocks of budget at the floor of the quota: a second selection in the same step, of other blocks, has no victims.
    rig<chosen_manager> r{
      {.geometry = {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 4, .block_tokens = 4},
       .manager = {.max_rows = 1, .max_tokens = 100, .max_prefill_tokens = 8, .quota_tokens = 28},
       .per_row = 8},
      {.budget_tokens = 20, .dense_tokens = 20}};
    std::vector<block_id> chosen;
    auto const import = [&](layer_id layer, row_list rows) {
      for (row_id const row : rows) {
        auto const& state = r.engine.row(row);
        if (r.kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
        auto const blocks = static_cast<std::uint32_t>(blocks_of(state.begin + state.count, 4));
        REQUIRE(r.kv.selector().import_selection(layer, lane_of(row, 0, 1), chosen, blocks) == status::ok);
      }
    };
    r.engine.before_enter = import;
    row_id const row = r.open(1, 60, 100);
    r.engine.prefill(row, 60, 8);
    chosen = {block_id{0}, block_id{1}, block_id{2}, block_id{3}};
    r.step({{.row = row}});

    step_row const one{.row = row};
    REQUIRE(r.engine.begin({&one, 1}) == status::ok);
    row_list const rows = r.kv.rows();
    REQUIRE(r.kv.append(layer_id{0}, rows, r.engine.key_view(), r.engine.value_view()) == status::ok);
    ticket first, second;
    for (ticket* const given : {&first, &second}) {
      REQUIRE(r.backend.synchronize() == status::ok);
      import(layer_id{0}, rows);
      REQUIRE(r.kv.begin_recall(layer_id{0}, rows, r.engine.query_view(), r.stream, *given) == status::ok);
      chosen = {block_id{4}, block_id{5}, block_id{6}, block_id{7}};
      if (given == &first) {
        REQUIRE(r.backend.synchronize() == status::ok);
        CHECK(r.kv.status_of(first) == status::ok);
      }
    }
    CHECK(r.kv.wait_on(second, r.stream) == status::ok);
    REQUIRE(r.backend.synchronize() == status::ok);
    CHECK(r.kv.status_of(second) == status::stalled);
    CHECK_FALSE(r.kv.landed(second).test(0));
    CHECK(r.kv.audit() == "");

    // The step was not what the slots are for; the next one is.
    REQUIRE(r.kv.append(layer_id{1}, rows, r.engine.key_view(), r.engine.value_view()) == status::ok);
    commit_row const none_kept{.row = row, .accepted = 0};
    REQUIRE(r.kv.commit({&none_kept, 1}) == status::ok);
    r.engine.row(row).in_step = false;
    r.step({{.row = row}});
    r.close_all();
  }
}
