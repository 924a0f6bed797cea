#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t row_count = 8;

rig_options options_of(std::uint32_t block_tokens, std::uint32_t depth, std::uint32_t step_tokens)
{
  auto const open_blocks = static_cast<std::uint32_t>(window_blocks(step_tokens, block_tokens));
  std::uint32_t const quota = 5 + open_blocks + open_blocks - 1 + depth;
  return {
    .geometry =
      {.layers = 3,
       .query_heads = 4,
       .kv_heads = 2,
       .head_dim = 4,
       .block_tokens = block_tokens,
       .head_groups = 2,
       .extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 2}}},
    .manager =
      {.max_rows = row_count,
       .max_tokens = 28 * block_tokens,
       .max_step_tokens = step_tokens,
       .max_prefill_tokens = 16,
       .quota_tokens = quota * block_tokens,
       .write_back_depth = depth,
       .warm_up_queries = 4},
    .cpu = {.mode = cpu_mode::threaded},
    .per_row = 16};
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 1: with a thread per stream a batch of sequences that come and go finds its own bytes", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    for (std::uint32_t const block_tokens : {1U, 4U}) {
      std::uint32_t const depth = block_tokens == 1 ? 2 : 1, step_tokens = block_tokens == 1 ? 1 : 3;
      std::uint32_t const budget = 5 + static_cast<std::uint32_t>(window_blocks(step_tokens, block_tokens));
      rig<Manager> r{
        options_of(block_tokens, depth, step_tokens),
        {.budget_tokens = budget * block_tokens,
         .sink_tokens = block_tokens,
         .recent_tokens = block_tokens,
         .dense_tokens = budget * block_tokens}};
      r.engine.warm_up = true;
      std::mt19937_64 random{block_tokens};
      std::uint32_t const length = 28 * block_tokens;
      std::uint64_t sequences = 0, recalled = 0;
      std::vector<std::uint32_t> prompts(row_count, 0);
      for (std::uint32_t step = 0; step < 90; ++step) {
        row_id row{};
        auto const prompt = static_cast<std::uint32_t>(1 + random() % (length / 2));
        if (r.kv.open({.prompt_tokens = prompt, .max_tokens = length}, row) == admission::admitted) {
          r.engine.assign(row, ++sequences);
          prompts[to_index(row)] = prompt;
        }
        std::vector<step_row> batch;
        for (std::uint32_t i = 0; i < row_count; ++i) {
          row = static_cast<row_id>(i);
          if (r.kv.mode_of(row) == row_mode::idle || !r.kv.sequences()[row].open()) { continue; }
          std::uint32_t const now = r.kv.tokens_of(row);
          std::uint32_t const left = prompts[i] > now ? prompts[i] - now : 0;
          std::uint32_t const count = std::min(left == 0 ? step_tokens : std::min(left, 16U), length - now);
          if (count == 0) {
            status const closed = r.kv.close(row);
            REQUIRE((closed == status::ok || closed == status::invalid_state));  // its copies may still fly
            continue;
          }
          batch.push_back({.row = row, .tokens = count});
          r.engine.row(row).accept = left == 0 ? static_cast<std::uint32_t>(random() % (count + 1)) : count;
        }
        status const stepped = r.engine.step(batch);
        REQUIRE(stepped == status::ok);
        REQUIRE(r.engine.fault() == "");
        recalled += r.kv.finish_sample().recalled_blocks;
        REQUIRE(r.kv.audit() == "");
      }
      CHECK(recalled > 0);
      r.close_all();
    }
  }

  TEST_CASE(
    "a store that grows on a thread of its own lets rows decode meanwhile, and takes in those that waited for it")
  {
    rig_options options = options_of(4, 1, 1);
    options.manager.host_blocks = 30;  // one sequence of 28 blocks
    options.manager.max_host_blocks = 150000;
    rig<hits_manager> r{options, {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24}};
    std::uint64_t sequences = 0;
    std::vector<row_id> rows;
    std::uint32_t turned_away = 0;
    for (std::uint32_t step = 0; step < 60; ++step) {
      row_id row{};
      if (r.kv.open({.prompt_tokens = 16, .max_tokens = 112}, row) == admission::admitted) {
        r.engine.assign(row, ++sequences);
        r.engine.prefill(row, 16, 16);
        rows.push_back(row);
      } else {
        ++turned_away;
      }
      if (step == 5) {
        CHECK(rows.size() == 1);
        REQUIRE(r.kv.grow_host_store(149000) == status::ok);
        CHECK(r.kv.grow_host_store(1) == status::busy);
      }
      std::vector<step_row> batch;
      for (row_id const each : rows) { batch.push_back({.row = each}); }
      REQUIRE(r.engine.step(batch) == status::ok);
      REQUIRE(r.engine.fault() == "");
    }
    while (r.kv.store().growth().under_way) {
      REQUIRE(r.kv.begin_step({}) == status::ok);
      REQUIRE(r.kv.commit({}) == status::ok);
    }
    CHECK(r.kv.store().growth_refusal() == "");
    CHECK(r.kv.store().blocks() == 149030);
    CHECK(turned_away >= 5);
    row_id late{};
    if (rows.size() < row_count) {
      REQUIRE(r.kv.open({.prompt_tokens = 16, .max_tokens = 112}, late) == admission::admitted);
      REQUIRE(r.kv.close(late) == status::ok);
    }
    CHECK(r.kv.audit() == "");
    r.close_all();
  }

  TEST_CASE("law 12: blocks that come to be while others are written and read hold what is written to them")
  {
    cpu_backend backend;
    block_layout layout;
    layout.block_bytes = 65536;
    layout.alignment = 16;
    for (bool const ends_early : {false, true}) {
      host_store<cpu_backend> store{
        backend, 2, 1, layout, {.blocks = 16, .most_blocks = 512, .growth_chunk_bytes = std::uint64_t{2} << 20U}};
      std::vector<host_block_id> held;
      REQUIRE(store.grow(496) == status::ok);
      bool growing = true;
      while (growing) {
        growing = store.growth().under_way && !(ends_early && held.size() > 40);
        static_cast<void>(store.adopt_growth());
        for (host_block_id block = store.acquire(); !is_none(block); block = store.acquire()) {
          for (std::uint32_t l = 0; l < 2; ++l) {
            std::byte* const at = store.ref().address(static_cast<layer_id>(l), 0, block);
            std::fill_n(at, layout.block_bytes, static_cast<std::byte>(to_index(block) * 2 + l));
          }
          held.push_back(block);
        }
        for (host_block_id const block : held) {
          for (std::uint32_t l = 0; l < 2; ++l) {
            std::byte const* const at = store.ref().address(static_cast<layer_id>(l), 0, block);
            auto const wanted = static_cast<std::byte>(to_index(block) * 2 + l);
            REQUIRE((at[0] == wanted && at[layout.block_bytes - 1] == wanted));
          }
        }
      }
      CHECK((ends_early || held.size() == 512));
      CHECK(store.audit() == "");
    }
    CHECK(backend.pinned_bytes() == 0);
  }
}
