#include <doctest/doctest.h>
#include <support/laws/rules.hpp>
#include <support/laws/small_rig.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Two sequences decode while one call, or some in a row, are refused. Rows that could not go on are closed. Everything is given
/// back, and what comes later goes well.
template <class Manager>
void decode_with_refusal(scripted_backend& backend, script_rule const& rule, std::uint64_t& refused)
{
  small_rig<Manager> r{backend, {.rows = 3}};
  r.engine.forgives_failed = true;
  std::vector<row_id> const rows{r.open(1, 8), r.open(2, 7)};
  r.step({{.row = rows[0]}, {.row = rows[1]}});
  std::size_t const place = backend.add_rule(rule);
  for (int i = 0; i < 3; ++i) {
    std::vector<step_row> batch;
    for (row_id const row : rows) {
      if (!r.kv.is_late(row)) { batch.push_back({.row = row}); }
    }
    static_cast<void>(r.engine.step(std::span<step_row const>{batch}));
    r.look();
  }
  backend.remove_rule(place);
  refused += backend.counts().refused;
  for (row_id const row : rows) {
    if (!r.kv.is_late(row) && r.kv.row_status(row) == status::ok) { continue; }
    r.engine.row(row).in_step = false;
    need(r.kv.close(row), "close");
  }
  need(r.kv.drain(no_deadline), "drain");
  row_id const next = r.open(3, 8);
  for (int i = 0; i < 4; ++i) {
    std::vector<step_row> batch{{.row = next}};
    for (row_id const row : rows) {
      if (row != next && r.kv.sequences()[row].open()) { batch.push_back({.row = row}); }
    }
    status const begun = r.engine.step(std::span<step_row const>{batch});
    r.look();
    need(begun == status::ok || begun == status::transfer_failed, std::string{"begin_step later: "} + name_of(begun));
    for (step_row const& it : batch) {
      if (r.kv.row_status(it.row) == status::ok) { continue; }
      need(it.row != next, "the new row fails");
      need(r.kv.close(it.row), "close");
    }
  }
  need(r.kv.tokens_of(next) > 8, "the new row does not go on");
  r.finish();
}

}  // namespace

TEST_SUITE("laws")
{
  TEST_CASE_TEMPLATE(
    "law 10: whichever call the device refuses, nothing is lost and whatever comes later goes well", Manager,
    device_planned, host_planned, in_lockstep)
  {
    for (script_call const call : {script_call::launch, script_call::copy, script_call::record, script_call::wait}) {
      for (status const code : {status::busy, status::resource_exhausted}) {
        for (std::uint64_t const count : {1U, 3U, 20U}) {
          std::uint64_t refused = 1;
          for (std::uint64_t first = 0; refused != 0; ++first) {
            refused = 0;
            scripted_backend backend;
            CAPTURE(static_cast<int>(call));
            CAPTURE(first);
            CAPTURE(count);
            std::string fault;
            try {
              decode_with_refusal<Manager>(
                backend,
                {.effect = script_effect::refuse,
                 .call = call,
                 .where = [](script_task const& t) { return std::string{t.name} != "host_function"; },
                 .first = first,
                 .count = count,
                 .code = code},
                refused);
            } catch (std::exception const& e) {
              fault = e.what();
              refused = 1;
            }
            CHECK(fault == "");
          }
        }
      }
    }
  }
}
