#pragma once

/// Runs the decoding of a batch on a counts_backend, under the very manager of the other backends, and holds it against its
/// bound.

#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/sim/counts_backend.hpp>
#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/scheduler/decode_profile.hpp>
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/workload/counted_workload.hpp>
#include <pulseinfer/workload/miss_generator.hpp>
#include <pulseinfer/workload/timed_engine.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace pulseinfer {

struct decode_options {
  workload_options workload = {};
  foresight_options foresight = {};  ///< block_time is filled in
  engine_cost engine = {};           ///< per_pass holds the select chain too
  sim_options machine = {};
  counts_options counts = {};
  std::uint64_t block_bytes = 65536;
  std::uint32_t rows_per_landing = 1;
  std::uint32_t steps = 32;      ///< measured
  std::uint32_t warm_steps = 4;  ///< before them
  bool timeline = false;         ///< keep when each visit and gather ran
};

/// Sums over the measured steps. The bound: nothing that does this work is through earlier.
struct decode_result {
  std::uint64_t tokens = 0;
  nanoseconds time{0};
  nanoseconds compute{0};  ///< C: every layer runs once for the whole batch
  nanoseconds link{0};     ///< R: every miss travels, one operation a layer
  nanoseconds chain{0};    ///< D: the longest chain of one request, alone
  /// About what schedulers reach that take the layers in order: misses are known no earlier than their layer's queries (or as far
  /// as estimates were fetched while the link was free), and a layer's rows go through it in one pass, which starts when all has
  /// landed, or in two, which read the weights twice and hide all else. No strict bound: a pass may hide the beginning of another
  /// layer's recall, which is not counted.
  nanoseconds in_order{0};
  /// What no schedule goes below whose misses are known no earlier than their layer's queries, be it made with knowledge of all
  /// that comes. A layer that all rows go through in one pass divides the step: what comes after it can't begin to travel before
  /// its end. Between two of them every layer has two passes or more, and device and link are each busy for all that there is to
  /// do, at best at the same time. The least over all choices of the layers that divide.
  nanoseconds relaxed{0};
  nanoseconds owed{0};  ///< link time of what the last step left for later, less that of what was left before the first
  std::vector<nanoseconds> steps = {};
  std::uint64_t visits = 0;
  std::uint64_t passes = 0;
  std::uint64_t waits = 0;
  std::uint64_t late_rows = 0;
  nanoseconds device_busy{0};
  nanoseconds link_busy{0};
  workload_totals totals = {};
  std::deque<visit_record> timeline = {};  ///< with options.timeline: visits, from the first step on
  std::deque<observation> gathers = {};    ///< likewise
  std::vector<float> skipped = {};         ///< of each plan, where something was deferred

  [[nodiscard]] nanoseconds bound() const noexcept { return std::max({compute, link, chain}); }
  [[nodiscard]] double efficiency() const noexcept
  {
    return static_cast<double>(bound().count()) / static_cast<double>(paid().count());
  }
  /// The time, and what was left for later beyond it.
  [[nodiscard]] nanoseconds paid() const noexcept { return time + std::max(owed, nanoseconds{0}); }
  [[nodiscard]] double tokens_per_second() const noexcept
  {
    return static_cast<double>(tokens) * 1e9 / static_cast<double>(paid().count());
  }
  /// @param share in [0, 1)
  [[nodiscard]] nanoseconds step_time(double share) const
  {
    if (steps.empty()) { return nanoseconds{0}; }
    std::vector<nanoseconds> sorted = steps;
    std::ranges::sort(sorted);
    return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size()))];
  }
};

/// The scheduler that knows the run's machine and engine.
[[nodiscard]] inline interruptible_scheduler<> make_interruptible(decode_options const& options)
{
  pass_cost const& pass = options.engine.pass;
  interruptible_scheduler<> scheduler;
  scheduler.layers = options.workload.layers;
  scheduler.profile = {
    .per_pass = pass.rest(0),
    .per_row = pass.rest(1) - pass.rest(0),
    .per_row_hits = pass.attention(1.0),
    .per_hits = options.engine.hits_launch,
    .per_recall = options.machine.kernels.per_operation + options.machine.control.resume,
    .link_bytes_per_second = options.machine.kernels.to_device_bytes_per_s,
    .resume = options.machine.control.resume,
    .wake = options.machine.control.wake,
    .rows_per_landing = options.rows_per_landing,
    .per_landing = options.counts.fused_gather ? nanoseconds{0} : options.machine.kernels.per_operation,
    .selected_bytes = options.workload.budget_blocks * options.block_bytes,
    .smallest_first = options.counts.smallest_first};
  return scheduler;
}

/// Blocks that a batch misses in each of its measured steps, at least: what a run of the same options will ask for.
[[nodiscard]] inline double mean_misses(decode_options const& options)
{
  miss_generator generator{options.workload};
  std::uint64_t sum = 0;
  for (std::uint32_t step = 0; step < options.warm_steps + options.steps; ++step) {
    generator.next_step();
    if (step < options.warm_steps) { continue; }
    for (std::uint32_t row = 0; row < options.workload.rows; ++row) {
      for (std::uint32_t layer = 0; layer < options.workload.layers; ++layer) {
        sum += generator.misses(static_cast<row_id>(row), static_cast<layer_id>(layer));
      }
    }
  }
  return static_cast<double>(sum) / options.steps;
}

namespace detail {

/// What a run notes in stream order.
struct decode_notes {
  miss_generator* generator = nullptr;
  counted_workload* workload = nullptr;
  std::vector<float>* skipped = nullptr;
  nanoseconds alone{0};  ///< a request's layers without the others
  nanoseconds block_time{0};
  nanoseconds longest{0};
  nanoseconds chain{0};
  bool measured = false;
  workload_totals before = {};
  engine_cost engine = {};
  nanoseconds per_recall{0};
  nanoseconds resume{0};
  bool foresees = false;
  double estimate_recall = 0.0;
  double estimate_precision = 1.0;
  std::uint64_t waiting_before = 0;
  std::vector<std::uint64_t> in_layer = {};  ///< misses of the step
  nanoseconds in_order{0};
  nanoseconds relaxed{0};
  std::vector<double> until = {};      ///< the least time until a layer is through that divides the step
  std::vector<nanoseconds> ends = {};  ///< of the last step that is not measured, and of those that are

  void begin(row_id row)
  {
    workload->begin_step(row);
    std::uint64_t misses = 0;
    for (std::uint32_t layer = 0; layer < generator->options().layers; ++layer) {
      std::uint32_t const here = generator->misses(row, static_cast<layer_id>(layer));
      in_layer[layer] += here;
      misses += here;
    }
    longest = std::max(longest, alone + block_time * static_cast<std::int64_t>(misses));
  }

  /// The least that a layer takes whose recall brings `travel` of link time: in one pass, or in two that read the weights twice.
  [[nodiscard]] double layer_time(std::uint32_t rows, double travel) const
  {
    auto const number = [](nanoseconds time) { return static_cast<double>(time.count()); };
    double const hits = number(engine.pass.attention(rows) + engine.hits_launch);
    double const rest = number(engine.pass.rest(rows));
    double const recall = number(per_recall) + travel;
    double const one = rest + std::max(hits, recall + number(resume));
    double const two = std::max(rest + hits + number(engine.pass.per_pass + engine.hits_launch), recall);
    return std::min(one, two);
  }

  /// decode_result::relaxed of the step that has ended.
  [[nodiscard]] double least_time(std::uint32_t rows)
  {
    auto const number = [](nanoseconds time) { return static_cast<double>(time.count()); };
    std::size_t const layers = in_layer.size();
    double const recall = number(per_recall), wake = number(resume);
    double const all = number(engine.pass.rest(rows) + engine.pass.attention(rows) + engine.hits_launch);
    double const twice = all + number(engine.pass.per_pass);
    until.assign(layers + 1, 1e300);
    until[0] = 0.0;
    double least = 1e300;
    for (std::size_t from = 0; from <= layers; ++from) {
      double link = 0.0, device = 0.0;
      for (std::size_t layer = from; layer < layers; ++layer) {
        double const missing =
          static_cast<double>(in_layer[layer]) / (static_cast<double>(rows) * generator->options().budget_blocks);
        double const landed = number(engine.pass.attention(rows * std::min(missing, 1.0)));
        link += recall + number(block_time * static_cast<std::int64_t>(in_layer[layer]));
        double const pass = number(engine.pass.rest(rows)) + landed;
        until[layer + 1] = std::min(until[layer + 1], until[from] + std::max(link + wake + pass, device + all));
        device += twice;
      }
      double const last = from == layers ? 0.0 : link + wake + number(engine.pass.rest(1));
      least = std::min(least, until[from] + std::max(last, device));
    }
    return least;
  }

  void end(nanoseconds now, bool from_here)
  {
    if (measured) {
      chain += longest;
      relaxed += nanoseconds{static_cast<std::int64_t>(least_time(generator->options().rows))};
      std::uint32_t const rows = generator->options().rows;
      double last = 0.0, last_demanded = 0.0;
      for (std::uint64_t const misses : in_layer) {
        double const travel = static_cast<double>((block_time * static_cast<std::int64_t>(misses)).count());
        // While the layer before ran, the link was free for what the estimate names, right or wrong.
        double const fetched = std::min(travel * estimate_recall / estimate_precision, last - last_demanded);
        double const demanded = travel - std::max(fetched, 0.0) * estimate_precision;
        last_demanded = foresees ? demanded : travel;
        last = layer_time(rows, last_demanded);
        in_order += nanoseconds{static_cast<std::int64_t>(last)};
      }
    } else if (from_here) {
      before = workload->totals();
      waiting_before = workload->waiting_blocks();
      workload->skipped = skipped;
    }
    measured = from_here;
    longest = nanoseconds{0};
    std::ranges::fill(in_layer, 0U);
    if (measured) { ends.push_back(now); }
  }
};

}  // namespace detail

/// @throws configuration_error; error where the manager refuses a step
template <layer_scheduler Scheduler>
[[nodiscard]] decode_result simulate_decode(decode_options const& options, Scheduler const& scheduler)
{
  using manager = offload_manager<counts_backend, counted_selector, gather_scatter_engine, Scheduler, fixed_admission>;
  std::uint32_t const rows = options.workload.rows;
  std::uint32_t const layers = options.workload.layers;
  auto const check = [](status s, char const* call) {
    if (s != status::ok) { throw error{s, call}; }
  };
  miss_generator generator{options.workload};
  foresight_options foresight = options.foresight;
  foresight.block_time =
    options.machine.kernels.duration(1, options.block_bytes, false) - options.machine.kernels.per_operation;
  counted_workload workload{generator, foresight};
  auto shares = [&workload](row_id row, layer_id layer, part which) { return workload.attend(row, layer, which); };

  sim_options machine = options.machine;
  machine.queue_depth = std::max(machine.queue_depth, 4096U + 4 * rows * layers);
  counts_backend backend{machine, options.counts, workload};
  backend.set_background(&workload);
  auto const stream = backend.create_stream();
  std::uint32_t const block_tokens = 16;
  kv_geometry const geometry{
    .layers = layers,
    .query_heads = 1,
    .kv_heads = 1,
    .head_dim = static_cast<std::uint32_t>(options.block_bytes / (4 * block_tokens)),
    .block_tokens = block_tokens};
  std::uint32_t const max_tokens = options.warm_steps + options.steps + 2 * block_tokens + 8;
  manager_options const sizes{
    .max_rows = rows,
    .max_tokens = max_tokens,
    .quota_tokens = (options.workload.budget_blocks + 8) * block_tokens,
    .recalls = std::min(2 * rows + 16, 64U)};
  decode_result result;
  {
    manager kv{
      backend,
      stream,
      geometry,
      sizes,
      counted_selector{options.workload.budget_blocks},
      gather_scatter_engine{.rows_per_landing = options.rows_per_landing},
      scheduler};
    engine_cost cost = options.engine;
    cost.pass.per_pass -= options.counts.select_chain;
    timed_engine<counts_backend, manager, decltype(shares)> engine{backend, stream, kv, rows, cost, shares};
    if (options.timeline) {
      engine.timeline = &result.timeline;
      backend.gathers = &result.gathers;
    }
    std::vector<row_id> all;
    for (std::uint32_t i = 0; i < rows; ++i) {
      row_id row = none<row_id>;
      if (kv.open({.prompt_tokens = 1, .max_tokens = max_tokens}, row) != admission::admitted) {
        throw error{status::capacity_exceeded, "simulate_decode: " + kv.explain_refusal({1, max_tokens})};
      }
      all.push_back(row);
    }
    check(engine.step(all, [](row_id) {}, [] {}), "simulate_decode: the prompt's step");
    detail::decode_notes notes{.generator = &generator, .workload = &workload, .skipped = &result.skipped};
    notes.alone = (options.engine.pass.per_pass + options.engine.pass.per_row) * layers;
    notes.block_time = foresight.block_time;
    notes.engine = options.engine;
    notes.per_recall = options.machine.kernels.per_operation + options.machine.control.resume;
    notes.resume = options.machine.control.resume;
    notes.foresees = options.foresight.prefetch;
    notes.estimate_recall = options.workload.newcomers.estimate_recall;
    notes.estimate_precision = options.workload.newcomers.estimate_precision;
    notes.in_layer.assign(layers, 0);
    notes.ends.reserve(std::size_t{options.warm_steps} + options.steps);
    nanoseconds device_before{0}, link_before{0};
    std::uint64_t visits = 0, passes = 0;
    for (std::uint32_t step = 0; step < options.warm_steps + options.steps; ++step) {
      if (step == options.warm_steps) {
        visits = engine.visits;
        passes = engine.passes;
      }
      auto const begun = [&notes](row_id row) { notes.begin(row); };
      auto const ended = [&, step] {
        notes.end(backend.now(), step + 1 >= options.warm_steps);
        if (step + 1 == options.warm_steps) {
          device_before = backend.busy(sim_resource::device);
          link_before = backend.busy(sim_resource::to_device);
        }
      };
      check(engine.step(all, begun, ended), "simulate_decode: a step");
      step_sample const& sample = kv.finish_sample();
      if (step < options.warm_steps) { continue; }
      result.tokens += engine.tokens();
      result.waits += sample.waits;
      result.late_rows += sample.late_rows;
    }
    check(backend.synchronize(stream), "simulate_decode: the end");
    nanoseconds const per_token = options.engine.pass.per_pass / rows + options.engine.pass.per_row;
    result.compute = per_token * layers * static_cast<std::int64_t>(result.tokens);
    result.chain = notes.chain;
    result.in_order = std::max({notes.in_order, result.compute, result.chain});
    result.relaxed = std::max({notes.relaxed, result.compute, result.chain});
    result.owed = foresight.block_time *
      (static_cast<std::int64_t>(workload.waiting_blocks()) - static_cast<std::int64_t>(notes.waiting_before));
    result.totals = difference(workload.totals(), notes.before);
    result.link = foresight.block_time * static_cast<std::int64_t>(result.totals.misses) +
      options.machine.kernels.per_operation * static_cast<std::int64_t>(layers) *
        static_cast<std::int64_t>(options.steps);
    result.visits = engine.visits - visits;
    result.passes = engine.passes - passes;
    result.device_busy = backend.busy(sim_resource::device) - device_before;
    result.link_busy = backend.busy(sim_resource::to_device) - link_before;
    for (std::size_t i = 1; i < notes.ends.size(); ++i) { result.steps.push_back(notes.ends[i] - notes.ends[i - 1]); }
    result.time = notes.ends.back() - notes.ends.front();
  }
  backend.set_background(nullptr);
  return result;
}

}  // namespace pulseinfer
