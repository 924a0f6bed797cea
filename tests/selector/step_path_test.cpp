// The step path of selectors allocates nothing.

#include "support/allocations.hpp"
#include "support/cache.hpp"
#include "support/selection.hpp"
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/selector/top_p.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

/// Runs operations at once, in scratch taken at set-up.
struct frugal_backend : pulseinfer::archetype::backend {
  std::vector<std::byte> scratch = std::vector<std::byte>(1U << 20U);

  template <pulseinfer::operation Op>
  pulseinfer::status launch(stream_ref, Op const& op) noexcept
  {
    if (op.scratch_bytes(1) > scratch.size()) { return pulseinfer::status::capacity_exceeded; }
    pulseinfer::run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
    return pulseinfer::status::ok;
  }
};

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE("law 7: digests, selections and imports allocate nothing over 100 steps")
  {
    using pulseinfer::layer_id;
    using pulseinfer::status;
    pulseinfer::kv_geometry const geometry{
      .layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 16, .block_tokens = 4};
    pulseinfer_test::cache c{geometry, {{200, 1}, {90, 2}, {3, 1}}, 1};
    pulseinfer_test::tensor queries{pulseinfer::dtype::float32, c.tensor_tokens, 4, 16};
    queries.randomise(c.random);
    frugal_backend on;
    pulseinfer::selector_limits const limits{
      .geometry = c.geometry, .layout = c.layout, .max_rows = 3, .max_blocks = c.max_blocks, .max_step_tokens = 2};
    auto vote = pulseinfer::solo_head_selector<>{.budget_tokens = 64, .recent_tokens = 8}.bind(on, limits);
    auto solo =
      pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::designated_head>{
        .budget_tokens = 64, .recent_tokens = 8, .heads = {.head_of_layer = {1}}}
        .bind(on, limits);
    auto few =
      pulseinfer::solo_head_selector<pulseinfer::min_max, pulseinfer::few_heads, pulseinfer::top_p>{
        .budget_tokens = 64,
        .recent_tokens = 8,
        .digest = {.type = pulseinfer::dtype::int8, .bounds = true},
        .heads = {.layers = {{.kv_heads = {0, 1}, .weights = {1.0F, 0.5F}}}}}
        .bind(on, limits);
    std::vector<pulseinfer::certificate_sums> sums(3 * 2 * 4);
    pulseinfer::certificate_table const certificates{.data = sums.data(), .queries = 2, .heads = 4};
    auto external = pulseinfer::external_selector{.budget_tokens = 64}.bind(on, limits);
    pulseinfer_test::selection_arrays arrays{
      c, 16, {std::max(vote.digest_bytes(layer_id{0}), few.digest_bytes(layer_id{0}))}};
    std::vector<pulseinfer::block_id> const ids{pulseinfer::block_id{2}, pulseinfer::block_id{0}};
    std::vector<float> scores(3 * std::size_t{c.max_blocks}, 0.5F);
    auto const view = pulseinfer::contiguous_tensor(scores.data(), pulseinfer::dtype::float32, 3, 1, c.max_blocks);

    std::uint64_t const before = pulseinfer_test::allocations();
    std::uint32_t failed = 0;
    auto const expect_ok = [&](status result) { failed += result == status::ok ? 0U : 1U; };
    for (int step = 0; step < 100; ++step) {
      expect_ok(vote.digest_async({}, arrays.digest_request(0, 2)));
      expect_ok(vote.select_async({}, arrays.select_request(0, queries.view)));
      expect_ok(solo.digest_async({}, arrays.digest_request(0, 2)));
      expect_ok(solo.select_async({}, arrays.select_request(0, queries.view)));
      expect_ok(few.digest_async({}, arrays.digest_request(0, 2)));
      expect_ok(few.select_async({}, arrays.select_request(0, queries.view)));
      expect_ok(few.certify_async({}, arrays.select_request(0, queries.view), certificates));
      for (std::int32_t row = 0; row < 3; ++row) {
        expect_ok(external.import_selection(layer_id{0}, static_cast<pulseinfer::lane_id>(row), ids, 50));
      }
      expect_ok(external.select_async({}, arrays.select_request(0, {})));
      expect_ok(external.import_scores(layer_id{0}, view));
      expect_ok(external.select_async({}, arrays.select_request(0, {})));
    }
    CHECK(pulseinfer_test::allocations() == before);
    CHECK(failed == 0);
  }
}
