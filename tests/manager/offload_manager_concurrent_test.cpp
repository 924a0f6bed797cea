#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

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
}
