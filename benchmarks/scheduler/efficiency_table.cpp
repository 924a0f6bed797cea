// How close schedulers come to the bound of a decode step: the manager of the library on a simulated device and link.
//   table_scheduler_efficiency [--quick] [--json FILE] [--machine FILE]      FILE: benchmarks/machines/h200.json
//   table_scheduler_efficiency --timeline FILE    the visits and recalls of some layers under three schedulers

#include "../machines/machine_file.hpp"
#include "context.hpp"
#include <pulseinfer/scheduler/interruptible_scheduler.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/scheduler/static_cohorts_scheduler.hpp>
#include <pulseinfer/workload/simulated_decode.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t layer_count = 32;

enum class mode : std::uint8_t { lockstep, hit_first, static_2, static_3, static_4, exact, predicted, deferral };
constexpr mode modes[] = {mode::lockstep, mode::hit_first, mode::static_2,  mode::static_3,
                          mode::static_4, mode::exact,     mode::predicted, mode::deferral};

/// The costs of the control path, of the link's operations and of what device and link do to one another.
struct machine_costs {
  control_cost control = h200_control;
  link_sharing sharing = h200_sharing;
  link_cost kernels = pcie5_kernel;
  nanoseconds select_chain{14500};  ///< twelve kernels of a captured graph
  std::string name = "H200, PCIe 5.0 x16";
};

machine_costs costs;  // NOLINT: set once, before anything runs

struct cell {
  double rho = 0.0;
  std::uint32_t rows = 0;
  double weight_share = 0.0;
  bool disturbed = false;  ///< device and link slow one another as measured
};

struct job {
  cell where;
  mode what = mode::lockstep;
  std::uint64_t seed = 1;
  decode_result result = {};
};

struct run_sizes {
  std::uint32_t seeds = 8;
  std::uint32_t steps = 24;
};

/// Sums over seeds.
struct figures {
  double eta = 0.0;
  double tokens_per_second = 0.0;
  double p50_ms = 0.0, p95_ms = 0.0, p99_ms = 0.0;
  double stalled_visits = 0.0;  ///< a step: sleeps of the host
  double late_rows = 0.0;       ///< a step
  double passes = 0.0;          ///< a step
  double wasted_share = 0.0;    ///< of the demand misses
  double skipped_share = 0.0, skipped_p99 = 0.0;
  double in_order_bound = 0.0;
  double relaxed_bound = 0.0;
  double disturbed_bound = 0.0;
  double lost_passes = 0.0, lost_launches = 0.0, idle = 0.0;  ///< of the time
};

[[nodiscard]] engine_cost cost_of(cell const& c)
{
  // 5 us a row, 10 where a layer's weights would come below the launches that every pass has.
  double row_us = 5.0;
  auto const weights_us = [&] { return c.weight_share / (1.0 - c.weight_share) * c.rows * row_us; };
  if (weights_us() < 30.0) { row_us = 10.0; }
  auto const time = [](double us) { return nanoseconds{std::llround(us * 1000.0)}; };
  return {.pass = {.per_pass = time(weights_us()), .per_row = time(row_us)}, .hits_launch = 2us};
}

[[nodiscard]] decode_options options_of(cell const& c, mode what, std::uint64_t seed, run_sizes const& sizes)
{
  decode_options o;
  o.workload = {.layers = layer_count, .rows = c.rows, .misses = misses_of(workload_preset::summary), .seed = seed};
  o.engine = cost_of(c);
  o.machine.compute.per_launch = 0ns;  // in the weights' time
  o.machine.kernels = costs.kernels;
  o.machine.kernels.per_run = 0ns;  // in the rate
  o.machine.control = costs.control;
  if (c.disturbed) { o.machine.sharing = costs.sharing; }
  o.counts.select_chain = costs.select_chain;
  o.rows_per_landing = std::max(1U, c.rows / 64);
  o.steps = sizes.steps;
  o.warm_steps = 12;
  if (what == mode::predicted) { o.foresight.prefetch = true; }
  if (what == mode::deferral) {
    o.foresight.prefetch = true;
    o.foresight.deferred_share = 0.02;
  }
  // The link is as fast as it must be for R = rho * C.
  double const compute = static_cast<double>(layer_count) *
    static_cast<double>((o.engine.pass.per_pass + o.engine.pass.per_row * c.rows).count());
  double const operations = layer_count * static_cast<double>(o.machine.kernels.per_operation.count());
  o.machine.kernels.to_device_bytes_per_s =
    mean_misses(o) * static_cast<double>(o.block_bytes) * 1e9 / (c.rho * compute - operations);
  return o;
}

[[nodiscard]] decode_result run(cell const& c, mode what, std::uint64_t seed, run_sizes const& sizes)
{
  decode_options const o = options_of(c, what, seed, sizes);
  auto const cohorts = [&](std::uint32_t count) {
    return simulate_decode(o, static_cohorts_scheduler<visit_order::hits_first>{.cohorts = count});
  };
  switch (what) {
    case mode::lockstep: return simulate_decode(o, lockstep_scheduler<visit_order::whole>{});
    case mode::hit_first: return simulate_decode(o, lockstep_scheduler<visit_order::hits_first>{});
    case mode::static_2: return cohorts(2);
    case mode::static_3: return cohorts(3);
    case mode::static_4: return cohorts(4);
    case mode::exact:
    case mode::predicted:
    case mode::deferral: break;
  }
  return simulate_decode(o, make_interruptible(o));
}

[[nodiscard]] figures sum_up(std::vector<job const*> const& jobs, cell const& c)
{
  figures f;
  std::vector<nanoseconds> steps;
  std::vector<float> skipped;
  double plans = 0.0, misses = 0.0, wasted = 0.0, skip = 0.0;
  auto const count = static_cast<double>(jobs.size());
  engine_cost const cost = cost_of(c);
  for (job const* j : jobs) {
    decode_result const& r = j->result;
    auto const time = static_cast<double>(r.time.count());
    auto const n = static_cast<double>(r.steps.size());
    f.eta += r.efficiency() / count;
    f.tokens_per_second += r.tokens_per_second() / count;
    f.stalled_visits += static_cast<double>(r.waits) / n / count;
    f.late_rows += static_cast<double>(r.late_rows) / n / count;
    f.passes += static_cast<double>(r.passes) / n / count;
    auto const bound = static_cast<double>(r.bound().count());
    f.in_order_bound += bound / static_cast<double>(std::max(r.in_order, r.link).count()) / count;
    f.relaxed_bound += bound / static_cast<double>(std::max(r.relaxed, r.link).count()) / count;
    link_sharing const& shared = costs.sharing;
    auto const compute = static_cast<double>(r.compute.count()), link = static_cast<double>(r.link.count());
    double const device_bound = compute + (1.0 - shared.compute_beside_link[1]) * std::min(link, compute);
    double const link_bound = link + (1.0 - shared.link_beside_compute[1]) * std::min(link, compute);
    f.disturbed_bound += bound / std::max(device_bound, link_bound) / count;
    double const extra =
      (static_cast<double>(r.passes) - layer_count * n) * static_cast<double>(cost.pass.per_pass.count());
    double const launches = static_cast<double>(r.visits - r.passes) * static_cast<double>(cost.hits_launch.count());
    f.lost_passes += extra / time / count;
    f.lost_launches += launches / time / count;
    f.idle += (time - compute - extra - launches) / time / count;
    steps.insert(steps.end(), r.steps.begin(), r.steps.end());
    skipped.insert(skipped.end(), r.skipped.begin(), r.skipped.end());
    plans += static_cast<double>(r.totals.plans);
    misses += static_cast<double>(r.totals.misses);
    wasted += static_cast<double>(r.totals.wasted);
    skip += r.totals.skipped_share;
  }
  std::ranges::sort(steps);
  std::ranges::sort(skipped);
  auto const at = [&](double share) {
    return static_cast<double>(steps[static_cast<std::size_t>(share * static_cast<double>(steps.size()))].count()) /
      1e6;
  };
  f.p50_ms = at(0.5);
  f.p95_ms = at(0.95);
  f.p99_ms = at(0.99);
  f.wasted_share = misses > 0.0 ? wasted / misses : 0.0;
  f.skipped_share = plans > 0.0 ? skip / plans : 0.0;
  if (!skipped.empty()) {
    f.skipped_p99 = double{skipped[static_cast<std::size_t>(0.99 * static_cast<double>(skipped.size()))]};
  }
  return f;
}

struct goals {
  double above_static = 0.0, predicted = 0.0, deferral = 0.0;
};

[[nodiscard]] goals goals_of(double rho)
{
  if (rho < 0.5) { return {0.02, 0.98, 0.99}; }
  if (rho < 0.8) { return {0.04, 0.92, 0.97}; }
  if (rho < 1.1) { return {0.05, 0.82, 0.95}; }
  return {0.04, 0.84, 0.95};
}

[[nodiscard]] nlohmann::json record(cell const& c, char const* name, figures const& f)
{
  return {
    {"rho", c.rho},
    {"rows", c.rows},
    {"weight_share", c.weight_share},
    {"disturbed", c.disturbed},
    {"mode", name},
    {"eta", f.eta},
    {"tokens_per_second", f.tokens_per_second},
    {"p50_ms", f.p50_ms},
    {"p95_ms", f.p95_ms},
    {"p99_ms", f.p99_ms},
    {"p99_over_p50", f.p99_ms / f.p50_ms},
    {"stalled_visits", f.stalled_visits},
    {"late_rows", f.late_rows},
    {"passes_per_step", f.passes},
    {"wasted_share", f.wasted_share},
    {"skipped_share", f.skipped_share},
    {"skipped_p99", f.skipped_p99},
    {"in_order_bound", f.in_order_bound},
    {"relaxed_bound", f.relaxed_bound},
    {"loss", {{"second_passes", f.lost_passes}, {"hits_launches", f.lost_launches}, {"idle", f.idle}}}};
}

/// The time of one decision of the interruptible scheduler, over some steps whose layers differ: the planner works in it.
[[nodiscard]] double decision_us(std::uint32_t count)
{
  interruptible_scheduler<> scheduler;
  scheduler.layers = layer_count;
  scheduler.profile = {
    .per_pass = 130us,
    .per_row = 2500ns,
    .per_row_hits = 2500ns,
    .per_hits = 2us,
    .per_recall = 4us,
    .link_bytes_per_second = 50e9,
    .resume = 2us,
    .wake = 8us};
  std::vector<scheduler_row> rows;
  std::vector<row_id> chosen(count);
  double best = 0.0;
  nanoseconds now{0};
  for (int round = 0; round < 20; ++round) {
    std::uint64_t decisions = 0;
    nanoseconds spent{0};
    for (int step = 0; step < 5; ++step) {
      auto const enter = [&](scheduler_row& row, std::int32_t layer) {
        auto const number = static_cast<std::uint32_t>(to_index(row.row));
        row.layer = static_cast<layer_id>(layer);
        row.phase = row_phase::in_flight;
        row.misses = (number * 7 + static_cast<std::uint32_t>(layer) * 5) % 23 * (layer % 4 == 0 ? 4U : 1U);
        row.bytes = std::uint64_t{row.misses} * 65536;
        row.entered = now;
      };
      rows.resize(count);
      for (std::uint32_t r = 0; r < count; ++r) {
        rows[r].row = static_cast<row_id>(r);
        enter(rows[r], 0);
      }
      while (!rows.empty()) {
        auto const begin = std::chrono::steady_clock::now();
        decision const made = scheduler.decide(rows, {}, now, chosen);
        spent += std::chrono::steady_clock::now() - begin;
        ++decisions;
        now += 100us;
        if (made.kind != decision_kind::run) {
          for (scheduler_row& row : rows) { row.phase = row_phase::ready; }
          continue;
        }
        for (std::uint32_t i = 0; i < made.rows; ++i) {
          auto const row = std::ranges::find(rows, chosen[i], &scheduler_row::row);
          enter(*row, to_number(row->layer) + 1);
        }
        std::erase_if(rows, [](scheduler_row const& row) { return to_index(row.layer) == layer_count; });
      }
    }
    double const us = static_cast<double>(spent.count()) / 1e3 / static_cast<double>(decisions);
    best = round == 0 ? us : std::min(best, us);
  }
  return best;
}

void run_all(std::vector<job>& jobs, run_sizes const& sizes)
{
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  std::exception_ptr failed;
  std::atomic<bool> stop{false};
  unsigned const most = std::max(1U, std::thread::hardware_concurrency());
  for (unsigned t = 0; t < most; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < jobs.size() && !stop; i = next++) {
        try {
          jobs[i].result = run(jobs[i].where, jobs[i].what, jobs[i].seed, sizes);
        } catch (...) {
          if (!stop.exchange(true)) { failed = std::current_exception(); }
        }
      }
    });
  }
  for (std::thread& thread : threads) { thread.join(); }
  if (failed) { std::rethrow_exception(failed); }
}

int print_tables(run_sizes const& sizes, nlohmann::json const& context, char const* json_file)
{
  auto const began = std::chrono::steady_clock::now();
  std::vector<cell> cells;
  for (bool const disturbed : {false, true}) {
    for (double const share : {0.09, 0.17, 0.45}) {
      for (std::uint32_t const rows : {32U, 128U}) {
        for (double const rho : {0.3, 0.6, 0.9, 1.2}) {
          if (disturbed && (rows != 32 || (rho != 0.6 && rho != 0.9))) { continue; }
          cells.push_back({rho, rows, share, disturbed});
        }
      }
    }
  }
  std::vector<job> jobs;
  for (cell const& c : cells) {
    for (mode const m : modes) {
      for (std::uint64_t seed = 1; seed <= sizes.seeds; ++seed) { jobs.push_back({c, m, seed}); }
    }
  }
  run_all(jobs, sizes);

  nlohmann::json document;
  document["context"] = context;
  document["eta"] = nlohmann::json::array();
  std::printf(
    "Efficiency max(C, R, D) / T of a decode step, preset summary, %u layers, %u seeds of %u steps\n", layer_count,
    sizes.seeds, sizes.steps);
  std::printf(
    "the manager of the library on counts_backend; prediction and deferral: which misses are demanded and which\n"
    "travel in the background is said by the simulated plan\n");
  int missed = 0, judged = 0;
  bool disturbed_head = false;
  std::size_t place = 0;
  for (cell const& c : cells) {
    figures f[std::size(modes)];
    for (std::size_t m = 0; m < std::size(modes); ++m) {
      std::vector<job const*> of_mode;
      for (std::uint64_t seed = 0; seed < sizes.seeds; ++seed) { of_mode.push_back(&jobs[place++]); }
      f[m] = sum_up(of_mode, c);
    }
    auto const of = [&](mode m) -> figures const& { return f[static_cast<std::size_t>(m)]; };
    mode best = mode::hit_first;
    for (mode const m : {mode::static_2, mode::static_3, mode::static_4}) {
      if (of(m).eta > of(best).eta) { best = m; }
    }
    document["eta"].push_back(record(c, "lockstep", of(mode::lockstep)));
    document["eta"].push_back(record(c, "hit_first", of(mode::hit_first)));
    document["eta"].push_back(record(c, "best_static", of(best)));
    document["eta"].back()["cohorts"] =
      best == mode::hit_first ? 1 : static_cast<int>(best) - static_cast<int>(mode::static_2) + 2;
    document["eta"].push_back(record(c, "exact", of(mode::exact)));
    document["eta"].push_back(record(c, "predicted", of(mode::predicted)));
    document["eta"].push_back(record(c, "deferral", of(mode::deferral)));

    if (c.disturbed) {
      if (!disturbed_head) {
        disturbed_head = true;
        std::printf(
          "\nDevice and link slow one another as measured (compute %.3f times slower beside a gather, the gather %.3f "
          "times):\n",
          1.0 / costs.sharing.compute_beside_link[1], 1.0 / costs.sharing.link_beside_compute[1]);
        std::printf(
          "%5s %5s %5s | %7s %7s %7s | %9s | %9s\n", "W/C", "rows", "rho", "static", "exact", "predict", "deferral",
          "at most");
      }
      std::printf(
        "%5.2f %5u %5.1f | %7.3f %7.3f %7.3f | %9.3f | %9.3f\n", c.weight_share, c.rows, c.rho, of(best).eta,
        of(mode::exact).eta, of(mode::predicted).eta, of(mode::deferral).eta, of(mode::exact).disturbed_bound);
      continue;
    }
    if (c.rho < 0.5) {
      std::printf("\nW/C %.2f, %u rows\n", c.weight_share, c.rows);
      std::printf(
        "%4s | %8s %8s %10s | %7s %7s %7s %7s | %7s %7s %7s | %8s %7s | %7s %9s\n", "rho", "lockstep", "hits 1st",
        "static", "exact", "goal", "inorder", "at most", "predict", "goal", "inorder", "deferral", "goal", "p99/p50",
        "tokens/s");
    }
    goals const g = goals_of(c.rho);
    double const exact_goal = of(best).eta + g.above_static;
    double const predicted_goal = std::max(g.predicted, of(mode::exact).eta + 0.02);
    auto const mark = [&](double value, double goal) {
      ++judged;
      bool const met = value >= goal - 0.0005;
      missed += met ? 0 : 1;
      return met ? ' ' : '-';
    };
    std::printf(
      "%4.1f | %8.3f %8.3f %6.3f (%d) | %7.3f %6.3f%c %7.3f %7.3f | %7.3f %6.3f%c %7.3f | %8.3f %6.2f%c | %7.2f "
      "%9.0f\n",
      c.rho, of(mode::lockstep).eta, of(mode::hit_first).eta, of(best).eta,
      best == mode::hit_first ? 1 : static_cast<int>(best) - static_cast<int>(mode::static_2) + 2, of(mode::exact).eta,
      exact_goal, mark(of(mode::exact).eta, exact_goal), of(mode::exact).in_order_bound, of(mode::exact).relaxed_bound,
      of(mode::predicted).eta, predicted_goal, mark(of(mode::predicted).eta, predicted_goal),
      of(mode::predicted).in_order_bound, of(mode::deferral).eta, g.deferral, mark(of(mode::deferral).eta, g.deferral),
      of(mode::exact).p99_ms / of(mode::exact).p50_ms, of(mode::exact).tokens_per_second);
    for (mode const m : {mode::exact, mode::predicted, mode::deferral}) {
      char const* const name = m == mode::exact ? "exact" : m == mode::predicted ? "predicted" : "deferral";
      std::printf(
        "       %-9s lost: second passes %4.1f %%, hits' launches %3.1f %%, waiting %4.1f %%; passes %4.1f, sleeps "
        "%5.1f, "
        "late %.2f, wasted %.3f, skipped %.4f (p99 %.4f)\n",
        name, of(m).lost_passes * 100.0, of(m).lost_launches * 100.0, of(m).idle * 100.0, of(m).passes,
        of(m).stalled_visits, of(m).late_rows, of(m).wasted_share, of(m).skipped_share, of(m).skipped_p99);
    }
  }
  double const us = decision_us(128);
  std::printf(
    "\n'inorder': about what schedulers reach that take the layers in order (docs/scheduling.md); '-' marks a goal "
    "that is missed: %d of %d\n",
    missed, judged);
  std::printf("a decision over 128 rows: %.1f us (goal 5)\n", us);
  double const took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::printf("%.0f s\n", took);
  document["decision_us_128_rows"] = us;
  document["seeds"] = sizes.seeds;
  document["steps"] = sizes.steps;
  if (json_file != nullptr) {
    std::ofstream out{json_file};
    out << document.dump(1) << '\n';
    if (!out) {
      std::fprintf(stderr, "error: cannot write %s\n", json_file);
      return 1;
    }
  }
  return 0;
}

/// What the device and the link do in one step, for scripts/timeline.
int write_timeline(char const* file)
{
  cell const where{.rho = 0.9, .rows = 32, .weight_share = 0.17};
  nlohmann::json document;
  document["rho"] = where.rho;
  document["weight_share"] = where.weight_share;
  document["rows"] = where.rows;
  auto const us = [](nanoseconds time) { return static_cast<double>(time.count()) / 1e3; };
  auto const add = [&](char const* name, auto const& scheduler, decode_options const& o) {
    decode_result const r = simulate_decode(o, scheduler);
    nlohmann::json device = nlohmann::json::array(), link = nlohmann::json::array();
    nanoseconds begin{-1}, end{0};
    // The last step.
    std::size_t first = r.timeline.size();
    while (first > 0 &&
           !(r.timeline[first - 1].layer == layer_id{layer_count - 1} && end.count() > 0 &&
             r.timeline[first - 1].seen.end + 1ms < end)) {
      --first;
      end = std::max(end, r.timeline[first].seen.end);
    }
    for (std::size_t i = first; i < r.timeline.size(); ++i) {
      visit_record const& v = r.timeline[i];
      if (begin.count() < 0) { begin = v.seen.begin; }
      device.push_back(
        {{"begin", us(v.seen.begin - begin)},
         {"end", us(v.seen.end - begin)},
         {"layer", to_number(v.layer)},
         {"rows", v.rows},
         {"part", name_of(v.part)}});
    }
    for (observation const& seen : r.gathers) {
      if (seen.begin < begin || seen.cost.link_bytes == 0) { continue; }
      link.push_back({us(seen.begin - begin), us(seen.end - begin)});
    }
    document["schedulers"].push_back({{"name", name}, {"device", device}, {"link", link}});
  };
  decode_options o = options_of(where, mode::exact, 1, {.seeds = 1, .steps = 8});
  o.timeline = true;
  add("lockstep, hits first", lockstep_scheduler<visit_order::hits_first>{}, o);
  add("two static cohorts", static_cohorts_scheduler<visit_order::hits_first>{.cohorts = 2}, o);
  add("interruptible", make_interruptible(o), o);
  std::ofstream out{file};
  out << document.dump(1) << '\n';
  if (!out) {
    std::fprintf(stderr, "error: cannot write %s\n", file);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments)
{
  run_sizes sizes;
  char const* json_file = nullptr;
  char const* timeline_file = nullptr;
  char const* machine_file = nullptr;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--quick") == 0) {
      sizes = {.seeds = 2, .steps = 10};
    } else if (std::strcmp(arguments[i], "--json") == 0 && i + 1 < count) {
      json_file = arguments[++i];
    } else if (std::strcmp(arguments[i], "--machine") == 0 && i + 1 < count) {
      machine_file = arguments[++i];
    } else if (std::strcmp(arguments[i], "--timeline") == 0 && i + 1 < count) {
      timeline_file = arguments[++i];
    } else {
      std::fprintf(
        stderr, "usage: table_scheduler_efficiency [--quick] [--json FILE] [--machine FILE] [--timeline FILE]\n");
      return 2;
    }
  }
  try {
    if (machine_file != nullptr) {
      pulseinfer_bench::machine const read = pulseinfer_bench::read_machine(machine_file);
      costs = {read.options.control, read.options.sharing, read.options.kernels, read.select_chain, read.name};
      std::printf("%s\n", read.name.c_str());
    }
    if (timeline_file != nullptr) { return write_timeline(timeline_file); }
    return print_tables(sizes, pulseinfer_bench::context_of(count, arguments, costs.name, sizes.seeds), json_file);
  } catch (std::exception const& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
