#include "paged_cache.hpp"
#include <pulseinfer/operation/paged_attention.hpp>

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

/// One row of 9 query and 3 KV heads, blocks of 16 tokens; caches are warm.
void paged_attention(benchmark::State& state, pulseinfer::dtype type)
{
  auto const tokens = static_cast<std::uint32_t>(state.range(0));
  auto const queries = static_cast<std::uint32_t>(state.range(1));
  auto const head_dim = static_cast<std::uint32_t>(state.range(2));
  pulseinfer_bench::paged_cache cache{
    {.layers = 1, .query_heads = 9, .kv_heads = 3, .head_dim = head_dim, .key_type = type, .value_type = type},
    tokens,
    queries};
  pulseinfer::paged_attention const op{
    .table = cache.table(),
    .rows = cache.rows(),
    .queries = cache.query_view(),
    .out = cache.out_view(),
    .lse = cache.lse.data(),
    .scale = 1.0F / std::sqrt(static_cast<float>(head_dim)),
    .most_queries = queries};
  std::vector<std::byte> scratch(op.scratch_bytes(1));
  for (auto _ : state) {
    pulseinfer::run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
    benchmark::DoNotOptimize(cache.out.data());
    benchmark::ClobberMemory();
  }
  pulseinfer::operation_cost const cost = op.cost();
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(cost.device_bytes));
  state.counters["flops"] =
    benchmark::Counter(static_cast<double>(cost.flops), benchmark::Counter::kIsIterationInvariantRate);
}

void shapes(benchmark::internal::Benchmark* bench)
{
  bench->ArgNames({"tokens", "queries", "head_dim"})
    ->Args({1024, 1, 64})
    ->Args({4096, 1, 64})
    ->Args({4096, 1, 128})
    ->Args({4096, 64, 64});
}

}  // namespace

BENCHMARK_CAPTURE(paged_attention, float32, pulseinfer::dtype::float32)
  ->Name("operation/paged_attention/float32/cpu")
  ->Apply(shapes);
BENCHMARK_CAPTURE(paged_attention, float16, pulseinfer::dtype::float16)
  ->Name("operation/paged_attention/float16/cpu")
  ->Apply(shapes);
