#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

solo_head_selector<> const six_blocks{
  .budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24, .hysteresis = 0};

rig_options options_of(std::uint32_t rows, std::uint64_t host_blocks = 0, std::uint64_t order = 0)
{
  return {
    .geometry =
      {.layers = 3,
       .query_heads = 4,
       .kv_heads = 2,
       .head_dim = 4,
       .block_tokens = 4,
       .extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 5}}},
    .manager =
      {.max_rows = rows,
       .max_tokens = 120,
       .max_step_tokens = 3,
       .max_prefill_tokens = 8,
       .quota_tokens = 40,
       .host_blocks = host_blocks,
       .saved_sequences = 6},
    .cpu = {.mode = cpu_mode::manual, .seed = order},
    .per_row = 8};
}

/// Writes NaN over every slot and host block that nobody owns, once nothing flies.
template <class Rig>
void poison_free(Rig& r)
{
  REQUIRE(r.kv.drain(no_deadline) == status::ok);
  REQUIRE(r.backend.synchronize() == status::ok);
  slot_pool_ref const pool = r.kv.pool().ref();
  for (std::uint32_t s = 0; s < pool.slots; ++s) {
    auto const slot = static_cast<slot_id>(s);
    if (r.kv.pool().is_free(layer_id{0}, slot)) {
      std::memset(pool.address(layer_id{0}, slot), 0xFF, r.kv.layout().block_bytes);
    }
  }
  for (std::uint32_t b = 0; b < r.kv.store().blocks(); ++b) {
    auto const block = static_cast<host_block_id>(b);
    if (r.kv.store().references(block) != 0 || r.kv.store().pins(block) != 0) { continue; }
    for (std::uint32_t l = 0; l < r.kv.geometry().layers; ++l) {
      for (std::uint32_t g = 0; g < r.kv.geometry().head_groups; ++g) {
        std::memset(r.kv.store().ref().address(static_cast<layer_id>(l), g, block), 0xFF, r.kv.layout().block_bytes);
      }
    }
  }
}

host_block_id home_of(rig<hits_manager>& r, row_id row, std::uint32_t block)
{
  return r.kv.sequences()[row].host_blocks[block];
}

}  // namespace

TEST_SUITE("manager")
{
  // Report: Avarok-Cybersecurity/atlas#1193
  TEST_CASE("two sequences that part within a block each read what they wrote there, and share the full ones")
  {
    for (std::uint32_t const at : {1U, 9U, 10U, 11U, 12U, 13U, 37U, 40U, 42U}) {
      CAPTURE(at);
      rig<hits_manager> r{options_of(3), six_blocks};
      r.engine.rows_differ = true;
      row_id const first = r.open(1, 4, 100);
      r.engine.prefill(first, std::min(at, 4U), 4);
      while (r.kv.tokens_of(first) < at) { r.step({{.row = first}}); }
      row_id second{};
      REQUIRE(r.kv.fork(first, {.prompt_tokens = 4, .max_tokens = 100}, second) == admission::admitted);
      r.engine.assign(second, r.engine.history_of(first));
      CHECK(r.kv.tokens_of(second) == at);
      poison_free(r);
      std::uint32_t const full = at / 4;
      for (std::uint32_t b = 0; b < full; ++b) {
        CHECK(home_of(r, first, b) == home_of(r, second, b));
        CHECK(r.kv.store().references(home_of(r, first, b)) == 2);
      }
      // One appends, then the other, then both: neither's partial block is the other's.
      r.step({{.row = first}});
      r.step({{.row = second, .tokens = 2}});
      for (int i = 0; i < 12; ++i) { r.step({{.row = second}, {.row = first}}); }
      for (std::uint32_t b = full; b < full + 2; ++b) {
        CHECK(home_of(r, first, b) != home_of(r, second, b));
        CHECK(r.kv.store().references(home_of(r, first, b)) == 1);
      }
      REQUIRE(r.kv.close(first) == status::ok);
      poison_free(r);
      for (std::uint32_t b = 0; b < full; ++b) { CHECK(r.kv.store().references(home_of(r, second, b)) == 1); }
      for (int i = 0; i < 12; ++i) { r.step({{.row = second}}); }
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      r.engine.look_at_host(second, false);
      CHECK(r.engine.fault() == "");
      r.close_all();
    }
  }

  // Report: Avarok-Cybersecurity/atlas#1193
  TEST_CASE("a fork for whose copy there is no room leaves its origin as it was")
  {
    // 25 blocks of a sequence of 100 tokens, and 24 more: a fork at 10 tokens shares two and needs 23 and a partial one.
    for (std::uint64_t const spare : {0U, 20U, 22U, 23U, 24U}) {
      CAPTURE(spare);
      rig<hits_manager> r{options_of(2, 25 + spare), six_blocks};
      r.engine.rows_differ = true;
      row_id const first = r.open(1, 4, 100);
      r.engine.prefill(first, 4, 4);
      while (r.kv.tokens_of(first) < 10) { r.step({{.row = first}}); }
      row_id second{};
      admission const said = r.kv.fork(first, {.prompt_tokens = 4, .max_tokens = 100}, second);
      CHECK((said == admission::admitted) == (spare == 24));
      CHECK(is_none(second) == (said != admission::admitted));
      CHECK(r.kv.tokens_of(first) == 10);
      CHECK(r.kv.audit() == "");
      for (std::uint32_t b = 0; b < 2; ++b) {
        CHECK(r.kv.store().references(home_of(r, first, b)) == (said == admission::admitted ? 2U : 1U));
      }
      if (said == admission::admitted) { r.engine.assign(second, r.engine.history_of(first)); }
      while (r.kv.tokens_of(first) < 60) { r.step({{.row = first}}); }
      r.close_all();
    }
  }

  // Report: sgl-project/sglang#27631
  TEST_CASE(
    "law 12: a prefix that is adopted while the host store is full reads its own blocks, whatever is given up when")
  {
    // Three kept prefixes of 7 blocks and a row of 25 fill the store.
    std::vector<std::uint32_t> order{0, 1, 2};
    do {
      rig<hits_manager> r{options_of(2, 3 * 7 + 25), six_blocks};
      r.engine.rows_differ = true;
      row_id const busy = r.open(9, 4, 100);
      r.engine.prefill(busy, 4, 4);
      saved_id kept[3];
      pattern_engine<cpu_backend, hits_manager>::history histories[3];
      for (std::uint32_t i = 0; i < 3; ++i) {
        row_id const row = r.open(i + 1, 28, 28);
        r.engine.prefill(row, 28, 8);
        REQUIRE(r.kv.retain(row, kept[i]) == status::ok);
        histories[i] = r.engine.history_of(row);
        REQUIRE(r.kv.close(row) == status::ok);
        REQUIRE(r.kv.drain(no_deadline) == status::ok);
      }
      CHECK(r.kv.store().available() == 0);
      // One that would grow needs blocks that are all kept: it waits, and nothing changes.
      std::uint32_t const wanted = order[0];
      row_id row{};
      CHECK(r.kv.adopt(kept[wanted], {.prompt_tokens = 28, .max_tokens = 56}, row) == admission::queued);
      CHECK(r.kv.store().available() == 0);
      CHECK(r.kv.audit() == "");
      // As long as what is kept, it shares all it needs.
      REQUIRE(r.kv.adopt(kept[wanted], {.prompt_tokens = 28, .max_tokens = 28}, row) == admission::admitted);
      CHECK(r.kv.store().available() == 0);
      REQUIRE(r.kv.close(row) == status::ok);
      // With another given up there is room; what was given up is written over while the adopted one reads its own.
      REQUIRE(r.kv.release(kept[order[1]]) == status::ok);
      REQUIRE(r.kv.release(kept[wanted]) == status::ok);
      CHECK(r.kv.adopt(kept[wanted], {.prompt_tokens = 28, .max_tokens = 56}, row) == admission::rejected);
      poison_free(r);
      REQUIRE(r.kv.adopt(kept[order[2]], {.prompt_tokens = 28, .max_tokens = 56}, row) == admission::admitted);
      r.engine.assign(row, histories[order[2]]);
      REQUIRE(r.kv.release(kept[order[2]]) == status::ok);  // the row holds the blocks alone now
      while (r.kv.tokens_of(row) < 56) { r.step({{.row = row}, {.row = busy}}); }
      CHECK(r.kv.audit() == "");
      r.close_all();
    } while (std::next_permutation(order.begin(), order.end()));
  }

  // Report: vllm-project/vllm#54193
  TEST_CASE("only blocks whose tokens all have keys and values are kept for others")
  {
    rig<hits_manager> r{options_of(2), six_blocks};
    r.engine.rows_differ = true;
    auto const kept_tokens = [&](row_id from) {
      saved_id saved;
      REQUIRE(r.kv.retain(from, saved) == status::ok);
      row_id row{};
      REQUIRE(r.kv.adopt(saved, {.prompt_tokens = 4, .max_tokens = 100}, row) == admission::admitted);
      std::uint32_t const tokens = r.kv.tokens_of(row);
      r.engine.assign(row, r.engine.history_of(from));
      r.step({{.row = row}, {.row = from}});  // both go on, apart
      REQUIRE(r.kv.close(row) == status::ok);
      REQUIRE(r.kv.truncate(from, r.kv.tokens_of(from) - 1) == status::ok);
      REQUIRE(r.kv.release(saved) == status::ok);
      return tokens;
    };
    // Three prompt tokens, and one sampled: position 3 has no keys yet.
    row_id first = r.open(1, 3, 100);
    r.engine.prefill(first, 3, 3);
    CHECK(r.kv.sequences()[first].sealed == 0);
    CHECK(kept_tokens(first) == 0);
    REQUIRE(r.kv.close(first) == status::ok);
    // Seven prompt tokens, then drafts at 7 and 8 that are rejected: block 1 was full for a moment.
    row_id const second = r.open(2, 7, 100);
    r.engine.prefill(second, 7, 7);
    r.engine.row(second).accept = 0;
    r.step({{.row = second, .tokens = 2}});
    r.engine.row(second).accept = ~0U;
    CHECK(r.kv.tokens_of(second) == 7);
    CHECK(r.kv.sequences()[second].sealed == 1);
    CHECK(kept_tokens(second) == 4);
    // The same at every place of a boundary: what is kept is what is committed, rounded down.
    for (std::uint32_t accept = 0; accept <= 3; ++accept) {
      for (std::uint32_t from = 8; from < 16; ++from) {
        while (r.kv.tokens_of(second) > from) { REQUIRE(r.kv.truncate(second, from) == status::ok); }
        r.engine.row(second).accept = ~0U;
        while (r.kv.tokens_of(second) < from) { r.step({{.row = second}}); }
        r.engine.row(second).accept = accept;
        r.step({{.row = second, .tokens = 3}});
        r.engine.row(second).accept = ~0U;
        CHECK(r.kv.sequences()[second].sealed == (from + accept) / 4);
        CHECK(kept_tokens(second) == (from + accept) / 4 * 4);
      }
    }
    r.close_all();
  }

  // Report: vllm-project/aibrix#2329
  TEST_CASE("law 12: the name of a prefix that was given up never yields the one that took its place")
  {
    rig<hits_manager> r{options_of(3), six_blocks};
    r.engine.rows_differ = true;
    row_id const a = r.open(1, 30, 100), b = r.open(2, 30, 100);
    r.engine.prefill(a, 30, 8);
    r.engine.prefill(b, 30, 8);
    std::vector<saved_id> old;
    for (int i = 0; i < 40; ++i) {
      saved_id saved;
      REQUIRE(r.kv.retain(i % 2 == 0 ? a : b, saved) == status::ok);
      for (saved_id const stale : old) {
        row_id row{};
        CHECK(r.kv.adopt(stale, {.prompt_tokens = 30, .max_tokens = 100}, row) == admission::rejected);
        CHECK(r.kv.resume(stale, row) == admission::rejected);
        CHECK(r.kv.release(stale) == status::stale_ticket);
      }
      row_id row{};
      REQUIRE(r.kv.adopt(saved, {.prompt_tokens = 30, .max_tokens = 100}, row) == admission::admitted);
      r.engine.assign(row, r.engine.history_of(i % 2 == 0 ? a : b));
      r.step({{.row = row, .tokens = 2}});
      REQUIRE(r.kv.close(row) == status::ok);
      REQUIRE(r.kv.release(saved) == status::ok);
      old.push_back(saved);
    }
    r.close_all();
  }

  // Report: sgl-project/sglang#17085
  TEST_CASE("law 6: every plane and the digests come along with a fork, a kept prefix and a sequence that was away")
  {
    kv_geometry g{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 8, .block_tokens = 16};
    g.key_type = g.value_type = dtype::float8_e4m3;
    g.extra_planes = {{.name = "scales", .bytes_per_block = 64}, {.name = "index keys", .bytes_per_token = 132}};
    enum class way { stays, fork, adopt, resume };
    std::uint64_t selections[4] = {};
    for (way const how : {way::stays, way::fork, way::adopt, way::resume}) {
      CAPTURE(static_cast<int>(how));
      rig<checked_manager> r{
        {.geometry = g,
         .manager =
           {.max_rows = 2,
            .max_tokens = 700,
            .max_prefill_tokens = 16,
            .quota_tokens = 160,
            .slots = 200,
            .host_blocks = 140},
         .per_row = 16},
        {.budget_tokens = 112, .sink_tokens = 16, .recent_tokens = 32, .dense_tokens = 112, .hysteresis = 0}};
      row_id row = r.open(1, 640, 700);
      r.engine.prefill(row, 640, 16);
      auto const history = r.engine.history_of(row);
      row_id back = row;
      saved_id saved;
      if (how == way::fork) {
        REQUIRE(r.kv.fork(row, {.prompt_tokens = 640, .max_tokens = 700}, back) == admission::admitted);
        REQUIRE(r.kv.close(row) == status::ok);
      } else if (how == way::adopt) {
        REQUIRE(r.kv.retain(row, saved) == status::ok);
        REQUIRE(r.kv.close(row) == status::ok);
        poison_free(r);
        REQUIRE(r.kv.adopt(saved, {.prompt_tokens = 640, .max_tokens = 700}, back) == admission::admitted);
        REQUIRE(r.kv.release(saved) == status::ok);
      } else if (how == way::resume) {
        REQUIRE(r.kv.preempt(row, saved) == status::ok);
        poison_free(r);
        REQUIRE(r.kv.resume(saved, back) == admission::admitted);
      }
      if (how != way::stays) {
        REQUIRE(r.backend.synchronize() == status::ok);
        r.engine.assign(back, history);
      }
      poison_free(r);
      CHECK(r.kv.tokens_of(back) == 640);
      r.engine.selections = 0;
      for (int step = 0; step < 40; ++step) { r.step({{.row = back}}); }
      selections[static_cast<int>(how)] = r.engine.selections;
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      r.engine.look_at_host(back, false);
      CHECK(r.engine.fault() == "");
      r.close_all();
      CHECK(r.backend.check() == 0);
    }
    CHECK(selections[1] == selections[0]);
    CHECK(selections[2] == selections[0]);
    CHECK(selections[3] == selections[0]);
  }

  TEST_CASE("a long row that comes back keeping its blocks may give them up before its next step")
  {
    for (bool const away : {false, true}) {
      rig_options options = options_of(2);
      options.manager.slots = 300;
      rig<hits_manager> r{options, six_blocks};
      row_id row{};
      REQUIRE(r.kv.open({.prompt_tokens = 4, .max_tokens = 100, .keep_resident = true}, row) == admission::admitted);
      r.engine.assign(row, 1);
      r.engine.prefill(row, 4, 4);
      while (r.kv.tokens_of(row) < 70) { r.step({{.row = row}}); }
      auto const history = r.engine.history_of(row);
      if (away) {
        saved_id saved;
        REQUIRE(r.kv.preempt(row, saved) == status::ok);
        REQUIRE(r.kv.resume(saved, row) == admission::admitted);
        r.engine.assign(row, history);
      }
      CHECK(r.kv.mode_of(row) == row_mode::sparse_resident);
      REQUIRE(r.kv.demote(row) == status::ok);
      CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
      CHECK(r.kv.audit() == "");
      while (r.kv.tokens_of(row) < 100) { r.step({{.row = row}}); }
      CHECK(r.kv.audit() == "");
      r.close_all();
    }
  }

  // Report: sgl-project/sglang#22453
  TEST_CASE("no more rows are let in than slots can be kept back for, also where a lease is longer than the sequence")
  {
    // A lease has 10 slots in each of three layers, a sequence of 30 tokens 8 blocks: 30 slots are kept back for it.
    for (bool const keeps : {false, true}) {
      rig_options options = options_of(3);
      options.manager.slots = 59;
      rig<hits_manager> r{options, six_blocks};
      row_id rows[2] = {};
      sequence_options const request{.prompt_tokens = 4, .max_tokens = 30, .keep_resident = keeps};
      REQUIRE(r.kv.open(request, rows[0]) == admission::admitted);
      CHECK(r.kv.open(request, rows[1]) == admission::queued);
      CHECK(r.kv.audit() == "");
      REQUIRE(r.kv.close(rows[0]) == status::ok);
      REQUIRE(r.kv.open(request, rows[0]) == admission::admitted);
      CHECK(r.kv.explain_refusal(request).find("30 slots (29 of 59 free)") != std::string::npos);
      r.close_all();
    }
  }
}
