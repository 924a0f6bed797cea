#include <doctest/doctest.h>
#include <support/explore.hpp>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr copy_mode both_modes[] = {copy_mode::late_read, copy_mode::early_write};

/// Asks for a place for a sequence until there is one; the device gets on by a task each time.
template <class Rig>
row_id open_when_possible(Rig& r, std::uint64_t seed, std::uint32_t prompt, std::uint32_t tokens)
{
  for (int turn = 0; turn < 100; ++turn) {
    row_id row{};
    if (r.kv.open({.prompt_tokens = prompt, .max_tokens = tokens}, row) == admission::admitted) {
      r.engine.assign(row, seed);
      return row;
    }
    r.look();
    static_cast<void>(r.backend.run_one());
  }
  need(false, "never admitted");
  return none<row_id>;
}

/// From the next step but one on the row misses nothing, and so waits for nobody's copies.
template <class Rig>
void keep_resident(Rig& r, row_id row)
{
  r.choice = [row, others = r.choice](row_id asking, layer_id layer, std::uint32_t sealed, std::uint32_t position) {
    return asking == row ? std::vector<block_id>{block_id{0}, block_id{1}} : others(asking, layer, sealed, position);
  };
}

/// A sequence is closed while a recall of its blocks flies, in the middle of its step; another one goes on, a third one gets
/// the memory.
template <class Manager>
struct close_in_step {
  std::uint32_t visits = 1;  ///< that the step has made by then
  bool others_step = false;
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 3, .slots = 18, .host_blocks = 20}};  // room for two
    r.engine.runs_ahead = true;
    row_id const first = r.open(1, 8), other = r.open(2, 7);
    keep_resident(r, other);
    backend.choose(false);
    r.step({{.row = first}, {.row = other}});
    need(backend.synchronize(), "synchronize");
    backend.choose(true);
    std::size_t const rule = backend.add_rule(without);
    r.engine.most_visits = visits;
    r.step({{.row = first}});
    r.engine.most_visits = ~0U;
    need(r.kv.close(first), "close");
    r.engine.row(first).in_step = false;
    if (others_step) { r.step({{.row = other}}); }
    row_id const third = open_when_possible(r, 3, 8, 20);
    need(third != other, "a row of two sequences");
    r.step({{.row = third, .tokens = 8}});
    backend.remove_rule(rule);
    need(backend.synchronize(), "synchronize");  // whatever is late comes now
    backend.choose(false);
    for (int i = 0; i < 3; ++i) { r.step({{.row = other}, {.row = third}}); }
    r.finish();
    return {};
  }
};

/// A sequence of which a block is on its way to the host is closed; another one gets its memory and leaves at once, so that
/// its partial block goes to a host block that was the first one's.
template <class Manager>
struct close_behind_seal {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 3, .slots = 10, .host_blocks = 5}};
    r.engine.runs_ahead = true;
    std::size_t const rule = backend.add_rule(without);
    row_id first{};
    need(r.kv.open({.prompt_tokens = 8, .max_tokens = 10}, first) == admission::admitted, "no place");
    r.engine.assign(first, 1);
    r.step({{.row = first, .tokens = 8}});  // seals four blocks
    need(r.kv.close(first), "close");
    row_id const between = open_when_possible(r, 3, 1, 2);
    r.step({{.row = between}});
    row_id second = open_when_possible(r, 2, 3, 6);
    r.step({{.row = second, .tokens = 3}});
    saved_id saved;
    need(r.kv.preempt(second, saved), "preempt");
    backend.remove_rule(rule);
    need(backend.synchronize(), "synchronize");
    backend.choose(false);
    need(r.kv.resume(saved, second) == admission::admitted, "resume");
    r.engine.assign(second, 2);
    for (int i = 0; i < 3; ++i) { r.step({{.row = second}}); }
    r.finish();
    return {};
  }
};

/// A sequence leaves while a block of it is on its way to the host, another one gets its slot, and the first comes back.
template <class Manager>
struct preempt_behind_seal {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 2, .slots = 10, .host_blocks = 20}};
    r.engine.runs_ahead = true;
    row_id first = r.open(1, 7);
    backend.choose(false);
    need(r.kv.drain(no_deadline), "drain");
    backend.choose(true);
    std::size_t const rule = backend.add_rule(without);
    r.step({{.row = first}});  // seals block 3
    saved_id saved;
    need(r.kv.preempt(first, saved), "preempt");
    row_id const second = open_when_possible(r, 2, 8, 20);
    r.step({{.row = second, .tokens = 8}});
    backend.remove_rule(rule);
    need(backend.synchronize(), "synchronize");
    backend.choose(false);
    need(r.kv.close(second), "close");
    need(r.kv.drain(no_deadline), "drain");
    need(r.kv.resume(saved, first) == admission::admitted, "resume");
    r.engine.assign(first, 1);
    for (int i = 0; i < 4; ++i) { r.step({{.row = first}}); }
    r.finish();
    return {};
  }
};

/// A kept prefix is begun again by two sequences while the one that it came from is closed in the middle of a step, and
/// another sequence gets what that one held alone.
template <class Manager>
struct shared_prefix {
  script_rule without = nothing();

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 4, .slots = 26, .host_blocks = 20}};
    r.engine.runs_ahead = true;
    row_id const first = r.open(1, 8);
    backend.choose(false);
    r.step({{.row = first}});
    saved_id kept;
    need(r.kv.retain(first, kept), "retain");
    row_id begun{};
    need(r.kv.adopt(kept, {.prompt_tokens = 8, .max_tokens = 20}, begun) == admission::admitted, "adopt");
    r.engine.assign(begun, 1);
    keep_resident(r, begun);
    r.step({{.row = first}, {.row = begun}});
    need(backend.synchronize(), "synchronize");
    backend.choose(true);
    std::size_t const rule = backend.add_rule(without);
    r.engine.most_visits = 1;
    r.step({{.row = first}});
    r.engine.most_visits = ~0U;
    need(r.kv.close(first), "close");
    r.engine.row(first).in_step = false;
    need(r.kv.release(kept), "release");
    row_id const other = open_when_possible(r, 3, 8, 20);
    r.step({{.row = other, .tokens = 8}});
    backend.remove_rule(rule);
    need(backend.synchronize(), "synchronize");
    backend.choose(false);
    for (int i = 0; i < 4; ++i) { r.step({{.row = begun}, {.row = other}}); }
    r.finish();
    return {};
  }
};

/// Some of the orders without asking: all of them where they are few, else some that are drawn.
template <class Program>
exploration some_orders(script const& how, Program const& program)
{
  exploration const all = explore_orders(how, program, {.orders = 1000});
  return all.complete && !all.cut ? all : draw_orders(how, program, std::min<std::uint64_t>(1000, sanitized_orders));
}

/// Nothing went wrong, and where the host does not ask whether copies are complete something does.
void check_control(exploration const& all, exploration const& control)
{
  MESSAGE(compared(all, control));
  CHECK(all.wrong == 0);
  CHECK(control.wrong > 0);
}

template <class Program>
void check_all_modes(std::uint32_t unasked)
{
  exploration all, control;
  for (copy_mode const copies : both_modes) {
    all += explore_orders({.copies = copies}, Program{});
    Program without;
    without.without = without_asking(unasked);
    control += some_orders({.copies = copies}, without);
  }
  CHECK(all.complete);
  check_control(all, control);
}

}  // namespace

TEST_SUITE("laws")
{
  // Report: sgl-project/sglang#27444
  TEST_CASE_TEMPLATE(
    "law 4: in all orders a closed sequence's slots and host blocks are another's only when its copies are complete",
    Manager, device_planned, host_planned, in_lockstep)
  {
    exploration all, control;
    for (copy_mode const copies : both_modes) {
      for (std::uint32_t const visits : {0U, 1U, 2U, 3U}) {
        for (bool const others_step : {false, true}) {
          script const how{.copies = copies};
          all += explore_orders(how, close_in_step<Manager>{visits, others_step});
          control += some_orders(how, close_in_step<Manager>{visits, others_step, without_asking(streams::recall)});
        }
      }
    }
    CHECK(all.complete);
    check_control(all, control);
  }

  TEST_CASE_TEMPLATE(
    "law 4: in all orders a host block that is being written is another's only when that is complete", Manager,
    device_planned, in_lockstep)
  {
    check_all_modes<close_behind_seal<Manager>>(streams::write_back);
  }

  // Reports: vllm-project/vllm#29870, vllm-project/vllm#48596
  TEST_CASE_TEMPLATE(
    "law 12: in all orders what is kept of a sequence that leaves is its own, whoever gets its slots next", Manager,
    device_planned, host_planned, in_lockstep)
  {
    check_all_modes<preempt_behind_seal<Manager>>(streams::write_back);
  }

  TEST_CASE_TEMPLATE(
    "law 12: in all orders sequences that share a prefix read their own blocks, whoever of them ends first", Manager,
    device_planned, host_planned)
  {
    check_all_modes<shared_prefix<Manager>>(streams::recall);
  }
}
