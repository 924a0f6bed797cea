#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <cstdint>
#include <map>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using selections = std::map<std::uint32_t, std::vector<block_id>>;  // by position of a step's first token

/// What the first layer selects in each step of one token. Its keys and queries follow from the tokens alone.
/// @param drafts tokens that are guessed wrong in every second step
selections first_layer_of(std::uint32_t block_tokens, std::uint32_t drafts)
{
  synthetic_model const model{
    {.layers = 2,
     .query_heads = 2,
     .kv_heads = 1,
     .head_dim = 8,
     .block_tokens = block_tokens,
     .key_type = dtype::float32,
     .value_type = dtype::float32}};
  std::uint32_t const step_tokens = 4;
  auto const open_blocks = static_cast<std::uint32_t>(window_blocks(step_tokens, block_tokens));
  model_rig<lockstep_manager> r{
    model,
    {.max_rows = 1,
     .max_tokens = 40 * block_tokens,
     .max_step_tokens = step_tokens,
     .max_prefill_tokens = 8,
     .quota_tokens = (12 + 2 * open_blocks) * block_tokens},
    {.budget_tokens = (6 + open_blocks) * block_tokens,
     .sink_tokens = block_tokens,
     .recent_tokens = block_tokens,
     .dense_tokens = 8 * block_tokens,
     .hysteresis = 0.0F}};
  selections result;
  row_id const row = r.open(1, 10 * block_tokens, 40 * block_tokens);
  bool alone = true;
  r.engine.attended = [&](visit const& v) {
    if (v.layer != layer_id{0} || !alone || r.kv.mode_of(row) != row_mode::sparse_offloaded) { return; }
    REQUIRE(r.backend.synchronize(r.stream) == status::ok);
    selection_ref const selection = r.kv.books().selection();
    result[r.kv.tokens_of(row)].assign(
      selection.ids_of(lane_id{0}), selection.ids_of(lane_id{0}) + selection.counts[0]);
  };
  r.engine.prefill(row, 10 * block_tokens, 8);
  for (std::uint32_t step = 0; r.kv.tokens_of(row) + 1 + drafts <= 40 * block_tokens; ++step) {
    alone = drafts == 0 || step % 2 == 0;
    r.engine.step({{.row = row, .tokens = alone ? 1 : 1 + drafts}}, 1);
    REQUIRE(r.kv.audit() == "");
  }
  return result;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("digests follow rejected drafts: the next selection is the one of the accepted tokens alone")
  {
    for (std::uint32_t const block_tokens : {1U, 3U, 4U, 16U}) {
      selections const plain = first_layer_of(block_tokens, 0);
      std::uint32_t compared = 0;
      for (std::uint32_t const drafts : {1U, 3U}) {
        for (auto const& [position, blocks] : first_layer_of(block_tokens, drafts)) {
          REQUIRE(blocks == plain.at(position));
          ++compared;
        }
      }
      CHECK(compared > 20);
    }
  }

  TEST_CASE("a step whose drafts are all rejected leaves the sequence where it was")
  {
    synthetic_model const model{
      {.layers = 2,
       .query_heads = 2,
       .kv_heads = 1,
       .head_dim = 8,
       .block_tokens = 4,
       .key_type = dtype::float32,
       .value_type = dtype::float32}};
    model_rig<hits_manager> r{
      model,
      {.max_rows = 1, .max_tokens = 64, .max_step_tokens = 4, .max_prefill_tokens = 8, .quota_tokens = 40},
      {.budget_tokens = 28, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 16}};
    row_id const row = r.open(1, 23, 64);
    r.engine.prefill(row, 23, 8);
    for (int i = 0; i < 5; ++i) {
      r.engine.step({{.row = row, .tokens = 4}}, 0);
      CHECK(r.kv.tokens_of(row) == 23);
      REQUIRE(r.kv.audit() == "");
    }
    // Exactly to a block's end, then exactly one past it.
    r.engine.step({{.row = row, .tokens = 4}}, 1);
    CHECK(r.kv.sequences()[row].sealed == 6);
    r.engine.step({{.row = row, .tokens = 4}}, 1);
    CHECK(r.kv.sequences()[row].sealed == 6);
    r.engine.step({{.row = row, .tokens = 4}}, 3);
    CHECK(r.kv.tokens_of(row) == 28);
    CHECK(r.kv.sequences()[row].sealed == 7);
    CHECK(r.kv.audit() == "");
  }
}
