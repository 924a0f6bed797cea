#include <pulseinfer/backend/scripted/scripted_backend.hpp>

#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using scripted_manager = offload_manager<
  scripted_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>,
  fixed_admission>;

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

kv_geometry plain() { return {.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 4, .block_tokens = 4}; }

manager_options options_of(bool verify = false)
{
  return {
    .max_rows = 3,
    .max_tokens = 160,
    .max_prefill_tokens = 8,
    .quota_tokens = 36,
    .stream_tokens = 12,
    .slots = 600,
    .verify = verify};
}

/// A manager over a scripted backend, and an engine that checks every byte that it is handed.
struct scene {
  explicit scene(script const& how, bool verify = false)
    : backend{how},
      stream{backend.create_stream()},
      kv{backend, stream, plain(), options_of(verify), six_blocks},
      engine{backend, stream, kv, 3, 160, 8}
  {}

  row_id open(std::uint64_t seed, std::uint32_t prompt, bool streams)
  {
    row_id row{};
    REQUIRE(
      kv.open({.prompt_tokens = prompt, .max_tokens = 160, .stream_prompt = streams}, row) == admission::admitted);
    engine.assign(row, seed);
    return row;
  }

  void step(std::vector<step_row> const& rows)
  {
    REQUIRE(engine.step(std::span<step_row const>{rows}) == status::ok);
    REQUIRE(engine.fault() == "");
    REQUIRE(kv.audit() == "");
  }

  scripted_backend backend;
  scripted_backend::stream_ref stream;
  scripted_manager kv;
  pattern_engine<scripted_backend, scripted_manager> engine;
};

/// Copies to the device that bring blocks through the halves: nothing else is recalled here.
script_rule copies_to_device(script_effect effect, std::uint64_t first, std::uint64_t count)
{
  return {.effect = effect, .call = script_call::copy, .name = "copy to device", .first = first, .count = count};
}

/// A prompt of 60 tokens has streamed up to 44, which are eleven blocks; another row decodes.
struct in_the_middle : scene {
  explicit in_the_middle(script const& how = {}, bool verify = false)
    : scene{how, verify}, row{open(1, 60, true)}, other{open(2, 4, false)}
  {
    engine.prefill(other, 4, 4);
    engine.prefill(row, 44, 8);
    REQUIRE(engine.fault() == "");
    REQUIRE(kv.tokens_of(row) == 44);
    seen = how.rules.empty() ? 0 : backend.seen_by(0);
  }

  row_id row;
  row_id other;
  std::uint64_t seen = 0;  ///< calls that the first rule has seen so far
};

std::uint64_t copies_before_the_step()
{
  in_the_middle const probe{script{.rules = {copies_to_device(script_effect::refuse, ~0ULL, 0)}}};
  return probe.seen;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE(
    "law 10: a refused copy of a stream is tried again; after the last try the row has failed and the others go on")
  {
    std::uint64_t const before = copies_before_the_step();
    CHECK(before > 10);
    // Eleven blocks go by in four chunks at each of two layers.
    for (std::uint64_t const chunk : {0U, 1U, 2U, 3U, 4U, 7U}) {
      for (std::uint64_t const refusals : {1U, 2U}) {
        CAPTURE(chunk);
        CAPTURE(refusals);
        in_the_middle s{script{.rules = {copies_to_device(script_effect::refuse, before + chunk, refusals)}}};
        s.engine.stream_may_fail = true;
        s.step({{.row = s.other}, {.row = s.row, .tokens = 8}});
        CHECK(s.kv.tokens_of(s.other) == 5);
        if (refusals == 1) {
          CHECK(s.kv.tokens_of(s.row) == 52);
          CHECK(s.kv.row_status(s.row) == status::ok);
          CHECK(s.kv.failures().empty());
        } else {
          CHECK(s.kv.tokens_of(s.row) == 44);
          CHECK(s.kv.row_status(s.row) == status::transfer_failed);
          std::size_t const blocks = chunk % 4 == 3 ? 2 : 3;
          REQUIRE(s.kv.failures().size() == blocks);
          for (std::size_t i = 0; i < blocks; ++i) {
            failure_record const& record = s.kv.failures()[i];
            CHECK(record.row == s.row);
            CHECK(to_index(record.layer) == chunk / 4);
            CHECK(to_index(record.block) == chunk % 4 * 3 + i);
            CHECK(record.tries == 2);
            CHECK(record.code == status::transfer_failed);
          }
          // It stands where it stood, and goes on from there.
          s.step({{.row = s.row, .tokens = 8}});
        }
        s.engine.stream_may_fail = false;
        s.step({{.row = s.row, .tokens = 8}, {.row = s.other}});
        CHECK(s.kv.tokens_of(s.row) == 60);
        for (int i = 0; i < 10; ++i) { s.step({{.row = s.row}, {.row = s.other}}); }
        CHECK(s.kv.mode_of(s.row) == row_mode::sparse_offloaded);
      }
    }
  }

  TEST_CASE("law 10: a copy of a stream that fails on its way is found before the row's tokens are kept")
  {
    std::uint64_t const before = copies_before_the_step();
    for (progress const runs : {progress::at_waits, progress::at_all_calls}) {
      for (std::uint64_t chunk = 0; chunk < 8; ++chunk) {
        CAPTURE(chunk);
        in_the_middle s{script{.runs = runs, .rules = {copies_to_device(script_effect::fail, before + chunk, 1)}}};
        s.engine.stream_may_fail = true;
        // Its bytes are wrong, and the engine would say so: nobody looks at them.
        std::vector<step_row> rows{{.row = s.other}, {.row = s.row, .tokens = 8}};
        REQUIRE(s.engine.begin(rows) == status::ok);
        s.engine.enter(s.kv.first_layer(), s.kv.rows());
        for (visit const& v : s.kv.step()) {
          for (row_id const row : v.rows) {
            auto earlier = s.kv.stream_blocks(v.layer, row);
            for (stream_part const& part : earlier) { static_cast<void>(part); }
          }
          static_cast<void>(s.backend.launch(
            s.stream, host_function{[&, v, now = s.engine.note()] { s.engine.write_extras(v.layer, v.rows, now); }}));
          if (!v.last) { s.engine.enter(v.next, v.rows); }
        }
        s.engine.commit();
        REQUIRE(s.engine.fault() == "");
        CHECK(s.kv.tokens_of(s.other) == 5);
        CHECK(s.kv.tokens_of(s.row) == 44);
        CHECK(s.kv.row_status(s.row) == status::transfer_failed);
        REQUIRE(s.kv.failures().size() == (chunk % 4 == 3 ? 2 : 3));
        CHECK(to_index(s.kv.failures()[0].layer) == chunk / 4);
        CHECK(to_index(s.kv.failures()[0].block) == chunk % 4 * 3);
        CHECK(s.kv.audit() == "");
        s.engine.stream_may_fail = false;
        s.step({{.row = s.row, .tokens = 8}, {.row = s.other}});
        s.step({{.row = s.row, .tokens = 8}, {.row = s.other}});
        for (int i = 0; i < 10; ++i) { s.step({{.row = s.row}, {.row = s.other}}); }
        CHECK(s.kv.row_status(s.row) == status::ok);
      }
    }
  }

  TEST_CASE("law 10: whichever call of a stream is refused, its row has failed or comes through, and no other row")
  {
    // The first rule is what is tried, the second finds the stream of the copies.
    auto const refusing = [](script_call call, std::uint32_t* copies, std::uint64_t first) {
      script how;
      how.rules.push_back(
        {.effect = script_effect::refuse,
         .call = call,
         .where =
           [copies](script_task const& t) {
             bool const own = t.stream == *copies || (t.call == script_call::wait && t.recorded_on == *copies);
             return *copies != 0 && (own || std::string_view{t.name} == "list_stream");
           },
         .first = first,
         .count = 1});
      how.rules.push_back({.call = script_call::launch, .name = "land_stream", .where = [copies](script_task const& t) {
                             *copies = t.stream;
                             return false;
                           }});
      return how;
    };
    for (script_call const call : {script_call::launch, script_call::record, script_call::wait}) {
      std::uint32_t copies = 0;
      in_the_middle probe{refusing(call, &copies, ~0ULL)};
      std::uint64_t const before = probe.seen;
      probe.step({{.row = probe.other}, {.row = probe.row, .tokens = 8}});
      std::uint64_t const behind = probe.backend.seen_by(0);
      CHECK(behind - before >= 8);
      std::uint64_t failed = 0;
      for (std::uint64_t place = before; place < behind; ++place) {
        CAPTURE(place);
        copies = 0;
        in_the_middle s{refusing(call, &copies, place)};
        s.engine.stream_may_fail = true;
        s.step({{.row = s.other}, {.row = s.row, .tokens = 8}});
        CHECK(s.kv.tokens_of(s.other) == 5);
        bool const lost = s.kv.tokens_of(s.row) == 44;
        CHECK((s.kv.row_status(s.row) == status::ok) != lost);
        failed += lost ? 1U : 0U;
        s.engine.stream_may_fail = false;
        while (s.kv.tokens_of(s.row) < 60) { s.step({{.row = s.row, .tokens = 8}, {.row = s.other}}); }
        for (int i = 0; i < 5; ++i) { s.step({{.row = s.row}, {.row = s.other}}); }
        REQUIRE(s.kv.close(s.row) == status::ok);
        REQUIRE(s.kv.drain(no_deadline) == status::ok);
        CHECK_FALSE(s.kv.sequences()[s.row].open());
      }
      CHECK(failed >= 8);
    }
  }

  TEST_CASE("law 1: verify mode names the block of a stream whose bytes changed on the host")
  {
    for (std::uint32_t const block : {0U, 4U, 10U}) {
      in_the_middle s{script{}, true};
      REQUIRE(s.kv.drain(no_deadline) == status::ok);
      host_block_id const home = s.kv.sequences()[s.row].host_blocks[block];
      s.kv.store().ref().address(layer_id{1}, 0, home)[5] ^= std::byte{1};
      s.engine.stream_may_fail = true;
      REQUIRE(s.engine.step({{.row = s.other}, {.row = s.row, .tokens = 8}}) == status::ok);
      CHECK(s.engine.fault() != "");  // attention has read it: the step is dropped for this
      CHECK(s.kv.tokens_of(s.row) == 44);
      CHECK(s.kv.tokens_of(s.other) == 5);
      CHECK(s.kv.row_status(s.row) == status::transfer_failed);
      REQUIRE(s.kv.failures().size() == 1);
      CHECK(s.kv.failures()[0].layer == layer_id{1});
      CHECK(to_index(s.kv.failures()[0].block) == block);
      CHECK(s.kv.audit() == "");
    }
  }

  TEST_CASE("a lost device ends a stream and says so")
  {
    std::uint64_t const before = copies_before_the_step();
    in_the_middle s{
      script{.runs = progress::at_all_calls, .rules = {copies_to_device(script_effect::lose, before + 1, 1)}}};
    s.engine.stream_may_fail = true;
    static_cast<void>(s.engine.step({{.row = s.row, .tokens = 8}}));
    CHECK(s.kv.tokens_of(s.row) == 44);
    step_row const again{.row = s.row, .tokens = 1};
    CHECK(s.kv.begin_step({&again, 1}) != status::ok);
  }

  TEST_CASE("law 9: a row that is closed while its blocks stream by is given back once the copies are complete")
  {
    in_the_middle s;
    step_row const one{.row = s.row, .tokens = 8};
    REQUIRE(s.engine.begin({&one, 1}) == status::ok);
    s.engine.enter(s.kv.first_layer(), s.kv.rows());
    std::uint32_t const held = s.kv.store().counts().held;
    {
      auto earlier = s.kv.stream_blocks(layer_id{0}, s.row);
      auto part = earlier.begin();
      REQUIRE(part != earlier.end());
      REQUIRE(s.kv.close(s.row) == status::ok);
      ++part;
      CHECK(part == earlier.end());
      CHECK(earlier.status() == status::aborted);
    }
    s.kv.poll();
    CHECK(s.kv.sequences()[s.row].open());
    CHECK(s.kv.store().counts().held == held);
    CHECK(s.kv.audit() == "");
    REQUIRE(s.kv.drain(no_deadline) == status::ok);
    CHECK_FALSE(s.kv.sequences()[s.row].open());
    CHECK(s.kv.store().counts().held == 1);  // of the other row
    CHECK(s.kv.audit() == "");
    s.engine.row(s.row).in_step = false;
    row_id const next = s.open(9, 60, true);
    s.engine.prefill(next, 60, 8);
    for (int i = 0; i < 10; ++i) { s.step({{.row = next}, {.row = s.other}}); }
  }

  TEST_CASE("law 4: a manager that goes while blocks stream by frees nothing that a copy names")
  {
    scripted_backend backend;
    auto const stream = backend.create_stream();
    {
      scripted_manager kv{backend, stream, plain(), options_of(), six_blocks};
      pattern_engine<scripted_backend, scripted_manager> engine{backend, stream, kv, 3, 160, 8};
      row_id row{};
      REQUIRE(kv.open({.prompt_tokens = 60, .max_tokens = 160, .stream_prompt = true}, row) == admission::admitted);
      engine.assign(row, 1);
      engine.prefill(row, 44, 8);
      step_row const one{.row = row, .tokens = 8};
      REQUIRE(engine.begin({&one, 1}) == status::ok);
      engine.enter(kv.first_layer(), kv.rows());
      REQUIRE(backend.synchronize(stream) == status::ok);
      auto const earlier = kv.stream_blocks(layer_id{0}, row);
      CHECK(backend.pending_tasks() > 3);
    }
    CHECK(backend.counts().freed_under_copy == 0);
    CHECK(backend.device_bytes() == 0);
  }

  TEST_CASE("law 5: a part waits for its copies, and copies wait for the attention that read their half before")
  {
    enum class without : std::uint8_t { nothing, copies_wait, compute_waits };
    auto const faults = [](without what) {
      std::uint32_t wrong = 0;
      for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        std::uint32_t copies = 0;
        script how{
          .order = order_kind::seeded,
          .seed = seed,
          .runs = seed % 2 == 0 ? progress::at_all_calls : progress::at_waits};
        how.rules.push_back(
          {.call = script_call::launch, .name = "land_stream", .where = [&copies](script_task const& t) {
             copies = t.stream;
             return false;
           }});
        how.rules.push_back(
          {.effect = script_effect::drop, .call = script_call::wait, .where = [&](script_task const& t) {
             if (copies == 0) { return false; }
             return what == without::copies_wait ? t.stream == copies
                                                 : what == without::compute_waits && t.recorded_on == copies;
           }});
        scene s{how};
        row_id const row = s.open(seed, 120, true);
        s.engine.prefill(row, 120, 8);
        wrong += s.engine.fault() == "" ? 0U : 1U;
      }
      return wrong;
    };
    CHECK(faults(without::nothing) == 0);
    CHECK(faults(without::copies_wait) > 20);
    CHECK(faults(without::compute_waits) > 10);
  }

  TEST_CASE("going on in a stream never waits for the device")
  {
    in_the_middle s;
    step_row const one{.row = s.row, .tokens = 8};
    REQUIRE(s.engine.begin({&one, 1}) == status::ok);
    REQUIRE(s.backend.synchronize() == status::ok);
    std::uint64_t const completed = s.backend.counts().completed;
    for (std::uint32_t l = 0; l < 2; ++l) {
      auto const layer = static_cast<layer_id>(l);
      REQUIRE(s.kv.append(layer, s.kv.rows(), s.engine.key_view(), s.engine.value_view()) == status::ok);
      std::uint32_t parts = 0;
      for (int again = 0; again < 5; ++again) {
        for (stream_part const& part : s.kv.stream_blocks(layer, s.row)) { parts += part.block_count; }
      }
      CHECK(parts == 5 * 11);
    }
    CHECK(s.backend.counts().completed == completed);  // a device that runs at waits only has done nothing
    CHECK(s.backend.pending_tasks() > 50);
    REQUIRE(s.backend.synchronize() == status::ok);
  }

  TEST_CASE("a stream that is asked for in a wrong state says so and changes nothing")
  {
    in_the_middle s;
    auto const said = [&](layer_id layer, row_id row) {
      std::uint64_t const queued = s.backend.pending_tasks();
      auto earlier = s.kv.stream_blocks(layer, row);
      CHECK(earlier.begin() == earlier.end());
      CHECK(s.backend.pending_tasks() == queued);
      CHECK(s.kv.audit() == "");
      return earlier.status();
    };
    row_id const shut = s.open(3, 60, true);
    REQUIRE(s.kv.close(shut) == status::ok);
    CHECK(said(layer_id{0}, none<row_id>) == status::out_of_range);
    CHECK(said(layer_id{0}, row_id{3}) == status::out_of_range);
    CHECK(said(layer_id{2}, s.row) == status::out_of_range);
    CHECK(said(none<layer_id>, s.row) == status::out_of_range);
    CHECK(said(layer_id{0}, shut) == status::invalid_state);
    CHECK(said(layer_id{0}, s.row) == status::invalid_state);  // in no step
    CHECK_FALSE(s.kv.prompt_streams(none<row_id>));
    CHECK_FALSE(s.kv.prompt_streams(shut));

    std::vector<step_row> const rows{{.row = s.row, .tokens = 8}, {.row = s.other, .token_offset = 16}};
    REQUIRE(s.engine.begin(rows) == status::ok);
    CHECK(said(layer_id{0}, s.row) == status::invalid_state);  // not yet at the layer
    s.engine.enter(s.kv.first_layer(), s.kv.rows());
    CHECK(said(layer_id{1}, s.row) == status::invalid_state);
    CHECK(said(layer_id{0}, s.other) == status::ok);  // nothing of it is on the host alone
    {
      auto first = s.kv.stream_blocks(layer_id{0}, s.row);
      CHECK(said(layer_id{0}, s.row) == status::busy);
      CHECK(first.status() == status::ok);
      CHECK(first.begin() != first.end());
      CHECK((*first.begin()).block_count == 3);
    }
    auto second = s.kv.stream_blocks(layer_id{0}, s.row);  // the first has ended
    std::uint32_t blocks = 0;
    for (stream_part const& part : second) { blocks += part.block_count; }
    CHECK(blocks == 11);
    CHECK(second.status() == status::ok);

    // A range that outlives its step has ended.
    auto stale = s.kv.stream_blocks(layer_id{0}, s.row);
    auto it = stale.begin();
    REQUIRE(s.kv.close(s.other) == status::ok);
    REQUIRE(s.kv.drain(no_deadline) == status::ok);
    row_id const next = s.open(4, 4, false);
    step_row const other{.row = next, .tokens = 1};
    REQUIRE(s.kv.begin_step({&other, 1}) == status::ok);
    ++it;
    CHECK(it == stale.end());
    CHECK(stale.status() == status::aborted);
    CHECK(s.kv.audit() == "");
    REQUIRE(s.backend.synchronize() == status::ok);
  }
}
