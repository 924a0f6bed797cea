#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/operation/order_entries.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/rank_group.hpp>
#include <support/recall_scene.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Groups of one thread run as a CPU does, larger ones as a device does.
void run(gather_blocks const& op, std::uint32_t ranks)
{
  if (ranks == 1) {
    run_operation(op, {});
  } else {
    run_with_ranks(op, ranks);
  }
}

/// join_entries over entries that stand in three rows.
struct joined_plan {
  std::vector<recall_entry> given;
  std::uint32_t head_groups;
  std::vector<std::uint32_t> row_begin = {};
  std::vector<recall_entry> entries = {};
  std::vector<target_span> of = {};
  std::vector<slot_id> targets = {};
  std::vector<join_entries::found> table = {};
  std::vector<join_entries::standing> stands = {};
  std::uint32_t begins[3] = {9, 9, 9};
  std::uint32_t first_row = 0;
  std::uint32_t row_count = 0;

  joined_plan(std::vector<recall_entry> list, std::uint32_t groups) : given{std::move(list)}, head_groups{groups}
  {
    auto const all = static_cast<std::uint32_t>(given.size());
    row_begin = {0, all / 3, all / 3, all};
    entries.resize(all);
    of.resize(all);
    targets.resize(all, none<slot_id>);
    table.resize(join_entries::table_places(all));
    stands.resize(all);
  }

  void run(std::uint32_t first = 1, std::uint32_t count = 2)
  {
    first_row = first;
    row_count = count;
    run_operation(
      join_entries{
        .plan =
          {.entries = given.data(),
           .row_begin = row_begin.data(),
           .head_groups = head_groups,
           .capacity = static_cast<std::uint32_t>(given.size())},
        .first_row = first,
        .row_count = count,
        .joined = entries.data(),
        .of = of.data(),
        .targets = targets.data(),
        .row_begin = begins,
        .table = table.data(),
        .stands = stands.data()},
      {});
  }
  [[nodiscard]] std::size_t first() const { return row_begin[first_row]; }
  [[nodiscard]] std::size_t last() const { return row_begin[first_row + row_count]; }
};

}  // namespace

TEST_SUITE("operation")
{
  // Report: vllm-project/vllm#45466
  TEST_CASE("law 1: gather_blocks moves every byte of every block and touches no other, at any pitch and alignment")
  {
    for (std::uint32_t pitch : {92U, 132U, 160U, 192U, 384U, 576U, 584U, 656U, 1152U, 37U, 2U}) {
      for (std::uint32_t tokens : {1U, 3U, 16U, 17U, 64U}) {
        for (std::uint32_t offset : {0U, 4U, 1U}) {
          recall_scene scene{
            {.layout = layout_of_pitch(pitch, tokens, 1),
             .layers = 2,
             .slots = 8,
             .offset = offset,
             .slot_padding = offset == 4 ? 12U : 0U}};
          for (std::uint32_t ranks : {1U, 64U}) {
            scene.clear_device();
            plan_three_rows(scene, 1);
            run({.plan = scene.plan(), .first_row = 0, .row_count = 3, .groups = 3}, ranks);
            scene.expect_all_arrived();
            REQUIRE_MESSAGE(
              scene.difference() == "",
              "pitch " << pitch << " tokens " << tokens << " offset " << offset << " ranks " << ranks);
          }
        }
      }
    }
  }

  TEST_CASE("gather_blocks shares the work out over any number of groups and threads without a gap")
  {
    for (std::uint32_t groups : {1U, 2U, 5U, 8U, 100U}) {
      for (std::uint32_t ranks : {1U, 2U, 31U, 32U, 33U, 100U, 256U}) {
        recall_scene scene{{.layout = layout_of_pitch(260, 17)}};
        plan_three_rows(scene, 2);
        run({.plan = scene.plan(), .first_row = 0, .row_count = 3, .groups = groups}, ranks);
        scene.expect_all_arrived();
        REQUIRE_MESSAGE(scene.difference() == "", "groups " << groups << " ranks " << ranks);
      }
    }
  }

  TEST_CASE("gather_blocks moves the rows that it is given and leaves the others")
  {
    for (std::uint32_t ranks : {1U, 32U}) {
      for (std::uint32_t first = 0; first < 3; ++first) {
        for (std::uint32_t count = 0; first + count <= 3; ++count) {
          recall_scene scene{{}};
          plan_three_rows(scene, 0);
          run({.plan = scene.plan(), .first_row = first, .row_count = count}, ranks);
          for (std::uint32_t place = first; place < first + count; ++place) { scene.expect_arrived(place); }
          CHECK(scene.difference() == "");
        }
      }
    }
  }

  // Report: sgl-project/sglang#23609
  TEST_CASE("gather_blocks has no items where the host knows that nothing can travel")
  {
    recall_scene scene{{}};
    plan_three_rows(scene, 0);
    recall_plan_ref plan = scene.plan();
    CHECK(gather_blocks{.plan = plan, .first_row = 1, .row_count = 0}.shape().items == 0);
    CHECK(gather_blocks{.plan = plan, .first_row = 0, .row_count = 3}.shape().items == 8);
    plan.capacity = 0;
    CHECK(gather_blocks{.plan = plan, .first_row = 0, .row_count = 3}.shape().items == 0);
  }

  TEST_CASE("gather_blocks charges the bytes of its rows, and neighbours at both ends as one run")
  {
    recall_scene scene{{}};
    plan_three_rows(scene, 1);
    operation_cost const all = gather_blocks{.plan = scene.plan(), .first_row = 0, .row_count = 3}.cost();
    CHECK(all.link_bytes == 6 * scene.sizes().layout.block_bytes);
    CHECK(all.link_runs == 5);
    CHECK(all.device_bytes == all.link_bytes);
    CHECK_FALSE(all.to_host);
    operation_cost const last = gather_blocks{.plan = scene.plan(), .first_row = 2, .row_count = 1}.cost();
    CHECK(last.link_bytes == 3 * scene.sizes().layout.block_bytes);
    CHECK(last.link_runs == 3);
    CHECK(gather_blocks{.plan = scene.plan(), .first_row = 1, .row_count = 1}.cost().link_runs == 0);
    // With room between slots nothing is contiguous.
    recall_scene apart{{.slot_padding = 16}};
    plan_three_rows(apart, 1);
    CHECK(gather_blocks{.plan = apart.plan(), .first_row = 0, .row_count = 3}.cost().link_runs == 6);
  }

  // Report: vllm-project/vllm#57019
  TEST_CASE("law 12: blocks of layers that lie apart, in any order, come from their own layer")
  {
    recall_scene scene{{.layout = layout_of_pitch(16, 4), .host_blocks = 6, .slots = 8}};
    for (std::uint32_t layer : {2U, 0U, 1U}) {
      plan_three_rows(scene, layer);
      run({.plan = scene.plan(), .first_row = 0, .row_count = 3}, 1);
      scene.expect_all_arrived();
      REQUIRE(scene.difference() == "");
    }
  }

  TEST_CASE("law 1: gather_blocks moves any plan as block by block copies do")
  {
    bool const held = rc::check([] {
      std::uint32_t const ranks = *rc::gen::element(1U, 32U, 96U);
      recall_scene scene{
        {.layout = layout_of_pitch(*rc::gen::inRange(1U, 70U), *rc::gen::inRange(1U, 40U)),
         .head_groups = *rc::gen::inRange(1U, 3U),
         .slots = 10,
         .slot_padding = *rc::gen::element(0U, 5U)}};
      scene.begin_plan(*rc::gen::inRange(0U, 3U));
      std::uint32_t slot = 0;
      for (std::int32_t row = 0; row < 4; ++row) {
        scene.add_row(row);
        std::uint32_t const count = *rc::gen::inRange(0U, 4U);
        for (std::uint32_t i = 0; i < count && slot < 10; ++i) {
          scene.add_entry(
            *rc::gen::inRange(0U, scene.sizes().head_groups), i, *rc::gen::inRange(0U, scene.sizes().host_blocks),
            slot++);
        }
      }
      run({.plan = scene.plan(), .first_row = 0, .row_count = 4, .groups = *rc::gen::inRange(1U, 9U)}, ranks);
      scene.expect_all_arrived();
      RC_ASSERT(scene.difference() == "");
    });
    CHECK(held);
  }

  // Report: vllm-project/vllm#50427
  TEST_CASE("addresses of blocks are 64-bit sums: no block id flips them")
  {
    host_store_ref host;
    std::byte* slab = nullptr;
    host.slab_base = &slab;
    host.block_stride = 65'536;
    slot_pool_ref pool;
    pool.layer_base = &slab;
    pool.slot_stride = 65'536;
    auto const offset = [&](std::byte const* address) { return reinterpret_cast<std::uintptr_t>(address); };
    struct given {
      std::int32_t block;
      std::uint64_t offset;
    };
    for (given const& it :
         {given{32'767, 2'147'418'112}, given{32'768, 2'147'483'648}, given{65'535, 4'294'901'760},
          given{65'536, 4'294'967'296}, given{131'072, 8'589'934'592}, given{2'147'483'647, 140'737'488'289'792}}) {
      CHECK(offset(host.address(layer_id{0}, 0, static_cast<host_block_id>(it.block))) == it.offset);
      CHECK(offset(pool.address(layer_id{0}, static_cast<slot_id>(it.block))) == it.offset);
    }
  }

  TEST_CASE("order_entries writes every entry of its rows once, by stretches of host memory that ascend")
  {
    CHECK(rc::check("order_entries", [] {
      std::uint32_t const head_groups = *rc::gen::inRange(1U, 4U);
      std::uint32_t const host_blocks = *rc::gen::inRange(1U, 40000U);
      std::uint64_t const stride = *rc::gen::element<std::uint64_t>(256, 1152, 65536, 4U << 20U);
      std::vector<recall_entry> entries(*rc::gen::inRange<std::size_t>(0, 300));
      for (std::size_t i = 0; i < entries.size(); ++i) {
        entries[i] = {
          .source = static_cast<host_block_id>(*rc::gen::inRange(0U, host_blocks)),
          .target = static_cast<slot_id>(i),
          .lane = static_cast<lane_id>(*rc::gen::inRange(0U, 3U * head_groups)),
          .block = static_cast<block_id>(i)};
      }
      auto const all = static_cast<std::uint32_t>(entries.size());
      std::uint32_t const row_begin[4] = {0, all / 3, all / 3, all};
      std::vector<recall_entry> ordered(entries.size());
      std::uint32_t begins[2] = {9, 9};
      order_entries const op{
        .plan =
          {.entries = entries.data(),
           .row_begin = row_begin,
           .host = {.block_stride = stride, .head_groups = head_groups, .blocks = host_blocks},
           .head_groups = head_groups,
           .capacity = all},
        .first_row = *rc::gen::inRange(0U, 2U),
        .row_count = 2,
        .ordered = ordered.data(),
        .row_begin = begins};
      std::uint32_t const first = row_begin[op.first_row];
      std::uint32_t const count = row_begin[op.first_row + 2] - first;
      RC_ASSERT(op.stretches() <= order_entries::most_stretches);
      std::vector<std::byte> scratch(op.scratch_bytes(1) + 16);
      run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
      RC_ASSERT(begins[0] == 0U && begins[1] == count);
      std::vector<bool> seen(all, false);
      std::uint32_t last = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        auto const from = static_cast<std::size_t>(to_index(ordered[i].target));
        RC_ASSERT(from >= first && from < first + count && !seen[from]);
        seen[from] = true;
        RC_ASSERT(ordered[i].source == entries[from].source && ordered[i].lane == entries[from].lane);
        std::uint32_t const stretch = op.stretch_of(ordered[i], op.stretch_blocks(), op.group_stretches());
        RC_ASSERT(stretch >= last && stretch < op.stretches());
        last = stretch;
      }
    }));
  }

  TEST_CASE("join_entries lists each source once, with the slots of all entries that name it")
  {
    CHECK(rc::check("join_entries", [] {
      std::uint32_t const head_groups = *rc::gen::inRange(1U, 4U);
      std::uint32_t const host_blocks = *rc::gen::inRange(1U, 60U);
      std::vector<recall_entry> entries(*rc::gen::inRange<std::size_t>(0, 200));
      for (std::size_t i = 0; i < entries.size(); ++i) {
        entries[i] = {
          .source = static_cast<host_block_id>(*rc::gen::inRange(0U, host_blocks)),
          .target = static_cast<slot_id>(i),
          .lane = static_cast<lane_id>(*rc::gen::inRange(0U, 8U * head_groups)),
          .block = static_cast<block_id>(i)};
      }
      joined_plan joined{entries, head_groups};
      joined.run();
      using source = std::pair<host_block_id, std::uint32_t>;
      std::map<source, std::set<slot_id>> wanted;
      auto const source_of = [&](recall_entry const& e) {
        return source{e.source, static_cast<std::uint32_t>(to_index(e.lane) % head_groups)};
      };
      for (std::size_t i = joined.first(); i < joined.last(); ++i) {
        wanted[source_of(entries[i])].insert(entries[i].target);
      }
      RC_ASSERT(joined.begins[0] == 0U && joined.begins[1] == wanted.size());
      std::uint32_t listed = 0;
      for (std::uint32_t i = 0; i < joined.begins[1]; ++i) {
        auto const found = wanted.find(source_of(joined.entries[i]));
        RC_ASSERT(found != wanted.end());
        target_span const span = joined.of[i];
        std::set<slot_id> targets{joined.entries[i].target};
        if (span.count != 0) {
          RC_ASSERT(span.count == found->second.size());
          targets = {joined.targets.begin() + span.begin, joined.targets.begin() + span.begin + span.count};
          listed += span.count;
        }
        RC_ASSERT(targets == found->second);
        wanted.erase(found);
      }
      RC_ASSERT(wanted.empty() && joined.begins[2] == listed);
    }));
  }

  TEST_CASE("law 12: entries are joined where host block and head group are the same, and nowhere else")
  {
    join_entries const op{.plan = {.head_groups = 4}};
    recall_entry const one{.source = host_block_id{7}, .lane = lane_id{5}};
    for (std::int32_t lane = 0; lane < 12; ++lane) {
      recall_entry other = one;
      other.lane = static_cast<lane_id>(lane);
      CHECK(op.same_source(one, other) == (lane % 4 == 1));
      other.source = host_block_id{8};
      CHECK_FALSE(op.same_source(one, other));
    }
  }

  TEST_CASE("law 1: blocks that rows share reach a slot of each, and cross the link once")
  {
    for (std::uint32_t const pitch : {37U, 64U, 260U}) {
      for (std::uint32_t const ranks : {1U, 33U, 64U}) {
        recall_scene scene{{.layout = layout_of_pitch(pitch, 17), .slots = 24}};
        scene.begin_plan(1);
        for (std::int32_t row = 0; row < 8; ++row) {
          scene.add_row(row);
          auto const slot = static_cast<std::uint32_t>(row) * 3;
          scene.add_entry(0, 0, 2, slot);
          scene.add_entry(1, 0, 2, slot + 2);  // the same host block in another slab
          scene.add_entry(0, 1, row % 2 == 0 ? 4U : 5U, slot + 1);
        }
        recall_plan_ref plan = scene.plan();
        joined_plan joined{{plan.entries, plan.entries + 24}, 2};
        joined.row_begin = {0, 24, 24, 24};
        joined.run(0, 1);
        REQUIRE(joined.begins[1] == 4);
        plan.entries = joined.entries.data();
        plan.row_begin = joined.begins;
        gather_blocks const op{
          .plan = plan,
          .first_row = 0,
          .row_count = 1,
          .groups = 3,
          .further = {.of = joined.of.data(), .targets = joined.targets.data()}};
        run(op, ranks);
        scene.expect_all_arrived();
        REQUIRE_MESSAGE(scene.difference() == "", "pitch " << pitch << " ranks " << ranks);
        CHECK(op.cost().link_bytes == 4 * scene.sizes().layout.block_bytes);
        CHECK(op.cost().device_bytes == 24 * scene.sizes().layout.block_bytes);
      }
    }
  }
}
