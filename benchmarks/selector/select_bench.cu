/// Selection on a GPU: scores, shares, votes and top-K, together and one by one, beside a copy of as many bytes as the digests
/// have; and with the resolve that follows.

#include "../operation/device_bench.cuh"
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/operation/choose_blocks.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

constexpr std::uint32_t block_tokens = 16, budget = 128, query_group = 4, kv_heads = 8, head_dim = 128;
constexpr std::uint32_t extent_blocks = 64, lease = 160;

struct shape {
  std::uint32_t rows = 64;
  std::uint32_t blocks = 8192;
  std::uint32_t heads = 1;  ///< scoring KV heads

  [[nodiscard]] std::string name() const
  {
    return "/rows:" + std::to_string(rows) + "/blocks:" + std::to_string(blocks) +
      "/scoring_heads:" + std::to_string(heads);
  }
};

/// Every slot that a step has taken is clean before the next: the recalls between are not measured here.
__global__ void land_all(slot_word* words, std::uint32_t count)
{
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    if (words[i].state == slot_state::in_flight) { words[i].state = slot_state::clean; }
  }
}

/// Digests of all rows' blocks, several sets of them where one would stay in the device's cache; queries that are others in
/// each call.
class select_scene {
 public:
  static constexpr std::uint32_t query_sets = 4;

  select_scene(device_bench& on, shape const& made)
    : of{made},
      block_bytes{std::uint64_t{made.heads} * device::cuboid_mean_elements(head_dim) * sizeof(half)},
      extents{divide_up(made.blocks, extent_blocks)},
      bytes{std::uint64_t{made.rows} * made.blocks * block_bytes},
      set_bytes{std::uint64_t{made.rows} * extents * extent_blocks * block_bytes},
      calls{calls_of(bytes, 64)},
      pitch{round_up(made.blocks, 16U)},
      words{divide_up(made.blocks, 32U)},
      digests{on.random(set_bytes / sizeof(half) * calls, dtype::float16, 1)},
      queries{on.random(std::uint64_t{query_sets} * made.rows * kv_heads * query_group * head_dim, dtype::bfloat16, 2)},
      scores{on.memory(std::uint64_t{made.rows} * made.heads * query_group * pitch * sizeof(float))},
      votes{on.memory(std::uint64_t{made.rows} * pitch * sizeof(float))},
      ids{on.memory(std::uint64_t{made.rows} * budget * sizeof(block_id))},
      previous{zeros(on, std::uint64_t{made.rows} * words)},
      counts{zeros(on, std::uint64_t{made.rows} * 8)},
      slot_of{zeros(on, std::uint64_t{made.rows} * made.blocks, 0xFF)},
      slots{zeros(on, std::uint64_t{made.rows} * lease * sizeof(slot_word) / 4)},
      listed{zeros(on, std::uint64_t{made.rows} * made.blocks, 0xFF)},
      landed{zeros(on, std::uint64_t{made.rows} * budget, 0xFF)},
      entries{zeros(on, std::uint64_t{made.rows} * budget * sizeof(recall_entry) / 4)},
      host_blocks{zeros(on, std::uint64_t{made.rows} * made.blocks)},
      step{on.upload(std::vector<std::uint32_t>{2, 3, 4, 5})}
  {
    std::mt19937 random{3};
    std::vector<std::int32_t> order(std::size_t{made.rows} * extents);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<row_info> infos(made.rows);
    std::vector<std::uint32_t> row_ids(made.rows);
    std::vector<std::uint32_t> leased(std::size_t{made.rows} * lease);
    std::iota(leased.begin(), leased.end(), 0U);
    for (std::uint32_t row = 0; row < made.rows; ++row) {
      row_ids[row] = row;
      infos[row] = {
        .tokens = static_cast<std::int32_t>(made.blocks * block_tokens),
        .new_tokens = 1,
        .token_offset = static_cast<std::int32_t>(row)};
    }
    extent_of = on.upload(order);
    info = on.upload(infos);
    rows = on.upload(row_ids);
    leases = on.upload(leased);
    offset = on.upload(std::vector<std::uint64_t>{0, block_bytes});
    std::vector<slot_word> empty(
      std::size_t{made.rows} * lease, slot_word{.block = none<block_id>, .state = slot_state::empty, .last_used = 1});
    slots = on.upload(empty);
    std::vector<std::uint32_t> const sizes(made.rows, lease);
    require(cudaMemcpy(counts.data(), sizes.data(), sizes.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  select_scene(select_scene&&) = delete;

  [[nodiscard]] select_request request(std::uint32_t call) const
  {
    std::uint64_t const query_bytes = queries.bytes() / query_sets;
    return {
      .layer = layer_id{0},
      .rows = list(),
      .info = info.as<row_info>(),
      .queries = contiguous_tensor(
        queries.data() + call % query_sets * query_bytes, dtype::bfloat16, of.rows, kv_heads * query_group, head_dim),
      .digests =
        {.base = digests.data() + call * set_bytes,
         .extent_of = extent_of.as<std::int32_t>(),
         .layer_offset = offset.as<std::uint64_t>(),
         .block_bytes = offset.as<std::uint64_t>() + 1,
         .extent_bytes = extent_blocks * block_bytes,
         .extent_blocks = extent_blocks,
         .max_extents = extents},
      .selection = selection(),
      .most_blocks = of.blocks};
  }
  [[nodiscard]] score_blocks score(std::uint32_t call) const
  {
    return {
      .request = request(call),
      .scores = table(),
      .heads = {.first = 0, .count = of.heads},
      .query_group = query_group,
      .block_tokens = block_tokens,
      .budget_blocks = budget,
      .digest_type = dtype::float16,
      .scale = 0.1F};
  }
  [[nodiscard]] share_blocks share() const
  {
    return {
      .rows = list(),
      .info = info.as<row_info>(),
      .scores = table(),
      .most_blocks = of.blocks,
      .block_tokens = block_tokens,
      .budget_blocks = budget};
  }
  [[nodiscard]] vote_blocks vote() const
  {
    return {
      .layer = layer_id{0},
      .rows = list(),
      .info = info.as<row_info>(),
      .scores = table(),
      .votes = votes.as<float>(),
      .selection = selection(),
      .most_blocks = of.blocks,
      .block_tokens = block_tokens,
      .budget_blocks = budget,
      .favour = 1.28F};
  }
  [[nodiscard]] select_top_k top_k() const
  {
    return {
      .layer = layer_id{0},
      .rows = list(),
      .info = info.as<row_info>(),
      .votes = votes.as<float>(),
      .selection = selection(),
      .vote_pitch = pitch,
      .block_tokens = block_tokens,
      .budget_blocks = budget,
      .sink_blocks = 1,
      .recent_blocks = 16};
  }
  [[nodiscard]] choose_blocks choose() const
  {
    return {
      .choose = top_k(), .scores = table(), .votes = votes.as<float>(), .most_blocks = of.blocks, .favour = 1.28F};
  }
  [[nodiscard]] resolve_blocks<lru> resolve(std::uint32_t call) const
  {
    std::uint32_t* const count = counts.as<std::uint32_t>();
    return {
      .rows = list(),
      .selection = selection(),
      .residency =
        {.slot_of = slot_of.as<slot_id>(),
         .slots = slots.as<slot_word>(),
         .lease = leases.as<slot_id>(),
         .lease_count = count,
         .layers = 1,
         .lanes = of.rows,
         .max_blocks = of.blocks,
         .max_lease = lease},
      .pool = {.layer_base = nullptr, .slot_stride = 64, .slots = of.rows * lease},
      .host_blocks = host_blocks.as<host_block_id>(),
      .plan =
        {.entries = entries.as<recall_entry>(),
         .misses = count + 2 * of.rows,
         .hits = count + 3 * of.rows,
         .flying = count + 4 * of.rows,
         .stalled = count + 5 * of.rows},
      .table =
        {.listed = listed.as<slot_id>(),
         .listed_count = count + 6 * of.rows,
         .landed = landed.as<slot_id>(),
         .landed_count = count + 7 * of.rows,
         .stride = of.blocks,
         .max_selected = budget},
      .step = step.as<std::uint32_t>() + call % 4,
      .layer = layer_id{0}};
  }
  void land(device_bench& on) const
  {
    land_all<<<16, 256, 0, on.stream.stream>>>(slots.as<slot_word>(), of.rows * lease);
    require(cudaGetLastError(), "land_all");
  }
  /// Misses that the last resolve planned.
  [[nodiscard]] std::uint32_t misses() const
  {
    std::vector<std::uint32_t> of_rows(of.rows);
    require(
      cudaMemcpy(of_rows.data(), counts.as<std::uint32_t>() + 2 * of.rows, of.rows * 4, cudaMemcpyDeviceToHost),
      "misses");
    return std::accumulate(of_rows.begin(), of_rows.end(), 0U);
  }

  shape of;
  std::uint64_t block_bytes;
  std::uint32_t extents;
  std::uint64_t bytes;  // of the digests that a call reads
  std::uint64_t set_bytes;
  std::uint32_t calls;
  std::uint32_t pitch;
  std::uint32_t words;
  device_bench::slab_type digests, queries, scores, votes, ids, previous, counts, slot_of, slots, listed, landed,
    entries, host_blocks, step, extent_of, info, rows, leases, offset;

 private:
  [[nodiscard]] static device_bench::slab_type zeros(device_bench& on, std::uint64_t count, int byte = 0)
  {
    device_bench::slab_type result = on.memory(count * 4);
    require(cudaMemset(result.data(), byte, result.bytes()), "cudaMemset");
    return result;
  }
  [[nodiscard]] row_list list() const { return {.ids = rows.as<row_id>(), .count = of.rows}; }
  [[nodiscard]] score_table table() const
  {
    return {.data = scores.as<float>(), .queries = 1, .heads = of.heads * query_group, .pitch = pitch};
  }
  [[nodiscard]] selection_ref selection() const
  {
    return {
      .ids = ids.as<block_id>(),
      .counts = counts.as<std::uint32_t>() + of.rows,
      .previous = previous.as<std::uint32_t>(),
      .max_selected = budget,
      .lanes = of.rows,
      .previous_words = words};
  }
};

/// `launch(run, scene, call)` gives the operations of a call to `run` in turn.
template <template <class> class Form, class Launch>
void select(benchmark::State& state, shape const& made, Launch const& launch)
{
  device_bench& on = shared_device();
  select_scene const scene{on, made};
  auto const run = [&](auto const& op) {
    require(on.backend.launch(on.stream, Form<std::decay_t<decltype(op)>>{op}), op.name);
  };
  auto const launch_own = [&](auto const& op) { require(on.backend.launch(on.stream, op), op.name); };
  // Scores, shares and votes for operations that are measured alone.
  launch_own(scene.score(0));
  launch_own(scene.share());
  launch_own(scene.vote());
  device_bench::graph work{on, scene.calls, [&](std::uint32_t call) { launch(run, scene, call); }};
  device_bench::copies copy{on, scene.calls, scene.bytes, scene.digests};
  on.report(state, scene.bytes, work, copy);
}

/// The operation as it is.
template <class Op>
using own = Op;

template <template <class> class Form, class Launch>
void add(std::string const& name, shape const& made, Launch launch)
{
  benchmark::RegisterBenchmark(
    (name + made.name()).c_str(), [=](benchmark::State& state) { select<Form>(state, made, launch); })
    ->UseManualTime()
    ->Iterations(1)
    ->Unit(benchmark::kMicrosecond);
}

constexpr auto whole = [](auto const& run, select_scene const& scene, std::uint32_t call) {
  run(scene.score(call));
  run(scene.share());
  run(scene.vote());
  run(scene.top_k());
};
constexpr auto in_two = [](auto const& run, select_scene const& scene, std::uint32_t call) {
  run(scene.score(call));
  run(scene.choose());
};
constexpr auto choose_alone = [](auto const& run, select_scene const& scene, std::uint32_t) { run(scene.choose()); };
constexpr auto score_alone = [](auto const& run, select_scene const& scene, std::uint32_t call) {
  run(scene.score(call));
};
constexpr auto share_alone = [](auto const& run, select_scene const& scene, std::uint32_t) { run(scene.share()); };
constexpr auto vote_alone = [](auto const& run, select_scene const& scene, std::uint32_t) { run(scene.vote()); };
constexpr auto top_k_alone = [](auto const& run, select_scene const& scene, std::uint32_t) { run(scene.top_k()); };

/// One graph of a selection and its resolve, timed by itself: the stream is idle before, or busy. Other queries, so other misses, each
/// time; what misses has landed before the next.
template <class Launch>
void select_and_resolve(benchmark::State& state, shape const& made, Launch const& select, bool behind_work)
{
  device_bench& on = shared_device();
  select_scene const scene{on, made};
  auto const launch = [&](std::uint32_t call) {
    select([&](auto const& op) { require(on.backend.launch(on.stream, op), op.name); }, scene, call);
    require(on.backend.launch(on.stream, scene.resolve(call)), "resolve");
  };
  for (std::uint32_t call = 0; call < 4; ++call) {  // leases fill
    launch(call);
    scene.land(on);
  }
  device_bench::graph first{on, 1, [&](std::uint32_t) { launch(0); }};
  scene.land(on);
  device_bench::graph second{on, 1, [&](std::uint32_t) { launch(1); }};
  for (auto _ : state) {
    std::vector<double> times;
    std::uint32_t misses = 0;
    for (std::uint32_t round = 0; round < 21; ++round) {
      scene.land(on);
      times.push_back((round % 2 == 0 ? first : second).run(behind_work));
      misses = std::max(misses, scene.misses());
    }
    std::sort(times.begin(), times.end());
    state.SetIterationTime(times[times.size() / 2] * 1e-6);
    state.counters["microseconds"] = times[times.size() / 2];
    state.counters["misses"] = misses;
  }
}

bool const registered = [] {
  for (std::uint32_t const heads : {1U, kv_heads}) {
    for (std::uint32_t const rows : {1U, 16U, 64U}) {
      for (std::uint32_t const blocks : {2048U, 8192U, 65536U}) {
        add<own>("select/score+share+vote+top_k", {rows, blocks, heads}, whole);
        if (blocks <= 8192U && heads == 1U) { add<own>("select/score+choose", {rows, blocks, heads}, in_two); }
      }
    }
  }
  for (shape const& made : {shape{}, shape{.rows = 64, .blocks = 65536}, shape{.heads = kv_heads}}) {
    add<own>("select/score_blocks", made, score_alone);
    add<own>("select/share_blocks", made, share_alone);
    add<own>("select/vote_blocks", made, vote_alone);
    add<own>("select/select_top_k", made, top_k_alone);
  }
  add<own>("select/choose_blocks", shape{}, choose_alone);
  add<own>("select/choose_blocks", shape{.rows = 1, .blocks = 4096}, choose_alone);
  add<generic>("select/generic_bodies", shape{}, whole);
  add<generic>("select/generic_bodies/score_blocks", shape{}, score_alone);
  add<generic>("select/generic_bodies/share_blocks", shape{}, share_alone);
  add<generic>("select/generic_bodies/vote_blocks", shape{}, vote_alone);
  add<generic>("select/generic_bodies/select_top_k", shape{}, top_k_alone);
  for (std::uint32_t const rows : {1U, 8U}) {
    shape const made{.rows = rows, .blocks = 4096};
    auto const add_resolved = [&](char const* name, auto const& select, bool behind_work) {
      benchmark::RegisterBenchmark(
        (std::string{"select/resolved/"} + name + made.name()).c_str(),
        [=](benchmark::State& state) { select_and_resolve(state, made, select, behind_work); })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMicrosecond);
    };
    add_resolved("graph", in_two, false);
    add_resolved("behind_work/graph", in_two, true);
    add_resolved("five_launches/graph", whole, false);
    add_resolved("five_launches/behind_work/graph", whole, true);
  }
  return true;
}();

}  // namespace
