/// How fast scattered blocks come from the host, beside one contiguous copy of as many bytes in the same run.

#include "recall_store.cuh"
#include <pulseinfer/backend/cuda/kernel/early_launch.cuh>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/operation/order_entries.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>
#include <pulseinfer/store/host_store.hpp>
#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20U;
/// Short moves are measured more often: theirs are differences of microseconds.
constexpr std::uint32_t rounds_of(std::uint64_t volume) { return volume <= mib ? 41 : 11; }

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
  benchmark::State& state, std::uint64_t fragment, std::uint64_t volume, bool ordered, memory_space where, Move move,
  std::uint32_t shared = 1)
{
  recall_store& store = shared_store();
  std::vector<std::unique_ptr<random_plan>> plans;
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    plans.push_back(std::make_unique<random_plan>(store, fragment, volume, seed, ordered, where, shared));
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
    for (std::uint32_t round = 0; round < rounds_of(volume); ++round) {
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

/// The launch alone that puts a plan in order.
void order(benchmark::State& state, std::uint64_t fragment, std::uint64_t volume)
{
  recall_store& store = shared_store();
  slab<cuda_backend> const entries{store.backend, memory_space::device, volume / fragment * sizeof(recall_entry)};
  slab<cuda_backend> const begins{store.backend, memory_space::device, 2 * sizeof(std::uint32_t)};
  random_plan const plan{store, fragment, volume, 1, false, memory_space::device};
  order_entries const op{
    .plan = plan.ref(),
    .first_row = 0,
    .row_count = 1,
    .ordered = entries.as<recall_entry>(),
    .row_begin = begins.as<std::uint32_t>()};
  for (auto _ : state) {
    std::vector<double> times;
    for (std::uint32_t round = 0; round < rounds_of(volume); ++round) {
      times.push_back(store.time([&] { require(store.backend.launch(store.stream, op), "order"); }));
    }
    state.SetIterationTime(median(times) * 1e-6);
    state.counters["microseconds"] = median(times);
  }
}

/// Two launches: the plan is put in order on the device, then gathered.
void order_and_gather(benchmark::State& state, std::uint32_t groups, std::uint64_t fragment, std::uint64_t volume)
{
  recall_store& store = shared_store();
  slab<cuda_backend> const entries{store.backend, memory_space::device, volume / fragment * sizeof(recall_entry)};
  slab<cuda_backend> const begins{store.backend, memory_space::device, 2 * sizeof(std::uint32_t)};
  measure(state, fragment, volume, false, memory_space::device, [&](recall_plan_ref const& plan) {
    recall_plan_ref list = plan;
    list.entries = entries.as<recall_entry>();
    list.row_begin = begins.as<std::uint32_t>();
    require(
      store.backend.launch(
        store.stream,
        order_entries{
          .plan = plan,
          .first_row = 0,
          .row_count = 1,
          .ordered = entries.as<recall_entry>(),
          .row_begin = begins.as<std::uint32_t>()}),
      "order");
    require(
      store.backend.launch(store.stream, gather_blocks{.plan = list, .first_row = 0, .row_count = 1, .groups = groups}),
      "gather");
  });
}

/// Blocks that `shared` rows want each, as they are or each read once.
void shared_gather(
  benchmark::State& state, std::uint32_t groups, std::uint64_t fragment, std::uint64_t volume, std::uint32_t shared,
  bool joined)
{
  recall_store& store = shared_store();
  auto const count = static_cast<std::uint32_t>(volume / fragment);
  auto const words = [&](std::uint64_t bytes) {
    return slab<cuda_backend>{store.backend, memory_space::device, bytes};
  };
  slab<cuda_backend> const entries = words(count * sizeof(recall_entry)), of = words(count * sizeof(target_span));
  slab<cuda_backend> const targets = words(count * sizeof(slot_id)), begins = words(3 * sizeof(std::uint32_t));
  slab<cuda_backend> const table = words(join_entries::table_places(count) * sizeof(join_entries::found));
  slab<cuda_backend> const stands = words(count * sizeof(join_entries::standing));
  measure(
    state, fragment, volume, false, memory_space::device,
    [&](recall_plan_ref const& plan) {
      gather_blocks op{.plan = plan, .first_row = 0, .row_count = 1, .groups = groups};
      if (joined) {
        join_entries const join{
          .plan = plan,
          .row_count = 1,
          .joined = entries.as<recall_entry>(),
          .of = of.as<target_span>(),
          .targets = targets.as<slot_id>(),
          .row_begin = begins.as<std::uint32_t>(),
          .table = table.as<join_entries::found>(),
          .stands = stands.as<join_entries::standing>()};
        require(store.backend.launch(store.stream, join), "join");
        op.plan.entries = join.joined;
        op.plan.row_begin = join.row_begin;
        op.further = {.of = join.of, .targets = join.targets};
      }
      require(store.backend.launch(store.stream, op), "gather");
    },
    shared);
}

/// Blocks from slots to the host in runs of `run` bytes, by `move_async`, beside one contiguous copy.
void write_back(benchmark::State& state, gather_scatter_engine const& engine, std::uint64_t run, std::uint64_t volume)
{
  recall_store& store = shared_store();
  slab<cuda_backend> const host{store.backend, memory_space::pinned, volume};
  auto bound = engine.bind(store.backend, transfer_limits{.max_rows = 1});
  auto const blocks = static_cast<std::uint32_t>(volume / run);
  std::uint32_t const slot_bits = bits_of(recall_store::slot_bytes / run);
  std::vector<copy_run> runs(blocks);
  for (std::uint32_t i = 0; i < blocks; ++i) {
    runs[i] = {
      .target = host.data() + i * run, .source = store.slots.data() + scatter(i, slot_bits, 3) * run, .bytes = run};
  }
  require(cudaMemset(store.slots.data(), 0, store.slots.bytes()), "cudaMemset");
  for (std::uint32_t i = 0; i < blocks; ++i) {
    require(cudaMemset(const_cast<std::byte*>(runs[i].source), static_cast<int>(i % 251 + 1), run), "cudaMemset");
  }
  require(store.backend.synchronize(), "cudaMemset");
  copy_list const list{.runs = runs.data(), .count = blocks, .direction = copy_direction::device_to_host};
  require(bound.move_async(store.stream, list), "move");
  require(store.backend.synchronize(store.stream), "move");
  for (std::uint32_t i = 0; i < blocks; ++i) {
    std::byte const* const at = host.data() + i * run;
    if (at[0] != static_cast<std::byte>(i % 251 + 1) || at[run - 1] != at[0]) { state.SkipWithError("wrong bytes"); }
  }
  for (auto _ : state) {
    std::vector<double> moved;
    std::vector<double> contiguous;
    for (std::uint32_t round = 0; round < rounds_of(volume); ++round) {
      contiguous.push_back(store.time([&] {
        require(
          cudaMemcpyAsync(host.data(), store.slots.data(), volume, cudaMemcpyDeviceToHost, store.stream.stream),
          "cudaMemcpyAsync");
      }));
      moved.push_back(store.time([&] { require(bound.move_async(store.stream, list), "move"); }));
    }
    report(state, volume, median(moved), median(contiguous));
  }
}

/// Seconds until pinned memory can be used, and until it is given back.
template <class Take, class Give>
void pinning(benchmark::State& state, std::uint64_t bytes, Take take, Give give)
{
  using clock = std::chrono::steady_clock;
  auto const seconds = [](clock::time_point from) {
    return std::chrono::duration<double>(clock::now() - from).count();
  };
  for (auto _ : state) {
    auto const begin = clock::now();
    void* const memory = take(bytes);
    state.SetIterationTime(seconds(begin));
    state.counters["seconds"] = seconds(begin);
    state.counters["bytes_per_second"] = static_cast<double>(bytes) / seconds(begin);
    auto const end = clock::now();
    give(memory, bytes);
    state.counters["seconds_to_give_back"] = seconds(end);
  }
}

/// Recalls of 1 MiB, one after the other, before and while a store of `slabs` slabs grows by 2 GiB on its thread: how long the host
/// stands in a launch, and until the data is there.
void growth(benchmark::State& state, std::uint64_t chunk, std::uint32_t slabs)
{
  using clock = std::chrono::steady_clock;
  constexpr std::uint64_t block = 65536;
  recall_store& store = shared_store();
  random_plan const plan{store, block, 1 * mib, 1, false, memory_space::device};
  struct times {
    std::vector<double> launch, whole;
    void recall(recall_store& of, recall_plan_ref const& what)
    {
      auto const us = [](clock::time_point from) {
        return std::chrono::duration<double, std::micro>(clock::now() - from).count();
      };
      auto const begin = clock::now();
      require(
        of.backend.launch(of.stream, gather_blocks{.plan = what, .first_row = 0, .row_count = 1, .groups = 8}),
        "gather");
      launch.push_back(us(begin));
      require(of.backend.synchronize(of.stream), "gather");
      whole.push_back(us(begin));
    }
    void report(benchmark::State& to, std::string const& when)
    {
      for (auto* const each : {&launch, &whole}) {
        std::sort(each->begin(), each->end());
        std::string const name = when + (each == &launch ? ":launch_us:" : ":recall_us:");
        to.counters[name + "median"] = (*each)[each->size() / 2];
        to.counters[name + "p99"] = (*each)[each->size() * 99 / 100];
        to.counters[name + "max"] = each->back();
      }
      to.counters[when + ":recalls"] = static_cast<double>(whole.size());
    }
  };
  block_layout layout;
  layout.block_bytes = block;
  layout.alignment = 16;
  std::uint32_t const more = static_cast<std::uint32_t>(2048 * mib / block / slabs);
  for (auto _ : state) {
    host_store<cuda_backend> grows{
      store.backend, slabs, 1, layout, {.blocks = 32, .most_blocks = 32 + more, .growth_chunk_bytes = chunk}};
    times alone, beside;
    for (std::uint32_t i = 0; i < 4000; ++i) { alone.recall(store, plan.ref()); }
    auto const begin = clock::now();
    require(grows.grow(more), "grow");
    while (grows.growth().under_way) {
      beside.recall(store, plan.ref());
      static_cast<void>(grows.adopt_growth());
    }
    state.SetIterationTime(std::chrono::duration<double>(clock::now() - begin).count());
    if (grows.blocks() != 32 + more) { state.SkipWithError(grows.growth_refusal().c_str()); }
    alone.report(state, "alone");
    beside.report(state, "beside");
    state.counters["longest_chunk_us"] = static_cast<double>(grows.growth().longest_chunk.count()) / 1000.0;
  }
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
  static constexpr std::uint32_t most_rows = 8, selected = 128, lease = 288;

  decode_scene(recall_store& made, std::uint32_t row_count, std::uint64_t block_bytes, std::uint32_t misses_per_row)
    : store{made},
      rows{row_count},
      bytes{block_bytes},
      misses{misses_per_row},
      blocks{static_cast<std::uint32_t>(recall_store::store_bytes / block_bytes / most_rows)},
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
    std::vector<std::uint32_t> words(2 * rows, 1U);
    std::iota(words.begin(), words.begin() + rows, 0U);
    upload(lists, words);
    require(cudaMemset(mailbox.data(), 0, mailbox.bytes()), "cudaMemset");
    for (std::uint32_t r = 0; r < rows; ++r) {
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
  void recall(Engine& engine, bool beside = false, bool in_turn = false)
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
    resolve_blocks<lru> const resolve{
      .rows = list,
      .selection =
        {.ids = ids.template as<block_id>(), .counts = count + rows, .max_selected = selected, .lanes = rows},
      .residency = residency,
      .pool = store.pool(bytes),
      .host_blocks = host_blocks.template as<host_block_id>(),
      .plan = lanes,
      .table = table,
      .step = step.template as<std::uint32_t>(),
      .layer = layer_id{0}};
    plan_recall const planning{
      .rows = list,
      .lanes = lanes,
      .entries = entries.template as<recall_entry>(),
      .row_begin = row_begin.template as<std::uint32_t>(),
      .failed = failed.template as<std::uint32_t>(),
      .mailbox = mailbox.template as<row_mailbox>(),
      .sequence = lists.template as<std::uint32_t>() + rows,
      .block_bytes = bytes,
      .max_selected = selected,
      .posts = !beside && !in_turn};
    recall_plan_ref plan{
      .entries = entries.template as<recall_entry>(),
      .row_begin = row_begin.template as<std::uint32_t>(),
      .failed = failed.template as<std::uint32_t>(),
      .rows = list,
      .host = store.host(bytes),
      .pool = store.pool(bytes),
      .layer = layer_id{0},
      .block_bytes = bytes,
      .capacity = rows * selected};
    landed_ref landing{
      .mailbox = mailbox.template as<row_mailbox>(),
      .sequence = lists.template as<std::uint32_t>() + rows,
      .residency = residency};
    require(store.backend.launch(store.stream, resolve), "resolve");
    require(store.backend.launch(store.stream, planning), "plan");
    if (in_turn) {
      plan.behind_plan = true;
      landing.counts = lanes.counts();
    }
    auto const copies = beside ? cuda_backend::stream_ref{copies_stream} : store.stream;
    if (beside) {
      require(cudaEventRecord(forked, store.stream.stream), "cudaEventRecord");
      require(cudaStreamWaitEvent(copies.stream, forked, 0), "cudaStreamWaitEvent");
      require(store.backend.launch(store.stream, planning.posting()), "post");
    }
    require(engine.recall_async(copies, plan, landing), "recall");
    if (beside) {
      require(cudaEventRecord(joined, copies.stream), "cudaEventRecord");
      require(cudaStreamWaitEvent(store.stream.stream, joined, 0), "cudaStreamWaitEvent");
    }
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
  [[nodiscard]] static cudaStream_t made_stream()
  {
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -5), "cudaStreamCreateWithPriority");
    return stream;
  }
  [[nodiscard]] static cudaEvent_t made_event()
  {
    cudaEvent_t event = nullptr;
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  /// A block of the row that was never selected before.
  [[nodiscard]] std::uint32_t fresh(std::uint32_t row)
  {
    used.resize(rows);
    return static_cast<std::uint32_t>(scatter(used[row]++, bits_of(blocks), row));
  }

  recall_store& store;
  cudaStream_t copies_stream = made_stream();
  cudaEvent_t forked = made_event(), joined = made_event();
  std::uint32_t rows;
  std::uint64_t bytes;
  std::uint32_t misses;
  std::uint32_t blocks;
  std::uint32_t number = 0;
  std::vector<std::uint32_t> chosen, used;
  slab<cuda_backend> slot_of, slots, leases, counts, ids, host_blocks, listed, landed, lane_entries, entries, row_begin,
    failed, step, mailbox, lists, staged;
};

/// How a step's recalls are enqueued.
struct planned_form {
  std::uint32_t rows = decode_scene::most_rows;
  std::uint32_t groups = 8;
  std::uint32_t rows_per_landing = 0;
  bool captured = true;        ///< the step's launches are one graph
  bool behind_work = false;    ///< the stream is busy until all is enqueued
  bool in_turn = true;         ///< of a graph: on one stream, as in a captured step that attends each layer whole
  bool beside = false;         ///< of a graph: copies on a stream of their own, as in one that attends hits first
  bool behind_kernel = false;  ///< of a graph: behind a kernel, as selection is, whose time is taken away
};

/// Stands for what a captured step has before a recall.
__global__ void kernel_before(std::uint32_t cycles)
{
  pulseinfer::detail::let_next_kernel_begin();
  pulseinfer::detail::await_kernel_before();
  long long const begin = clock64();
  while (clock64() - begin < cycles) {}
}

/// A graph of what `enqueue` does to a stream.
class bench_graph {
 public:
  template <class Enqueue>
  bench_graph(cudaStream_t stream, Enqueue enqueue)
  {
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    require(cudaStreamEndCapture(stream, &graph), "capture");
    require(cudaGraphInstantiate(&runnable_, graph, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  bench_graph(bench_graph&&) = delete;
  ~bench_graph() { static_cast<void>(cudaGraphExecDestroy(runnable_)); }

  void launch(cudaStream_t stream) const { require(cudaGraphLaunch(runnable_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t runnable_ = nullptr;
};

/// `volume` bytes over all rows, each step other blocks.
void planned(benchmark::State& state, planned_form const& form, std::uint64_t fragment, std::uint64_t volume)
{
  recall_store& store = shared_store();
  bool const captured = form.captured;
  auto const per_row = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, volume / fragment / form.rows));
  decode_scene scene{store, form.rows, fragment, per_row};
  auto engine = gather_scatter_engine{.groups = form.groups, .rows_per_landing = form.rows_per_landing}.bind(
    store.backend, transfer_limits{.max_rows = decode_scene::most_rows});
  scene.choose();
  scene.recall(engine);  // brings all that is selected
  cudaStream_t const stream = store.stream.stream;
  std::unique_ptr<bench_graph> graph, before;
  auto const enqueue_before = [&] {
    if (form.behind_kernel) { kernel_before<<<1, 32, 0, stream>>>(6000); }
  };
  if (captured) {
    require(store.backend.synchronize(store.stream), "synchronize");
    graph = std::make_unique<bench_graph>(stream, [&] {
      enqueue_before();
      scene.recall(engine, form.beside, form.in_turn);
    });
  }
  if (form.behind_kernel) { before = std::make_unique<bench_graph>(stream, enqueue_before); }
  auto const run = [&] {
    if (captured) {
      graph->launch(stream);
    } else {
      scene.recall(engine);
    }
  };
  for (auto _ : state) {
    std::vector<double> scattered;
    std::vector<double> contiguous;
    std::vector<double> kernels;
    for (std::uint32_t round = 0; round < rounds_of(volume); ++round) {
      contiguous.push_back(store.time_contiguous(volume, round, form.behind_work));
      scene.choose();
      scattered.push_back(store.time(run, form.behind_work));
      if (before) {
        kernels.push_back(store.time([&] { before->launch(stream); }, form.behind_work));
      }
      if (scene.planned() != per_row * form.rows || scene.wrong() != 0) {
        state.SkipWithError("wrong bytes or misses");
        break;
      }
    }
    report(state, volume, median(scattered) - (before ? median(kernels) : 0.0), median(contiguous));
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
  // As it is bound where nothing is said, and each of its two movers by itself.
  std::vector<std::pair<std::string, gather_scatter_engine>> const movers{
    {"move_async", {.groups = 8}},
    {"move_async:copy_engine", {.groups = 8, .copy_engine_from_bytes = 0}},
    {"move_async:move_runs", {.groups = 8, .copy_engine_from_bytes = never_by_copy_engine}}};
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
        add("order_entries", fragment, volume, [=](benchmark::State& state) { order(state, fragment, volume); });
        add("order_entries+gather_blocks:4", fragment, volume, [=](benchmark::State& state) {
          order_and_gather(state, 4, fragment, volume);
        });
      }
      if (volume / fragment <= 16384) {
        add("fragment_copy_engine", fragment, volume, [=](benchmark::State& state) {
          host_planned(state, fragment_copy_engine{}, fragment, volume);
        });
        add("batch_copy_engine", fragment, volume, [=](benchmark::State& state) {
          host_planned(state, batch_copy_engine{}, fragment, volume);
        });
        for (auto const& [name, engine] : movers) {
          add(name, fragment, volume, [=, used = engine](benchmark::State& state) {
            host_planned(state, used, fragment, volume);
          });
        }
      }
    }
  }
  for (std::uint64_t const volume : {1 * mib, 8 * mib, 64 * mib}) {
    for (std::uint64_t const run : {std::uint64_t{8192}, std::uint64_t{65536}, std::uint64_t{262144}, 1 * mib}) {
      for (auto const& [mover, engine] : movers) {
        std::string const name =
          "transfer/write_back/" + mover + "/run:" + std::to_string(run) + "/volume:" + std::to_string(volume);
        benchmark::RegisterBenchmark(
          name.c_str(), [=, used = engine](benchmark::State& state) { write_back(state, used, run, volume); })
          ->UseManualTime()
          ->Iterations(1)
          ->Unit(benchmark::kMicrosecond);
      }
    }
    for (std::uint64_t const fragment : {std::uint64_t{1024}, std::uint64_t{8192}, std::uint64_t{65536}}) {
      auto const add_shared = [&](std::string const& name, std::uint32_t shared, bool joined) {
        add("shared:" + std::to_string(shared) + "/" + name, fragment, volume, [=](benchmark::State& state) {
          shared_gather(state, 8, fragment, volume, shared, joined);
        });
      };
      for (std::uint32_t const shared : {1U, 8U}) {
        add_shared("gather_blocks:8", shared, false);
        add_shared("join_entries+gather_blocks:8", shared, true);
      }
    }
  }
  benchmark::RegisterBenchmark(
    "transfer/measure_moves/groups:8",
    [](benchmark::State& state) {
      for (auto _ : state) {
        auto const begin = std::chrono::steady_clock::now();
        std::vector<move_rate> const rates = measure_moves(shared_store().backend, 8, 64);
        state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        for (move_rate const& rate : rates) {
          bool const up = rate.direction == copy_direction::host_to_device;
          std::string const what = (up ? "to_device:" : "to_host:") + std::to_string(rate.run_bytes);
          state.counters["copy_engine:" + what] = rate.copy_engine;
          state.counters["move_runs:" + what] = rate.gather;
        }
        auto const from = [&](copy_direction direction) {
          return static_cast<double>(choose_copy_engine_from(rates, direction, 0));
        };
        state.counters["from:to_device"] = from(copy_direction::host_to_device);
        state.counters["from:to_host"] = from(copy_direction::device_to_host);
      }
    })
    ->UseManualTime()
    ->Iterations(3)
    ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark(
    "transfer/measure_gather/fragment:65536",
    [](benchmark::State& state) {
      for (auto _ : state) {
        auto const begin = std::chrono::steady_clock::now();
        std::vector<gather_rate> const rates = measure_gather(shared_store().backend, 65536);
        state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        for (gather_rate const& rate : rates) {
          state.counters["bytes_per_second:" + std::to_string(rate.groups)] = rate.bytes_per_second;
        }
        state.counters["chosen"] = choose_gather_groups(rates, 0);
      }
    })
    ->UseManualTime()
    ->Iterations(3)
    ->Unit(benchmark::kMillisecond);
  auto const add_pinning = [](char const* how, std::uint64_t bytes, auto take, auto give) {
    std::string const name = std::string{"transfer/pinning/"} + how + "/bytes:" + std::to_string(bytes);
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { pinning(state, bytes, take, give); })
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
  };
  constexpr std::uint64_t pinned = 4096 * mib;
  add_pinning(
    "allocate", pinned,
    [](std::uint64_t bytes) { return shared_store().backend.allocate(memory_space::pinned, bytes); },
    [](void* memory, std::uint64_t bytes) { shared_store().backend.deallocate(memory_space::pinned, memory, bytes); });
  add_pinning(
    "cudaHostAlloc", pinned,
    [](std::uint64_t bytes) {
      void* memory = nullptr;
      require(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped), "cudaHostAlloc");
      return memory;
    },
    [](void* memory, std::uint64_t) { require(cudaFreeHost(memory), "cudaFreeHost"); });
  for (std::uint64_t const chunk : {2 * mib, 8 * mib, 64 * mib}) {
    for (std::uint32_t const slabs : {1U, 32U}) {
      std::string const name =
        "transfer/pinning/growth/chunk:" + std::to_string(chunk) + "/slabs:" + std::to_string(slabs);
      benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { growth(state, chunk, slabs); })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(benchmark::kMillisecond);
    }
  }
  constexpr std::uint64_t block = 64 * 1024;
  auto const add_planned = [](char const* name, planned_form const& form, std::uint64_t volume) {
    add(
      "gather_scatter_engine:" + std::to_string(form.groups) + "/planned/" + name +
        "/rows:" + std::to_string(form.rows),
      block, volume, [=](benchmark::State& state) { planned(state, form, block, volume); });
  };
  for (std::uint64_t const volume : {mib / 2, 1 * mib, 8 * mib, 64 * mib}) {
    add_planned("graph", {}, volume);
    add_planned("behind_work", {.behind_work = true}, volume);
    add_planned("behind_kernel", {.behind_work = true, .behind_kernel = true}, volume);
    add_planned("beside/graph", {.in_turn = false, .beside = true}, volume);
    add_planned("beside/behind_work", {.behind_work = true, .in_turn = false, .beside = true}, volume);
    add_planned("eager", {.captured = false}, volume);
    add_planned("row_by_row/graph", {.rows_per_landing = 1}, volume);
  }
  for (std::uint32_t const groups : {4U, 6U, 8U}) { add_planned("graph", {.rows = 1, .groups = groups}, block); }
  add_planned("behind_work", {.rows = 1, .behind_work = true}, block);
  add_planned("behind_kernel", {.rows = 1, .behind_work = true, .behind_kernel = true}, block);
  add_planned("beside/behind_work", {.rows = 1, .behind_work = true, .in_turn = false, .beside = true}, block);
  add_planned(
    "beside/behind_kernel", {.rows = 1, .behind_work = true, .in_turn = false, .beside = true, .behind_kernel = true},
    block);
  add_planned("eager", {.rows = 1, .captured = false}, block);
  return true;
}();

}  // namespace
