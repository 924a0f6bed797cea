#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

kv_geometry geometry_of(std::uint32_t head_groups, bool mixed_layers = false)
{
  kv_geometry g{
    .layers = 4,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
  if (mixed_layers) {
    g.layer_groups = {
      {.first = 0, .count = 1},
      {.first = 1, .count = 1, .kind = layer_kind::windowed, .window_tokens = 10, .sink_tokens = 4},
      {.first = 2, .count = 1, .kind = layer_kind::dense},
      {.first = 3, .count = 1}};
  }
  return g;
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

std::vector<sequence_plan> const plans{{1, 40, 160}, {2, 10, 130}, {3, 61, 180, 5}};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 2: attention over the table equals attention over the same blocks kept resident, bit for bit", Manager,
    lockstep_manager, fragment_manager)
  {
    for (bool const mixed : {false, true}) {
      synthetic_model const model{geometry_of(mixed ? 1 : 2, mixed)};
      manager_options options{.max_rows = 3, .max_tokens = 200, .max_prefill_tokens = 8, .slots = 8000};
      options.quota_tokens = 32;  // the floor: six blocks and two that are written back
      model_rig<Manager> small{model, options, six_blocks};
      options.quota_tokens = 240;
      model_rig<lockstep_manager> large{model, options, six_blocks};
      run_plans(small, plans);
      run_plans(large, plans);
      for (sequence_plan const& plan : plans) {
        for (std::uint32_t t = 0; t < plan.length; ++t) {
          REQUIRE(small.engine.output(plan.seed, t) == large.engine.output(plan.seed, t));
        }
      }
    }
  }

  TEST_CASE("law 2: hits then landed equal one pass over all selected blocks within 1e-6 relative")
  {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      synthetic_model const model{geometry_of(head_groups)};
      model_rig<hits_manager> r{
        model,
        {.max_rows = 3, .max_tokens = 200, .max_prefill_tokens = 8, .quota_tokens = 32, .slots = 8000},
        six_blocks};
      std::vector<float> once(std::size_t{3} * 8 * 4 * 8);
      std::vector<slot_id> slots;
      std::vector<std::uint32_t> counts(3 * head_groups);
      std::vector<std::byte> scratch(1 << 20);
      double worst = 0.0;
      std::uint64_t compared = 0;
      r.engine.attended = [&](visit const& v) {
        if (v.part != part::landed) { return; }
        REQUIRE(r.backend.synchronize(r.stream) == status::ok);
        selection_ref const selection = r.kv.books().selection();
        slots.assign(std::size_t{3} * head_groups * v.table.stride, none<slot_id>);
        block_table table = v.table;
        table.which = part::whole;
        table.slots = slots.data();
        table.counts = counts.data();
        table.stride = selection.max_selected;
        for (row_id const row : v.rows) {
          if (v.table.info[to_index(row)].mode != row_mode::sparse_offloaded) { return; }  // a batch with dense rows
          for (std::uint32_t g = 0; g < head_groups; ++g) {
            lane_id const lane = lane_of(row, g, head_groups);
            counts[to_index(lane)] = selection.counts[to_index(lane)];
            for (std::uint32_t i = 0; i < counts[to_index(lane)]; ++i) {
              slots[to_index(lane) * table.stride + i] =
                r.kv.books().residency().slots_of_lane(v.layer, lane)[to_index(selection.ids_of(lane)[i])];
            }
          }
        }
        tensor_view const merged = r.engine.attention_view();
        tensor_view out = merged;
        out.data = reinterpret_cast<std::byte*>(once.data());
        run_operation(
          paged_attention{
            .table = table,
            .rows = v.rows,
            .queries = r.engine.query_view(),
            .out = out,
            .scale = 1.0F / std::sqrt(8.0F),
            .most_queries = 1},
          {.data = scratch.data(), .bytes = scratch.size()});
        for (row_id const row : v.rows) {
          std::uint64_t const token = to_index(row) * 8;
          for (std::uint32_t head = 0; head < 4; ++head) {
            auto const* const a = reinterpret_cast<float const*>(merged.row(token, head));
            auto const* const b = reinterpret_cast<float const*>(out.row(token, head));
            double size = 0.0, difference = 0.0;
            for (std::uint32_t d = 0; d < 8; ++d) {
              size = std::max(size, std::fabs(double{b[d]}));
              difference = std::max(difference, std::fabs(double{a[d]} - double{b[d]}));
            }
            worst = std::max(worst, difference / size);
            ++compared;
          }
        }
      };
      run_plans(r, plans);
      CHECK(compared > 1000);
      CHECK(worst < 1e-6);
    }
  }
}
