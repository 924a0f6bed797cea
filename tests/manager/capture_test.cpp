#include "../support/allocations.hpp"
#include "../support/captured_decode.hpp"
#include "../support/recording_backend.hpp"
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

using recorder = recording<cpu_backend>;

struct recorded_graphs {
  using graph = recorder::graph;
  recorder& backend;

  void begin(recorder::stream_ref) { backend.begin_capture(); }
  [[nodiscard]] graph end() { return backend.end_capture(); }
  static status launch(graph const& calls, recorder::stream_ref) { return recorder::replay(calls); }
};

template <class Scheduler>
using decode = captured_decode<recorder, Scheduler, recorded_graphs>;
// Layers that do not select are attended whole here too.
using lockstep = lockstep_scheduler<visit_order::hits_first>;
using parking = interruptible_scheduler<visit_order::hits_first>;

cpu_options manual() { return {.mode = cpu_mode::manual}; }

template <class Scheduler>
void compare(captured_as how)
{
  recorder one{manual()}, other{manual()};
  CHECK(compare_with_loop<recorder, Scheduler, recorded_graphs>(one, other, how, 64) > 100);
  CHECK(other.captured_copies() == 0);
  CHECK(other.wrong_questions() == 0);
}

std::string refusal(auto make)
{
  try {
    static_cast<void>(make());
  } catch (error const& said) {
    return said.what();
  }
  return "";
}

}  // namespace

TEST_CASE(
  "a captured step replays 64 times as the loop runs: tables, books and outputs, whatever rows it is replayed for")
{
  SUBCASE("hits attended while misses travel") { compare<lockstep>(captured_as::step); }
  SUBCASE("each layer attended whole") { compare<lockstep_scheduler<visit_order::whole>>(captured_as::step); }
}

TEST_CASE("captured visits replay as the loop runs, their recalls enqueued behind them")
{
  SUBCASE("rows in lockstep") { compare<lockstep>(captured_as::visits); }
  SUBCASE("rows parked at their layers, hits before what lands") { compare<parking>(captured_as::visits); }
}

TEST_CASE("a replay that nothing was made ready for is refused, and nothing has changed")
{
  // vllm-project/vllm#56158
  recorder backend{manual()};
  decode<lockstep> run{backend};
  row_id const row = run.open(1, 100);
  row_id const second = run.open(2, 60);
  run.capture(1, 1, 150);
  std::vector<std::uint32_t> const before = run.books();
  std::uint32_t const tokens = run.kv.tokens_of(row);
  auto const unchanged = [&] { return run.launches == 0 && run.books() == before && run.kv.tokens_of(row) == tokens; };

  CHECK(run.replay() == status::invalid_state);  // no step has begun
  CHECK(unchanged());

  REQUIRE(run.kv.begin_step(std::vector{step_row{row}, step_row{second, 1, 8}}) == status::ok);
  CHECK(run.replay() == status::capacity_exceeded);  // two rows
  CHECK(run.launches == 0);
  REQUIRE(run.kv.commit(std::vector{commit_row{row, 0}, commit_row{second, 0}}) == status::ok);

  REQUIRE(run.kv.close(second) == status::ok);
  row_id const again = run.open(2, 148);
  REQUIRE(again == second);
  run.engine.step({{.row = second}});
  run.engine.step({{.row = second}});
  REQUIRE(run.kv.begin_step(std::vector{step_row{second, 1, 8}}) == status::ok);
  status const longer = run.replay();  // 151 tokens, of 150: one block more
  CHECK(longer == status::ok);
}

TEST_CASE("blocks that do not arrive in a replay fail their row, which may be replayed again; the others go on")
{
  recorder backend{manual()}, other{manual()};
  // Without hysteresis: what is selected in a step does not depend on one that was dropped.
  decode<lockstep> run{backend, true, 0.0F}, loop{other, true, 0.0F};
  row_id const hurt = run.open(1, 100);
  row_id const well = run.open(2, 90);
  REQUIRE(loop.open(1, 100) == hurt);
  REQUIRE(loop.open(2, 90) == well);
  auto const spoil = [&] {
    for (host_block_id const block : run.kv.sequences()[hurt].host_blocks) {
      if (!is_none(block)) { *run.kv.store().ref().address(layer_id{1}, 1, block) ^= std::byte{0x10}; }
    }
  };
  std::vector<step_row> const both{{.row = hurt}, {.row = well}};
  for (std::uint32_t t = 0; t < 8; ++t) { run.replayed(both, 3); }
  std::uint32_t failed = 0;
  for (std::uint32_t t = 0; t < 30; ++t) {
    std::uint32_t const before = run.kv.tokens_of(hurt);
    spoil();
    run.replayed(both, 3);
    spoil();
    bool const lost = run.kv.tokens_of(hurt) == before;
    failed += lost ? 1U : 0U;
    REQUIRE(lost == (run.kv.row_status(hurt) == status::transfer_failed));
    REQUIRE(lost == !run.kv.failures().empty());
    for (failure_record const& record : run.kv.failures()) {
      REQUIRE(record.row == hurt);
      REQUIRE(record.layer == layer_id{1});
      REQUIRE(record.sequence == run.kv.sequences()[hurt].id);
    }
    run.kv.clear_failures();
    if (lost) { run.replayed({{.row = hurt}}, 3); }
    REQUIRE(run.kv.row_status(hurt) == status::ok);
    REQUIRE(run.kv.tokens_of(hurt) == before + 1);
    REQUIRE(run.kv.tokens_of(well) == 90 + 8 + t + 1);
  }
  CHECK(failed > 5);
  for (std::uint32_t t = 0; t < 38; ++t) { loop.eager(both); }
  // What a dropped step brought is hit by the next try and not merged later: equal but for the order of sums.
  for (auto const& [place, output] : loop.engine.outputs()) {
    REQUIRE(difference(run.engine.output(place.first, place.second), output) < 1e-4F);
  }
}

TEST_CASE("a row whose blocks prove lost after its step was committed can't go on, by the loop and by replays")
{
  // The device falls behind until the host waits for it, or is waited for before every second commit, which learns of both steps.
  for (auto const& [by_replay, meets] : {std::pair{false, false}, {true, false}, {false, true}}) {
    CAPTURE(by_replay);
    CAPTURE(meets);
    recorder backend{manual()};
    decode<lockstep> run{backend, true};
    row_id const row = run.open(1, 100);
    run.capture(2, 1);
    run.eager({{.row = row}});
    for (host_block_id const block : run.kv.sequences()[row].host_blocks) {
      if (!is_none(block)) { *run.kv.store().ref().address(layer_id{2}, 0, block) ^= std::byte{0x10}; }
    }
    // Steps are committed before the device has run them.
    status said = status::ok;
    for (std::uint32_t step = 0; step < 60 && said == status::ok; ++step) {
      run.engine.scramble_inputs(step / 2);
      said = run.kv.begin_step(std::vector{step_row{row}});
      if (said != status::ok) { break; }
      if (by_replay) {
        said = run.replay();
      } else {
        run.engine.enqueue_body(run.kv);
        if (meets && step % 2 == 1) { REQUIRE(backend.synchronize() == status::ok); }
      }
      if (said == status::ok) { said = run.kv.commit(std::vector{commit_row{row}}); }
    }
    REQUIRE(run.kv.drain(no_deadline) == status::ok);
    CHECK(said == status::transfer_failed);
    CHECK(run.kv.row_status(row) == status::transfer_failed);
    CHECK_FALSE(run.kv.failures().empty());
    CHECK(run.kv.begin_step(std::vector{step_row{row}}) == status::transfer_failed);
    CHECK(run.kv.close(row) == status::ok);
  }
}

TEST_CASE("law 7: replays allocate nothing")
{
  recorder backend{manual()};
  decode<lockstep> run{backend};
  row_id const row = run.open(1, 100);
  run.replayed({{.row = row}}, 3);
  auto before = run.kv.capture_visit({.rows = 3}, none<layer_id>);
  backend.begin_capture();
  run.engine.enqueue_visit(before);
  recorder::graph const graph = backend.end_capture();
  step_row const begun{.row = row};
  commit_row const kept{.row = row};
  std::uint64_t const allocated = allocations();
  bool sound = true;
  for (std::uint32_t t = 0; t < 20; ++t) {
    sound = sound && run.kv.begin_step({&begun, 1}) == status::ok && run.replay() == status::ok &&
      backend.synchronize() == status::ok && run.kv.commit({&kept, 1}) == status::ok;
  }
  sound = sound && run.kv.begin_step({&begun, 1}) == status::ok &&
    before.replay(run.kv.rows(), [&] { return recorder::replay(graph); }) == status::ok;
  CHECK(allocations() == allocated);
  CHECK(sound);
  CHECK(run.kv.tokens_of(row) == 121);
}

TEST_CASE("what can't be captured is refused when it is asked for, with what lacks")
{
  recorder backend{manual()};
  {
    offload_manager<recorder, solo_head_selector<>, gather_scatter_engine, parking, fixed_admission> kv{
      backend,
      backend.create_stream(stream_priority::normal),
      captured_geometry(),
      {.max_rows = 2, .max_tokens = 64, .captured_steps = 1},
      {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8}};
    CHECK(refusal([&] {
            return kv.capture_step({.rows = 1}).rows().count;
          }).find("reads the mailbox") != std::string::npos);
    CHECK(
      refusal([&] { return kv.capture_visit({.rows = 3}, layer_id{0}).enters(); }).find("3 rows") != std::string::npos);
    CHECK(refusal([&] {
            return kv.capture_visit({.rows = 1}, layer_id{0}, part::hits).enters();
          }).find("layer 0") != std::string::npos);
    CHECK(refusal([&] {
            return kv.capture_visit({.rows = 1}, layer_id{4}).enters();
          }).find("layer 4") != std::string::npos);
  }
  decode<lockstep> run{backend};
  run.capture(1, 1);
  auto const second = run.kv.capture_step({.rows = 5, .max_tokens = 200});
  CHECK(second.rows().count == 5);
  CHECK(refusal([&] {
          return run.kv.capture_step({.rows = 1}).rows().count;
        }).find("captured_steps 2") != std::string::npos);
  CHECK(refusal([&] { return run.kv.capture_step({.rows = 0}).rows().count; }).find("0 rows") != std::string::npos);
  CHECK(refusal([&] {
          return run.kv.capture_step({.rows = 1, .max_tokens = 201}).rows().count;
        }).find("201 tokens") != std::string::npos);
}
