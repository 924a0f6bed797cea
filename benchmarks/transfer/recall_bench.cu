/// How fast scattered blocks come from the host, beside one contiguous copy of as many bytes in the same run.

#include "recall_store.cuh"
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>
#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

constexpr std::uint32_t rounds = 11;
constexpr std::uint64_t mib = std::uint64_t{1} << 20U;

void report(benchmark::State& state, std::uint64_t volume, double microseconds, double contiguous)
{
  state.SetIterationTime(microseconds * 1e-6);
  state.counters["bytes_per_second"] = static_cast<double>(volume) / (microseconds * 1e-6);
  state.counters["contiguous_bytes_per_second"] = static_cast<double>(volume) / (contiguous * 1e-6);
  state.counters["link_ratio"] = contiguous / microseconds;
  state.counters["microseconds"] = microseconds;
}

/// Times `move(plan)` over plans in turn, checks each plan's slots once, and reports the median.
template <class Move>
void measure(
  benchmark::State& state, std::uint64_t fragment, std::uint64_t volume, bool ordered, memory_space where, Move move)
{
  recall_store& store = shared_store();
  std::vector<std::unique_ptr<random_plan>> plans;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    plans.push_back(std::make_unique<random_plan>(store, fragment, volume, seed, ordered, where));
  }
  for (auto const& plan : plans) {
    store.poison();
    move(plan->ref());
    require(store.backend.synchronize(store.stream), "recall");
    if (store.wrong(plan->ref().entries, plan->count, fragment) != 0) {
      state.SkipWithError("wrong bytes");
      return;
    }
  }
  for (auto _ : state) {
    std::vector<double> scattered;
    std::vector<double> contiguous;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      contiguous.push_back(store.time_contiguous(volume, round));
      scattered.push_back(store.time([&] { move(plans[round % plans.size()]->ref()); }));
    }
    report(state, volume, median(scattered), median(contiguous));
  }
}

/// The gather alone: one launch.
void gather(benchmark::State& state, std::uint32_t groups, std::uint64_t fragment, std::uint64_t volume, bool ordered)
{
  recall_store& store = shared_store();
  measure(state, fragment, volume, ordered, memory_space::device, [&](recall_plan_ref const& plan) {
    require(
      store.backend.launch(store.stream, gather_blocks{.plan = plan, .first_row = 0, .row_count = 1, .groups = groups}),
      "gather");
  });
}

/// The copy engine, driven by a plan that the host knows: `move` of the engine.
template <class Engine>
void host_planned(benchmark::State& state, Engine const& engine, std::uint64_t fragment, std::uint64_t volume)
{
  recall_store& store = shared_store();
  block_layout layout;
  layout.block_bytes = fragment;
  layout.planes[layout.plane_count++] = {.offset = 0, .bytes = fragment};
  auto bound = engine.bind(store.backend, transfer_limits{.max_rows = 1, .layout = layout});
  // The plan is there when the move begins, as it is when a sequence resumes or is written back.
  std::map<recall_entry const*, std::vector<copy_run>> lists;
  measure(state, fragment, volume, false, memory_space::pinned, [&](recall_plan_ref const& plan) {
    std::vector<copy_run>& runs = lists[plan.entries];
    for (auto i = static_cast<std::uint32_t>(runs.size()); i < plan.capacity; ++i) {
      runs.push_back(
        {.target = plan.pool.address(plan.layer, plan.entries[i].target),
         .source = plan.host.address(plan.layer, 0, plan.entries[i].source),
         .bytes = fragment});
    }
    require(
      bound.move_async(
        store.stream,
        {.runs = runs.data(),
         .count = static_cast<std::uint32_t>(runs.size()),
         .direction = copy_direction::host_to_device}),
      "move");
  });
}

// Resolve, plan, gather and landing --------------------------------------------------------------------------------------

/// Rows that each select 128 blocks of their own 8 GiB / rows, of which some are new in each step.
class decode_scene {
 public:
  static constexpr std::uint32_t rows = 8, selected = 128, lease = 288;

  decode_scene(recall_store& made, std::uint64_t block_bytes, std::uint32_t misses_per_row)
    : store{made},
      bytes{block_bytes},
      misses{misses_per_row},
      blocks{static_cast<std::uint32_t>(recall_store::store_bytes / block_bytes / rows)},
      slot_of{words(std::uint64_t{rows} * blocks)},
      slots{words(std::uint64_t{rows} * lease * 4)},
      leases{words(rows * lease)},
      counts{words(rows * 8)},
      ids{words(rows * selected)},
      host_blocks{words(std::uint64_t{rows} * blocks)},
      listed{words(std::uint64_t{rows} * blocks)},
      landed{words(rows * selected)},
      lane_entries{words(rows * selected * 4)},
      entries{words(rows * selected * 4)},
      row_begin{words(rows + 1)},
      failed{words(rows * selected)},
      step{words(1)},
      mailbox{made.backend, memory_space::pinned, rows * sizeof(row_mailbox)},
      lists{made.backend, memory_space::pinned, 2 * rows * sizeof(std::uint32_t)},
      staged{made.backend, memory_space::pinned, (rows * selected + 1) * sizeof(std::uint32_t)}
  {
    std::vector<std::uint32_t> numbers(std::uint64_t{rows} * blocks, 0xFFFFFFFFU);
    upload(slot_of, numbers);
    upload(listed, numbers);
    for (std::uint32_t i = 0; i < numbers.size(); ++i) { numbers[i] = i; }
    upload(host_blocks, numbers);
    upload(leases, numbers);
    std::vector<std::uint32_t> empty;
    for (std::uint32_t i = 0; i < rows * lease; ++i) {
      empty.insert(empty.end(), {0xFFFFFFFFU, static_cast<std::uint32_t>(slot_state::empty), 0U, 0U});
    }
    upload(slots, empty);
    std::vector<std::uint32_t> ones(rows * 8, lease);
    upload(counts, ones);
    for (std::uint32_t r = 0; r < rows; ++r) {
      lists.as<row_id>()[r] = static_cast<row_id>(r);
      lists.as<std::uint32_t>()[rows + r] = 1;
      mailbox.as<row_mailbox>()[r] = {};
      for (std::uint32_t i = 0; i < selected; ++i) { chosen.push_back(fresh(r)); }
    }
  }

  /// The next step's selection is on the device when this returns.
  void choose()
  {
    std::uint32_t* const out = staged.as<std::uint32_t>();
    for (std::uint32_t r = 0; r < rows; ++r) {
      std::uint32_t* const own = chosen.data() + r * selected;
      for (std::uint32_t i = 0; number > 0 && i < misses; ++i) { own[(number * misses + i) % selected] = fresh(r); }
      std::copy(own, own + selected, out + r * selected);
      std::sort(out + r * selected, out + (r + 1) * selected);
    }
    ++number;
    out[rows * selected] = number;
    require(cudaMemcpyAsync(ids.data(), out, rows * selected * 4, cudaMemcpyHostToDevice, store.stream.stream), "ids");
    require(
      cudaMemcpyAsync(step.data(), out + rows * selected, 4, cudaMemcpyHostToDevice, store.stream.stream), "step");
    std::vector<std::uint32_t> all(rows, selected);
    require(
      cudaMemcpyAsync(counts.data() + rows * 4, all.data(), rows * 4, cudaMemcpyDefault, store.stream.stream),
      "counts");
    require(store.backend.synchronize(store.stream), "synchronize");
  }

  /// From a selection to data that attention may read.
  template <class Engine>
  void recall(Engine& engine)
  {
    std::uint32_t* const count = counts.template as<std::uint32_t>();
    residency_ref const residency{
      .slot_of = slot_of.template as<slot_id>(),
      .slots = slots.template as<slot_word>(),
      .lease = leases.template as<slot_id>(),
      .lease_count = count,
      .layers = 1,
      .lanes = rows,
      .max_blocks = blocks,
      .max_lease = lease};
    lane_table_ref const table{
      .listed = listed.template as<slot_id>(),
      .listed_count = count + 2 * rows,
      .landed = landed.template as<slot_id>(),
      .landed_count = count + 3 * rows,
      .stride = blocks,
      .max_selected = selected};
    lane_plan_ref const lanes{
      .entries = lane_entries.template as<recall_entry>(),
      .misses = count + 4 * rows,
      .hits = count + 5 * rows,
      .flying = count + 6 * rows,
      .stalled = count + 7 * rows};
    row_list const list{.ids = lists.template as<row_id>(), .count = rows};
    require(
      store.backend.launch(
        store.stream,
        resolve_blocks<lru>{
          .rows = list,
          .selection =
            {.ids = ids.template as<block_id>(), .counts = count + rows, .max_selected = selected, .lanes = rows},
          .residency = residency,
          .pool = store.pool(bytes),
          .host_blocks = host_blocks.template as<host_block_id>(),
          .plan = lanes,
          .table = table,
          .step = step.template as<std::uint32_t>(),
          .layer = layer_id{0}}),
      "resolve");
    require(
      store.backend.launch(
        store.stream,
        plan_recall{
          .rows = list,
          .lanes = lanes,
          .entries = entries.template as<recall_entry>(),
          .row_begin = row_begin.template as<std::uint32_t>(),
          .failed = failed.template as<std::uint32_t>(),
          .mailbox = mailbox.template as<row_mailbox>(),
          .sequence = lists.template as<std::uint32_t>() + rows,
          .block_bytes = bytes,
          .max_selected = selected}),
      "plan");
    recall_plan_ref const plan{
      .entries = entries.template as<recall_entry>(),
      .row_begin = row_begin.template as<std::uint32_t>(),
      .failed = failed.template as<std::uint32_t>(),
      .rows = list,
      .host = store.host(bytes),
      .pool = store.pool(bytes),
      .layer = layer_id{0},
      .block_bytes = bytes,
      .capacity = rows * selected};
    require(
      engine.recall_async(
        store.stream, plan,
        {.mailbox = mailbox.template as<row_mailbox>(),
         .sequence = lists.template as<std::uint32_t>() + rows,
         .residency = residency}),
      "recall");
  }

  [[nodiscard]] std::uint32_t planned()
  {
    std::uint32_t end = 0;
    require(cudaMemcpy(&end, row_begin.as<std::uint32_t>() + rows, 4, cudaMemcpyDefault), "row_begin");
    return end;
  }
  [[nodiscard]] unsigned long long wrong() { return store.wrong(entries.as<recall_entry>(), planned(), bytes); }

 private:
  [[nodiscard]] slab<cuda_backend> words(std::uint64_t count)
  {
    slab<cuda_backend> memory{store.backend, memory_space::device, count * 4};
    require(cudaMemset(memory.data(), 0, memory.bytes()), "cudaMemset");
    return memory;
  }
  static void upload(slab<cuda_backend> const& to, std::vector<std::uint32_t> const& from)
  {
    require(
      cudaMemcpy(to.data(), from.data(), std::min<std::uint64_t>(to.bytes(), from.size() * 4), cudaMemcpyDefault),
      "cudaMemcpy");
  }
  /// A block of the row that was never selected before.
  [[nodiscard]] std::uint32_t fresh(std::uint32_t row)
  {
    used.resize(rows);
    return static_cast<std::uint32_t>(scatter(used[row]++, bits_of(blocks), row));
  }

  recall_store& store;
  std::uint64_t bytes;
  std::uint32_t misses;
  std::uint32_t blocks;
  std::uint32_t number = 0;
  std::vector<std::uint32_t> chosen, used;
  slab<cuda_backend> slot_of, slots, leases, counts, ids, host_blocks, listed, landed, lane_entries, entries, row_begin,
    failed, step, mailbox, lists, staged;
};

/// `volume` bytes over all rows, each step other blocks. `captured`: the step's launches are one graph.
void planned(
  benchmark::State& state, std::uint32_t groups, std::uint32_t rows_per_landing, std::uint64_t fragment,
  std::uint64_t volume, bool captured)
{
  recall_store& store = shared_store();
  auto const per_row = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, volume / fragment / decode_scene::rows));
  decode_scene scene{store, fragment, per_row};
  auto engine = gather_scatter_engine{.groups = groups, .rows_per_landing = rows_per_landing}.bind(
    store.backend, transfer_limits{.max_rows = decode_scene::rows});
  scene.choose();
  scene.recall(engine);  // brings all that is selected
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  if (captured) {
    require(store.backend.synchronize(store.stream), "synchronize");
    require(cudaStreamBeginCapture(store.stream.stream, cudaStreamCaptureModeThreadLocal), "capture");
    scene.recall(engine);
    require(cudaStreamEndCapture(store.stream.stream, &graph), "capture");
    require(cudaGraphInstantiate(&runnable, graph, 0), "cudaGraphInstantiate");
  }
  auto const run = [&] {
    if (captured) {
      require(cudaGraphLaunch(runnable, store.stream.stream), "cudaGraphLaunch");
    } else {
      scene.recall(engine);
    }
  };
  for (auto _ : state) {
    std::vector<double> scattered;
    std::vector<double> contiguous;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      contiguous.push_back(store.time_contiguous(volume, round));
      scene.choose();
      scattered.push_back(store.time(run));
      if (scene.planned() != per_row * decode_scene::rows || scene.wrong() != 0) {
        state.SkipWithError("wrong bytes or misses");
        break;
      }
    }
    report(state, volume, median(scattered), median(contiguous));
  }
  if (captured) {
    require(cudaGraphExecDestroy(runnable), "cudaGraphExecDestroy");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
}

template <class F>
void add(std::string const& name, std::uint64_t fragment, std::uint64_t volume, F f)
{
  std::string const full =
    "transfer/recall/" + name + "/fragment:" + std::to_string(fragment) + "/volume:" + std::to_string(volume);
  benchmark::RegisterBenchmark(full.c_str(), f)->UseManualTime()->Iterations(1)->Unit(benchmark::kMicrosecond);
}

bool const registered = [] {
  for (std::uint64_t const volume : {1 * mib, 8 * mib, 64 * mib, 256 * mib}) {
    for (std::uint64_t fragment = 256; fragment <= 256 * 1024; fragment *= 2) {
      for (std::uint32_t const groups : {4U, 6U, 8U}) {
        add("gather_blocks:" + std::to_string(groups), fragment, volume, [=](benchmark::State& state) {
          gather(state, groups, fragment, volume, false);
        });
      }
      if (fragment < 2048) {
        for (std::uint32_t const groups : {4U, 8U, 12U}) {
          add("gather_blocks_ordered:" + std::to_string(groups), fragment, volume, [=](benchmark::State& state) {
            gather(state, groups, fragment, volume, true);
          });
        }
      }
      if (volume / fragment <= 16384) {
        add("fragment_copy_engine", fragment, volume, [=](benchmark::State& state) {
          host_planned(state, fragment_copy_engine{}, fragment, volume);
        });
        add("batch_copy_engine", fragment, volume, [=](benchmark::State& state) {
          host_planned(state, batch_copy_engine{}, fragment, volume);
        });
        add("move_async", fragment, volume, [=](benchmark::State& state) {
          host_planned(state, gather_scatter_engine{}, fragment, volume);
        });
      }
    }
  }
  constexpr std::uint64_t block = 64 * 1024;
  for (std::uint64_t const volume : {mib / 2, 1 * mib, 8 * mib, 64 * mib}) {
    for (bool const captured : {true, false}) {
      for (std::uint32_t const rows : {0U, 1U}) {
        add(
          std::string{"gather_scatter_engine:8/planned/"} + (captured ? "graph" : "eager") +
            "/rows_per_landing:" + std::to_string(rows),
          block, volume, [=](benchmark::State& state) { planned(state, 8, rows, block, volume, captured); });
      }
    }
  }
  return true;
}();

}  // namespace
