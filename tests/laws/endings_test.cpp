#include <doctest/doctest.h>
#include <support/explore.hpp>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Every copy and every gather is so late.
std::vector<script_rule> late_copies(nanoseconds delay)
{
  std::vector<script_rule> rules;
  for (char const* const kind : {"gather_blocks", "copy to device", "copy to host"}) {
    rules.push_back(copies_that(script_effect::delay, kind, 0, script_rule::unlimited));
    rules.back().delay = delay;
  }
  return rules;
}

/// A row whose recall flies, begun with copies that are late.
template <class Manager>
row_id leave_in_flight(small_rig<Manager>& r, nanoseconds delay)
{
  r.engine.runs_ahead = true;
  row_id const row = r.open(1, 8);
  r.step({{.row = row}});
  need(r.kv.drain(no_deadline), "drain");
  for (script_rule const& rule : late_copies(delay)) { r.backend.add_rule(rule); }
  r.engine.most_visits = 1;
  r.step({{.row = row}});
  r.engine.most_visits = ~0U;
  return row;
}

}  // namespace

TEST_SUITE("laws")
{
  // Report: taco-project/FlexKV#292
  TEST_CASE_TEMPLATE(
    "law 9: a manager that ends waits for copies that are late, and frees everything", Manager, device_planned,
    in_lockstep)
  {
    scripted_backend backend;
    nanoseconds begun{};
    {
      small_rig<Manager> r{backend};
      static_cast<void>(leave_in_flight(r, std::chrono::milliseconds{10}));
      begun = backend.now();
    }
    CHECK(backend.now() - begun >= std::chrono::milliseconds{9});
    CHECK(backend.now() - begun < std::chrono::milliseconds{100});
    CHECK(backend.counts().freed_under_copy == 0);
    CHECK(backend.pinned_bytes() == 0);
    CHECK(backend.device_bytes() == 0);
    CHECK(backend.live_events() == 0);
  }

  // Report: taco-project/FlexKV#292
  TEST_CASE("law 9: a manager that ends with copies that never complete gives up at its limit and frees nothing")
  {
    scripted_backend backend;
    nanoseconds begun{};
    std::uint64_t pinned = 0;
    {
      small_rig<device_planned> r{backend, {.wait_limit = std::chrono::milliseconds{200}}};
      static_cast<void>(leave_in_flight(r, never));
      static_cast<void>(backend.synchronize(r.stream));
      begun = backend.now();
      pinned = backend.pinned_bytes();
      work_in_flight const flying = r.kv.in_flight();
      CHECK(flying.recalls == 1);
      CHECK_FALSE(flying.idle());
      CHECK(r.kv.drain(backend.now() + std::chrono::milliseconds{5}) == status::drain_timeout);
      begun = backend.now();
    }
    CHECK(backend.now() - begun >= std::chrono::milliseconds{199});
    CHECK(backend.now() - begun < std::chrono::milliseconds{300});
    CHECK(backend.counts().freed_under_copy == 0);
    CHECK(backend.pinned_bytes() == pinned);
    backend.release();
    REQUIRE(backend.synchronize() == status::ok);

    // The next one is not touched by it.
    small_rig<device_planned> next{backend};
    for (std::size_t i = 0; i < 3; ++i) { backend.remove_rule(i); }
    row_id const row = next.open(2, 8);
    for (int i = 0; i < 4; ++i) { next.step({{.row = row}}); }
    next.finish();
  }

  TEST_CASE("law 9: in_flight says what drain would wait for: recalls, blocks on their way to the host, launches")
  {
    scripted_backend backend;
    small_rig<device_planned> r{backend};
    CHECK(r.kv.in_flight().idle());
    r.engine.runs_ahead = true;
    for (script_rule const& rule : late_copies(std::chrono::milliseconds{1})) { backend.add_rule(rule); }
    row_id row{};
    REQUIRE(r.kv.open({.prompt_tokens = 8, .max_tokens = 20}, row) == admission::admitted);
    r.engine.assign(row, 1);
    r.step({{.row = row, .tokens = 4}});
    CHECK(r.kv.in_flight().launches);
    CHECK(r.kv.in_flight().write_backs == 1);
    REQUIRE(backend.synchronize(r.stream) == status::ok);
    CHECK_FALSE(r.kv.in_flight().launches);
    CHECK(r.kv.in_flight().write_backs == 1);
    CHECK(r.kv.drain(backend.now() + nanoseconds{10}) == status::drain_timeout);
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK(r.kv.in_flight().idle());
    r.step({{.row = row, .tokens = 4}});
    r.finish();
  }

  TEST_CASE(
    "law 9: a sequence closed while its copies never end holds its memory, the others go on, and it ends with them")
  {
    scripted_backend backend;
    small_rig<device_planned> r{backend, {.rows = 2}};
    row_id const row = leave_in_flight(r, never);
    for (std::size_t i = 0; i < 3; ++i) { backend.remove_rule(i); }
    REQUIRE(r.kv.close(row) == status::ok);
    r.engine.row(row).in_step = false;
    REQUIRE(backend.synchronize(r.stream) == status::ok);
    r.kv.poll();
    CHECK(r.kv.sequences()[row].open());
    row_id const other = r.open(2, 3, 6);
    CHECK(other != row);
    for (int i = 0; i < 3; ++i) { r.step({{.row = other}}); }
    CHECK(r.kv.drain(backend.now() + std::chrono::seconds{1}) == status::drain_timeout);
    backend.release();
    REQUIRE(r.kv.drain(no_deadline) == status::ok);
    CHECK_FALSE(r.kv.sequences()[row].open());
    r.finish();
  }

  TEST_CASE_TEMPLATE(
    "law 10: a device that is lost ends the manager for all rows, and what the host has stays readable", Manager,
    device_planned, host_planned, in_lockstep)
  {
    for (script_call const call : {script_call::launch, script_call::copy}) {
      for (std::uint64_t first = 0; first < 40; ++first) {
        scripted_backend backend;
        {
          small_rig<Manager> r{backend, {.rows = 3}};
          r.engine.forgives_failed = true;
          std::vector<row_id> const rows{r.open(1, 8), r.open(2, 7)};
          r.step({{.row = rows[0]}, {.row = rows[1]}});
          REQUIRE(r.kv.drain(no_deadline) == status::ok);
          backend.add_rule({.effect = script_effect::lose, .call = call, .first = first, .count = 1});
          CAPTURE(first);
          status begun = status::ok;
          for (int i = 0; i < 10 && begun == status::ok; ++i) {
            std::vector<step_row> batch;
            for (row_id const row : rows) {
              if (!r.kv.is_late(row)) { batch.push_back({.row = row}); }
            }
            begun = r.engine.step(std::span<step_row const>{batch});
          }
          if (backend.lost() && begun == status::ok) { begun = r.kv.drain(no_deadline); }
          if (!backend.lost()) {
            CHECK(first > 4);
            break;  // there are no more such calls
          }
          CHECK(begun == status::device_lost);
          for (row_id const row : rows) { CHECK(r.kv.row_status(row) == status::device_lost); }
          CHECK(r.kv.drain(no_deadline) == status::device_lost);
          CHECK(r.kv.in_flight().recalls == 0);
          CHECK(r.kv.audit() == "");
          // The blocks that were on the host when the device was lost are there still.
          for (row_id const row : rows) {
            sequence_state const& sequence = r.kv.sequences()[row];
            for (std::uint32_t b = 0; b < 3; ++b) { CHECK_FALSE(is_none(sequence.host_blocks[b])); }
            r.engine.look_at_host(row, true, 3);
          }
          CHECK(r.kv.sequences()[rows[0]].tokens >= 9);
          row_id none_left{};
          CHECK(r.kv.open({.prompt_tokens = 3, .max_tokens = 6}, none_left) == admission::rejected);
          for (row_id const row : rows) { CHECK(r.kv.close(row) == status::ok); }
          r.kv.poll();
          CHECK(r.kv.memory().host_bytes == 0);
          CHECK(r.kv.memory().slot_bytes == 0);
        }
        CHECK(backend.live_events() == 0);
        CHECK(backend.pinned_bytes() == 0);
      }
    }
  }

  TEST_CASE("law 4: what copies name that outlast the wait limit of a call is held until they are complete")
  {
    constexpr nanoseconds limit = std::chrono::milliseconds{200};
    constexpr nanoseconds late = std::chrono::seconds{10};
    // The call's first copy is late: it gives up, and what it was about takes part in nothing until the copy is complete.
    auto const late_copy = [&](scripted_backend& backend, char const* kind) {
      script_rule rule = copies_that(script_effect::delay, kind, 0, 1);
      rule.delay = late;
      backend.add_rule(rule);
    };
    for (char const* const call : {"preempt", "resume", "promote"}) {
      CAPTURE(call);
      scripted_backend backend;
      {
        small_rig<device_planned> r{backend, {.rows = 2, .slots = 200, .saved_sequences = 2, .wait_limit = limit}};
        row_id row = r.open(1, 8);
        for (int i = 0; i < 4; ++i) { r.step({{.row = row}}); }
        need(r.kv.drain(no_deadline), "drain");
        backend.choose(false);
        saved_id saved;
        std::uint64_t const slots = r.kv.memory().slot_bytes;
        if (call == std::string{"preempt"}) {
          late_copy(backend, "copy to host");
          CHECK(r.kv.preempt(row, saved) == status::drain_timeout);
          CHECK(r.kv.memory().slot_bytes == slots);
        } else if (call == std::string{"promote"}) {
          late_copy(backend, "copy to device");
          CHECK(r.kv.promote(row) == status::drain_timeout);
          CHECK(r.kv.mode_of(row) == row_mode::sparse_offloaded);
        } else {
          need(r.kv.preempt(row, saved), "preempt");
          late_copy(backend, "copy to device");
          row_id back = none<row_id>;
          CHECK(r.kv.resume(saved, back) == admission::queued);
          CHECK(is_none(back));
          CHECK(r.kv.memory().slot_bytes > 0);
        }
        CHECK(r.kv.in_flight().moves);
        saved_id other;
        CHECK(r.kv.retain(row_id{1}, other) != status::ok);
        if (call != std::string{"resume"}) {
          std::vector<step_row> const rows{{.row = row}};
          CHECK(r.kv.begin_step(rows) == status::busy);
          CHECK(r.kv.preempt(row, other) == status::busy);
          CHECK(r.kv.demote(row) == status::busy);
        }
        // A second request finds no memory of the first one's.
        row_id const second = r.open(2, 8);
        for (int i = 0; i < 4; ++i) { r.step({{.row = second}}); }
        backend.choose(false);
        CHECK(backend.counts().freed_under_copy == 0);
        need(r.kv.drain(no_deadline), "drain");
        CHECK_FALSE(r.kv.in_flight().moves);
        CHECK(r.kv.audit() == "");
        // And now the call goes well, and the row goes on where it was.
        if (call == std::string{"promote"}) {
          CHECK(r.kv.promote(row) == status::ok);
        } else {
          if (call == std::string{"preempt"}) { CHECK(r.kv.preempt(row, saved) == status::ok); }
          CHECK(r.kv.resume(saved, row) == admission::admitted);
        }
        for (int i = 0; i < 3; ++i) { r.step({{.row = row}, {.row = second}}); }
        if (call == std::string{"promote"}) { CHECK(r.kv.demote(row) == status::ok); }
        r.finish();
      }
      CHECK(backend.counts().freed_under_copy == 0);
    }
  }

  TEST_CASE(
    "law 9: a row whose slots are on their way for a ticket that was given up waits for them, and comes through")
  {
    for (std::uint32_t const spare_slots : {0U, 1U}) {
      scripted_backend backend;
      small_rig<device_planned> r{backend, {.spare_slots = spare_slots}};
      row_id const row = r.open(1, 8);
      for (int i = 0; i < 3; ++i) { r.step({{.row = row}}); }
      backend.choose(false);
      auto const import = r.engine.before_enter;
      std::uint32_t given_up = 0;
      // Before each layer a ticket recalls other blocks than the layer will, and is given up while they travel.
      r.engine.before_enter = [&](layer_id layer, row_list rows) {
        for (script_rule const& rule : late_copies(std::chrono::milliseconds{1})) { backend.add_rule(rule); }
        auto const choice = r.choice;
        r.choice = [](row_id, layer_id, std::uint32_t sealed, std::uint32_t position) {
          auto const first = static_cast<std::uint32_t>((2 * position + 2) % sealed);
          return std::vector<block_id>{static_cast<block_id>(first), static_cast<block_id>((first + 1) % sealed)};
        };
        import(layer, rows);
        r.choice = choice;
        ticket given;
        need(r.kv.begin_recall(layer, rows, r.engine.query_view(), r.stream, given), "begin_recall");
        need(r.kv.abort(given), "abort");
        ++given_up;
        import(layer, rows);
      };
      for (int i = 0; i < 4; ++i) { r.step({{.row = row}}); }
      CHECK(given_up == 8);
      CHECK(r.kv.row_status(row) == status::ok);
      r.engine.before_enter = import;
      r.finish();
    }
  }
}
