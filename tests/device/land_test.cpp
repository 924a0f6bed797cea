#include "support/parallel_group.hpp"
#include "support/recall_scene.hpp"
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/land.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t stride = 6;

std::vector<slot_id> slots(std::vector<std::int32_t> const& numbers)
{
  std::vector<slot_id> ids;
  for (std::int32_t const number : numbers) { ids.push_back(static_cast<slot_id>(number)); }
  return ids;
}

/// Lists of one row with one head group in a scene of one layer.
struct lists {
  std::vector<slot_id> listed;
  std::uint32_t listed_count;
  std::vector<slot_id> landed;
  std::uint32_t landed_count;

  [[nodiscard]] lane_table_ref table()
  {
    return {
      .listed = listed.data(),
      .listed_count = &listed_count,
      .landed = landed.data(),
      .landed_count = &landed_count,
      .stride = stride,
      .max_selected = stride};
  }
};

/// Row 0 misses blocks 2, 5 and 9, which travel into slots 4, 1 and 3.
recall_plan_ref plan_of(recall_scene& scene, std::vector<std::uint32_t>& failed)
{
  scene.begin_plan(0);
  scene.add_row(0);
  scene.add_entry(0, 2, 0, 4);
  scene.add_entry(0, 5, 1, 1);
  scene.add_entry(0, 9, 2, 3);
  recall_plan_ref plan = scene.plan();
  plan.failed = failed.data();
  return plan;
}

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("law 10: lists without the blocks that did not arrive have no gap, since attention may read them at once")
  {
    struct {
      std::vector<std::uint32_t> failed;
      std::vector<std::int32_t> listed;
      std::vector<std::int32_t> landed;
    } const cases[] = {
      {{0, 0, 0}, {0, 4, 1, 3, 7}, {4, 1, 3}},
      {{1, 0, 0}, {0, 1, 3, 7}, {1, 3}},
      {{0, 1, 1}, {0, 4, 7}, {4}},
      {{1, 1, 1}, {0, 7}, {}}};
    for (auto const& one : cases) {
      for (std::uint32_t const threads : {1U, 4U}) {
        for (bool const whole : {true, false}) {
          recall_scene scene{{.layers = 1, .head_groups = 1, .max_rows = 1}};
          std::vector<std::uint32_t> failed = one.failed;
          recall_plan_ref const plan = plan_of(scene, failed);
          // A whole table lists hits and misses by block; else the misses are in the list of the landed alone.
          lists all{
            .listed = whole ? slots({0, 4, 1, 3, 7, -1}) : slots({0, 7, -1, -1, -1, -1}),
            .listed_count = whole ? 5U : 2U,
            .landed = slots({4, 1, 3, -1, -1, -1}),
            .landed_count = 3};
          landed_ref landed = scene.landed();
          landed.table = all.table();
          run_group(threads, [&](parallel_group const& group) { device::land_row(group, plan, landed, 0); });

          std::vector<std::int32_t> listed = whole ? one.listed : std::vector<std::int32_t>{0, 7};
          std::vector<std::int32_t> arrived = one.landed;
          CHECK(all.listed_count == listed.size());
          CHECK(all.landed_count == arrived.size());
          listed.resize(stride, -1);
          arrived.resize(stride, -1);
          CHECK(all.listed == slots(listed));
          CHECK(all.landed == slots(arrived));
        }
      }
    }
  }

  TEST_CASE("law 10: a recall that failed as a whole leaves the hits in the lists")
  {
    recall_scene scene{{.layers = 1, .head_groups = 1, .max_rows = 1}};
    std::vector<std::uint32_t> failed(3);
    recall_plan_ref const plan = plan_of(scene, failed);
    lists all{
      .listed = slots({4, 0, 1, 3, 7, -1}),
      .listed_count = 5,
      .landed = slots({4, 1, 3, -1, -1, -1}),
      .landed_count = 3};
    landed_ref landed = scene.landed();
    landed.table = all.table();
    device::fail_row(device::solo_group{}, plan, landed, 0);
    CHECK(all.listed_count == 2);
    CHECK(all.landed_count == 0);
    CHECK(all.listed == slots({0, 7, -1, -1, -1, -1}));
    CHECK(all.landed == slots({-1, -1, -1, -1, -1, -1}));
    CHECK(scene.has_failed(0));
  }
}
