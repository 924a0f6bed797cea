#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// One configuration of a random run.
struct setting {
  std::uint32_t block_tokens = 4;
  std::uint32_t head_groups = 1;
  std::uint32_t step_tokens = 1;  ///< with drafts
  std::uint32_t depth = 2;        ///< of write-back
  std::uint32_t spare_slots = 0;  ///< slots above the floor of the quota
  bool mixed_layers = false;      ///< selected, windowed, dense, selected
  bool warm_up = true;
  std::uint64_t seed = 1;
  cpu_mode mode = cpu_mode::manual;
  std::uint32_t steps = 120;
};

std::string name_of(setting const& s)
{
  return "block_tokens " + std::to_string(s.block_tokens) + ", head_groups " + std::to_string(s.head_groups) +
    ", step_tokens " + std::to_string(s.step_tokens) + ", depth " + std::to_string(s.depth) + ", spare " +
    std::to_string(s.spare_slots) + (s.mixed_layers ? ", mixed layers" : "") + ", seed " + std::to_string(s.seed);
}

/// Opens, steps and closes sequences at random, with drafts accepted at random, and looks at every table and at the books
/// after every step.
template <class Manager>
void run_randomly(setting const& s)
{
  CAPTURE(name_of(s));
  kv_geometry geometry{
    .layers = s.mixed_layers ? 4U : 3U,
    .query_heads = 8,
    .kv_heads = 4,
    .head_dim = 4,
    .block_tokens = s.block_tokens,
    .head_groups = s.head_groups,
    .extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 5}}};
  if (s.mixed_layers) {
    geometry.layer_groups = {
      {.first = 0, .count = 1, .kind = layer_kind::selected},
      {.first = 1, .count = 1, .kind = layer_kind::windowed, .window_tokens = 2 * s.block_tokens + 1, .sink_tokens = 2},
      {.first = 2, .count = 1, .kind = layer_kind::dense},
      {.first = 3, .count = 1, .kind = layer_kind::selected}};
  }
  auto const open_blocks = static_cast<std::uint32_t>(window_blocks(s.step_tokens, s.block_tokens));
  std::uint32_t const budget = 1 + 1 + open_blocks + 3;  // sink, recent, open, chosen
  std::uint32_t const quota = budget + open_blocks - 1 + s.depth + s.spare_slots;
  constexpr std::uint32_t max_rows = 4, max_chunk = 24;
  std::uint32_t const max_tokens = 30 * s.block_tokens;
  rig<Manager> r{
    {.geometry = geometry,
     .manager =
       {.max_rows = max_rows,
        .max_tokens = max_tokens,
        .max_step_tokens = s.step_tokens,
        .max_prefill_tokens = max_chunk,
        .quota_tokens = quota * s.block_tokens,
        .write_back_depth = s.depth,
        .warm_up_queries = 3},
     .cpu = {.mode = s.mode, .seed = s.seed - 1},
     .per_row = max_chunk},
    {.budget_tokens = budget * s.block_tokens,
     .sink_tokens = s.block_tokens,
     .recent_tokens = s.block_tokens,
     .dense_tokens = budget * s.block_tokens}};
  r.engine.warm_up = s.warm_up;

  std::mt19937_64 random{s.seed};
  auto const below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
  struct running {
    row_id row;
    std::uint32_t prompt;
    std::uint32_t tokens;
  };
  std::vector<running> rows;
  std::uint64_t sequences = 0, recalled = 0, thrashed = 0;
  for (std::uint32_t step = 0; step < s.steps; ++step) {
    CAPTURE(step);
    if (rows.size() < max_rows && below(3) != 0) {
      std::uint32_t const tokens = 1 + below(max_tokens);
      std::uint32_t const prompt = below(tokens + 1);
      row_id row{};
      if (r.kv.open({.prompt_tokens = prompt, .max_tokens = tokens}, row) == admission::admitted) {
        r.engine.assign(row, ++sequences);
        rows.push_back({row, prompt, tokens});
      }
    }
    std::vector<step_row> batch;
    for (running const& it : rows) {
      if (below(5) == 0) { continue; }
      std::uint32_t const now = r.kv.tokens_of(it.row);
      std::uint32_t const left = it.prompt > now ? it.prompt - now : 0;
      std::uint32_t most = std::min(std::max(left, s.step_tokens), max_chunk);
      if (left == 0) { most = s.step_tokens; }
      std::uint32_t const count = std::min(1 + below(most), it.tokens - now);
      batch.push_back({.row = it.row, .tokens = count});
      r.engine.row(it.row).accept = below(4) == 0 ? below(count + 1) : count;
    }
    REQUIRE(r.engine.step(batch) == status::ok);
    REQUIRE(r.engine.fault() == "");
    step_sample const& sample = r.kv.finish_sample();
    recalled += sample.recalled_blocks;
    thrashed += sample.thrash_steps;
    std::erase_if(rows, [&](running const& it) {
      bool const ends = r.kv.tokens_of(it.row) == it.tokens || below(40) == 0;
      if (ends) { REQUIRE(r.kv.close(it.row) == status::ok); }
      return ends;
    });
    REQUIRE(r.kv.audit() == "");
  }
  CHECK(sequences > 10);
  CHECK(recalled > 0);
  r.close_all();
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 1: random sequences with drafts find every selected block with its own bytes", Manager, lockstep_manager,
    hits_manager, fragment_manager)
  {
    run_randomly<Manager>({});
    run_randomly<Manager>({.block_tokens = 1, .depth = 0, .seed = 2});
    run_randomly<Manager>({.block_tokens = 1, .step_tokens = 4, .depth = 1, .seed = 3});
    run_randomly<Manager>({.block_tokens = 3, .head_groups = 2, .step_tokens = 5, .depth = 0, .seed = 4});
    run_randomly<Manager>({.block_tokens = 4, .head_groups = 4, .step_tokens = 3, .depth = 2, .seed = 5});
    run_randomly<Manager>({.block_tokens = 16, .step_tokens = 4, .depth = 1, .spare_slots = 3, .seed = 6});
    run_randomly<Manager>({.block_tokens = 4, .step_tokens = 4, .mixed_layers = true, .warm_up = false, .seed = 7});
    run_randomly<Manager>({.block_tokens = 3, .head_groups = 2, .depth = 0, .mixed_layers = true, .seed = 8});
    run_randomly<Manager>({.block_tokens = 1, .head_groups = 4, .step_tokens = 2, .mixed_layers = true, .seed = 9});
  }
}
