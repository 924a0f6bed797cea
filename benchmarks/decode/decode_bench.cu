/// Decoding with a cache that lies in device memory, and with one that lies in host memory: whole steps at the size of a model
/// of 8 billion parameters, through a manager.

#include "../../examples/decode_text/cuda_operations.cuh"
#include "model.cuh"
#include "stage_clock.cuh"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/calibrated_heads.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/head_choice.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/visit.hpp>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

constexpr double gib = 0x1p30;

struct batch_shape {
  std::uint32_t rows;
  std::uint32_t tokens;         ///< of each at its end
  std::uint32_t prompt_tokens;  ///< of each at the beginning
  std::uint32_t budget_tokens = 2048;
  std::uint32_t slots_tokens = 3072;

  [[nodiscard]] std::string name() const
  {
    return "/rows:" + std::to_string(rows) + "/tokens:" + std::to_string(tokens);
  }
};

model_weights const& shared_weights()
{
  static model_weights const* const made = new model_weights{eight_billion};
  return *made;
}

double microseconds_since(std::chrono::steady_clock::time_point begin)
{
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

/// A captured stream's work.
class graph {
 public:
  template <class Work>
  graph(cudaStream_t stream, Work work) : stream_{stream}
  {
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    work();
    cudaGraph_t recorded = nullptr;
    require(cudaStreamEndCapture(stream, &recorded), "capture");
    require(cudaGraphInstantiate(&runnable_, recorded, 0), "cudaGraphInstantiate");
    require(cudaGraphDestroy(recorded), "cudaGraphDestroy");
    require(cudaGraphUpload(runnable_, stream), "cudaGraphUpload");
  }
  graph(graph&&) = delete;
  ~graph()
  {
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaGraphExecDestroy(runnable_));
  }
  status launch()
  {
    return cudaGraphLaunch(runnable_, stream_) == cudaSuccess ? status::ok : status::capture_unsupported;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t runnable_ = nullptr;
};

void report_times(benchmark::State& state, std::vector<double> times, std::uint32_t rows)
{
  double const mean = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
  std::sort(times.begin(), times.end());
  state.SetIterationTime(mean * 1e-6);
  state.counters["step_microseconds"] = mean;  // the time of an output token of each row
  state.counters["step_p50_microseconds"] = times[times.size() / 2];
  state.counters["step_p99_microseconds"] = times[times.size() * 99 / 100];
  state.counters["tokens_per_second"] = 1e6 * rows / mean;
  state.counters["steps"] = static_cast<double>(times.size());
}

__global__ void count_blocks(
  row_info const* info, std::uint32_t* counts, std::uint32_t rows, std::uint32_t block_tokens)
{
  for (std::uint32_t row = threadIdx.x; row < rows; row += blockDim.x) { counts[row] = info[row].blocks(block_tokens); }
}

// -- the baseline: all blocks in device memory, all of them attended, a step as one graph

class dense_decode {
 public:
  explicit dense_decode(batch_shape const& of)
    : of_{of},
      weights_{shared_weights()},
      geometry_{weights_.shape.cache()},
      layout_{make_block_layout(geometry_)},
      row_blocks_{divide_up(of.tokens, layout_.block_tokens)},
      model_{backend_, stream_, weights_, of.rows, 0},
      cache_{backend_, memory_space::device, geometry_.layers * layer_bytes()},
      lists_{backend_, memory_space::device, list_bytes()},
      staged_{backend_, memory_space::pinned, of.rows * sizeof(row_info)},
      lengths_(of.rows, of.prompt_tokens)
  {
    // Random elements between -1 and 1: what they are does not matter for the time.
    kernels::fill_weights<<<4096, kernels::threads, 0, stream_.stream>>>(
      cache_.as<kernels::bfloat>(), cache_.bytes() / sizeof(kernels::bfloat), 1.0F, 3);
    require(cudaGetLastError(), "fill_weights");
    std::byte* next = lists_.data();
    auto const upload = [&]<class T>(T*& to, std::vector<T> const& from) {
      to = reinterpret_cast<T*>(next);
      next += round_up(from.size() * sizeof(T), std::uint64_t{16});
      require(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    };
    std::vector<std::byte*> bases;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      bases.push_back(cache_.data() + layer * layer_bytes());
    }
    std::vector<row_id> ids;
    for (std::uint32_t row = 0; row < of.rows; ++row) { ids.push_back(static_cast<row_id>(row)); }
    std::vector<slot_id> slots;
    for (std::uint64_t block = 0; block < std::uint64_t{of.rows} * row_blocks_; ++block) {
      slots.push_back(static_cast<slot_id>(block));
    }
    upload(bases_, bases);
    upload(ids_, ids);
    upload(slots_, slots);
    upload(info_, std::vector<row_info>(of.rows));
    upload(counts_, std::vector<std::uint32_t>(of.rows));
    step();  // what cuBLAS and CUDA do at their first calls
    graph_.emplace(stream_.stream, [&] { enqueue(); });
  }
  dense_decode(dense_decode&&) = delete;
  ~dense_decode() { static_cast<void>(backend_.synchronize(stream_)); }

  void run(benchmark::State& state, std::uint32_t steps)
  {
    for (std::uint32_t i = 0; i < 8; ++i) { step(); }
    std::vector<double> times;
    for (std::uint32_t i = 0; i < steps; ++i) {
      auto const begin = std::chrono::steady_clock::now();
      step();
      times.push_back(microseconds_since(begin));
    }
    report_times(state, times, of_.rows);
    state.counters["cache_gibibytes_device"] = static_cast<double>(cache_.bytes()) / gib;
  }

 private:
  [[nodiscard]] std::uint64_t layer_bytes() const
  {
    return std::uint64_t{of_.rows} * row_blocks_ * layout_.block_bytes;
  }
  [[nodiscard]] std::uint64_t list_bytes() const
  {
    return geometry_.layers * sizeof(std::byte*) + of_.rows * (sizeof(row_info) + 2 * sizeof(row_id)) +
      std::uint64_t{of_.rows} * row_blocks_ * sizeof(slot_id) + 5 * 16;
  }

  void step()
  {
    for (std::uint32_t row = 0; row < of_.rows; ++row) {
      staged_.as<row_info>()[row] = {
        .tokens = static_cast<std::int32_t>(++lengths_[row]),
        .new_tokens = 1,
        .token_offset = static_cast<std::int32_t>(row),
        .mode = row_mode::dense_resident};
    }
    if (graph_) {
      require(graph_->launch(), "a dense step");
    } else {
      enqueue();
    }
    require(backend_.synchronize(stream_), "a dense step");
  }

  void enqueue()
  {
    row_list const rows{.ids = ids_, .count = of_.rows};
    require(
      cudaMemcpyAsync(info_, staged_.data(), of_.rows * sizeof(row_info), cudaMemcpyHostToDevice, stream_.stream),
      "info");
    count_blocks<<<1, 256, 0, stream_.stream>>>(info_, counts_, of_.rows, layout_.block_tokens);
    model_.embed(rows, info_);
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      slot_pool_ref const pool{
        .layer_base = bases_ + layer,
        .slot_stride = layout_.block_bytes,
        .slots = static_cast<std::uint32_t>(of_.rows * row_blocks_)};
      model_.project(layer, rows, info_);
      model_.launch(append_tokens{
        .layer = layer_id{0},  // of the pool, which is that of one layer
        .rows = rows,
        .info = info_,
        .keys = model_.keys(),
        .values = model_.values(),
        .residency = {.slot_of = slots_, .layers = 1, .lanes = of_.rows, .max_blocks = row_blocks_},
        .pool = pool,
        .layout = layout_,
        .most_tokens = 1});
      model_.attend(
        rows,
        {.slots = slots_,
         .counts = counts_,
         .info = info_,
         .pool = pool,
         .layout = layout_,
         .layer = layer_id{0},
         .stride = row_blocks_},
        part::whole);
      model_.feed_forward(layer, rows);
    }
    model_.sample(rows);
  }

  batch_shape of_;
  model_weights const& weights_;
  kv_geometry geometry_;
  block_layout layout_;
  std::uint32_t row_blocks_;
  cuda_backend backend_;
  cuda_backend::stream_ref stream_ = backend_.create_stream();
  model model_;
  slab<cuda_backend> cache_;   // [layer][row][block]
  slab<cuda_backend> lists_;   // what follows
  slab<cuda_backend> staged_;  // [rows] info, from the host
  std::byte** bases_ = nullptr;
  row_id* ids_ = nullptr;
  slot_id* slots_ = nullptr;
  row_info* info_ = nullptr;
  std::uint32_t* counts_ = nullptr;
  std::vector<std::uint32_t> lengths_;
  std::optional<graph> graph_;
};

// -- through a manager

/// A scheduler that can be another one in the next step.
struct changing_scheduler {
  static constexpr bool hits_first = true;
  static constexpr bool reads_mailbox = true;

  struct choice {
    bool in_lockstep = true;
    lockstep_scheduler<visit_order::hits_first> lockstep = {};
    interruptible_scheduler<visit_order::hits_first> interruptible = {};
  };
  choice* chosen = nullptr;

  decision decide(
    std::span<scheduler_row const> rows, link_state const& link, nanoseconds now, std::span<row_id> ids) noexcept
  {
    return chosen->in_lockstep ? chosen->lockstep.decide(rows, link, now, ids)
                               : chosen->interruptible.decide(rows, link, now, ids);
  }
};

/// What a gather brings beside a decode's products, of one contiguous copy's rate.
constexpr double gather_beside_products = 0.87;  // results/h200/interference.json

/// Bytes that a recall brings in a second.
double recall_rate()
{
  static double const rate = [] {
    constexpr std::uint64_t bytes = std::uint64_t{32} << 20U;
    cuda_backend backend;
    cuda_backend::stream_ref const stream = backend.create_stream();
    slab<cuda_backend> const from{backend, memory_space::pinned, bytes};
    slab<cuda_backend> const to{backend, memory_space::device, bytes};
    copy_run const run{.target = to.data(), .source = from.data(), .bytes = bytes};
    auto const copy = [&] {
      auto const begin = std::chrono::steady_clock::now();
      require(backend.copy(stream, {.runs = &run, .count = 1, .direction = copy_direction::host_to_device}), "copy");
      require(backend.synchronize(stream), "copy");
      return microseconds_since(begin);
    };
    static_cast<void>(copy());
    return gather_beside_products * static_cast<double>(bytes) / (1e-6 * std::min(copy(), copy()));
  }();
  return rate;
}

/// How a manager is set up.
struct cache_options {
  bool resident = false;          ///< rows begin with every block in a slot, until `demote`
  bool dense = false;             ///< rows select nothing: a manager beside the baseline
  std::uint32_t head_groups = 1;  ///< selections for each layer
};

/// One head chooses in 14 of 32 layers, two in 13 and all in 5: about as a calibration has it of a language model
/// (examples/calibrate/smollm2-135m.txt).
calibration made_up_calibration(kv_geometry const& geometry)
{
  calibration made{
    .query_heads = geometry.query_heads,
    .kv_heads = geometry.kv_heads,
    .head_dim = geometry.head_dim,
    .block_tokens = geometry.block_tokens,
    .budget_tokens = 2048,
    .digest = cuboid_mean::form::name};
  for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
    std::uint32_t const heads = layer % 6 == 5 ? geometry.kv_heads : layer % 9 < 4 ? 1U : 2U;
    calibrated_layer of{.heads = all_heads(geometry, share_combination::sum), .coverage = 1.0, .vote_coverage = 1.0};
    of.heads.kv_heads.resize(heads);
    made.layers.push_back(of);
  }
  return made;
}

using by_calibration = solo_head_selector<cuboid_mean, calibrated_heads>;
using by_all_heads = solo_head_selector<>;

template <class Scheduler, class Selector = by_calibration, class TransferEngine = gather_scatter_engine>
class managed_decode {
 public:
  using manager_type = offload_manager<marking_backend, Selector, TransferEngine, Scheduler, fixed_admission>;
  static constexpr bool captures = !Scheduler::reads_mailbox && TransferEngine::plans_on == plan_place::device;
  static constexpr std::uint32_t chunk = 2048;  ///< tokens of a prompt that come in together

  managed_decode(
    batch_shape const& of, cache_options const& options, Scheduler const& scheduler = {},
    TransferEngine const& transfer = {})
    : of_{of},
      weights_{shared_weights()},
      kv_{backend_,
          stream_,
          weights_.shape.cache(options.head_groups),
          options_of(of, options),
          make_selector(of, options),
          transfer,
          scheduler},
      model_{backend_, stream_, weights_, of.rows, chunk},
      clock_{stream_.stream}
  {
    backend_.marked = stream_.stream;
    for (std::uint32_t i = 0; i < of.rows; ++i) {
      take_prompt(options.resident);
      steps_.push_back({.row = rows_.back(), .token_offset = static_cast<std::uint32_t>(rows_.back())});
      commits_.push_back({.row = rows_.back()});
      // Its first step: the row leaves what it does not need in its slots, and the next prompt finds room.
      step(i, 1);
    }
  }
  managed_decode(managed_decode&&) = delete;
  ~managed_decode() { static_cast<void>(backend_.synchronize()); }

  void demote()
  {
    for (row_id const row : rows_) { require(kv_.demote(row), "demote"); }
  }

  /// Decodes `warm` steps that do not count and `steps` that do, the first `rows` of all.
  void run(benchmark::State& state, float correlation, std::uint32_t warm, std::uint32_t steps)
  {
    model_.keep_queries(correlation);
    for (std::uint32_t i = 0; i < warm; ++i) { step(0, of_.rows); }
    clock_.clear(false);
    std::vector<double> times;
    step_sample sums;
    for (std::uint32_t i = 0; i < steps; ++i) {
      auto const begin = std::chrono::steady_clock::now();
      step(0, of_.rows);
      times.push_back(microseconds_since(begin));
      step_sample const& one = kv_.finish_sample();
      sums.visits += one.visits;
      sums.waits += one.waits;
      sums.selected_blocks += one.selected_blocks;
      sums.recalled_blocks += one.recalled_blocks;
      sums.recalled_bytes += one.recalled_bytes;
      sums.stalled += one.stalled;
    }
    report_times(state, times, of_.rows);
    auto const add = [&](char const* name, double value) { state.counters[name] = value / steps; };
    add("visits", sums.visits);
    add("sleeps", sums.waits);
    add("slept_microseconds", static_cast<double>(sums.stalled.count()) / 1e3);
    add("recalled_bytes", static_cast<double>(sums.recalled_bytes));
    state.counters["recalled_share"] =
      static_cast<double>(sums.recalled_blocks) / static_cast<double>(std::max<std::uint64_t>(sums.selected_blocks, 1));
    auto const host = clock_.host();
    char const* const host_names[] = {
      "host_begin_step_microseconds", "host_enter_microseconds", "host_next_microseconds", "host_model_microseconds",
      "host_commit_microseconds"};
    for (std::size_t i = 0; i < host.size(); ++i) { add(host_names[i], host[i]); }
    memory_use const used = kv_.memory();
    state.counters["cache_gibibytes_device"] =
      static_cast<double>(used.slot_bytes + used.digest_bytes + used.book_bytes) / gib;
    state.counters["cache_gibibytes_host"] = static_cast<double>(used.host_bytes) / gib;
    if constexpr (!captures) {
      for (auto const& [stage, microseconds] : profile(of_.rows, 4, true)) {
        state.counters["device_" + stage + "_microseconds"] = microseconds;
      }
    }
  }

  /// What an interruptible scheduler asks to be told, from steps in lockstep of all rows and of a third of them.
  [[nodiscard]] decode_profile measure_profile()
  {
    std::uint32_t const many = of_.rows;
    std::uint32_t const few = std::max(of_.rows / 3, 1U);
    auto const of_many = profile(many, 4);
    auto const of_few = profile(few, 4);
    auto const of = [&](stage_clock::device_sums const& sums, bool attends_hits) {
      double sum = 0.0;
      for (auto const& [stage, microseconds] : sums) {
        if (stage != "wait" && stage != "begin" && (stage == "hits") == attends_hits) { sum += microseconds; }
      }
      return sum / weights_.shape.layers;
    };
    auto const rest = [&](auto const& sums) { return of(sums, false); };
    auto const hits = [&](auto const& sums) { return of(sums, true); };
    auto const time = [](double us) { return nanoseconds{static_cast<std::int64_t>(1e3 * std::max(us, 0.0))}; };
    double const apart = std::max(many - few, 1U);
    double const per_row = std::max(rest(of_many) - rest(of_few), 0.0) / apart;
    double const per_row_hits = std::max(hits(of_many) - hits(of_few), 0.0) / apart;
    return {
      .per_pass = time(rest(of_many) - many * per_row),
      .per_row = time(per_row),
      .per_row_hits = time(per_row_hits),
      .per_hits = time(hits(of_many) - many * per_row_hits),
      .per_recall = std::chrono::microseconds{6},
      .link_bytes_per_second = recall_rate(),
      .resume = std::chrono::microseconds{2},
      .wake = std::chrono::microseconds{8},
      .selected_bytes = std::uint64_t{of_.budget_tokens / kv_.layout().block_tokens} * kv_.layout().block_bytes,
      .smallest_first = false};
  }

 private:
  [[nodiscard]] static manager_options options_of(batch_shape const& of, cache_options const& options)
  {
    std::uint64_t const blocks = divide_up(of.tokens, 16U);
    return {
      .max_rows = of.rows,
      .max_tokens = of.tokens,
      .max_prefill_tokens = chunk,
      .quota_tokens = of.slots_tokens,
      .slots = options.resident || options.dense ? std::uint64_t{of.rows} * blocks * shared_weights().shape.layers : 0,
      .captured_steps = captures ? 1U : 0U};
  }

  [[nodiscard]] static Selector make_selector(batch_shape const& of, cache_options const& options)
  {
    Selector made{
      .budget_tokens = of.budget_tokens, .dense_tokens = options.dense ? std::optional{of.tokens} : std::nullopt};
    if constexpr (std::is_same_v<Selector, by_calibration>) {
      made.heads.measured = made_up_calibration(shared_weights().shape.cache());
    }
    return made;
  }

  void take_prompt(bool resident)
  {
    row_id row = none<row_id>;
    sequence_options const request{
      .prompt_tokens = of_.prompt_tokens, .max_tokens = of_.tokens, .keep_resident = resident};
    if (kv_.open(request, row) != admission::admitted) {
      std::fprintf(stderr, "a request %s\n", kv_.explain_refusal(request).c_str());
      std::exit(1);
    }
    for (std::uint32_t first = 0; first < of_.prompt_tokens; first += chunk) {
      std::uint32_t const tokens = std::min(chunk, of_.prompt_tokens - first);
      require(kv_.begin_step(std::vector{step_row{.row = row, .tokens = tokens}}), "begin_step");
      auto const enter = [&](layer_id layer, row_list rows) {
        model_.make_prompt(static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(layer), first, tokens);
        require(kv_.enter(layer, rows, model_.keys(), model_.values(), model_.queries()), "enter");
      };
      enter(kv_.first_layer(), kv_.rows());
      for (visit const& v : kv_.step()) {
        if (v.part != part::hits && !v.last) { enter(v.next, v.rows); }
      }
      require(kv_.commit(std::vector{commit_row{.row = row, .accepted = tokens}}), "commit");
    }
    rows_.push_back(row);
  }

  template <class Steps>
  void body(Steps& steps)
  {
    row_info const* const info = kv_.books().info();
    auto const enter = [&](layer_id layer, row_list rows) {
      clock_.on_host(host_stage::model, [&] { model_.project(static_cast<std::uint32_t>(layer), rows, info); });
      clock_.mark("model");
      backend_.clock = by_operation_ ? &clock_ : nullptr;
      clock_.on_host(host_stage::enter, [&] {
        require(steps.enter(layer, rows, model_.keys(), model_.values(), model_.queries()), "enter");
      });
      backend_.clock = nullptr;
      clock_.mark("enter");
    };
    clock_.on_host(host_stage::model, [&] { model_.embed(steps.rows(), info); });
    enter(steps.first_layer(), steps.rows());
    auto const visits = steps.step();
    auto at = clock_.on_host(host_stage::next, [&] { return visits.begin(); });
    while (at != visits.end()) {
      visit const v = *at;
      clock_.mark("wait");
      clock_.on_host(host_stage::model, [&] { model_.attend(v.rows, v.table, v.part); });
      clock_.mark(v.part == part::hits ? "hits" : "rest");
      if (v.part != part::hits) {
        clock_.on_host(host_stage::model, [&] {
          model_.feed_forward(static_cast<std::uint32_t>(v.layer), v.rows);
          if (v.last) { model_.sample(v.rows); }
        });
        clock_.mark("model");
        if (!v.last) { enter(v.next, v.rows); }
      }
      clock_.on_host(host_stage::next, [&] { ++at; });
    }
  }

  /// A step of some rows.
  void step(std::uint32_t first, std::uint32_t count)
  {
    auto const steps = std::span{steps_}.subspan(first, count);
    clock_.on_host(host_stage::begin, [&] { require(kv_.begin_step(steps), "begin_step"); });
    clock_.mark("begin");
    if constexpr (captures) {
      if (count < of_.rows) {
        body(kv_);
      } else if (!graph_) {
        captured_.emplace(kv_.capture_step({.rows = of_.rows}));
        body(kv_);  // what cuBLAS and CUDA do at their first calls
        require(backend_.synchronize(stream_), "a step");
        graph_.emplace(stream_.stream, [&] { body(*captured_); });
      } else {
        clock_.on_host(
          host_stage::model, [&] { require(captured_->replay([&] { return graph_->launch(); }), "replay"); });
      }
    } else {
      body(kv_);
    }
    require(backend_.synchronize(stream_), "a step");
    clock_.end_step();
    for (step_row const& row : steps) { require(kv_.row_status(row.row), "a row"); }
    clock_.on_host(
      host_stage::commit, [&] { require(kv_.commit(std::span{commits_}.subspan(first, count)), "commit"); });
  }

  /// Microseconds of a step that the compute stream spends, by stage, with each of the manager's operations a stage or not.
  [[nodiscard]] stage_clock::device_sums profile(std::uint32_t rows, std::uint32_t steps, bool by_operation = false)
  {
    clock_.clear(true);
    by_operation_ = by_operation;
    for (std::uint32_t i = 0; i < steps; ++i) { step(0, rows); }
    stage_clock::device_sums sums = clock_.device();
    for (auto& [stage, microseconds] : sums) { microseconds /= steps; }
    clock_.clear(false);
    return sums;
  }

  batch_shape of_;
  model_weights const& weights_;
  marking_backend backend_;
  marking_backend::stream_ref stream_ = backend_.create_stream();
  manager_type kv_;
  model model_;
  stage_clock clock_;
  bool by_operation_ = false;
  std::vector<row_id> rows_;
  std::vector<step_row> steps_;
  std::vector<commit_row> commits_;
  std::optional<captured_step<manager_type>> captured_;
  std::optional<graph> graph_;
};

// -- what is registered

using changing_decode = managed_decode<changing_scheduler>;
using captured_decode = managed_decode<lockstep_scheduler<visit_order::hits_first>>;
using fragment_decode = managed_decode<lockstep_scheduler<visit_order::whole>, by_all_heads, fragment_copy_engine>;

changing_scheduler::choice& chosen_scheduler()
{
  static changing_scheduler::choice made;
  return made;
}

/// The caches that benchmarks share, one kind at a time: each fills the machine.
struct caches {
  std::unique_ptr<dense_decode> dense;
  std::unique_ptr<changing_decode> changing;
  std::unique_ptr<captured_decode> captured;
  std::unique_ptr<fragment_decode> fragments;
  bool resident = false;

  void clear()
  {
    dense.reset();
    changing.reset();
    captured.reset();
    fragments.reset();
  }
};

caches& shared_caches()
{
  static auto* const made = new caches;  // lives until the process ends, as the runtime does
  return *made;
}

/// Rows whose blocks are resident, or on the host.
changing_decode& changing(batch_shape const& of, bool resident)
{
  caches& all = shared_caches();
  if (!all.changing || (resident && !all.resident)) {
    all.clear();
    chosen_scheduler() = {};
    all.changing = std::make_unique<changing_decode>(
      of, cache_options{.resident = true}, changing_scheduler{&chosen_scheduler()},
      gather_scatter_engine{.rows_per_landing = 8});
    all.resident = true;
  }
  if (!resident && all.resident) {
    all.changing->demote();
    all.resident = false;
  }
  return *all.changing;
}

template <class Run>
void add(std::string const& name, batch_shape const& of, Run run)
{
  benchmark::RegisterBenchmark(
    ("decode/llama_8b/" + name + of.name()).c_str(),
    [=](benchmark::State& state) {
      for (auto _ : state) { run(state); }
    })
    ->UseManualTime()
    ->Iterations(1)
    ->Unit(benchmark::kMicrosecond);
}

constexpr std::uint32_t warm_steps = 12;
constexpr std::uint32_t timed_steps = 32;

bool const registered = [] {
  batch_shape const few{.rows = 4, .tokens = 32768, .prompt_tokens = 32000};
  batch_shape const many{.rows = 24, .tokens = 32768, .prompt_tokens = 32000};
  for (batch_shape const& of : {few, many}) {
    add("dense_resident/graph", of, [=](benchmark::State& state) {
      caches& all = shared_caches();
      all.clear();
      all.dense = std::make_unique<dense_decode>(of);
      all.dense->run(state, timed_steps);
    });
  }
  add("dense_managed/lockstep", few, [=](benchmark::State& state) {
    caches& all = shared_caches();
    all.clear();
    chosen_scheduler() = {};
    all.changing =
      std::make_unique<changing_decode>(few, cache_options{.dense = true}, changing_scheduler{&chosen_scheduler()});
    all.changing->run(state, 0.95F, warm_steps, timed_steps);
    all.clear();
  });
  // Of a row's queries from one step to the next. What a language model selects is missed as often as with 0.95: 5.8 % with
  // half as many slots again as the budget has blocks (results/accuracy/trace.json).
  auto const named = [](float correlation) { return "/correlation:" + std::to_string(correlation).substr(0, 4); };
  auto const lockstep = [](benchmark::State& state, changing_decode& decode, float correlation) {
    chosen_scheduler().in_lockstep = true;
    decode.run(state, correlation, warm_steps, timed_steps);
  };
  add("sparse_resident/lockstep" + named(0.95F), many, [=](benchmark::State& state) {
    lockstep(state, changing(many, true), 0.95F);
  });
  for (float const correlation : {0.99F, 0.95F, 0.9F}) {
    std::string const name = named(correlation);
    add("offloaded/lockstep" + name, many, [=](benchmark::State& state) {
      lockstep(state, changing(many, false), correlation);
    });
    add("offloaded/interruptible" + name, many, [=](benchmark::State& state) {
      changing_decode& decode = changing(many, false);
      changing_scheduler::choice& chosen = chosen_scheduler();
      chosen.in_lockstep = true;
      decode_profile profile = decode.measure_profile();
      profile.rows_per_landing = 8;
      profile.per_landing = std::chrono::microseconds{4};
      chosen.interruptible = {};
      chosen.interruptible.layers = eight_billion.layers;
      chosen.interruptible.profile = profile;
      chosen.in_lockstep = false;
      decode.run(state, correlation, warm_steps, timed_steps);
      state.counters["profile_per_pass_microseconds"] = static_cast<double>(profile.per_pass.count()) / 1e3;
      state.counters["profile_per_row_microseconds"] = static_cast<double>(profile.per_row.count()) / 1e3;
      state.counters["profile_per_row_hits_microseconds"] = static_cast<double>(profile.per_row_hits.count()) / 1e3;
      state.counters["profile_link_bytes_per_second"] = profile.link_bytes_per_second;
    });
  }
  add("offloaded/interruptible_without_profile" + named(0.95F), many, [=](benchmark::State& state) {
    changing_decode& decode = changing(many, false);
    chosen_scheduler().interruptible = {};
    chosen_scheduler().in_lockstep = false;
    decode.run(state, 0.95F, warm_steps, timed_steps);
  });
  for (float const correlation : {0.99F, 0.95F, 0.9F}) {
    add("offloaded/lockstep_graph" + named(correlation), many, [=](benchmark::State& state) {
      caches& all = shared_caches();
      if (!all.captured) {
        all.clear();
        all.captured = std::make_unique<captured_decode>(many, cache_options{});
      }
      all.captured->run(state, correlation, warm_steps, timed_steps);
    });
  }
  // What systems do that select by head, wait for the recall and drive the copy engine fragment by fragment.
  add("offloaded/by_head_fragment_copies" + named(0.95F), many, [=](benchmark::State& state) {
    caches& all = shared_caches();
    all.clear();
    all.fragments = std::make_unique<fragment_decode>(many, cache_options{.head_groups = eight_billion.kv_heads});
    all.fragments->run(state, 0.95F, 4, 8);
    all.clear();
  });
  return true;
}();

}  // namespace
