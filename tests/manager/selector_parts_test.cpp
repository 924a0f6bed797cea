/// Managers that decode with every digest, head rule and budget: what they select is what is attended, wherever it lies.

#include "../support/recording_backend.hpp"
#include "../support/synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/observe/selection_trace.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/calibrated_heads.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/max_share.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/selector_among.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/top_p.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using voting = solo_head_selector<>;
using largest = solo_head_selector<log_mass, max_share>;
using few = solo_head_selector<min_max, few_heads>;
using calibrated = solo_head_selector<mean_key, calibrated_heads>;
using following = solo_head_selector<cuboid_mean, soft_vote, top_p>;
using among = selector_among<voting, largest, few, calibrated, following>;

using recorder = recording<cpu_backend>;
using parts_manager = offload_manager<
  recorder, recorded_selector<among>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>, fixed_admission>;

constexpr std::uint32_t block_tokens = 4, length = 120, budget_blocks = 6;

kv_geometry geometry()
{
  return {
    .layers = 4,
    .query_heads = 8,
    .kv_heads = 4,
    .head_dim = 16,
    .block_tokens = block_tokens,
    .key_type = dtype::float32,
    .value_type = dtype::float32,
    .layer_groups = {
      {.first = 0, .count = 2}, {.first = 2, .count = 1, .kind = layer_kind::dense}, {.first = 3, .count = 1}}};
}

constexpr char const* calibration_text =
  "pulseinfer calibration 2\n"
  "model layers 4 query_heads 8 kv_heads 4 head_dim 16\n"
  "selection digest mean_key block_tokens 4 budget_tokens 24\n"
  "layer 0 selected divergence 0 coverage 0.9 of_vote 0.9 sum heads 2\n"
  "layer 1 selected divergence 0 coverage 0.9 of_vote 0.9 sum heads 0 1 3 weights 1 0.5 2\n"
  "layer 2 dense divergence 0 coverage 0.9 of_vote 0.9 sum heads 0 1 2 3\n"
  "layer 3 selected divergence 0 coverage 0.9 of_vote 0.9 largest heads 1 2\n"
  "end 4\n";

calibrated_heads rules_of(std::string const& text)
{
  std::istringstream in{text};
  return {.measured = read_calibration(in)};
}

/// With whatever else it has, the selector reads so many tokens.
template <class Selector>
among reading(Selector selector, std::uint32_t budget_tokens)
{
  selector.budget_tokens = budget_tokens;
  selector.sink_tokens = selector.recent_tokens.emplace(4);
  selector.dense_tokens = 24;
  return {.chosen = selector};
}

constexpr char const* names[] = {
  "cuboid_mean int8, soft_vote", "log_mass, max_share", "min_max int8, few_heads", "mean_key int8, calibrated_heads",
  "cuboid_mean, top_p"};

std::vector<among> each_of(std::uint32_t budget_tokens)
{
  return {
    reading(voting{.digest = {.type = dtype::int8}}, budget_tokens), reading(largest{}, budget_tokens),
    reading(
      few{
        .digest = {.type = dtype::int8},
        .heads =
          {.layers =
             {{.kv_heads = {1}},
              {.kv_heads = {0, 3}, .weights = {1.0F, 0.5F}},
              {.kv_heads = {0}},
              {.kv_heads = {1, 2, 3}}}}},
      budget_tokens),
    reading(calibrated{.digest = {.type = dtype::int8}, .heads = rules_of(calibration_text)}, budget_tokens),
    reading(following{.budget = {.share = 0.5, .least_tokens = 12}}, budget_tokens)};
}

struct scene {
  explicit scene(among const& selector, std::uint32_t quota_tokens = 36, float deferred_share = 0.0F)
    : backend{cpu_options{.mode = cpu_mode::manual}},
      stream{backend.create_stream(stream_priority::normal)},
      model{geometry()},
      kv{
        backend,
        stream,
        model.geometry,
        {.max_rows = 3,
         .max_tokens = length,
         .max_step_tokens = 2,
         .max_prefill_tokens = 8,
         .quota_tokens = quota_tokens,
         .slots = 2000,
         .deferred_share = deferred_share,
         .captured_steps = 1},
        {.selector = selector}},
      engine{backend, stream, model, kv, 3, 8}
  {
    engine.attended = [this](visit const& v) { look(v); };
  }
  scene(scene&&) = delete;
  ~scene() { static_cast<void>(backend.synchronize()); }

  void open(std::uint64_t seed, std::uint32_t prompt, bool keep)
  {
    row_id row = none<row_id>;
    sequence_options const request{.prompt_tokens = prompt, .max_tokens = length, .keep_resident = keep};
    REQUIRE(kv.open(request, row) == admission::admitted);
    engine.assign(row, seed);
    engine.prefill(row, prompt, 8);
    rows.push_back(row);
  }

  /// The rows' next tokens, in some steps two: the second as a draft that proves right.
  [[nodiscard]] std::vector<step_row> next() const
  {
    std::vector<step_row> batch;
    for (row_id const row : rows) {
      std::uint32_t const now = kv.tokens_of(row);
      if (now < length) { batch.push_back({.row = row, .tokens = now % 5 == 0 && now + 1 < length ? 2U : 1U}); }
    }
    return batch;
  }

  /// To the ends of all sequences, by the loop or by replays of a step that is captured first.
  void decode(bool by_replay = false)
  {
    if (by_replay) {
      captured_step<parts_manager> step = kv.capture_step({.rows = 2, .tokens = 2});
      backend.begin_capture();
      engine.enqueue_body(step);
      recorder::graph const graph = backend.end_capture();
      while (!next().empty()) {
        engine.step_with(next(), [&] { REQUIRE(step.replay([&] { return recorder::replay(graph); }) == status::ok); });
        settle();
      }
    }
    while (!next().empty()) {
      engine.step(next());
      settle();
    }
  }

  void settle()
  {
    REQUIRE(kv.drain(no_deadline) == status::ok);
    recalled += kv.finish_sample().recalled_blocks;
    REQUIRE(kv.audit() == "");
  }

  /// A table lists the slots of the selected blocks, in their order.
  void look(visit const& v)
  {
    REQUIRE(backend.synchronize(stream) == status::ok);
    selection_ref const selection = kv.books().selection();
    residency_ref const books = kv.books().residency();
    for (row_id const row : v.rows) {
      lane_id const lane = lane_of(row, 0, 1);
      std::uint32_t const count = v.table.counts[to_index(lane)];
      slot_id const* const listed = v.table.slots + to_index(lane) * v.table.stride;
      std::vector<block_id> blocks;
      for (std::uint32_t i = 0; i < count; ++i) {
        blocks.push_back(books.slots[v.table.pool.word(v.layer, listed[i])].block);
        REQUIRE((i == 0 || blocks[i - 1] < blocks[i]));
      }
      row_mode const mode = v.table.info[to_index(row)].mode;
      if (mode != row_mode::sparse_offloaded && mode != row_mode::sparse_resident) { continue; }
      if (geometry().group_of(v.layer).kind != layer_kind::selected) { continue; }
      block_id const* const ids = selection.ids_of(lane);
      REQUIRE((blocks == std::vector<block_id>(ids, ids + selection.counts[to_index(lane)])));
      ++tables;
    }
  }

  [[nodiscard]] std::vector<selection_record> records()
  {
    REQUIRE(kv.selector().dropped() == 0);
    return kv.selector().records();
  }

  recorder backend;
  recorder::stream_ref stream;
  synthetic_model model;
  parts_manager kv;
  synthetic_engine<recorder, parts_manager> engine;
  std::vector<row_id> rows;
  std::uint64_t recalled = 0;
  std::uint64_t tables = 0;
};

/// Sink, recent and open blocks, each block once and in order, and no more than the budget: all of it where `follows` is not set.
void check_selections(std::vector<selection_record> const& records, bool follows)
{
  for (selection_record const& r : records) {
    CAPTURE(r.tokens);
    auto const blocks = static_cast<std::uint32_t>(blocks_of(r.tokens, block_tokens));
    auto const has = [&](std::uint32_t block) {
      return std::find(r.selected.begin(), r.selected.end(), static_cast<block_id>(block)) != r.selected.end();
    };
    REQUIRE(std::is_sorted(r.selected.begin(), r.selected.end()));
    REQUIRE(std::adjacent_find(r.selected.begin(), r.selected.end()) == r.selected.end());
    REQUIRE(r.selected.size() <= budget_blocks);
    if (!follows || blocks <= budget_blocks) { REQUIRE(r.selected.size() == std::min(blocks, budget_blocks)); }
    REQUIRE(has(0));
    REQUIRE(has(blocks - 1));
    REQUIRE(has(blocks - 2));
    REQUIRE(to_index(r.selected.back()) < blocks);
  }
}

std::string refusal(among const& selector, std::uint32_t quota_tokens = 36, float deferred_share = 0.0F)
{
  try {
    scene const made{selector, quota_tokens, deferred_share};
  } catch (configuration_error const& said) {
    return said.what();
  }
  return "constructed";
}

std::string replaced(std::string text, std::string const& part, std::string const& by)
{
  return text.replace(text.find(part), part.size(), by);
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("law 3: a budget that covers a sequence gives the dense result, whatever chooses")
  {
    std::vector<among> const selectors = each_of(length + 3);
    for (std::size_t i = 0; i < selectors.size(); ++i) {
      CAPTURE(names[i]);
      scene s{selectors[i], 3 * length};
      s.open(1, 40, false);
      s.open(2, 70, false);
      s.decode();
      CHECK(s.kv.mode_of(s.rows[0]) == row_mode::sparse_offloaded);
      for (std::uint64_t const seed : {1U, 2U}) {
        auto const dense = dense_outputs(s.model, seed, length);
        for (std::uint32_t t = 0; t < length; ++t) { REQUIRE(difference(s.engine.output(seed, t), dense[t]) < 1e-4F); }
      }
    }
  }

  TEST_CASE("law 2: with each digest, head rule and budget, what is recalled is what would have been resident")
  {
    std::vector<among> const selectors = each_of(budget_blocks * block_tokens);
    std::vector<std::vector<selection_record>> seen;
    for (std::size_t i = 0; i < selectors.size(); ++i) {
      CAPTURE(names[i]);
      scene away{selectors[i]}, here{selectors[i]}, replayed{selectors[i]};
      for (scene* const s : {&away, &here, &replayed}) {
        s->open(1, 40, s == &here);
        s->open(2, 65, s == &here);
        s->decode(s == &replayed);
      }
      CHECK(here.kv.mode_of(here.rows[0]) == row_mode::sparse_resident);
      CHECK(here.recalled == 0);
      CHECK(away.recalled > 100);
      CHECK(away.tables > 300);
      std::vector<selection_record> const records = away.records();
      CHECK((records == here.records()));
      CHECK((away.engine.outputs() == here.engine.outputs()));
      check_selections(records, i == 4);

      // The same by replays of one captured step, which has launches for the largest of all steps.
      CHECK((replayed.engine.outputs() == away.engine.outputs()));
      CHECK(replayed.recalled == away.recalled);
      CHECK(replayed.backend.captured_copies() == 0);

      // Each chooses in its own way.
      for (auto const& other : seen) { CHECK((other != records)); }
      seen.push_back(records);
    }
  }

  TEST_CASE("top_p: selections differ in size, and slots have room for the largest")
  {
    auto const sized = [](double share) {
      return reading(following{.budget = {.share = share, .least_tokens = 12}}, budget_blocks * block_tokens);
    };
    scene s{sized(0.7)};
    s.open(1, 40, false);
    s.open(2, 65, false);
    s.decode();
    std::set<std::size_t> sizes;
    for (selection_record const& r : s.records()) { sizes.insert(r.selected.size()); }
    CHECK(sizes.size() > 1);
    CHECK(*sizes.rbegin() == budget_blocks);

    // Where all votes are wanted it is the fixed budget.
    scene whole{sized(1.0)}, fixed{reading(voting{}, budget_blocks * block_tokens)};
    for (scene* const one : {&whole, &fixed}) {
      one->open(1, 40, false);
      one->decode();
    }
    CHECK((whole.records() == fixed.records()));

    // The floor is that of the largest selection: 6 blocks, 1 that a draft opens, 2 being written back.
    std::string const said = refusal(sized(0.1), 32);
    CHECK(said.find("hot cache has 8 slots, one step can pin 9") != std::string::npos);
    CHECK(refusal(sized(0.1), 36) == "constructed");
  }

  TEST_CASE("deferral is refused where a head has no say: what is left for later may be all that it looks for")
  {
    std::vector<among> const selectors = each_of(budget_blocks * block_tokens);
    for (std::size_t const i : {0U, 1U, 4U}) { CHECK(refusal(selectors[i], 36, 0.02F) == "constructed"); }
    CHECK(refusal(selectors[2], 36, 0.02F).find("in layer 0 2 of 8 query heads choose") != std::string::npos);
    CHECK(refusal(selectors[3], 36, 0.02F).find("in layer 0 2 of 8 query heads choose") != std::string::npos);
    // The layer without selection asks nobody.
    auto const by_all_but_dense = [&] {
      few selector{
        .heads = {
          .layers = {
            {.kv_heads = {0, 1, 2, 3}}, {.kv_heads = {0, 1, 2, 3}}, {.kv_heads = {0}}, {.kv_heads = {0, 1, 2, 3}}}}};
      return reading(selector, budget_blocks * block_tokens);
    };
    CHECK(refusal(by_all_but_dense(), 36, 0.02F) == "constructed");
  }

  TEST_CASE("calibrated_heads: each layer keeps and follows the heads of its own line")
  {
    std::uint32_t const budget = budget_blocks * block_tokens;
    auto const by = [&](std::string const& text) {
      return reading(calibrated{.digest = {.type = dtype::float32}, .heads = rules_of(text)}, budget);
    };
    std::string const all = "sum heads 0 1 2 3";
    std::string votes = calibration_text;
    votes = replaced(votes, "sum heads 2\n", all + '\n');
    votes = replaced(votes, "sum heads 0 1 3 weights 1 0.5 2", all);
    std::string const voting_text = replaced(votes, "largest heads 1 2", all);

    scene one{by(calibration_text)}, every{by(voting_text)},
      last{by(replaced(voting_text, all + "\nend", "sum heads 3\nend"))};
    for (scene* const s : {&one, &every, &last}) {
      s->open(3, 50, false);
      s->decode();
    }
    // Heads that choose in the selected layers 0, 1 and 3: 1 + 3 + 2 of 4 + 4 + 4, and 4 + 4 + 1.
    CHECK(one.kv.memory().digest_bytes * 12 == every.kv.memory().digest_bytes * 6);
    CHECK(last.kv.memory().digest_bytes * 12 == every.kv.memory().digest_bytes * 9);

    // The layers before the one that differs select alike in the first step that selects, and that one does not for long.
    auto const of_layer = [](scene& s, std::int32_t layer) {
      std::vector<selection_record> found = s.records();
      std::erase_if(found, [&](selection_record const& r) { return to_number(r.layer) != layer; });
      return found;
    };
    CHECK(of_layer(last, 0) == of_layer(every, 0));
    CHECK(of_layer(last, 1) == of_layer(every, 1));
    CHECK(of_layer(last, 3) != of_layer(every, 3));
    CHECK(of_layer(one, 0) != of_layer(every, 0));
  }

  TEST_CASE("a calibration of another cache is refused where the manager is made, with the numbers")
  {
    auto const said = [](std::string const& part, std::string const& by) {
      return refusal(reading(calibrated{.heads = rules_of(replaced(calibration_text, part, by))}, 24));
    };
    auto const names_both = [](std::string const& text, std::string const& calibrated, std::string const& here) {
      return text.find("calibrated for " + calibrated) != std::string::npos &&
        text.find("has " + here) != std::string::npos;
    };
    CHECK(said("coverage 0.9", "coverage 0.8") == "constructed");
    CHECK(names_both(said("query_heads 8", "query_heads 16"), "16 query heads", "8"));
    CHECK(names_both(said("kv_heads 4", "kv_heads 5"), "5 KV heads", "4"));
    CHECK(names_both(said("head_dim 16", "head_dim 64"), "64 elements of a head", "16"));
    CHECK(names_both(said("block_tokens 4", "block_tokens 16"), "16 tokens of a block", "4"));
    std::string const fewer = replaced(
      replaced(
        replaced(calibration_text, "layer 3 selected divergence 0 coverage 0.9 of_vote 0.9 largest heads 1 2\n", ""),
        "end 4", "end 3"),
      "layers 4", "layers 3");
    CHECK(names_both(refusal(reading(calibrated{.heads = rules_of(fewer)}, 24)), "3 layers", "4"));
    std::string const form = said("digest mean_key", "digest min_max");
    CHECK(form.find("'min_max'") != std::string::npos);
    CHECK(form.find("'mean_key'") != std::string::npos);
  }
}
