#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

rig_options options_of(std::uint32_t recalls = 0, std::uint32_t rows = 3)
{
  return {
    .geometry = {.layers = 3, .query_heads = 4, .kv_heads = 2, .head_dim = 4, .block_tokens = 4, .head_groups = 2},
    .manager = {.max_rows = rows, .max_tokens = 160, .max_prefill_tokens = 8, .quota_tokens = 36, .recalls = recalls},
    .per_row = 8};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

layer_id layer(std::uint32_t number) { return static_cast<layer_id>(number); }

/// A step by tickets: what a host engine with a loop of its own does.
template <class Manager>
struct by_tickets {
  using rig_type = rig<Manager>;

  explicit by_tickets(rig_type& r, recall_lists lists = Manager::default_lists) : rig_{&r}, lists_{lists} {}

  void begin(std::vector<step_row> rows)
  {
    for (step_row& r : rows) { r.token_offset = static_cast<std::uint32_t>(to_index(r.row)) * 8; }
    REQUIRE(rig_->kv.begin_step(rows) == status::ok);
    for (step_row const& r : rows) {
      auto& state = rig_->engine.row(r.row);
      state.begin = rig_->kv.tokens_of(r.row);
      state.count = r.tokens;
      for (std::uint32_t t = 0; t < r.tokens; ++t) { ++state.version[state.begin + t]; }
    }
    rows_ = rows;
  }

  /// Fills the layer's tensors, appends, and begins the recall.
  [[nodiscard]] ticket recall(layer_id l)
  {
    REQUIRE(rig_->backend.synchronize(rig_->stream) == status::ok);
    rig_->engine.fill(l, rig_->kv.rows());
    REQUIRE(rig_->kv.append(l, rig_->kv.rows(), rig_->engine.key_view(), rig_->engine.value_view()) == status::ok);
    ticket given;
    status const begun =
      rig_->kv.begin_recall(l, rig_->kv.rows(), rig_->engine.query_view(), rig_->stream, given, lists_);
    REQUIRE(begun == status::ok);
    return given;
  }

  /// Looks at what a recall's tables hold, in stream order.
  void look(ticket t, layer_id l, part which)
  {
    visit v{.layer = l, .rows = rig_->kv.rows(), .part = which, .last = to_index(l) == 2};
    REQUIRE(rig_->kv.table(t, which, v.table) == status::ok);
    auto* const engine = &rig_->engine;
    REQUIRE(rig_->backend.launch(rig_->stream, host_function{[engine, v] { engine->look(v); }}) == status::ok);
  }

  void commit()
  {
    REQUIRE(rig_->backend.synchronize(rig_->stream) == status::ok);
    REQUIRE(rig_->engine.fault() == "");
    std::vector<commit_row> kept;
    for (step_row const& r : rows_) { kept.push_back({.row = r.row, .accepted = r.tokens}); }
    REQUIRE(rig_->kv.commit(kept) == status::ok);
    REQUIRE(rig_->kv.audit() == "");
  }

  void step(std::vector<step_row> const& rows)
  {
    begin(rows);
    for (std::uint32_t l = 0; l < 3; ++l) {
      ticket const t = recall(layer(l));
      bool const whole = lists_ == recall_lists::whole;
      if (!whole) { look(t, layer(l), part::hits); }
      REQUIRE(rig_->kv.wait_on(t, rig_->stream) == status::ok);
      look(t, layer(l), whole ? part::whole : part::landed);
      REQUIRE(rig_->backend.synchronize(rig_->stream) == status::ok);
      REQUIRE(rig_->engine.fault() == "");
      CHECK(rig_->kv.status_of(t) == status::ok);
      for (std::uint32_t i = 0; i < rows.size(); ++i) { CHECK(rig_->kv.landed(t).test(i)); }
    }
    commit();
  }

 private:
  rig_type* rig_;
  recall_lists lists_;
  std::vector<step_row> rows_;
};

/// Rows 0 and 2 are sparse, row 1 stays dense.
template <class Manager>
std::vector<row_id> open_rows(rig<Manager>& r)
{
  std::vector<row_id> rows{r.open(1, 50, 160), r.open(2, 4, 20), r.open(3, 61, 160)};
  r.engine.prefill(rows[0], 50, 8);
  r.engine.prefill(rows[1], 4, 8);
  r.engine.prefill(rows[2], 61, 8);
  return rows;
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 1: what tickets recall has the bytes that were written, in a batch of dense and sparse rows", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    rig<Manager> r{options_of(), six_blocks};
    std::vector<row_id> const rows = open_rows(r);
    by_tickets<Manager> engine{r};
    std::uint64_t recalled = 0;
    for (int i = 0; i < 60; ++i) {
      std::vector<step_row> batch{{.row = rows[0]}, {.row = rows[2]}};
      if (i < 10) { batch.insert(batch.begin() + 1, {.row = rows[1]}); }
      engine.step(batch);
      recalled += r.kv.finish_sample().recalled_blocks;
    }
    CHECK(recalled > 0);
    r.close_all();
  }

  // A dense layer between two that select: what landed in the first must not be listed in it.
  TEST_CASE_TEMPLATE(
    "whatever the scheduler, a recall makes the lists that it is asked for, in layers of every kind", Manager,
    lockstep_manager, hits_manager)
  {
    for (recall_lists const lists : {recall_lists::whole, recall_lists::hits_then_landed}) {
      for (layer_kind const kind : {layer_kind::selected, layer_kind::windowed, layer_kind::dense}) {
        CAPTURE(static_cast<int>(kind));
        rig_options options = options_of();
        options.geometry.layer_groups = {
          {.first = 0, .count = 1},
          {.first = 1, .count = 1, .kind = kind, .window_tokens = 10, .sink_tokens = 4},
          {.first = 2, .count = 1}};
        rig<Manager> r{options, six_blocks};
        std::vector<row_id> const rows = open_rows(r);
        by_tickets<Manager> engine{r, lists};
        std::uint64_t recalled = 0;
        for (int i = 0; i < 30; ++i) {
          engine.step({{.row = rows[0]}, {.row = rows[2]}});
          recalled += r.kv.finish_sample().recalled_blocks;
        }
        CHECK(recalled > 0);
        r.close_all();
      }
    }
  }

  TEST_CASE_TEMPLATE(
    "a ticket gives no table of a part that its recall has no list of", Manager, lockstep_manager, hits_manager)
  {
    rig<Manager> r{options_of(), six_blocks};
    std::vector<row_id> const rows = open_rows(r);
    auto const said = [&](ticket t, part which) {
      block_table table{.stride = 7};
      status const s = r.kv.table(t, which, table);
      CHECK((s == status::ok) == (table.counts != nullptr));
      CHECK((s == status::ok || (table.slots == nullptr && table.stride == 0)));
      return s;
    };
    ticket t;
    for (recall_lists const lists : {recall_lists::whole, recall_lists::hits_then_landed}) {
      by_tickets<Manager> engine{r, lists};
      bool const whole = lists == recall_lists::whole;
      engine.begin({{.row = rows[0]}});
      for (std::uint32_t l = 0; l < 3; ++l) {
        t = engine.recall(layer(l));
        CHECK(said(t, part::whole) == (whole ? status::ok : status::invalid_argument));
        CHECK(said(t, part::hits) == (whole ? status::invalid_argument : status::ok));
        CHECK(said(t, part::landed) == (whole ? status::invalid_argument : status::ok));
        if (lists == Manager::default_lists) { CHECK(whole != Manager::hits_first); }
      }
      engine.commit();
    }
    ++t.generation;
    for (part const which : {part::whole, part::hits, part::landed}) { CHECK(said(t, which) == status::stale_ticket); }
    r.close_all();
  }

  TEST_CASE("the rows of a ticket's mask are numbered as they were passed, and dense ones have landed at once")
  {
    rig<hits_manager> r{options_of(), six_blocks};
    std::vector<row_id> const rows = open_rows(r);
    by_tickets<hits_manager> engine{r};
    bool told_apart = false;
    for (int i = 0; i < 20 && !told_apart; ++i) {
      engine.begin({{.row = rows[1]}, {.row = rows[0]}, {.row = rows[2]}});
      ticket const t = engine.recall(layer(0));
      CHECK(r.kv.landed(t).test(0));
      CHECK_FALSE(r.kv.landed(t).test(1));
      CHECK_FALSE(r.kv.landed(t).test(2));
      CHECK(r.kv.status_of(t) == status::busy);
      while (!r.kv.landed(t).test(1) && !r.kv.landed(t).test(2)) { REQUIRE(r.backend.run_one()); }
      told_apart = r.kv.landed(t).test(1) != r.kv.landed(t).test(2);
      r.backend.run_all();
      CHECK(r.kv.landed(t).test(1));
      CHECK(r.kv.landed(t).test(2));
      CHECK(r.kv.status_of(t) == status::ok);
      for (std::uint32_t l = 1; l < 3; ++l) { static_cast<void>(engine.recall(layer(l))); }
      r.backend.run_all();
      engine.commit();
    }
    CHECK(told_apart);
    r.close_all();
  }

  TEST_CASE_TEMPLATE(
    "a ticket speaks the truth when its row has begun another recall since", Manager, hits_manager, fragment_manager)
  {
    rig<Manager> r{options_of(), six_blocks};
    std::vector<row_id> const rows = open_rows(r);
    by_tickets<Manager> engine{r};
    for (int i = 0; i < 20; ++i) {
      engine.begin({{.row = rows[0]}});
      ticket given[3];
      for (std::uint32_t l = 0; l < 3; ++l) { given[l] = engine.recall(layer(l)); }
      for (ticket const t : given) { CHECK(r.kv.wait_on(t, r.stream) == status::ok); }
      r.backend.run_all();
      for (ticket const t : given) {
        CHECK(r.kv.status_of(t) == status::ok);
        CHECK(r.kv.landed(t).test(0));
      }
      engine.commit();
    }
    r.close_all();
  }

  TEST_CASE_TEMPLATE(
    "law 10: a ticket whose blocks did not arrive says so also when the row's later ones have landed", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    rig_options options = options_of();
    options.manager.verify = true;
    rig<Manager> r{options, six_blocks};
    row_id const row = open_rows(r)[0];
    by_tickets<Manager> engine{r};
    for (int i = 0; i < 10; ++i) { engine.step({{.row = row}}); }
    auto const flip = [&] {
      REQUIRE(r.kv.drain(no_deadline) == status::ok);
      for (host_block_id const block : r.kv.sequences()[row].host_blocks) {
        if (!is_none(block)) { r.kv.store().ref().address(layer(0), 0, block)[5] ^= std::byte{1}; }
      }
    };
    flip();
    int told = 0;
    for (int i = 0; i < 20; ++i) {
      engine.begin({{.row = row}});
      ticket given[3];
      for (std::uint32_t l = 0; l < 3; ++l) { given[l] = engine.recall(layer(l)); }
      for (ticket const t : given) { CHECK(r.kv.wait_on(t, r.stream) == status::ok); }
      r.backend.run_all();
      bool const failed = r.kv.status_of(given[0]) == status::transfer_failed;
      told += failed ? 1 : 0;
      CHECK(r.kv.landed(given[0]).test(0) == !failed);
      CHECK(r.kv.status_of(given[1]) == status::ok);
      CHECK(r.kv.status_of(given[2]) == status::ok);
      engine.commit();
    }
    CHECK(told > 0);
    flip();
    r.close_all();
  }

  TEST_CASE_TEMPLATE(
    "a ticket that was given up, or never asked for, leaves its blocks whole for whoever selects them next", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    for (std::uint32_t const recalls : {1U, 2U, 7U}) {
      rig<Manager> r{options_of(recalls), six_blocks};
      std::vector<row_id> const rows = open_rows(r);
      by_tickets<Manager> engine{r};
      for (int i = 0; i < 40; ++i) {
        if (i % 2 == 0) {
          engine.step({{.row = rows[0]}, {.row = rows[2]}});
          continue;
        }
        engine.begin({{.row = rows[0]}, {.row = rows[2]}});
        for (std::uint32_t l = 0; l < 3; ++l) {
          ticket const t = engine.recall(layer(l));
          if (i % 4 == 1) {
            CHECK(r.kv.abort(t) == status::ok);
            CHECK(r.kv.status_of(t) == status::aborted);
          }
        }
        engine.commit();
      }
      r.close_all();
    }
  }

  TEST_CASE("a full ring of recalls makes room by waiting, and the tickets that lose their place are stale")
  {
    rig<hits_manager> r{options_of(2), six_blocks};
    std::vector<row_id> const rows = open_rows(r);
    by_tickets<hits_manager> engine{r};
    engine.begin({{.row = rows[0]}});
    ticket const first = engine.recall(layer(0)), second = engine.recall(layer(1)), third = engine.recall(layer(2));
    CHECK(r.kv.status_of(first) == status::stale_ticket);
    CHECK(r.kv.wait_on(first, r.stream) == status::stale_ticket);
    CHECK(r.kv.abort(first) == status::stale_ticket);
    CHECK_FALSE(r.kv.landed(first).test(0));
    CHECK(r.kv.wait_on(second, r.stream) == status::ok);
    CHECK(r.kv.wait_on(third, r.stream) == status::ok);
    r.backend.run_all();
    CHECK(r.kv.status_of(second) == status::ok);
    CHECK(r.kv.status_of(third) == status::ok);
    CHECK(r.kv.status_of({.index = 99, .generation = 1}) == status::stale_ticket);
    engine.commit();
    r.close_all();
  }

  TEST_CASE("law 4: a row closed between a host plan and its copies keeps its slots until they are complete")
  {
    for (std::uint64_t const seed : {0U, 2U, 3U}) {
      rig<fragment_manager> r{options_of(), six_blocks};
      std::vector<row_id> rows = open_rows(r);
      by_tickets<fragment_manager> engine{r};
      std::uint32_t misses = 0;
      for (int i = 0; i < 100; ++i) {
        r.step({{.row = rows[0]}, {.row = rows[2]}});
        engine.begin({{.row = rows[0]}, {.row = rows[2]}});
        static_cast<void>(engine.recall(layer(0)));
        r.backend.run_seeded(seed);  // the plan is there, no copy has been enqueued
        misses = r.kv.books().plan().misses[0] + r.kv.books().plan().misses[1];
        if (misses != 0) { break; }
        for (std::uint32_t l = 1; l < 3; ++l) { static_cast<void>(engine.recall(layer(l))); }
        engine.commit();
      }
      REQUIRE(misses != 0);
      std::uint64_t const slots = r.kv.memory().slot_bytes;
      REQUIRE(r.kv.close(rows[0]) == status::ok);
      CHECK(r.kv.memory().slot_bytes == slots);
      CHECK(r.kv.sequences()[rows[0]].open());
      // Somebody else comes, and gets none of those slots.
      row_id other{};
      admission const said = r.kv.open({.prompt_tokens = 50, .max_tokens = 160}, other);
      CHECK(other != rows[0]);
      CHECK(said == admission::queued);
      r.backend.run_all();
      r.kv.poll();
      CHECK_FALSE(r.kv.sequences()[rows[0]].open());
      for (std::uint32_t l = 1; l < 3; ++l) {
        REQUIRE(r.backend.synchronize(r.stream) == status::ok);
        row_id const left = rows[2];
        row_list const rest{.ids = &left, .count = 1};
        r.engine.fill(layer(l), rest);
        REQUIRE(r.kv.append(layer(l), rest, r.engine.key_view(), r.engine.value_view()) == status::ok);
      }
      commit_row const kept{.row = rows[2], .accepted = 1};
      REQUIRE(r.kv.commit({&kept, 1}) == status::ok);
      for (int i = 0; i < 4; ++i) { r.step({{.row = rows[2]}}); }
      r.close_all();
    }
  }
}
