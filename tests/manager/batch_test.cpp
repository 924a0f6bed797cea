#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Eight sequences of different lengths: some end early, some never become sparse.
std::vector<sequence_plan> const eight{{1, 40, 120}, {2, 5, 90, 3},   {3, 77, 130, 8}, {4, 12, 20},
                                       {5, 0, 70},   {6, 24, 110, 5}, {7, 31, 64, 7},  {8, 100, 140}};

manager_options options_of(std::uint32_t rows)
{
  return {.max_rows = rows, .max_tokens = 160, .max_prefill_tokens = 8, .quota_tokens = 36, .slots = 9000};
}

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

template <class Manager>
void check_batch(cpu_options const& cpu)
{
  synthetic_model const model{
    {.layers = 3,
     .query_heads = 4,
     .kv_heads = 2,
     .head_dim = 8,
     .block_tokens = 4,
     .key_type = dtype::bfloat16,
     .value_type = dtype::float16}};
  model_rig<Manager> together{model, options_of(8), six_blocks, cpu};
  together.engine.warm_up = true;
  run_plans(together, eight);
  for (sequence_plan const& plan : eight) {
    model_rig<Manager> alone{model, options_of(1), six_blocks};
    alone.engine.warm_up = true;
    run_plans(alone, {plan});
    for (std::uint32_t t = 0; t < plan.length; ++t) {
      std::vector<float> const& a = together.engine.output(plan.seed, t);
      std::vector<float> const& b = alone.engine.output(plan.seed, t);
      // Which blocks are hits depends on when write-backs end: the sums of hits and landed blocks round differently.
      if (Manager::hits_first) {
        REQUIRE(difference(a, b) < 1e-4F);
      } else {
        REQUIRE(a == b);
      }
    }
  }
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "a batch of eight sequences of different lengths decodes as each alone", Manager, lockstep_manager, hits_manager,
    fragment_manager)
  {
    check_batch<Manager>({.mode = cpu_mode::manual});
    check_batch<Manager>({.mode = cpu_mode::manual, .seed = 11});
    check_batch<Manager>({.mode = cpu_mode::threaded});
  }
}
