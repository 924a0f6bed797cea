#include <doctest/doctest.h>
#include <support/explore.hpp>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <cstdint>
#include <string>
#include <type_traits>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Nothing went wrong, and without the wait something does.
void check_control(exploration const& all, exploration const& control)
{
  MESSAGE(compared(all, control));
  CHECK(all.complete);
  CHECK(all.wrong == 0);
  CHECK(control.wrong > 0);
}

constexpr exploration_bounds few{.orders = 5000};

constexpr copy_mode both_modes[] = {copy_mode::late_read, copy_mode::early_write};

/// A prompt comes in in chunks, a block is sealed by each; the host does not wait for the device between them.
template <class Manager>
struct prompt {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    backend.choose(false);
    small_rig<Manager> r{backend};
    backend.choose(true);
    backend.add_rule(without);
    r.engine.runs_ahead = true;
    row_id row{};
    need(r.kv.open({.prompt_tokens = 8, .max_tokens = 20}, row) == admission::admitted, "no place");
    r.engine.assign(row, 1);
    for (std::uint32_t const tokens : {3U, 2U, 1U}) { r.step({{.row = row, .tokens = tokens}}); }
    r.finish();
    return {};
  }
};

/// A sequence decodes: in each step and layer it reads two other blocks, which are recalled over those of the step before.
template <class Manager, int Steps>
struct decode {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend};
    row_id const row = r.open(1, 8);
    backend.choose(false);
    r.step({{.row = row}});
    backend.choose(true);
    backend.add_rule(without);
    for (int i = 0; i < Steps; ++i) { r.step({{.row = row}}); }
    r.finish();
    return {};
  }
};

/// A sequence that never offloads leaves the device while its last append may not have run, and comes back.
template <class Manager>
struct preempt_behind_append {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend};
    row_id row = r.open(1, 2, 6);
    r.engine.runs_ahead = true;
    backend.add_rule(without);
    r.step({{.row = row}});
    saved_id saved;
    need(r.kv.preempt(row, saved), "preempt");
    need(r.kv.resume(saved, row) == admission::admitted, "resume");
    r.step({{.row = row}});
    r.finish();
    return {};
  }
};

/// One sequence comes back into the slots of another, whose last attention may not have run.
template <class Manager>
struct resume_behind_attention {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 2, .slots = 10}};
    r.engine.runs_ahead = true;
    row_id first = r.open(1, 3, 6);
    saved_id saved;
    need(r.kv.preempt(first, saved), "preempt");
    row_id const second = r.open(2, 3, 6);
    backend.add_rule(without);
    r.step({{.row = second}});
    need(r.kv.close(second), "close");
    need(r.kv.resume(saved, first) == admission::admitted, "resume");
    need(backend.synchronize(r.stream), "synchronize");
    r.engine.assign(first, 1);
    r.step({{.row = first}});
    r.finish();
    return {};
  }
};

}  // namespace

TEST_SUITE("laws")
{
  // Report: vllm-project/vllm#45704
  TEST_CASE_TEMPLATE(
    "law 5: in all orders a write-back waits for the append of what it writes", Manager, device_planned, host_planned,
    in_lockstep)
  {
    for (copy_mode const copies : both_modes) {
      script const how{.copies = copies};
      exploration const all = explore_orders(how, prompt<Manager>{});
      exploration const control =
        explore_orders(how, prompt<Manager>{without_wait(streams::write_back, streams::compute)}, few);
      check_control(all, control);
    }
  }

  TEST_CASE_TEMPLATE(
    "law 5: in all orders a recall waits for its plan, and with it for the last attention that read its slots", Manager,
    device_planned, host_planned, in_lockstep)
  {
    for (copy_mode const copies : both_modes) {
      script const how{.copies = copies};
      exploration const all = explore_orders(how, decode<Manager, 1>{});
      // An engine that plans on the host asks for the plan before it enqueues anything.
      if (std::is_same_v<Manager, host_planned>) {
        CHECK(all.wrong == 0);
      } else {
        check_control(all, explore_orders(how, decode<Manager, 1>{without_wait(streams::recall, streams::compute)}));
      }
      exploration const longer = explore_orders(how, decode<Manager, 2>{});
      MESSAGE("two steps: " << longer.text());
      CHECK(longer.complete);
      CHECK(longer.wrong == 0);
      // The device may also get on before the host waits: as near to the order of enqueuing as two choices are.
      exploration const early =
        explore_orders({.runs = progress::at_all_calls, .copies = copies}, decode<Manager, 2>{}, {.deviations = 2});
      MESSAGE("at any call: " << early.text());
      CHECK(early.complete);
      CHECK(early.wrong == 0);
    }
  }

  TEST_CASE_TEMPLATE(
    "law 5: in all orders a sequence is taken off the device behind its last append", Manager, device_planned,
    host_planned, in_lockstep)
  {
    for (copy_mode const copies : both_modes) {
      script const how{.copies = copies};
      exploration const all = explore_orders(how, preempt_behind_append<Manager>{});
      exploration const control =
        explore_orders(how, preempt_behind_append<Manager>{without_wait(streams::move, streams::compute)}, few);
      check_control(all, control);
    }
  }

  TEST_CASE_TEMPLATE(
    "law 5: in all orders a sequence comes back behind the last attention that read the slots it gets", Manager,
    device_planned, host_planned, in_lockstep)
  {
    for (copy_mode const copies : both_modes) {
      script const how{.copies = copies};
      exploration const all = explore_orders(how, resume_behind_attention<Manager>{});
      exploration const control =
        explore_orders(how, resume_behind_attention<Manager>{without_wait(streams::move, streams::compute)});
      check_control(all, control);
    }
  }
}
