#include <pulseinfer/manager/slot_budget.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

using namespace pulseinfer;

namespace {

kv_geometry geometry_of(std::uint32_t block_tokens)
{
  return {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 4, .block_tokens = block_tokens};
}

slot_budget budget_of(
  kv_geometry const& geometry, manager_options const& options, std::uint32_t budget_blocks,
  std::uint32_t dense_tokens = 0)
{
  return make_slot_budget(geometry, options, dense_tokens, [&](layer_id) { return budget_blocks; });
}

std::string text_of(kv_geometry const& geometry, manager_options const& options, std::uint32_t budget_blocks)
{
  try {
    static_cast<void>(budget_of(geometry, options, budget_blocks));
  } catch (error const& thrown) {
    return thrown.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("manager")
{
  // Report: sgl-project/sglang#22453
  TEST_CASE("the floor of a quota is what one step can pin; one slot less is refused with the numbers")
  {
    kv_geometry const geometry = geometry_of(1);
    manager_options options{.max_tokens = 40, .max_step_tokens = 2, .write_back_depth = 0};
    for (std::uint32_t const quota : {6U, 7U}) {
      options.quota_tokens = quota;
      CHECK(
        text_of(geometry, options, 7) ==
        "invalid_argument: hot cache has " + std::to_string(quota) +
          " slots, one step can pin 8: a selection of 7 blocks, 1 that drafts may open and 0 being written back; "
          "quota_tokens is " +
          std::to_string(quota) + " and must be at least 8");
    }
    for (std::uint32_t const quota : {8U, 9U}) {
      options.quota_tokens = quota;
      slot_budget const budget = budget_of(geometry, options, 7);
      CHECK(budget.quota == quota);
      CHECK(budget.ring == 2);
      CHECK(budget.lease == quota - 2);
    }
    options.write_back_depth = 2;
    CHECK_FALSE(text_of(geometry, options, 7).empty());
    options.quota_tokens = 10;
    CHECK(budget_of(geometry, options, 7).lease == 6);
  }

  TEST_CASE("drafts count by the blocks that they may open, however the block boundary falls")
  {
    struct expected {
      std::uint32_t block_tokens, step_tokens, open;
    };
    for (expected const e : {expected{1, 1, 1}, {1, 4, 4}, {4, 1, 1}, {4, 2, 2}, {4, 5, 2}, {4, 6, 3}, {16, 4, 2}}) {
      manager_options options{.max_tokens = 64 * e.block_tokens, .max_step_tokens = e.step_tokens};
      slot_budget const budget = budget_of(geometry_of(e.block_tokens), options, 10);
      CHECK(budget.open_blocks == e.open);
      CHECK(budget.ring == e.open + 2);
      CHECK(budget.quota == 30);  // three budgets where nothing else is asked
      options.quota_tokens = (10 + e.open - 1 + 2) * e.block_tokens;
      CHECK(budget_of(geometry_of(e.block_tokens), options, 10).lease == 9);
    }
  }

  TEST_CASE("sizes of 0 are refused by name")
  {
    manager_options const good{.max_tokens = 40};
    auto const refused = [&](auto change) {
      manager_options options = good;
      change(options);
      return text_of(geometry_of(4), options, 3);
    };
    CHECK(text_of(geometry_of(4), good, 3).empty());
    CHECK(refused([](manager_options& o) { o.max_rows = 0; }) == "invalid_argument: max_rows is 0");
    CHECK(refused([](manager_options& o) { o.max_tokens = 0; }) == "invalid_argument: max_tokens is 0");
    CHECK(refused([](manager_options& o) { o.max_step_tokens = 0; }) == "invalid_argument: max_step_tokens is 0");
    CHECK(refused([](manager_options& o) { o.max_prefill_tokens = 0; }) == "invalid_argument: max_prefill_tokens is 0");
  }

  TEST_CASE(
    "a row needs slots for its prompt while it comes in, for its quota once it decodes, and never more than it is long")
  {
    kv_geometry geometry = geometry_of(4);
    geometry.layers = 4;
    geometry.layer_groups = {
      {.first = 0, .count = 1},
      {.first = 1, .count = 1, .kind = layer_kind::dense},
      {.first = 2, .count = 2, .kind = layer_kind::windowed, .window_tokens = 10, .sink_tokens = 3}};
    manager_options const options{.max_tokens = 400, .max_step_tokens = 1, .max_prefill_tokens = 8, .quota_tokens = 40};
    slot_budget const budget = budget_of(geometry, options, 6, 24);
    layer_group const selected = geometry.layer_groups[0], dense = geometry.layer_groups[1],
                      windowed = geometry.layer_groups[2];
    CHECK(budget.offloads(25));
    CHECK_FALSE(budget.offloads(24));
    CHECK(budget.resident_slots(selected, 100, 400) == 26);  // the prompt and one token more
    CHECK(budget.resident_slots(selected, 0, 400) == 7);     // up to the threshold
    CHECK(budget.resident_slots(selected, 100, 101) == 26);
    CHECK(budget.decode_slots(selected, 400) == 10);
    CHECK(budget.decode_slots(selected, 24) == 6);
    CHECK(budget.resident_slots(dense, 100, 400) == 100);
    CHECK(budget.decode_slots(dense, 400) == 100);
    CHECK(budget.resident_slots(windowed, 100, 400) == window_blocks(10 + 7, 4) + 1);
    CHECK(budget.decode_slots(windowed, 400) == window_blocks(10, 4) + 1);
    CHECK(budget.decode_slots(windowed, 7) == 2);
    CHECK(budget.max_selected == 6);
  }

  TEST_CASE("without a selected layer nothing is offloaded and no quota is asked for")
  {
    kv_geometry geometry = geometry_of(4);
    geometry.layer_groups = {{.first = 0, .count = 2, .kind = layer_kind::dense}};
    slot_budget const budget = budget_of(geometry, {.max_tokens = 40, .quota_tokens = 4}, 6, 8);
    CHECK_FALSE(budget.offloads(40));
    CHECK(budget.lease == 0);
    CHECK(budget.decode_slots(geometry.layer_groups[0], 40) == 10);
  }
}
