/// What comes unasked in the background, and what is left for later.

#include <pulseinfer/observe/counters.hpp>

#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>
#include <support/manager/rig.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

kv_geometry geometry_of(std::uint32_t head_groups)
{
  return {
    .layers = 4,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .head_groups = head_groups,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};
std::vector<sequence_plan> const plans{{1, 40, 160}, {2, 10, 130}, {3, 61, 180, 5}};

manager_options options_of(float deferred_share, float near_share)
{
  return {
    .max_rows = 3,
    .max_tokens = 200,
    .max_prefill_tokens = 8,
    .quota_tokens = 48,
    .slots = 8000,
    .deferred_share = deferred_share,
    .near_share = near_share};
}

/// Runs the plans to their ends. @return what the samples of all steps sum to
template <class Manager>
counters run(model_rig<Manager>& r)
{
  counters sums;
  std::uint64_t step = 0;
  auto const take = [&](step_sample const& sample) {
    if (sample.step == step) { return; }
    step = sample.step;
    sums.add(sample);
  };
  r.engine.attended = [&](visit const&) { take(r.kv.last_sample()); };
  run_plans(r, plans);
  take(r.kv.finish_sample());
  return sums;
}

template <class Manager>
std::uint64_t differences(model_rig<Manager>& a, model_rig<Manager>& b)
{
  std::uint64_t count = 0;
  for (sequence_plan const& plan : plans) {
    for (std::uint32_t t = 0; t < plan.length; ++t) {
      count += a.engine.output(plan.seed, t) == b.engine.output(plan.seed, t) ? 0U : 1U;
    }
  }
  return count;
}

std::string refusal(manager_options const& options)
{
  try {
    cpu_backend backend{{.mode = cpu_mode::manual}};
    lockstep_manager const kv{backend, backend.create_stream(), geometry_of(1), options, six_blocks};
  } catch (configuration_error const& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 8: blocks below the cut come unasked and change no result, bit for bit", Manager, lockstep_manager,
    fragment_manager)
  {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      synthetic_model const model{geometry_of(head_groups)};
      model_rig<Manager> without{model, options_of(0.0F, 0.0F), six_blocks};
      counters const before = run(without);
      CHECK(before.background_blocks == 0);
      model_rig<Manager> with{model, options_of(0.0F, 0.5F), six_blocks};
      counters const after = run(with);
      CHECK(differences(with, without) == 0);
      CHECK(after.background_blocks > 100);
      CHECK(after.background_hits > 10);
      CHECK(after.wasted_blocks > 0);
      CHECK(after.background_hits + after.wasted_blocks <= after.background_blocks);
      CHECK(after.background_precision() < 1.0);
      CHECK(after.deferred_blocks == 0);
      CHECK(after.skipped_share == 0.0);
    }
  }

  TEST_CASE_TEMPLATE(
    "law 3: deferral skips no more than it may of any head; what it left out comes later, and nothing stays away",
    Manager, lockstep_manager, hits_manager, fragment_manager)
  {
    synthetic_model const model{geometry_of(2)};
    model_rig<Manager> exact{model, options_of(0.0F, 0.0F), six_blocks};
    CHECK(run(exact).deferred_blocks == 0);
    for (float const share : {0.05F, 0.3F}) {
      model_rig<Manager> r{model, options_of(share, 0.0F), six_blocks};
      counters const after = run(r);
      CHECK(after.deferred_blocks > 20);
      CHECK(after.most_skipped_share > 0.0);
      // Told in units of 2^-32, rounded up.
      CHECK(after.most_skipped_share <= static_cast<double>(share) + 0x1p-32);
      CHECK(after.mean_skipped_share() <= after.most_skipped_share);
      CHECK(after.mean_skipped_share() > 0.0);
      CHECK(after.background_blocks > 0);
      CHECK(after.background_hits > 0);
      CHECK(differences(r, exact) > 0);
      CHECK(r.kv.audit() == "");
    }
  }

  TEST_CASE_TEMPLATE(
    "a share that no block is below defers nothing, and the results are the exact ones", Manager, lockstep_manager,
    fragment_manager)
  {
    synthetic_model const model{geometry_of(1)};
    model_rig<Manager> exact{model, options_of(0.0F, 0.0F), six_blocks};
    run(exact);
    model_rig<Manager> r{model, options_of(1e-30F, 0.25F), six_blocks};
    counters const sums = run(r);
    CHECK(sums.deferred_blocks == 0);
    CHECK(sums.deferrals > 1000);
    CHECK(differences(r, exact) == 0);
  }

  TEST_CASE("law 1: with blocks left for later and others coming unasked, every block that is attended has its bytes")
  {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      manager_options options = options_of(0.5F, 0.5F);
      options.background_bytes = 4096 << seed;
      rig<hits_manager> r{
        {.geometry = geometry_of(1), .manager = options, .cpu = {.mode = cpu_mode::manual, .seed = seed}, .per_row = 8},
        six_blocks};
      row_id const a = r.open(1, 50, 160), b = r.open(2, 30, 160);
      r.engine.prefill(a, 50, 8);
      r.engine.prefill(b, 30, 8);
      std::uint64_t deferred = 0, brought = 0;
      for (int i = 0; i < 80; ++i) {
        r.step({{.row = a}, {.row = b}});
        REQUIRE(r.kv.audit() == "");
        deferred += r.kv.finish_sample().deferred_blocks;
        brought += r.kv.last_sample().background_blocks;
      }
      CHECK(deferred > 0);
      CHECK(brought > 0);
      r.close_all();
    }
  }

  TEST_CASE("parts that are none, and selectors that do not tell scores, are refused with the numbers")
  {
    CHECK(refusal(options_of(0.02F, 0.25F)) == "");
    CHECK(refusal(options_of(1.5F, 0.25F)).find("deferred_share is 1.5") != std::string::npos);
    CHECK(refusal(options_of(0.0F, -0.25F)).find("near_share -0.25") != std::string::npos);
    CHECK(refusal(options_of(std::numeric_limits<float>::quiet_NaN(), 0.0F)) != "");
    cpu_backend backend{{.mode = cpu_mode::manual}};
    auto const stream = backend.create_stream();
    CHECK_THROWS_WITH_AS(
      (chosen_manager{
        backend, stream, geometry_of(1), options_of(0.0F, 0.25F), external_selector{.budget_tokens = 24}}),
      doctest::Contains("does not tell the scores"), configuration_error);
  }
}
