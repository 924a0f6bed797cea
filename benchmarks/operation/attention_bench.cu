/// Paged decode attention beside a copy of as many bytes in the same memory.

#include "device_bench.cuh"
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/operation/paged_attention.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

struct shape {
  std::uint32_t rows = 64;
  std::uint32_t tokens = 2048;
  std::uint32_t kv_heads = 8;
  std::uint32_t group = 4;
  std::uint32_t dim = 128;
  std::uint32_t value_dim = 0;  ///< not 0: values are prefixes of the keys
  std::uint32_t queries = 1;
  dtype type = dtype::bfloat16;

  [[nodiscard]] std::string name() const
  {
    auto const number = [](std::uint32_t value) { return std::to_string(value); };
    return name_of(type) + std::string{"/kv_heads:"} + number(kv_heads) + "/group:" + number(group) +
      "/dim:" + number(dim) + (value_dim == 0 ? "" : "/value_dim:" + number(value_dim)) +
      (queries == 1 ? "" : "/queries:" + number(queries)) + "/rows:" + number(rows) + "/tokens:" + number(tokens);
  }
  [[nodiscard]] kv_geometry geometry() const
  {
    return {
      .layers = 1,
      .query_heads = kv_heads * group,
      .kv_heads = kv_heads,
      .head_dim = dim,
      .value_dim = value_dim,
      .key_type = type,
      .value_type = type,
      .value_is_key_prefix = value_dim != 0};
  }
};

/// Caches of all rows in shuffled slots, several of them where one would stay in the device's cache.
class attention_scene {
 public:
  attention_scene(device_bench& on, shape const& made)
    : of{made},
      layout{make_block_layout(made.geometry())},
      blocks{divide_up(made.tokens, layout.block_tokens)},
      bytes{std::uint64_t{made.rows} * blocks * layout.block_bytes},
      calls{calls_of(bytes, 64)},
      pool{on.random(bytes / size_of(made.type) * calls, made.type, 1)},
      queries{on.random(std::uint64_t{made.rows} * made.queries * made.kv_heads * made.group * made.dim, made.type, 2)},
      out{on.memory(out_elements() * sizeof(float))},
      lse{on.memory(out_elements() * sizeof(float) / layout.value_dim)}
  {
    std::mt19937 random{3};
    std::vector<std::int32_t> order(std::size_t{made.rows} * blocks * calls);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<row_info> infos(made.rows);
    std::vector<std::uint32_t> ids(made.rows);
    for (std::uint32_t row = 0; row < made.rows; ++row) {
      ids[row] = row;
      infos[row] = {
        .tokens = static_cast<std::int32_t>(made.tokens),
        .new_tokens = static_cast<std::int32_t>(made.queries),
        .token_offset = static_cast<std::int32_t>(row * made.queries)};
    }
    slots = on.upload(order);
    counts = on.upload(std::vector<std::uint32_t>(made.rows, blocks));
    info = on.upload(infos);
    rows = on.upload(ids);
    base = on.upload(std::vector<std::byte*>{pool.data()});
  }
  attention_scene(attention_scene&&) = delete;

  [[nodiscard]] paged_attention operation(std::uint32_t call) const
  {
    std::uint32_t const heads = of.kv_heads * of.group;
    std::uint64_t const tokens = std::uint64_t{of.rows} * of.queries;
    return {
      .table =
        {.slots = slots.as<slot_id>() + std::uint64_t{call} * of.rows * blocks,
         .counts = counts.as<std::uint32_t>(),
         .info = info.as<row_info>(),
         .pool =
           {.layer_base = base.as<std::byte*>(), .slot_stride = layout.block_bytes, .slots = of.rows * blocks * calls},
         .layout = layout,
         .layer = layer_id{0},
         .stride = blocks},
      .rows = {.ids = rows.as<row_id>(), .count = of.rows},
      .queries = contiguous_tensor(queries.data(), of.type, tokens, heads, of.dim),
      .out = contiguous_tensor(out.data(), dtype::float32, tokens, heads, layout.value_dim),
      .lse = lse.as<float>(),
      .scale = 1.0F / std::sqrt(static_cast<float>(of.dim)),
      .most_queries = of.queries};
  }

  /// The results of the last call.
  [[nodiscard]] std::vector<float> results() const
  {
    std::vector<float> values(out_elements());
    require(cudaMemcpy(values.data(), out.data(), values.size() * sizeof(float), cudaMemcpyDeviceToHost), "results");
    return values;
  }

  shape of;
  block_layout layout;
  std::uint32_t blocks;
  std::uint64_t bytes;  // of the keys and values of one call
  std::uint32_t calls;
  device_bench::slab_type pool, queries, out, lse, slots, counts, info, rows, base;

 private:
  [[nodiscard]] std::uint64_t out_elements() const
  {
    return std::uint64_t{of.rows} * of.queries * of.kv_heads * of.group * layout.value_dim;
  }
};

/// Largest difference of the kernel's results from those of the generic body.
double largest_difference(device_bench& on, attention_scene const& scene)
{
  require(on.backend.launch(on.stream, generic<paged_attention>{scene.operation(0)}), "generic");
  require(on.backend.synchronize(on.stream), "generic");
  std::vector<float> const expected = scene.results();
  require(on.backend.launch(on.stream, scene.operation(0)), "attention");
  require(on.backend.synchronize(on.stream), "attention");
  std::vector<float> const found = scene.results();
  double largest = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    double const apart = std::abs(static_cast<double>(found[i]) - static_cast<double>(expected[i]));
    largest = apart <= largest ? largest : apart;  // a NaN stays
  }
  return largest;
}

template <bool Generic>
void attention(benchmark::State& state, shape const& made)
{
  device_bench& on = shared_device();
  attention_scene const scene{on, made};
  if (!Generic && made.rows <= 64 && made.tokens <= 2048) {
    double const apart = largest_difference(on, scene);
    state.counters["largest_difference"] = apart;
    if (!(apart <= 1e-5)) {
      state.SkipWithError("other results than the generic body's");
      return;
    }
  }
  std::uint32_t const calls = Generic ? 1U : scene.calls;
  device_bench::graph work{
    on, calls, [&](std::uint32_t call) {
      if constexpr (Generic) {
        require(on.backend.launch(on.stream, generic<paged_attention>{scene.operation(call)}), "generic");
      } else {
        require(on.backend.launch(on.stream, scene.operation(call)), "attention");
      }
    }};
  device_bench::copies copy{on, calls, scene.bytes, scene.pool};
  on.report(state, scene.bytes, work, copy, Generic ? 3U : 9U);
}

void add(shape const& made)
{
  benchmark::RegisterBenchmark(
    ("attention/paged_attention/" + made.name()).c_str(),
    [=](benchmark::State& state) { attention<false>(state, made); })
    ->UseManualTime()
    ->Iterations(1)
    ->Unit(benchmark::kMicrosecond);
}

bool const registered = [] {
  for (std::uint32_t const rows : {1U, 8U, 64U}) {
    for (std::uint32_t const tokens : {512U, 2048U, 8192U}) { add({.rows = rows, .tokens = tokens}); }
  }
  for (std::uint32_t const group : {1U, 2U, 8U, 16U, 32U}) { add({.group = group}); }
  add({.queries = 4});
  add({.kv_heads = 16, .dim = 64});
  add({.kv_heads = 4, .dim = 256});
  add({.type = dtype::float16});
  add({.kv_heads = 4, .type = dtype::float32});
  add({.kv_heads = 1, .group = 16, .dim = 576, .value_dim = 512});
  add({.kv_heads = 1, .group = 128, .dim = 576, .value_dim = 512});
  benchmark::RegisterBenchmark(
    ("attention/generic_body/" + shape{}.name()).c_str(),
    [](benchmark::State& state) { attention<true>(state, shape{}); })
    ->UseManualTime()
    ->Iterations(1)
    ->Unit(benchmark::kMicrosecond);
  return true;
}();

}  // namespace
