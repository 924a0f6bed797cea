#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 1: recalled bytes equal the written bytes", Manager, lockstep_manager, hits_manager, fragment_manager)
  {
    kv_geometry geometry{
      .layers = 3,
      .query_heads = 4,
      .kv_heads = 2,
      .head_dim = 8,
      .block_tokens = 4,
      .extra_planes = {{.name = "scales", .bytes_per_token = 5, .bytes_per_block = 3}}};
    rig<Manager> r{
      {.geometry = geometry, .manager = {.max_rows = 2, .max_tokens = 160, .quota_tokens = 32}},
      {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24}};
    row_id const a = r.open(1, 60, 160);
    r.engine.prefill(a, 60, 8);
    REQUIRE(r.engine.fault() == "");
    std::uint64_t recalled = 0;
    for (std::uint32_t t = 60; t < 160; ++t) {
      r.step({{.row = a}});
      recalled += r.kv.finish_sample().recalled_blocks;
      REQUIRE(r.kv.audit() == "");
    }
    CHECK(recalled > 0);
    r.close_all();
  }
}
