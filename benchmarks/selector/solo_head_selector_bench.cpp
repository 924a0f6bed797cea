#include "../operation/paged_cache.hpp"
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/external_selector.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

/// Runs operations at once, of one name alone where one is given.
struct inline_backend : pulseinfer::archetype::backend {
  std::vector<std::byte> scratch = std::vector<std::byte>(1U << 20U);
  std::string only = {};

  template <pulseinfer::operation Op>
  pulseinfer::status launch(stream_ref, Op const& op) noexcept
  {
    if (!only.empty() && only != Op::name) { return pulseinfer::status::ok; }
    pulseinfer::run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
    return pulseinfer::status::ok;
  }
};

constexpr pulseinfer::layer_id layer{0};

/// One row of 9 query and 3 KV heads of 64, blocks of 16 tokens; caches are warm. Digests of all blocks are made first.
struct selection_fixture {
  explicit selection_fixture(std::uint32_t blocks)
    : cache{{.layers = 1, .query_heads = 9, .kv_heads = 3, .head_dim = 64}, blocks * 16, 1},
      ids(blocks),
      previous(blocks / 32 + 1, 0xA5A5A5A5U)
  {
    limits = {
      .geometry = cache.geometry, .layout = cache.layout, .max_rows = 1, .max_blocks = blocks, .max_step_tokens = 1};
  }
  template <class Bound>
  void digest(Bound& bound)
  {
    block_bytes = bound.digest_bytes(layer);
    digests.assign(static_cast<std::size_t>(block_bytes * cache.blocks + 1), std::byte{0});
    std::int32_t const appended = cache.info.new_tokens;
    cache.info.new_tokens = cache.info.tokens;
    static_cast<void>(bound.digest_async(
      {},
      {.layer = layer,
       .rows = cache.rows(),
       .info = &cache.info,
       .residency = cache.residency(),
       .pool = cache.pool(),
       .layout = cache.layout,
       .digests = digest_ref(),
       .most_touched = cache.blocks}));
    cache.info.new_tokens = appended;
  }
  [[nodiscard]] pulseinfer::digest_store_ref digest_ref()
  {
    return {
      .base = digests.data(),
      .extent_of = &extent,
      .layer_offset = &offset,
      .block_bytes = &block_bytes,
      .extent_bytes = digests.size(),
      .extent_blocks = cache.blocks,
      .max_extents = 1};
  }
  [[nodiscard]] pulseinfer::select_request request()
  {
    return {
      .layer = layer,
      .rows = cache.rows(),
      .info = &cache.info,
      .queries = cache.query_view(),
      .digests = digest_ref(),
      .selection =
        {.ids = ids.data(),
         .counts = &count,
         .previous = previous.data(),
         .max_selected = cache.blocks,
         .lanes = 1,
         .previous_words = static_cast<std::uint32_t>(previous.size())},
      .most_blocks = cache.blocks};
  }

  pulseinfer_bench::paged_cache cache;
  pulseinfer::selector_limits limits;
  std::vector<pulseinfer::block_id> ids;
  std::uint32_t count = 0;
  std::vector<std::uint32_t> previous;
  std::vector<std::byte> digests;
  std::uint64_t block_bytes = 0;
  std::uint64_t offset = 0;
  std::int32_t extent = 0;
};

template <class Selector>
void select(benchmark::State& state, Selector options, char const* only)
{
  auto const blocks = static_cast<std::uint32_t>(state.range(0));
  selection_fixture fixture{blocks};
  options.budget_tokens = static_cast<std::uint32_t>(state.range(1)) * 16;
  inline_backend on;
  auto bound = options.bind(on, fixture.limits);
  fixture.digest(bound);
  pulseinfer::select_request const request = fixture.request();
  static_cast<void>(bound.select_async({}, request));  // scores for the operations behind them
  on.only = only;
  for (auto _ : state) {
    static_cast<void>(bound.select_async({}, request));
    benchmark::DoNotOptimize(fixture.count);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(fixture.block_bytes * blocks));
}

/// The null selection: top-K over scores that the host engine has.
void select_scores(benchmark::State& state)
{
  auto const blocks = static_cast<std::uint32_t>(state.range(0));
  selection_fixture fixture{blocks};
  inline_backend on;
  auto bound = pulseinfer::external_selector{.budget_tokens = static_cast<std::uint32_t>(state.range(1)) * 16}.bind(
    on, fixture.limits);
  pulseinfer::select_request request = fixture.request();
  std::vector<float> scores(blocks);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = fixture.cache.queries[i % fixture.cache.queries.size()];
  }
  auto const view = pulseinfer::contiguous_tensor(scores.data(), pulseinfer::dtype::float32, 1, 1, blocks);
  for (auto _ : state) {
    static_cast<void>(bound.import_scores(layer, view));
    static_cast<void>(bound.select_async({}, request));
    benchmark::DoNotOptimize(fixture.count);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(blocks * sizeof(float)));
}

void shapes(benchmark::internal::Benchmark* bench)
{
  bench->ArgNames({"blocks", "budget_blocks"})->Args({256, 64})->Args({1024, 128})->Args({8192, 128});
}

using votes = pulseinfer::solo_head_selector<>;
using one_head = pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::designated_head>;

}  // namespace

BENCHMARK_CAPTURE(select, all, votes{}, "")->Name("selector/solo_head_selector/soft_vote/cpu")->Apply(shapes);
BENCHMARK_CAPTURE(select, solo, one_head{.heads = {.head_of_layer = {1}}}, "")
  ->Name("selector/solo_head_selector/designated_head/cpu")
  ->Apply(shapes);
BENCHMARK(select_scores)->Name("selector/external_selector/scores/cpu")->Apply(shapes);
BENCHMARK_CAPTURE(select, score, votes{}, "score_blocks")->Name("selector/score_blocks/cpu")->Apply(shapes);
BENCHMARK_CAPTURE(select, share, votes{}, "share_blocks")->Name("selector/share_blocks/cpu")->Apply(shapes);
BENCHMARK_CAPTURE(select, vote, votes{}, "vote_blocks")->Name("selector/vote_blocks/cpu")->Apply(shapes);
BENCHMARK_CAPTURE(select, top_k, votes{}, "select_top_k")->Name("selector/select_top_k/cpu")->Apply(shapes);
