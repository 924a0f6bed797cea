#include <doctest/doctest.h>
#include <support/manager/chosen_blocks.hpp>

#include <cstdint>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

rig_options options_of(std::uint32_t rows)
{
  return {
    .geometry = {.layers = 3, .query_heads = 4, .kv_heads = 2, .head_dim = 4, .block_tokens = 4},
    .manager = {.max_rows = rows, .max_tokens = 100, .max_prefill_tokens = 8, .quota_tokens = 32},
    .per_row = 8};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("a row that is cut back and grows to as many blocks again reads them where they are now")
  {
    rig<hits_manager> r{options_of(2), six_blocks};
    row_id const a = r.open(1, 8, 20), b = r.open(2, 4, 20);
    r.engine.prefill(a, 8, 8);
    REQUIRE(r.kv.truncate(a, 4) == status::ok);
    r.engine.prefill(b, 4, 4);  // takes the slots that a has given back
    r.step({{.row = a}});
    r.step({{.row = a}, {.row = b}});
    CHECK(r.kv.tokens_of(a) == 6);
    r.close_all();
  }

  TEST_CASE("a sparse row that is cut back into its prompt takes the rest of it as a decoding row does")
  {
    rig<hits_manager> r{options_of(1), six_blocks};
    row_id const row = r.open(1, 40, 60);
    r.engine.prefill(row, 40, 8);
    r.step({{.row = row}});
    REQUIRE(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    REQUIRE(r.kv.truncate(row, 9) == status::ok);
    CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
    std::uint64_t const queued = r.backend.queued_tasks();
    for (std::uint32_t const tokens : {2U, 8U}) {
      CHECK(r.engine.step({{.row = row, .tokens = tokens}}) == status::invalid_argument);
      CHECK(r.kv.tokens_of(row) == 9);
      CHECK(r.backend.queued_tasks() == queued);
    }
    while (r.kv.tokens_of(row) < 60) { r.step({{.row = row}}); }
    CHECK(r.kv.audit() == "");
    r.close_all();
  }

  TEST_CASE("windowed layers give the blocks behind their windows back again after every cut")
  {
    rig_options options = options_of(1);
    options.geometry.layer_groups = {
      {.first = 0, .count = 1},
      {.first = 1, .count = 1, .kind = layer_kind::windowed, .window_tokens = 9, .sink_tokens = 4},
      {.first = 2, .count = 1, .kind = layer_kind::dense}};
    rig<hits_manager> r{options, six_blocks};
    row_id const row = r.open(1, 4, 100);
    r.engine.prefill(row, 4, 8);
    while (r.kv.tokens_of(row) < 60) { r.step({{.row = row}}); }
    std::uint64_t const bytes = r.kv.memory().slot_bytes;
    for (std::uint32_t const to : {0U, 3U, 4U}) {
      REQUIRE(r.kv.truncate(row, to) == status::ok);  // back to where the windows hold no more than the sinks
      while (r.kv.tokens_of(row) < 60) { r.step({{.row = row}}); }
      CHECK(r.kv.memory().slot_bytes == bytes);
      CHECK(r.kv.audit() == "");
    }
    CHECK(r.kv.truncate(row, 30) == status::invalid_state);
    r.close_all();
  }

  TEST_CASE("law 4: a row is cut back only once the recalls that read its host blocks are complete")
  {
    rig<chosen_manager> r{options_of(1), {.budget_tokens = 24, .dense_tokens = 24}};
    random_choice choice{r, 1};
    row_id const row = r.open(1, 60, 100);
    r.engine.prefill(row, 60, 8);
    ticket given;
    std::uint32_t misses = 0;
    while (misses == 0) {
      r.step({{.row = row}});
      step_row const one{.row = row};
      REQUIRE(r.engine.begin({&one, 1}) == status::ok);
      REQUIRE(r.backend.synchronize() == status::ok);
      row_list const rows = r.kv.rows();
      r.engine.fill(layer_id{0}, rows);
      REQUIRE(r.kv.append(layer_id{0}, rows, r.engine.key_view(), r.engine.value_view()) == status::ok);
      r.engine.before_enter(layer_id{0}, rows);
      REQUIRE(r.kv.begin_recall(layer_id{0}, rows, r.engine.query_view(), r.stream, given) == status::ok);
      while (r.backend.run_one(r.stream)) {}  // planned, nothing copied
      misses = r.kv.books().plan().misses[0];
      for (std::uint32_t l = 1; l < 3; ++l) {
        r.engine.fill(static_cast<layer_id>(l), rows);
        REQUIRE(r.kv.append(static_cast<layer_id>(l), rows, r.engine.key_view(), r.engine.value_view()) == status::ok);
        while (r.backend.run_one(r.stream)) {}
      }
      commit_row const dropped{.row = row, .accepted = 0};
      REQUIRE(r.kv.commit({&dropped, 1}) == status::ok);
      r.engine.row(row).in_step = false;
    }
    REQUIRE(r.kv.status_of(given) == status::busy);
    REQUIRE(r.kv.abort(given) == status::ok);
    std::uint64_t const bytes = r.kv.memory().host_bytes;
    REQUIRE(r.kv.truncate(row, 4) == status::ok);
    CHECK(r.kv.memory().host_bytes < bytes);
    CHECK(r.kv.landed(given).test(0));
    while (r.kv.tokens_of(row) < 80) { r.step({{.row = row}}); }
    r.close_all();
  }
}
