#include <doctest/doctest.h>
#include <support/manager/model_rig.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t length = 64;

/// A budget that covers the longest sequence, whole blocks of up to 16 tokens, and a threshold that rows pass early: they
/// select, and select everything.
solo_head_selector<> const everything{
  .budget_tokens = length + 15, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 12};

kv_geometry plain()
{
  return {
    .layers = 3,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 8,
    .block_tokens = 4,
    .key_type = dtype::float32,
    .value_type = dtype::float32};
}

template <class Manager>
void check_dense(
  kv_geometry const& geometry, std::vector<sequence_plan> const& plans,
  solo_head_selector<> const& selector = everything)
{
  synthetic_model const model{geometry};
  model_rig<Manager> r{
    model,
    {.max_rows = static_cast<std::uint32_t>(plans.size()),
     .max_tokens = length,
     .max_prefill_tokens = 8,
     .slots = 9000},
    selector};
  run_plans(r, plans);
  for (sequence_plan const& plan : plans) {
    auto const dense = dense_outputs(model, plan.seed, plan.length);
    for (std::uint32_t t = 0; t < plan.length; ++t) {
      CAPTURE(plan.seed);
      CAPTURE(t);
      REQUIRE(difference(r.engine.output(plan.seed, t), dense[t]) < 1e-4F);
    }
  }
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 3: a budget that covers every sequence of a batch gives the dense result", Manager, lockstep_manager,
    hits_manager, fragment_manager)
  {
    std::vector<sequence_plan> const batch{{1, 10, 60, 4}, {2, 0, 11}, {3, 33, 64}, {4, 1, 30}};
    check_dense<Manager>(plain(), batch);

    kv_geometry headwise = plain();
    headwise.kv_heads = 4;
    headwise.head_groups = 4;
    headwise.order = token_order::nhd;
    check_dense<Manager>(headwise, batch);

    kv_geometry latent = plain();
    latent.kv_heads = 1;
    latent.value_is_key_prefix = true;
    latent.value_dim = 5;
    latent.block_tokens = 3;
    check_dense<Manager>(latent, batch);

    // Token by token, as windows of whole blocks depend on where a step begins.
    kv_geometry mixed = plain();
    mixed.layers = 4;
    mixed.layer_groups = {
      {.first = 0, .count = 1, .kind = layer_kind::windowed, .window_tokens = 9, .sink_tokens = 3},
      {.first = 1, .count = 1},
      {.first = 2, .count = 1, .kind = layer_kind::dense},
      {.first = 3, .count = 1}};
    check_dense<Manager>(mixed, {{1, 10, 60, 1}, {2, 0, 11}, {3, 33, 64, 1}});
  }

  TEST_CASE_TEMPLATE(
    "law 3: layers that never select give the dense result however small the budget", Manager, lockstep_manager,
    hits_manager)
  {
    kv_geometry geometry = plain();
    geometry.layer_groups = {{.first = 0, .count = 3, .kind = layer_kind::dense}};
    check_dense<Manager>(
      geometry, {{1, 10, 60, 4}, {2, 3, 40}},
      {.budget_tokens = 16, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 8});
  }

  TEST_CASE_TEMPLATE(
    "law 3: with drafts of which some are rejected the accepted tokens have the dense result", Manager,
    lockstep_manager, hits_manager, fragment_manager)
  {
    for (std::uint32_t const block_tokens : {1U, 3U, 4U, 16U}) {
      kv_geometry geometry = plain();
      geometry.block_tokens = block_tokens;
      synthetic_model const model{geometry};
      constexpr std::uint32_t step_tokens = 4;
      model_rig<Manager> r{
        model,
        {.max_rows = 1, .max_tokens = length, .max_step_tokens = step_tokens, .max_prefill_tokens = 8},
        everything};
      row_id const row = r.open(7, 14, length);
      r.engine.prefill(row, 14, 8);
      std::uint32_t rejected = 0;
      for (std::uint32_t step = 0; r.kv.tokens_of(row) < length; ++step) {
        std::uint32_t const count = std::min(1 + step % step_tokens, length - r.kv.tokens_of(row));
        std::uint32_t const accepted = step % 3 == 0 ? 1 : std::min(count, 1 + step % 2);
        r.engine.step({{.row = row, .tokens = count}}, accepted);
        rejected += count - accepted;
        REQUIRE(r.kv.audit() == "");
      }
      CHECK(rejected > 10);
      auto const dense = dense_outputs(model, 7, length);
      for (std::uint32_t t = 0; t < length; ++t) { REQUIRE(difference(r.engine.output(7, t), dense[t]) < 1e-4F); }
    }
  }
}
