#include <doctest/doctest.h>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Copies that read a host block of a row, in any layer and head group.
template <class Rig>
script_rule copies_of_block(Rig& r, row_id row, std::uint32_t block, script_effect effect)
{
  host_block_id const source = r.kv.sequences()[row].host_blocks[block];
  host_store_ref const host = r.kv.store().ref();
  kv_geometry const g = r.kv.geometry();
  std::uint64_t const bytes = r.kv.layout().block_bytes;
  return {.effect = effect, .call = script_call::copy, .name = "copy to device", .where = [=](script_task const& t) {
            for (std::uint32_t i = 0; i < t.runs.count; ++i) {
              for (std::uint32_t l = 0; l < g.layers; ++l) {
                for (std::uint32_t h = 0; h < g.head_groups; ++h) {
                  std::byte const* const begin = host.address(static_cast<layer_id>(l), h, source);
                  if (t.runs.runs[i].source >= begin && t.runs.runs[i].source < begin + bytes) { return true; }
                }
              }
            }
            return false;
          }};
}

/// Every step reads blocks 2 and 3 of the row, which no slot holds.
template <class Rig>
row_id open_reading_two(Rig& r)
{
  r.choice = [](row_id, layer_id, std::uint32_t, std::uint32_t) {
    return std::vector<block_id>{block_id{0}, block_id{1}};
  };
  row_id const row = r.open(1, 8);
  for (int i = 0; i < 2; ++i) { r.step({{.row = row}}); }
  r.choice = [](row_id, layer_id, std::uint32_t, std::uint32_t) {
    return std::vector<block_id>{block_id{2}, block_id{3}};
  };
  need(r.kv.drain(no_deadline), "drain");
  return row;
}

}  // namespace

TEST_SUITE("laws")
{
  // Report: vllm-project/vllm#49176
  TEST_CASE("law 10: a block whose copies always fail is tried twice, then its row fails; nothing else is copied again")
  {
    for (script_effect const effect : {script_effect::fail, script_effect::refuse}) {
      scripted_backend backend;
      small_rig<host_planned> r{backend, {.layers = 1}};
      r.engine.forgives_failed = true;
      row_id const row = open_reading_two(r);
      std::uint32_t const tokens = r.kv.tokens_of(row);
      std::size_t const broken = backend.add_rule(copies_of_block(r, row, 3, effect));
      std::size_t const whole = backend.add_rule(copies_of_block(r, row, 2, script_effect::delay));
      r.step({{.row = row}});
      CHECK(r.kv.row_status(row) == status::transfer_failed);
      CHECK(r.kv.tokens_of(row) == tokens);
      REQUIRE(!r.kv.failures().empty());
      bool named = false;
      for (failure_record const& failure : r.kv.failures()) { named = named || failure.block == block_id{3}; }
      CHECK(named);
      CHECK(r.kv.failures().front().tries == 2);
      CHECK(backend.seen_by(broken) <= 4);  // keys and values, twice
      if (effect == script_effect::refuse) {
        // The other block arrived and stays.
        CHECK(backend.seen_by(whole) == 2);
        CHECK(r.kv.failures().size() == 1);
        residency_ref const books = r.kv.books().residency();
        CHECK_FALSE(is_none(books.slots_of_lane(layer_id{0}, lane_id{0})[2]));
        CHECK(is_none(books.slots_of_lane(layer_id{0}, lane_id{0})[3]));
      }
      CHECK(r.kv.finish_sample().failed_transfers >= 2);
      backend.remove_rule(broken);
      for (int i = 0; i < 3; ++i) { r.step({{.row = row}}); }
      CHECK(r.kv.row_status(row) == status::ok);
      CHECK(r.kv.tokens_of(row) == tokens + 3);
      r.finish();
    }
  }

  // Report: ai-dynamo/dynamo#15079
  TEST_CASE_TEMPLATE(
    "law 10: one copy of four that fails, whichever it is, is made again, and its slot never shows what lay there",
    Manager, device_planned, host_planned)
  {
    std::string const kind = std::is_same_v<Manager, host_planned> ? "copy to device" : "gather_blocks";
    std::uint64_t const copies = std::is_same_v<Manager, host_planned> ? 8 : 1;
    for (script_effect const effect : {script_effect::fail, script_effect::refuse}) {
      for (std::uint64_t first = 0; first < copies; ++first) {
        scripted_backend backend;
        small_rig<Manager> r{backend, {.rows = 2, .layers = 1, .head_groups = 2}};
        row_id const row = open_reading_two(r);
        std::size_t const rule = backend.add_rule(copies_that(effect, kind, first));
        r.step({{.row = row}});
        CHECK(r.kv.row_status(row) == status::ok);
        CHECK(backend.counts().failed + backend.counts().refused == 1);
        CHECK(r.kv.finish_sample().failed_transfers == 1);
        CHECK(r.kv.failures().empty());
        backend.remove_rule(rule);
        for (int i = 0; i < 3; ++i) { r.step({{.row = row}}); }
        r.finish();
      }
    }
  }

  // Report: sgl-project/sglang#27631
  TEST_CASE(
    "law 12: kept prefixes that fill the host store are begun again in any order, and none is given up for another")
  {
    std::array<std::size_t, 3> order{0, 1, 2};
    do {
      scripted_backend backend;
      small_rig<device_planned> r{backend, {.rows = 4, .host_blocks = 16, .saved_sequences = 4}};
      r.engine.runs_ahead = true;
      std::array<saved_id, 3> kept;
      for (std::size_t i = 0; i < 3; ++i) {
        row_id const row = r.open(i + 1, 8, 8);
        REQUIRE(r.kv.retain(row, kept[i]) == status::ok);
        REQUIRE(r.kv.close(row) == status::ok);
        REQUIRE(r.kv.drain(no_deadline) == status::ok);
      }
      // Each needs two blocks beside the four that it shares; four are free.
      std::vector<row_id> rows;
      for (std::size_t const i : order) {
        std::uint64_t const held = r.kv.memory().host_bytes;
        row_id row{};
        admission const said = r.kv.adopt(kept[i], {.prompt_tokens = 8, .max_tokens = 12}, row);
        CHECK(said == (rows.size() < 2 ? admission::admitted : admission::queued));
        CHECK(r.kv.memory().host_bytes == held);
        CHECK(r.kv.audit() == "");
        if (said != admission::admitted) { continue; }
        r.engine.assign(row, i + 1);
        rows.push_back(row);
      }
      for (int step = 0; step < 4; ++step) { r.step({{.row = rows[0]}, {.row = rows[1]}}); }
      REQUIRE(r.kv.close(rows[0]) == status::ok);
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      row_id last{};
      REQUIRE(r.kv.adopt(kept[order[2]], {.prompt_tokens = 8, .max_tokens = 12}, last) == admission::admitted);
      r.engine.assign(last, order[2] + 1);
      for (int step = 0; step < 4; ++step) { r.step({{.row = last}}); }
      for (saved_id const id : kept) { REQUIRE(r.kv.release(id) == status::ok); }
      r.finish();
    } while (std::ranges::next_permutation(order).found);
  }

  // Report: kvcache-ai/Mooncake#2507
  TEST_CASE("a manager takes all its handles at construction, however long it runs")
  {
    scripted_backend backend;
    {
      small_rig<device_planned> r{backend, {.rows = 3}};
      std::uint64_t const created = backend.counts().events_created;
      std::uint32_t const events = backend.live_events(), streams = backend.live_streams();
      for (std::uint64_t sequence = 1; sequence <= 300; ++sequence) {
        row_id row = r.open(sequence, 7);
        for (int step = 0; step < 6; ++step) { r.step({{.row = row}}); }
        if (sequence % 3 == 0) {
          saved_id saved;
          REQUIRE(r.kv.preempt(row, saved) == status::ok);
          REQUIRE(r.kv.resume(saved, row) == admission::admitted);
        }
        REQUIRE(r.kv.close(row) == status::ok);
      }
      CHECK(backend.counts().events_created == created);
      CHECK(backend.live_streams() == streams);
      CHECK(backend.live_events() == events);
      r.finish();
    }
    CHECK(backend.live_events() == 0);
    CHECK(backend.live_streams() == 1);
  }

  TEST_CASE("law 10: what a prefetch did not bring is told to who waits for it, also when another has begun since")
  {
    for (bool const fails : {false, true}) {
      scripted_backend backend;
      small_rig<device_planned> r{backend, {.spare_slots = 2}};
      auto const read = [&](std::uint32_t first) {
        r.choice = [=](row_id, layer_id, std::uint32_t, std::uint32_t) {
          return std::vector<block_id>{static_cast<block_id>(first), static_cast<block_id>(first + 1)};
        };
      };
      read(0);
      row_id const row = r.open(1, 14);
      for (int i = 0; i < 2; ++i) { r.step({{.row = row}}); }
      need(r.kv.drain(no_deadline), "drain");
      r.kv.finish_sample();
      read(2);  // which no slot holds
      backend.choose(false);
      step_row const one{.row = row};
      need(r.engine.begin({&one, 1}), "begin_step");
      row_list const rows = r.kv.rows();
      auto const import = [&](layer_id layer, row_list of) { r.engine.before_enter(layer, of); };
      r.engine.fill(layer_id{0}, rows);
      need(r.kv.append(layer_id{0}, rows, r.engine.key_view(), r.engine.value_view()), "append");
      // The prefetch's copies are late, so that the recall finds its blocks on their way; then they fail, or do not.
      script_rule late = copies_that(script_effect::delay, "gather_blocks", 0, 1);
      late.delay = std::chrono::milliseconds{1};
      backend.add_rule(late);
      if (fails) { backend.add_rule(copies_that(script_effect::fail, "gather_blocks", 0, 1)); }
      import(layer_id{0}, rows);
      need(r.kv.prefetch(layer_id{0}, rows, r.engine.query_view()), "prefetch");
      import(layer_id{0}, rows);
      ticket waits;
      need(r.kv.begin_recall(layer_id{0}, rows, r.engine.query_view(), r.stream, waits), "begin_recall");
      need(r.kv.drain(no_deadline), "drain");
      // Another prefetch takes the place of the one before, of which nobody has asked yet.
      import(layer_id{1}, rows);
      need(r.kv.prefetch(layer_id{1}, rows, r.engine.query_view()), "prefetch");
      need(r.kv.drain(no_deadline), "drain");
      CHECK(r.kv.finish_sample().background_blocks >= 2);
      CHECK(r.kv.status_of(waits) == (fails ? status::transfer_failed : status::ok));
      CHECK(r.kv.landed(waits).test(0) == !fails);
      CHECK(r.kv.audit() == "");
    }
  }

  TEST_CASE("law 12: rows that share a prefix read it once for all of them, and each its own blocks beside it")
  {
    scripted_backend backend;
    gather_scatter_engine const joining{.rows_per_landing = 0, .join_shared = true};
    small_rig<in_lockstep> r{backend, {.rows = 4, .max_tokens = 40}, {}, joining};
    std::size_t const joins = backend.add_rule({.effect = script_effect::delay, .name = "join_entries"});
    auto const select = [&](std::uint32_t first) {
      r.choice = [=](row_id, layer_id, std::uint32_t sealed, std::uint32_t) {
        return std::vector<block_id>{static_cast<block_id>(first), static_cast<block_id>(sealed - 1)};
      };
    };
    select(0);
    row_id const rows[4] = {r.open(1, 12, 40), r.open(2, 12, 40), {}, {}};
    r.step({{.row = rows[0]}, {.row = rows[1]}});
    select(1);
    r.step({{.row = rows[0]}, {.row = rows[1]}});
    CHECK(backend.seen_by(joins) == 0);  // strangers
    row_id forks[2] = {};
    for (row_id& fork : forks) {
      need(r.kv.fork(rows[0], {.prompt_tokens = 12, .max_tokens = 40}, fork) == admission::admitted, "fork");
      r.engine.assign(fork, r.engine.history_of(rows[0]));
    }
    for (std::uint32_t turn = 0; turn < 6; ++turn) {
      select(turn % 3);
      r.step({{.row = rows[0]}, {.row = forks[0]}, {.row = rows[1]}, {.row = forks[1]}});
    }
    std::uint64_t const shared = backend.seen_by(joins);
    CHECK(shared == 12);  // of two layers
    need(r.kv.close(rows[0]), "close");
    need(r.kv.close(forks[0]), "close");
    select(1);
    r.step({{.row = forks[1]}, {.row = rows[1]}});
    CHECK(backend.seen_by(joins) == shared);  // alone with its prefix
    r.finish();
  }
}
