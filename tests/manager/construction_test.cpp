/// A construction that fails leaves nothing behind, wherever it fails.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/scripted/scripted_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

using namespace pulseinfer;

namespace {

using scripted_manager = offload_manager<
  scripted_backend, solo_head_selector<>, gather_scatter_engine, lockstep_scheduler<visit_order::whole>,
  fixed_admission>;

kv_geometry small_geometry()
{
  return {.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 8, .block_tokens = 4};
}

struct outcome {
  std::string refused;      // the text of the resource_error; empty where construction succeeds
  std::uint64_t calls = 0;  // of the rule's kind, when it had succeeded or thrown
};

outcome construct(script_rule const& rule)
{
  scripted_backend backend{script{.rules = {rule}}};
  auto const compute = backend.create_stream();
  outcome found;
  try {
    scripted_manager const kv{
      backend,
      compute,
      small_geometry(),
      {.max_rows = 2, .max_tokens = 64, .quota_tokens = 48},
      {.budget_tokens = 32, .sink_tokens = 4, .recent_tokens = 4}};
    found.calls = backend.seen_by(0);
  } catch (resource_error const& problem) {
    found = {.refused = problem.what(), .calls = backend.seen_by(0)};
  }
  CHECK(backend.counts().freed_under_copy == 0);
  CHECK(backend.device_bytes() == 0);
  CHECK(backend.pinned_bytes() == 0);
  CHECK(backend.live_events() == 0);
  if (!backend.lost()) {
    // The device is as late as it can be: what nobody waited for is pending still, and names freed memory.
    CHECK(backend.pending_tasks() == 0);
    CHECK(backend.live_streams() == 1);
  }
  return found;
}

/// Lets each call of this kind be the one that goes wrong, from the `first` on. @return how many there are
std::uint64_t fail_each(script_call call, script_effect effect, std::uint64_t first = 0)
{
  for (std::uint64_t place = first;; ++place) {
    CAPTURE(place);
    outcome const found = construct({.effect = effect, .call = call, .first = place, .count = 1});
    if (found.calls <= place) {
      CHECK(found.refused == "");
      return place - first;
    }
    CHECK(found.refused != "");
    REQUIRE(place < 1000);
  }
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE("a construction that is refused memory frees nothing that enqueued work names")
  {
    CHECK(fail_each(script_call::allocate, script_effect::refuse) > 20);
  }

  TEST_CASE("a construction that is refused a handle frees nothing that enqueued work names")
  {
    CHECK(fail_each(script_call::create_event, script_effect::refuse) > 5);
    CHECK(fail_each(script_call::create_stream, script_effect::refuse, 1) > 2);  // the first is the host engine's
  }

  TEST_CASE(
    "a construction that is refused a launch, a copy or an event's record frees nothing that enqueued work names")
  {
    CHECK(fail_each(script_call::launch, script_effect::refuse) > 5);
    CHECK(fail_each(script_call::copy, script_effect::refuse) > 1);
    CHECK(fail_each(script_call::record, script_effect::refuse) > 2);
  }

  TEST_CASE("a construction whose work fails on the device says so")
  {
    CHECK(fail_each(script_call::launch, script_effect::fail) > 5);
    CHECK(fail_each(script_call::copy, script_effect::fail) > 1);
  }

  TEST_CASE("a construction on a device that is lost says so")
  {
    CHECK(fail_each(script_call::launch, script_effect::lose) > 5);
    CHECK(fail_each(script_call::copy, script_effect::lose) > 1);
  }
}
