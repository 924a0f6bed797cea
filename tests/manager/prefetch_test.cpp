#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>
#include <support/manager/rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

kv_geometry geometry_of(std::uint32_t head_groups)
{
  return {
    .layers = 4,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};
std::vector<sequence_plan> const plans{{1, 40, 160}, {2, 10, 130}, {3, 61, 180, 5}};

manager_options options_of(std::uint32_t quota)
{
  return {.max_rows = 3, .max_tokens = 200, .max_prefill_tokens = 8, .quota_tokens = quota, .slots = 8000};
}

/// Runs the plans; after each visit the next layer's blocks are asked for with this layer's queries.
template <class Manager>
std::uint64_t run_with_prefetch(model_rig<Manager>& r)
{
  std::uint64_t brought = 0;
  std::uint64_t step = 0;
  r.engine.attended = [&](visit const& v) {
    if (v.last || v.part == part::hits) { return; }
    status const asked = r.kv.prefetch(v.next, v.rows, r.engine.query_view());
    REQUIRE((asked == status::ok || asked == status::busy));
    if (r.kv.last_sample().step != step) {
      step = r.kv.last_sample().step;
      brought += r.kv.last_sample().background_blocks;
    }
  };
  run_plans(r, plans);
  return brought;
}

/// 80 steps in the order that the seed draws, each layer by a ticket, with a perfect estimate before it: the queries
/// themselves. Every block that attention sees must have its bytes. @return sums over the steps
step_sample run_by_tickets(std::uint64_t seed, bool prefetch)
{
  rig<hits_manager> r{
    {.geometry = geometry_of(1),
     .manager = {.max_rows = 1, .max_tokens = 160, .max_prefill_tokens = 8, .quota_tokens = 48},
     .cpu = {.mode = cpu_mode::manual, .seed = seed},
     .per_row = 8},
    six_blocks};
  row_id const row = r.open(1, 50, 160);
  r.engine.prefill(row, 50, 8);
  r.kv.finish_sample();
  step_sample sums;
  for (int i = 0; i < 80; ++i) {
    std::vector<step_row> const rows{{.row = row}};
    REQUIRE(r.kv.begin_step(rows) == status::ok);
    auto& state = r.engine.row(row);
    state.begin = r.kv.tokens_of(row);
    state.count = 1;
    ++state.version[state.begin];
    for (std::uint32_t l = 0; l < 4; ++l) {
      auto const layer = static_cast<layer_id>(l);
      REQUIRE(r.backend.synchronize(r.stream) == status::ok);
      r.engine.fill(layer, r.kv.rows());
      REQUIRE(r.kv.append(layer, r.kv.rows(), r.engine.key_view(), r.engine.value_view()) == status::ok);
      if (prefetch) { REQUIRE(r.kv.prefetch(layer, r.kv.rows(), r.engine.query_view()) == status::ok); }
      ticket given;
      REQUIRE(r.kv.begin_recall(layer, r.kv.rows(), r.engine.query_view(), r.stream, given) == status::ok);
      REQUIRE(r.kv.wait_on(given, r.stream) == status::ok);
      for (part const which : {part::hits, part::landed}) {
        visit v{.layer = layer, .rows = r.kv.rows(), .part = which, .last = l == 3};
        REQUIRE(r.kv.table(given, which, v.table) == status::ok);
        REQUIRE(r.backend.launch(r.stream, host_function{[&r, v] { r.engine.look(v); }}) == status::ok);
      }
      REQUIRE(r.backend.synchronize(r.stream) == status::ok);
      REQUIRE(r.engine.fault() == "");
      CHECK(r.kv.status_of(given) == status::ok);
    }
    std::vector<commit_row> const kept{{.row = row}};
    REQUIRE(r.kv.commit(kept) == status::ok);
    REQUIRE(r.kv.audit() == "");
    step_sample const& sample = r.kv.finish_sample();
    sums.recalled_blocks += sample.recalled_blocks;
    sums.background_blocks += sample.background_blocks;
    sums.selected_blocks += sample.selected_blocks;
  }
  r.close_all();
  return sums;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "what comes ahead of need changes no result, bit for bit", Manager, lockstep_manager, fragment_manager)
  {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      synthetic_model const model{geometry_of(head_groups)};
      for (std::uint32_t const quota : {36U, 40U, 72U}) {
        model_rig<Manager> without{model, options_of(quota), six_blocks};
        run_plans(without, plans);
        model_rig<Manager> with{model, options_of(quota), six_blocks};
        CHECK(run_with_prefetch(with) > 0);
        for (sequence_plan const& plan : plans) {
          for (std::uint32_t t = 0; t < plan.length; ++t) {
            REQUIRE(with.engine.output(plan.seed, t) == without.engine.output(plan.seed, t));
          }
        }
      }
    }
  }

  TEST_CASE("at the floor of the quota nothing travels in the background, so that a demand always finds slots")
  {
    synthetic_model const model{geometry_of(1)};
    model_rig<lockstep_manager> r{model, options_of(32), six_blocks};
    CHECK(run_with_prefetch(r) == 0);
  }

  TEST_CASE("no more than 512 KiB travel in the background, of however many rows, and every row has its turn")
  {
    // Blocks of 200 KB: two of them fit, and none of 600 KB.
    for (std::uint32_t const state_bytes : {200000U, 600000U}) {
      rig<hits_manager> r{
        {.geometry =
           {.layers = 2,
            .query_heads = 2,
            .kv_heads = 2,
            .head_dim = 4,
            .block_tokens = 4,
            .extra_planes = {{.name = "state", .bytes_per_token = 0, .bytes_per_block = state_bytes}}},
         .manager = {.max_rows = 5, .max_tokens = 80, .max_prefill_tokens = 8, .quota_tokens = 48},
         .cpu = {.mode = cpu_mode::manual},
         .per_row = 8},
        six_blocks};
      std::vector<step_row> rows;
      for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        rows.push_back({.row = r.open(seed, 50, 80)});
        rows.back().token_offset = static_cast<std::uint32_t>(to_index(rows.back().row)) * 8;
        r.engine.prefill(rows.back().row, 50, 8);
      }
      r.kv.finish_sample();
      std::vector<std::uint32_t> brought(5, 0);
      for (int step = 0; step < 24; ++step) {
        REQUIRE(r.kv.begin_step(rows) == status::ok);
        for (step_row const& each : rows) {
          auto& state = r.engine.row(each.row);
          state.begin = r.kv.tokens_of(each.row);
          state.count = 1;
          ++state.version[state.begin];
        }
        for (std::uint32_t l = 0; l < 2; ++l) {
          auto const layer = static_cast<layer_id>(l);
          REQUIRE(r.backend.synchronize(r.stream) == status::ok);
          r.engine.fill(layer, r.kv.rows());
          REQUIRE(r.kv.append(layer, r.kv.rows(), r.engine.key_view(), r.engine.value_view()) == status::ok);
          if (l == 1) { REQUIRE(r.kv.prefetch(layer, r.kv.rows(), r.engine.query_view()) == status::ok); }
          ticket given;
          REQUIRE(r.kv.begin_recall(layer, r.kv.rows(), r.engine.query_view(), r.stream, given) == status::ok);
          REQUIRE(r.kv.wait_on(given, r.stream) == status::ok);
          REQUIRE(r.backend.synchronize(r.stream) == status::ok);
        }
        std::vector<commit_row> kept;
        for (step_row const& each : rows) { kept.push_back({.row = each.row}); }
        REQUIRE(r.kv.commit(kept) == status::ok);
        REQUIRE(r.kv.drain(no_deadline) == status::ok);
        std::uint64_t const blocks = r.kv.finish_sample().background_blocks;
        CHECK(blocks * r.kv.layout().block_bytes <= (std::uint64_t{512} << 10U));
        brought[static_cast<std::size_t>(step) % 3] += static_cast<std::uint32_t>(blocks);
      }
      // Five rows take three turns: two, two and one.
      for (std::size_t turn = 0; turn < 3; ++turn) { CHECK((brought[turn] > 0) == (state_bytes == 200000)); }
      r.close_all();
    }
  }

  TEST_CASE("a block that is on its way when it is selected is waited for, and is no miss")
  {
    std::uint64_t misses_before = 0, misses = 0, waited = 0, brought = 0;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      misses_before += run_by_tickets(seed, false).recalled_blocks;
      step_sample const sums = run_by_tickets(seed, true);
      misses += sums.recalled_blocks;
      brought += sums.background_blocks;
      waited += 80 * 4 * 6 - sums.selected_blocks;  // neither resident nor misses
    }
    CHECK(brought > 0);
    CHECK(misses < misses_before);
    CHECK(waited > 0);
    CHECK(waited <= brought);
  }

  TEST_CASE("a prefetch with wrong arguments enqueues nothing")
  {
    synthetic_model const model{geometry_of(1)};
    model_rig<lockstep_manager> r{model, options_of(40), six_blocks};
    row_id const row = r.open(1, 40, 160);
    r.engine.prefill(row, 40, 8);
    while (r.kv.tokens_of(row) < 60) { r.engine.step({{.row = row}}); }
    tensor_view const queries = r.engine.query_view();
    row_id const ids[] = {row};
    row_list const list{.ids = ids, .count = 1};
    CHECK(r.kv.prefetch(layer_id{1}, list, queries) == status::invalid_state);  // in no step
    std::vector<step_row> const rows{{.row = row}};
    REQUIRE(r.kv.begin_step(rows) == status::ok);
    CHECK(r.kv.prefetch(layer_id{4}, r.kv.rows(), queries) == status::out_of_range);
    CHECK(r.kv.prefetch(none<layer_id>, r.kv.rows(), queries) == status::out_of_range);
    tensor_view narrow = queries;
    narrow.dim = 4;
    CHECK(r.kv.prefetch(layer_id{1}, r.kv.rows(), narrow) == status::invalid_argument);
    row_id const strange[] = {row_id{9}};
    CHECK(r.kv.prefetch(layer_id{1}, {.ids = strange, .count = 1}, queries) == status::out_of_range);
    CHECK(r.kv.audit() == "");
  }
}
