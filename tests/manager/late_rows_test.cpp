#include <doctest/doctest.h>
#include <support/manager/chosen_blocks.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t row_count = 4, length = 200;

rig_options options_of(cpu_options const& cpu)
{
  return {
    .geometry =
      {.layers = 4,
       .query_heads = 4,
       .kv_heads = 2,
       .head_dim = 4,
       .block_tokens = 4,
       .layer_groups =
         {{.first = 0, .count = 1},
          {.first = 1, .count = 1, .kind = layer_kind::dense},
          {.first = 2, .count = 1, .kind = layer_kind::windowed, .window_tokens = 9, .sink_tokens = 4},
          {.first = 3, .count = 1}}},
    .manager = {.max_rows = row_count, .max_tokens = length, .max_prefill_tokens = 8, .quota_tokens = 28},
    .cpu = cpu,
    .per_row = 8};
}

constexpr external_selector five_blocks{.budget_tokens = 20, .dense_tokens = 20};

struct lateness {
  std::vector<std::vector<bool>> late = std::vector<std::vector<bool>>(row_count);

  void look(rig<chosen_manager>& r, std::vector<row_id> const& rows)
  {
    for (row_id const row : rows) { late[to_index(row)].push_back(r.kv.is_late(row)); }
  }
  [[nodiscard]] std::uint64_t count() const
  {
    std::uint64_t sum = 0;
    for (auto const& row : late) { sum += static_cast<std::uint64_t>(std::ranges::count(row, true)); }
    return sum;
  }
  /// Most late steps of a row among eight in a row.
  [[nodiscard]] int most_in_eight() const
  {
    int most = 0;
    for (auto const& row : late) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        int here = 0;
        for (std::size_t j = i; j < row.size() && j < i + 8; ++j) { here += row[j] ? 1 : 0; }
        most = std::max(most, here);
      }
    }
    return most;
  }
};

/// Prompts of different lengths, so that rows seal blocks in different steps.
std::vector<row_id> open_rows(rig<chosen_manager>& r)
{
  std::vector<row_id> rows;
  for (std::uint32_t i = 0; i < row_count; ++i) {
    rows.push_back(r.open(i + 1, 30 + 3 * i, length));
    r.engine.prefill(rows[i], 30 + 3 * i, 8);
  }
  return rows;
}

void step_all(rig<chosen_manager>& r, std::vector<row_id> const& rows)
{
  std::vector<step_row> batch;
  for (row_id const row : rows) {
    if (!r.kv.is_late(row)) { batch.push_back({.row = row}); }
  }
  REQUIRE(r.engine.step(batch) == status::ok);
  REQUIRE(r.engine.fault() == "");
  REQUIRE(r.kv.audit() == "");
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE(
    "rows left late by the scheduler go on in the next step, at most one step in eight, and read their own bytes")
  {
    for (std::uint64_t const seed : {0U, 3U, 4U}) {
      late_scheduler::record log;
      rig<chosen_manager> r{options_of({.mode = cpu_mode::manual, .seed = seed}), five_blocks, late_scheduler{&log}};
      random_choice choice{r, seed};
      std::vector<row_id> const rows = open_rows(r);
      lateness seen;
      std::mt19937_64 random{seed};
      for (int step = 0; step < 120; ++step) {
        log.made = 0;
        log.decisions = static_cast<std::uint32_t>(random() % 6);
        step_all(r, rows);
        seen.look(r, rows);
        CHECK(r.kv.finish_sample().late_rows == static_cast<std::uint32_t>(std::ranges::count_if(rows, [&](row_id row) {
                return r.kv.is_late(row);
              })));
      }
      CHECK(seen.count() > 20);
      CHECK(log.forced > 0);
      CHECK(seen.most_in_eight() == 1);
      log.decisions = ~0U;
      step_all(r, rows);
      for (row_id const row : rows) {
        CHECK_FALSE(r.kv.is_late(row));
        CHECK(r.kv.tokens_of(row) > 100);
      }
      r.close_all();
    }
  }

  TEST_CASE("a loop that is left early parks its rows, wherever they stand")
  {
    for (std::uint64_t const seed : {0U, 5U}) {
      rig<chosen_manager> r{options_of({.mode = cpu_mode::manual, .seed = seed}), five_blocks};
      random_choice choice{r, seed + 1};
      std::vector<row_id> const rows = open_rows(r);
      std::mt19937_64 random{seed};
      std::uint64_t late = 0;
      for (int step = 0; step < 200; ++step) {
        // From none, which leaves rows before their first visit, to more than a step has.
        r.engine.most_visits = static_cast<std::uint32_t>(random() % 14);
        step_all(r, rows);
        for (row_id const row : rows) { late += r.kv.is_late(row) ? 1U : 0U; }
      }
      CHECK(late > 50);
      for (row_id const row : rows) { CHECK(r.kv.tokens_of(row) > 60); }
      r.engine.most_visits = ~0U;
      step_all(r, rows);
      r.close_all();
    }
  }

  TEST_CASE("a row whose last visit is in hand when the loop is left is committed, not late")
  {
    rig<chosen_manager> r{options_of({.mode = cpu_mode::manual}), five_blocks};
    random_choice choice{r, 1};
    row_id const row = r.open(1, 10, 40);
    r.engine.prefill(row, 10, 8);
    r.engine.most_visits = 4;  // one a layer
    r.step({{.row = row}});
    CHECK_FALSE(r.kv.is_late(row));
    CHECK(r.kv.tokens_of(row) == 11);
    r.close_all();
  }

  TEST_CASE("late rows may not be named by begin_step, are passed over by commit, and end with close")
  {
    rig<chosen_manager> r{options_of({.mode = cpu_mode::manual}), five_blocks};
    random_choice choice{r, 1};
    std::vector<row_id> const rows = open_rows(r);
    r.engine.most_visits = 1;
    step_all(r, rows);
    REQUIRE(r.kv.is_late(rows[1]));
    std::uint32_t const tokens = r.kv.tokens_of(rows[1]);
    step_row const again{.row = rows[1]};
    CHECK(r.kv.begin_step({&again, 1}) == status::invalid_state);
    commit_row const kept{.row = rows[1], .accepted = 1};
    CHECK(r.kv.commit({&kept, 1}) == status::ok);
    CHECK(r.kv.tokens_of(rows[1]) == tokens);
    REQUIRE(r.kv.close(rows[1]) == status::ok);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK_FALSE(r.kv.sequences()[rows[1]].open());
    r.engine.row(rows[1]).in_step = false;
    r.engine.most_visits = ~0U;
    std::vector<row_id> const rest{rows[0], rows[2], rows[3]};
    step_all(r, rest);
    for (row_id const row : rest) { CHECK_FALSE(r.kv.is_late(row)); }
    r.close_all();
  }
}
