#include <doctest/doctest.h>
#include <support/explore.hpp>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Two sequences decode, and some of their copies fail. A row whose blocks cannot be brought says so, keeps the tokens that it
/// had, and goes on once copies work again. A row whose blocks cannot be written keeps its tokens and ends.
template <class Manager>
struct with_failures {
  script_rule rule;
  std::uint32_t* failed_rows;
  std::uint32_t steps = 1;

  std::string operator()(scripted_backend& backend) const
  {
    small_rig<Manager> r{backend, {.rows = 2, .layers = 1}};
    r.engine.forgives_failed = true;
    std::vector<row_id> rows{r.open(1, 8), r.open(2, 7)};
    backend.choose(false);
    step(r, rows);
    backend.choose(true);
    std::size_t const place = backend.add_rule(rule);
    for (std::uint32_t i = 0; i < steps; ++i) { step(r, rows); }
    backend.remove_rule(place);
    backend.choose(false);
    for (int i = 0; i < 4; ++i) { step(r, rows); }
    for (row_id const row : rows) { need(r.kv.row_status(row), "a row at the end"); }
    r.finish();
    return {};
  }

  /// One step of the rows; those that can never go on are closed.
  void step(small_rig<Manager>& r, std::vector<row_id>& rows) const
  {
    std::vector<step_row> batch;
    std::vector<std::uint32_t> before;
    for (row_id const row : rows) {
      batch.push_back({.row = row});
      before.push_back(r.kv.tokens_of(row));
    }
    status const begun = r.engine.step(std::span<step_row const>{batch});
    need(begun == status::ok || begun == status::transfer_failed, std::string{"begin_step: "} + name_of(begun));
    r.look();
    std::vector<row_id> going_on;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      status const said = r.kv.row_status(rows[i]);
      std::uint32_t const gained = r.kv.tokens_of(rows[i]) - before[i];
      bool const failed = said == status::transfer_failed;
      need(
        gained == (failed || begun != status::ok ? 0U : 1U) && (failed || said == status::ok),
        std::string{"a row says "} + name_of(said) + " and gained " + std::to_string(gained) + " tokens");
      *failed_rows += failed ? 1U : 0U;
      if (begun != status::ok && failed) {
        need(r.kv.close(rows[i]), "close");
      } else {
        going_on.push_back(rows[i]);
      }
    }
    need(begun == status::ok || going_on.size() + 1 == rows.size(), "begin_step does not say which row it was");
    rows = going_on;
  }
};

/// The copies that a manager makes, by its kind.
template <class Manager>
std::vector<std::string> kinds_of()
{
  bool const host = std::is_same_v<Manager, host_planned>;
  return {host ? "copy to device" : "gather_blocks", "copy to host"};
}

}  // namespace

TEST_SUITE("laws")
{
  // Reports: ai-dynamo/dynamo#15079, vllm-project/vllm#49176
  TEST_CASE_TEMPLATE(
    "law 10: in all orders a copy that fails, whichever it is, leaves its row where it was and the other row alone",
    Manager, device_planned, host_planned, in_lockstep)
  {
    exploration all, control;
    std::uint32_t failed = 0, unnoticed = 0;
    for (std::string const& kind : kinds_of<Manager>()) {
      for (std::uint64_t first = 0; first < 4; ++first) {
        for (script_effect const effect : {script_effect::refuse, script_effect::fail}) {
          for (std::uint64_t const count : {std::uint64_t{1}, std::uint64_t{2}, script_rule::unlimited}) {
            all += explore_orders({}, with_failures<Manager>{copies_that(effect, kind, first, count), &failed});
          }
        }
        control += explore_orders(
          {}, with_failures<Manager>{copies_that(script_effect::swallow, kind, first), &unnoticed}, {.orders = 500});
      }
    }
    MESSAGE(compared(all, control) << "; rows that failed: " << failed);
    CHECK(all.complete);
    CHECK(all.wrong == 0);
    CHECK(failed > 0);
    CHECK(control.wrong > 0);
  }
}
