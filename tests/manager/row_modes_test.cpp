#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t length = 150;

kv_geometry geometry_of(std::uint32_t head_groups, bool mixed_layers)
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

manager_options options_of(std::uint64_t slots = 2000)
{
  return {.max_rows = 2, .max_tokens = 200, .max_prefill_tokens = 8, .quota_tokens = 36, .slots = slots};
}

template <class Manager>
row_id open(model_rig<Manager>& r, std::uint64_t seed, bool keep_resident)
{
  row_id row = none<row_id>;
  sequence_options const request{.prompt_tokens = 40, .max_tokens = length, .keep_resident = keep_resident};
  REQUIRE(r.kv.open(request, row) == admission::admitted);
  r.engine.assign(row, seed);
  r.engine.prefill(row, 40, 8);
  return row;
}

/// Decodes to the end; `between` is called before each step.
template <class Manager, class Between>
void decode(model_rig<Manager>& r, row_id row, Between between)
{
  while (r.kv.tokens_of(row) < length) {
    between();
    r.engine.step({{.row = row}});
    REQUIRE(r.kv.audit() == "");
  }
}

template <class Manager>
void require_same(model_rig<Manager>& a, model_rig<Manager>& b, std::uint64_t seed)
{
  for (std::uint32_t t = 0; t < length; ++t) { REQUIRE(a.engine.output(seed, t) == b.engine.output(seed, t)); }
}

struct shape {
  std::uint32_t head_groups;
  bool mixed;
};
constexpr shape shapes[] = {{1, false}, {2, false}, {1, true}, {2, true}};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("a row that keeps its blocks selects what one that offloads does, and recalls nothing")
  {
    for (auto const [head_groups, mixed] : shapes) {
      synthetic_model const model{geometry_of(head_groups, mixed)};
      model_rig<lockstep_manager> offloaded{model, options_of(), six_blocks};
      model_rig<lockstep_manager> resident{model, options_of(), six_blocks};
      row_id const away = open(offloaded, 5, false);
      row_id const here = open(resident, 5, true);
      std::uint64_t recalled = 0;
      decode(offloaded, away, [&] { recalled += offloaded.kv.finish_sample().recalled_blocks; });
      CHECK(recalled > 0);
      recalled = 0;
      decode(resident, here, [&] { recalled += resident.kv.finish_sample().recalled_blocks; });
      CHECK(recalled == 0);
      CHECK(resident.kv.mode_of(here) == row_mode::sparse_resident);
      CHECK(offloaded.kv.mode_of(away) == row_mode::sparse_offloaded);
      CHECK(resident.kv.memory().slot_bytes > offloaded.kv.memory().slot_bytes);
      require_same(offloaded, resident, 5);
    }
  }

  TEST_CASE("promoting and demoting a row at any step changes nothing of what it computes, bit for bit")
  {
    for (auto const [head_groups, mixed] : shapes) {
      synthetic_model const model{geometry_of(head_groups, mixed)};
      model_rig<lockstep_manager> still{model, options_of(), six_blocks};
      decode(still, open(still, 9, false), [] {});
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        model_rig<lockstep_manager> moved{model, options_of(), six_blocks};
        std::mt19937_64 random{seed};
        bool keeps = seed % 2 == 0;
        row_id const row = open(moved, 9, keeps);
        std::uint32_t changes = 0;
        decode(moved, row, [&] {
          if (random() % 5 != 0) { return; }
          REQUIRE((keeps ? moved.kv.demote(row) : moved.kv.promote(row)) == status::ok);
          keeps = !keeps;
          ++changes;
          REQUIRE(moved.kv.audit() == "");
        });
        CHECK(changes > 10);
        CHECK(moved.kv.mode_of(row) == (keeps ? row_mode::sparse_resident : row_mode::sparse_offloaded));
        require_same(still, moved, 9);
        REQUIRE(moved.kv.close(row) == status::ok);
        REQUIRE(moved.kv.drain(no_deadline) == status::ok);
        CHECK(moved.kv.memory().slot_bytes == 0);
        CHECK(moved.kv.memory().host_bytes == 0);
      }
    }
  }

  TEST_CASE("a demoted row keeps the blocks of its last selection: the next step recalls few of them")
  {
    synthetic_model const model{geometry_of(1, false)};
    model_rig<lockstep_manager> r{model, options_of(), six_blocks};
    row_id const row = open(r, 3, true);
    while (r.kv.tokens_of(row) < 100) { r.engine.step({{.row = row}}); }
    REQUIRE(r.kv.demote(row) == status::ok);
    r.engine.step({{.row = row}});
    step_sample const& sample = r.kv.finish_sample();
    CHECK(sample.selected_blocks == 4 * 6);
    CHECK(sample.recalled_blocks < 4 * 3);
  }

  TEST_CASE("a row is promoted only where slots for all of its blocks are free, and is left as it was otherwise")
  {
    synthetic_model const model{geometry_of(1, false)};
    // Nine slots a lane and layer for two rows that offload, and for one prompt: 150 tokens are 38 blocks in 4 layers.
    model_rig<lockstep_manager> r{model, options_of(100), six_blocks};
    row_id const row = open(r, 3, false);
    while (r.kv.tokens_of(row) < 60) { r.engine.step({{.row = row}}); }
    memory_use const before = r.kv.memory();
    CHECK(r.kv.promote(row) == status::capacity_exceeded);
    CHECK(r.kv.memory().slot_bytes == before.slot_bytes);
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    CHECK(r.kv.audit() == "");
    r.engine.step({{.row = row}});
    row_id refused = none<row_id>;
    sequence_options const request{.prompt_tokens = 40, .max_tokens = length, .keep_resident = true};
    CHECK(r.kv.open(request, refused) != admission::admitted);
    CHECK(r.kv.explain_refusal(request).find("152 slots") != std::string::npos);
  }

  TEST_CASE("a row before its prompt is in changes its mind without moving anything")
  {
    synthetic_model const model{geometry_of(1, false)};
    model_rig<lockstep_manager> r{model, options_of(), six_blocks};
    row_id row = none<row_id>;
    REQUIRE(r.kv.open({.prompt_tokens = 40, .max_tokens = length}, row) == admission::admitted);
    r.engine.assign(row, 4);
    r.engine.prefill(row, 16, 8);
    REQUIRE(r.kv.promote(row) == status::ok);
    CHECK(r.kv.promote(row) == status::invalid_state);
    r.engine.prefill(row, 24, 8);
    decode(r, row, [] {});
    CHECK(r.kv.mode_of(row) == row_mode::sparse_resident);
    row_id other = none<row_id>;
    REQUIRE(r.kv.open({.prompt_tokens = 8, .max_tokens = length, .keep_resident = true}, other) == admission::admitted);
    REQUIRE(r.kv.demote(other) == status::ok);
    CHECK(r.kv.demote(other) == status::invalid_state);
  }

  TEST_CASE("wrong rows are neither promoted nor demoted")
  {
    synthetic_model const model{geometry_of(1, false)};
    model_rig<lockstep_manager> r{model, options_of(), six_blocks};
    row_id short_row = none<row_id>;
    REQUIRE(r.kv.open({.prompt_tokens = 8, .max_tokens = 20}, short_row) == admission::admitted);
    for (row_id const row : {none<row_id>, row_id{2}, row_id{77}}) {
      CHECK(r.kv.promote(row) == status::out_of_range);
      CHECK(r.kv.demote(row) == status::out_of_range);
    }
    CHECK(r.kv.promote(row_id{1}) == status::invalid_state);  // not open
    CHECK(r.kv.demote(row_id{1}) == status::invalid_state);
    CHECK(r.kv.promote(short_row) == status::invalid_state);  // never offloads
    CHECK(r.kv.demote(short_row) == status::invalid_state);
    r.engine.assign(short_row, 2);
    r.engine.prefill(short_row, 8, 8);
    std::vector<step_row> const rows{{.row = short_row}};
    REQUIRE(r.kv.begin_step(rows) == status::ok);
    CHECK(r.kv.promote(short_row) == status::invalid_state);  // in a step
    CHECK(r.kv.audit() == "");
  }

  TEST_CASE("rows that keep their blocks are written back once slots are low, and only then")
  {
    synthetic_model const model{geometry_of(1, false)};
    for (bool const low : {false, true}) {
      manager_options options = options_of();
      options.write_back_below = low ? 2000 : 0;
      model_rig<lockstep_manager> r{model, options, six_blocks};
      row_id const row = open(r, 8, true);
      std::uint64_t written = 0;
      decode(r, row, [&] { written += r.kv.finish_sample().written_bytes; });
      CHECK((written > 0) == low);
    }
  }

  TEST_CASE("a preempted row that kept its blocks keeps them when it resumes")
  {
    synthetic_model const model{geometry_of(2, false)};
    model_rig<lockstep_manager> still{model, options_of(), six_blocks};
    decode(still, open(still, 6, true), [] {});
    model_rig<lockstep_manager> moved{model, options_of(), six_blocks};
    row_id row = open(moved, 6, true);
    while (moved.kv.tokens_of(row) < 90) { moved.engine.step({{.row = row}}); }
    saved_id saved;
    REQUIRE(moved.kv.preempt(row, saved) == status::ok);
    CHECK(moved.kv.memory().slot_bytes == 0);
    REQUIRE(moved.kv.resume(saved, row) == admission::admitted);
    moved.engine.assign(row, 6);
    decode(moved, row, [] {});
    CHECK(moved.kv.mode_of(row) == row_mode::sparse_resident);
    require_same(still, moved, 6);
  }
}
