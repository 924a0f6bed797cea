#include <doctest/doctest.h>
#include <support/manager/mixed_batch.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("manager")
{
  // Report: sgl-project/sglang#23609
  TEST_CASE_TEMPLATE(
    "empty work succeeds, enqueues nothing, and the next step is a normal one", Manager, lockstep_manager, hits_manager,
    fragment_manager)
  {
    rig<Manager> r{mixed_batch::options({.mode = cpu_mode::manual}), mixed_batch::selector()};
    auto const nothing_enqueued = [&](auto call) {
      r.backend.run_all();
      call();
      return r.backend.queued_tasks() == 0;
    };
    auto const no_rows = [&] {
      CHECK(r.kv.begin_step({}) == status::ok);
      CHECK(r.kv.rows().count == 0);
      CHECK(
        r.kv.enter(layer_id{0}, r.kv.rows(), r.engine.key_view(), r.engine.value_view(), r.engine.query_view()) ==
        status::ok);
      CHECK(r.kv.append(layer_id{0}, r.kv.rows(), r.engine.key_view(), r.engine.value_view()) == status::ok);
      CHECK(r.kv.warm_up(layer_id{0}, r.kv.rows(), r.engine.query_view()) == status::ok);
      ticket given;
      CHECK(r.kv.begin_recall(layer_id{0}, r.kv.rows(), r.engine.query_view(), r.stream, given) == status::ok);
      CHECK(r.kv.status_of(given) == status::ok);
      CHECK(r.kv.wait_on(given, r.stream) == status::ok);
      CHECK(r.kv.abort(given) == status::ok);
      for (visit const& v : r.kv.step()) { FAIL_CHECK("a visit at layer " << to_number(v.layer)); }
      CHECK(r.kv.commit({}) == status::ok);
      r.kv.poll();
      CHECK(r.kv.drain(no_deadline) == status::ok);
      static_cast<void>(r.kv.finish_sample());
    };
    CHECK(nothing_enqueued(no_rows));

    // A sequence of length 0 has nothing, and leaves nothing.
    row_id const empty = r.open(1, 0, 40);
    CHECK(r.kv.tokens_of(empty) == 0);
    CHECK(r.kv.memory().slot_bytes == 0);
    CHECK(r.kv.memory().host_bytes == 0);
    r.backend.run_all();
    CHECK(r.kv.books().table().listed_count[to_index(lane_of(empty, 0, 2))] == 0);
    CHECK(nothing_enqueued(no_rows));
    REQUIRE(r.kv.close(empty) == status::ok);

    // Three rows with no misses: nothing travels.
    std::vector<row_id> rows;
    for (std::uint32_t i = 0; i < 3; ++i) {
      rows.push_back(r.open(10 + i, 16, 24));
      r.engine.prefill(rows[i], 16, 8);
    }
    for (int step = 0; step < 8; ++step) {
      r.step({{.row = rows[0]}, {.row = rows[1]}, {.row = rows[2]}});
      CHECK(r.kv.finish_sample().recalled_blocks == 0);
      CHECK(r.kv.last_sample().recalled_bytes == 0);
    }
    CHECK(nothing_enqueued(no_rows));
    r.close_all();
    for (std::uint32_t l = 0; l < 3; ++l) {
      lane_table_ref const table = r.kv.books().table();
      for (std::uint32_t lane = l * 12; lane < (l + 1) * 12; ++lane) {
        CHECK(table.listed_count[lane] == 0);
        CHECK(is_none(table.listed[std::uint64_t{lane} * table.stride]));
      }
    }
  }

  // Report: sgl-project/sglang#23609
  TEST_CASE("a budget without room for what is always selected is refused at construction, with the numbers")
  {
    rig_options const options = mixed_batch::options({.mode = cpu_mode::manual});
    CHECK_THROWS_WITH_AS(
      (rig<lockstep_manager>{options, {.budget_tokens = 0}}),
      "invalid_argument: a budget of 0 tokens holds no block of 4", configuration_error);
    CHECK_THROWS_WITH_AS(
      (rig<lockstep_manager>{options, {.budget_tokens = 11, .sink_tokens = 4, .recent_tokens = 4}}),
      "invalid_argument: a budget of 11 tokens is 2 blocks of 4, but 1 sink, 1 recent and 1 open blocks are always "
      "selected",
      configuration_error);
  }

  TEST_CASE("a manager that is constructed and destroyed, or whose construction fails, leaves nothing behind")
  {
    for (bool const sound : {true, false}) {
      cpu_backend backend{{.mode = cpu_mode::manual}};
      auto const stream = backend.create_stream(stream_priority::normal);
      rig_options options = mixed_batch::options({.mode = cpu_mode::manual});
      if (!sound) { options.manager.quota_tokens = 4; }
      try {
        lockstep_manager kv{backend, stream, options.geometry, options.manager, mixed_batch::selector()};
        row_id row{};
        REQUIRE(kv.open({.prompt_tokens = 4, .max_tokens = 40}, row) == admission::admitted);
        CHECK(sound);
      } catch (configuration_error const&) {
        CHECK_FALSE(sound);
      }
      CHECK(backend.live_events() == 0);
      CHECK(backend.live_streams() == 1);
      CHECK(backend.device_bytes() == 0);
      CHECK(backend.pinned_bytes() == 0);
      backend.run_all();
    }
  }
}
