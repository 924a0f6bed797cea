// What admission policies make of loads: the manager of the library on a simulated device and link (counts), each scenario beside
// its goal.
//   table_scheduler_admission [--quick] [--json FILE] [--machine FILE] [--only SCENARIO] [--seeds N]
// A FILE of --json that holds an object already gets "admission" and "admission_context" added to it. Each seed runs everything once.

#include "../machines/machine_file.hpp"
#include "context.hpp"
#include <pulseinfer/admission/adaptive_admission.hpp>
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/admission/working_set_admission.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/workload/simulated_serving.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace pulseinfer;
using namespace std::chrono_literals;

namespace {

/// What all scenarios share. A layer reads its weights in 130 us and takes 5 us for a row (an 8B model); a block is 64 KiB.
struct setting {
  bool quick = false;
  std::uint32_t layers = 8;
  std::uint32_t most_rows = 96;
  std::uint32_t budget_blocks = 64;
  control_cost control = h200_control;
  link_cost kernels = pcie5_kernel;
  nanoseconds select_chain{14500};
  std::string machine = "H200, PCIe 5.0 x16";
  std::uint64_t seed = 0;  ///< added to those of the scenarios
};

setting given;  // NOLINT: set once, before anything runs
std::atomic<std::uint64_t> visited{0};

constexpr std::uint64_t block_bytes = 65536;
/// Blocks of 1 KiB on links that are as much slower stand for them: where rows are promoted their bytes really move.
constexpr std::uint32_t stand_in = 64;

struct load {
  workload_preset preset = workload_preset::summary;
  double link_bytes_per_second = 49e9;
  std::uint64_t seed = 1;
};

[[nodiscard]] serving_options options_of(load const& l)
{
  serving_options o;
  decode_options& d = o.decode;
  d.workload = {
    .layers = given.layers,
    .rows = given.most_rows,
    .budget_blocks = given.budget_blocks,
    .misses = misses_of(l.preset),
    .seed = l.seed + given.seed};
  d.engine = {.pass = {.per_pass = 130us, .per_row = 5us}, .hits_launch = 2us};
  d.machine.compute.per_launch = 0ns;  // in the weights' time
  d.machine.kernels = given.kernels;
  d.machine.kernels.per_run = 0ns;  // in the rate
  d.machine.kernels.to_device_bytes_per_s = l.link_bytes_per_second;
  d.block_bytes = block_bytes / stand_in;
  for (link_cost* const link : {&d.machine.kernels, &d.machine.copies}) {
    link->to_device_bytes_per_s /= stand_in;
    link->to_host_bytes_per_s /= stand_in;
  }
  d.machine.control = given.control;
  d.counts.select_chain = given.select_chain;
  d.rows_per_landing = 8;
  return o;
}

/// Requests that are all there from the beginning, more than are served.
void wait_all(serving_options& o, std::uint64_t seed)
{
  arrival_options const lengths{
    .pattern = arrival_pattern::constant,
    .requests_per_s = 1e6,
    .prompt = {.median = 1},
    .output = {.median = 200, .deviation = 0.4, .least = 32, .most = 800},
    .seed = seed + given.seed};
  o.requests = make_arrivals(lengths, 3ms);
}

template <class Admission>
[[nodiscard]] serving_result serve(serving_options const& o, Admission const& admits)
{
  serving_result r = simulate_serving(o, make_interruptible(o.decode), admits);
  visited += r.visits;
  return r;
}

[[nodiscard]] adaptive_admission adaptive(load const& l, nanoseconds target = 0ns)
{
  return {.tpot_target = target, .link_bytes_per_second = l.link_bytes_per_second / stand_in};
}

/// Tokens a second of the last two thirds of the steps.
[[nodiscard]] double settled_rate(serving_result const& r)
{
  return r.tokens_per_second(r.steps[r.steps.size() / 3].end, r.steps.back().end + 1ns);
}

class report {
 public:
  nlohmann::json rows = nlohmann::json::array();
  int judged = 0, missed = 0;

  /// What a scenario does not measure is null.
  void add(nlohmann::json row)
  {
    for (char const* key : {"ratio_to_best_fixed", "tpot_miss_share", "recalled_bytes"}) {
      if (!row.contains(key)) { row[key] = nullptr; }
    }
    row["seed"] = given.seed + 1;
    rows.push_back(std::move(row));
  }
  /// @return a mark for the printed line
  char const* judge(bool met)
  {
    ++judged;
    missed += met ? 0 : 1;
    return met ? "met" : "MISSED";
  }
};

/// Runs jobs on all cores.
void run_all(std::vector<std::function<void()>> const& jobs)
{
  std::atomic<std::size_t> next{0};
  std::atomic<bool> stop{false};
  std::exception_ptr failed;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < jobs.size() && !stop; i = next++) {
        try {
          jobs[i]();
        } catch (...) {
          if (!stop.exchange(true)) { failed = std::current_exception(); }
        }
      }
    });
  }
  for (std::thread& thread : threads) { thread.join(); }
  if (failed) { std::rethrow_exception(failed); }
}

// -- steady -----------------------------------------------------------------------------------------------------------

void steady(report& out)
{
  struct cell {
    workload_preset preset;
    char const* bound;
    load with;
    double fixed[6] = {};
    double ours = 0.0, working_set = 0.0, no_offload = 0.0;
    std::uint32_t our_rows = 0;
    std::uint64_t recalled = 0;
  };
  static constexpr std::uint32_t sizes[] = {12, 24, 36, 48, 72, 96};
  std::vector<cell> cells;
  for (workload_preset const preset : workload_presets) {
    cells.push_back({preset, "compute", {preset, 250e9}});
    cells.push_back({preset, "link", {preset, 15e9}});
  }
  std::vector<std::function<void()>> jobs;
  auto const options = [](cell const& c) {
    serving_options o = options_of(c.with);
    wait_all(o, 7);
    o.max_steps = given.quick ? 300 : 1500;
    return o;
  };
  for (cell& c : cells) {
    for (std::size_t i = 0; i < std::size(sizes); ++i) {
      jobs.emplace_back(
        [&c, &options, i] { c.fixed[i] = settled_rate(serve(options(c), fixed_admission{.max_rows = sizes[i]})); });
    }
    jobs.emplace_back([&c, &options] {
      serving_result const r = serve(options(c), adaptive(c.with));
      c.ours = settled_rate(r);
      c.our_rows = r.steps.back().rows;
      c.recalled = r.recalled_blocks * block_bytes;
    });
    jobs.emplace_back([&c, &options] { c.working_set = settled_rate(serve(options(c), working_set_admission{})); });
    jobs.emplace_back([&c, &options] {
      // What decodes in the slots of 96 rows of three budgets if every row of 16 budgets keeps all its blocks.
      serving_options o = options(c);
      o.decode.workload.misses.mean_logit = -20.0;
      o.decode.workload.misses.change_height = 0.0;
      c.no_offload = settled_rate(serve(o, fixed_admission{.max_rows = given.most_rows * 3 / 16}));
    });
  }
  run_all(jobs);
  std::printf(
    "\nsteady: requests wait all the time; tokens/s over those of the best fixed number of rows in hindsight (goal "
    "0.97)\n"
    "%-15s %-8s | %9s %5s | %8s %5s | %11s %10s\n",
    "preset", "bound", "best", "rows", "adaptive", "rows", "working set", "no offload");
  for (cell const& c : cells) {
    double const* const best = std::max_element(std::begin(c.fixed), std::end(c.fixed));
    double const ratio = c.ours / *best;
    std::printf(
      "%-15s %-8s | %9.0f %5u | %8.3f %5u | %11.3f %10.3f  %s\n", name_of(c.preset), c.bound, *best,
      sizes[best - c.fixed], ratio, c.our_rows, c.working_set / *best, c.no_offload / *best, out.judge(ratio >= 0.97));
    auto const add = [&](char const* policy, double rate) {
      out.add(
        {{"scenario", std::string{"steady, "} + c.bound + "-bound"},
         {"preset", name_of(c.preset)},
         {"policy", policy},
         {"tokens_per_second", rate},
         {"ratio_to_best_fixed", rate / *best}});
    };
    add("adaptive", c.ours);
    out.rows.back()["rows"] = c.our_rows;
    out.rows.back()["recalled_bytes"] = c.recalled;
    add("best fixed", *best);
    out.rows.back()["rows"] = sizes[best - c.fixed];
    add("working set", c.working_set);
    add("no offload", c.no_offload);
  }
}

// -- overload ---------------------------------------------------------------------------------------------------------

void overload(report& out)
{
  constexpr nanoseconds target = 5ms;
  static constexpr double loads[] = {6.0, 9.0, 12.0, 15.0, 18.0, 22.5, 27.0};  // requests a second
  struct cell {
    double fine[2] = {};  // working set, adaptive
    double missed[2] = {};
  };
  std::vector<workload_preset> presets{workload_preset::summary};
  if (!given.quick) { presets = {workload_preset::retrieval, workload_preset::summary, workload_preset::reasoning}; }
  auto const length = given.quick ? 12s : 40s;
  std::printf(
    "\noverload: a step may take %.0f ms; tokens/s of steps that do (goal at 1.25 and 1.5 times the load at which "
    "working set "
    "peaks:\nabove it, and at least 0.97 of adaptive's own peak)\n",
    static_cast<double>(target.count()) / 1e6);
  for (workload_preset const preset : presets) {
    load const l{preset, 25e9};
    auto const run = [&](double rate, auto const& policy, double& fine, double& missed) {
      serving_options o = options_of(l);
      o.requests = make_arrivals(
        {.requests_per_s = rate,
         .prompt = {.median = 1},
         .output = {.median = 300, .deviation = 0.4, .least = 32, .most = 900},
         .seed = 3 + given.seed},
        length);
      o.end = length;
      serving_result const r = serve(o, policy);
      nanoseconds const all = length, from = all / 4;
      double tokens = 0.0;
      for (served_step const& s : r.steps) { tokens += s.end >= from && s.time <= target ? s.rows : 0.0; }
      fine = tokens / (static_cast<double>((all - from).count()) * 1e-9);
      missed = r.missed_share(target, from, length);
    };
    std::vector<cell> cells(std::size(loads));
    std::vector<std::function<void()>> jobs;
    for (std::size_t i = 0; i < std::size(loads); ++i) {
      jobs.emplace_back([&, i] { run(loads[i], working_set_admission{}, cells[i].fine[0], cells[i].missed[0]); });
      jobs.emplace_back([&, i] { run(loads[i], adaptive(l, target), cells[i].fine[1], cells[i].missed[1]); });
    }
    run_all(jobs);
    double ws_peak = 0.0, own_peak = 0.0;
    std::size_t peak = 0;
    for (std::size_t i = 0; i < std::size(loads); ++i) {
      if (cells[i].fine[0] > ws_peak) {
        ws_peak = cells[i].fine[0];
        peak = i;
      }
      own_peak = std::max(own_peak, cells[i].fine[1]);
    }
    for (std::size_t i = 0; i < std::size(loads); ++i) {
      std::printf(
        "%-10s %5.1f requests/s: working set %7.0f (%5.1f %% late), adaptive %7.0f (%4.2f %% late)%s\n",
        name_of(preset), loads[i], cells[i].fine[0], cells[i].missed[0] * 100.0, cells[i].fine[1],
        cells[i].missed[1] * 100.0, i == peak ? "  <- working set peaks" : "");
    }
    // Loads that the table above has are not run again.
    static constexpr double beyond[] = {1.25, 1.5};
    cell above[std::size(beyond)];
    jobs.clear();
    for (std::size_t k = 0; k < std::size(beyond); ++k) {
      double const rate = loads[peak] * beyond[k];
      double const* const known = std::find(std::begin(loads), std::end(loads), rate);
      cell& c = above[k];
      if (known != std::end(loads)) {
        c = cells[static_cast<std::size_t>(known - std::begin(loads))];
        continue;
      }
      jobs.emplace_back([&, rate] { run(rate, working_set_admission{}, c.fine[0], c.missed[0]); });
      jobs.emplace_back([&, rate] { run(rate, adaptive(l, target), c.fine[1], c.missed[1]); });
    }
    run_all(jobs);
    for (std::size_t k = 0; k < std::size(beyond); ++k) {
      double const times = beyond[k];
      cell const& c = above[k];
      own_peak = std::max(own_peak, c.fine[1]);
      bool const met = c.fine[1] > c.fine[0] && c.fine[1] >= 0.97 * own_peak;
      std::printf(
        "%-10s x%.2f: working set %7.0f, adaptive %7.0f, %.3f of its peak, %.2f %% late  %s\n", name_of(preset), times,
        c.fine[0], c.fine[1], c.fine[1] / own_peak, c.missed[1] * 100.0, out.judge(met));
      char const* const names[] = {"working set", "adaptive"};
      for (std::size_t p = 0; p < 2; ++p) {
        out.add(
          {{"scenario", "overload"},
           {"preset", name_of(preset)},
           {"policy", names[p]},
           {"load", times},
           {"goodput", c.fine[p]},
           {"ratio_to_own_peak", c.fine[p] / (p == 0 ? ws_peak : own_peak)},
           {"tpot_miss_share", c.missed[p]}});
      }
    }
  }
}

// -- bursts -----------------------------------------------------------------------------------------------------------

/// Steps of `r` within [from, to) at which the policy's limit turned.
[[nodiscard]] int turns(serving_result const& r, nanoseconds from, nanoseconds to)
{
  int count = 0, direction = 0;
  std::uint32_t before = 0;
  for (served_step const& s : r.steps) {
    if (s.end < from || s.end >= to) { continue; }
    int const moved = before == 0 || s.limit == before ? 0 : s.limit > before ? 1 : -1;
    count += moved != 0 && direction != 0 && moved != direction ? 1 : 0;
    direction = moved == 0 ? direction : moved;
    before = s.limit;
  }
  return count;
}

void bursts(report& out)
{
  constexpr nanoseconds target = 5ms;
  std::vector<workload_preset> presets{workload_preset::summary};
  if (!given.quick) { presets.assign(std::begin(workload_presets), std::end(workload_presets)); }
  std::printf(
    "\nbursts: five times as many requests for 60 s, a step may take %.0f ms (goals: at most 1 %% of tokens late, at "
    "most 2 turns "
    "a minute once settled, at most 64 steps that left someone waiting before as many ran as later)\n",
    static_cast<double>(target.count()) / 1e6);
  struct cell {
    double missed = 0.0;
    int turned = 0;
    std::uint32_t settled = 0, rows = 0;
    std::uint64_t visits = 0;
  };
  std::vector<cell> cells(presets.size());
  std::vector<std::function<void()>> jobs;
  for (std::size_t i = 0; i < presets.size(); ++i) {
    jobs.emplace_back([&, i] {
      load const l{presets[i], 25e9};
      serving_options o = options_of(l);
      // Requests wait for a while after the burst, so that the minute in which turns are counted is one of a settled system.
      constexpr nanoseconds begin = 5s, last = 60s, after = 10s;
      o.requests = make_arrivals(
        {.requests_per_s = 6.0,
         .burst_factor = 5.0,
         .first_burst = begin,
         .burst_length = last,
         .prompt = {.median = 1},
         .output = {.median = 300, .deviation = 0.4, .least = 32, .most = 900},
         .seed = 5 + given.seed},
        begin + last + after);
      o.end = begin + last + after;
      serving_result const r = serve(o, adaptive(l, target));
      cell& c = cells[i];
      c.missed = r.missed_share(target, 0s, o.end);
      c.visits = r.visits;
      // Settled: from there on rows stay within a tenth of their mean while others wait.
      nanoseconds const settled_from = begin + 10s;
      double rows = 0.0, steps = 0.0;
      for (served_step const& s : r.steps) {
        if (s.end < settled_from || s.end >= begin + last || s.waiting == 0) { continue; }
        rows += s.rows;
        ++steps;
      }
      double const mean = steps > 0.0 ? rows / steps : 0.0;
      c.rows = static_cast<std::uint32_t>(std::lround(mean));
      // Steps that left someone waiting although fewer ran than once it had settled.
      std::uint32_t since = 0;
      for (served_step const& s : r.steps) {
        if (s.end < begin) { continue; }
        if (s.rows >= 0.9 * mean) { break; }
        since += s.waiting > 0 ? 1U : 0U;
      }
      c.settled = since;
      c.turned = turns(r, settled_from, settled_from + 60s);
    });
  }
  run_all(jobs);
  for (std::size_t i = 0; i < presets.size(); ++i) {
    cell const& c = cells[i];
    bool const met = c.missed <= 0.01 && c.turned <= 2 && c.settled <= 64;
    std::printf(
      "%-15s %.2f %% late, %d turns a minute, settled in %u steps at %u rows  %s\n", name_of(presets[i]),
      c.missed * 100.0, c.turned, c.settled, c.rows, out.judge(met));
    out.add(
      {{"scenario", "bursts"},
       {"preset", name_of(presets[i])},
       {"policy", "adaptive"},
       {"tpot_miss_share", c.missed},
       {"turns_per_minute", c.turned},
       {"settled_steps", c.settled},
       {"rows", c.rows}});
  }
}

// -- rows in slots ------------------------------------------------------------------------------------------------------

constexpr std::uint32_t prompt_blocks = 512;  // eight budgets
constexpr std::uint32_t answer_tokens = 400;

/// Requests of 8,192 tokens, at equal times.
[[nodiscard]] std::vector<request_arrival> long_requests(double per_second, nanoseconds end)
{
  return make_arrivals(
    {.pattern = arrival_pattern::constant,
     .requests_per_s = per_second,
     .prompt = {.median = prompt_blocks * 16},
     .output = {.median = answer_tokens},
     .seed = 1},
    end);
}

/// Slots for so many rows with every block and so many with a lease.
[[nodiscard]] std::uint64_t slots_for(std::uint32_t resident, std::uint32_t offloaded)
{
  std::uint64_t const all = prompt_blocks + answer_tokens / 16 + 1;
  return given.layers * (resident * all + offloaded * std::uint64_t{3} * given.budget_blocks);
}

void light_load(report& out)
{
  load const l{workload_preset::summary, 25e9};
  serving_options o = options_of(l);
  o.decode.workload.rows = 8;
  o.slots = slots_for(8, 0);
  o.place_freely = true;
  o.join_steps = 8;
  nanoseconds const length = given.quick ? 4s : 12s;
  o.requests = long_requests(4.0, length);
  o.end = length;
  serving_result ours, never;
  run_all(
    {[&] { ours = serve(o, adaptive(l)); },
     [&] {
       serving_options resident = o;
       // Sparse rows whose hits are all there, in lockstep: what an engine without offload does.
       resident.decode.workload.misses.mean_logit = -20.0;
       resident.decode.workload.misses.change_height = 0.0;
       never = simulate_serving(resident, lockstep_scheduler<visit_order::whole>{}, adaptive(l));
     }});
  double const visits = static_cast<double>(ours.launches) / static_cast<double>(ours.steps.size());
  double const rate = settled_rate(ours) / settled_rate(never);
  bool const met = ours.recalled_blocks == 0 && visits <= given.layers && rate >= 0.99;
  std::printf(
    "\nlight load: everything fits (goals: nothing recalled, no visit besides one a layer, at most 1 %% slower)\n"
    "%llu blocks recalled, %.2f visits a step in %u layers, %.3f of the tokens/s without offload  %s\n",
    static_cast<unsigned long long>(ours.recalled_blocks), visits, given.layers, rate, out.judge(met));
  out.add(
    {{"scenario", "light load"},
     {"preset", name_of(l.preset)},
     {"policy", "adaptive"},
     {"recalled_bytes", ours.recalled_blocks * block_bytes},
     {"visits_per_step_and_layer", visits / given.layers},
     {"ratio_to_no_offload", rate}});
}

void placing(report& out)
{
  // Memory for 6 rows with all their blocks, or 16 of which all recall.
  load const l{workload_preset::summary, 25e9};
  nanoseconds const length = given.quick ? 6s : 20s;
  struct run_of {
    char const* policy;
    double rate = 0.0, offloaded = 0.0, rows = 0.0;
    std::uint64_t recalled = 0;
  };
  run_of runs[] = {{"no offload"}, {"offload all"}, {"adaptive"}};
  std::vector<std::function<void()>> jobs;
  for (std::size_t i = 0; i < std::size(runs); ++i) {
    jobs.emplace_back([&, i] {
      serving_options o = options_of(l);
      o.decode.workload.rows = i == 0 ? 6 : 16;
      o.slots = slots_for(6, 0) + slots_for(0, 1);
      o.place_freely = i != 1;
      o.join_steps = 8;
      o.requests = long_requests(100.0, length);
      o.end = length;
      serving_result const r = i == 2 ? serve(o, adaptive(l))
        : i == 0                      ? serve(o, adaptive(l))
                                      : serve(o, fixed_admission{});
      runs[i].rate = settled_rate(r);
      double steps = 0.0;
      for (served_step const& s : r.steps) {
        if (s.end < length / 3) { continue; }
        runs[i].offloaded += s.offloaded;
        runs[i].rows += s.rows;
        ++steps;
      }
      runs[i].offloaded /= steps;
      runs[i].rows /= steps;
      runs[i].recalled = r.recalled_blocks * block_bytes / std::max<std::uint64_t>(r.tokens, 1);
    });
  }
  run_all(jobs);
  double const best = std::max(runs[0].rate, runs[1].rate);
  bool const met = runs[2].rate >= 0.97 * best;
  std::printf(
    "\nplacing: slots for 6 resident rows or 16 that recall, requests wait (goal: 0.97 of the better extreme)\n");
  for (run_of const& r : runs) {
    std::printf(
      "%-12s %7.0f tokens/s, %4.1f rows of which %4.1f recall, %6.2f MB a token\n", r.policy, r.rate, r.rows,
      r.offloaded, static_cast<double>(r.recalled) / 1e6);
    out.add(
      {{"scenario", "placing"},
       {"preset", name_of(l.preset)},
       {"policy", r.policy},
       {"tokens_per_second", r.rate},
       {"rows", r.rows},
       {"offloaded_rows", r.offloaded},
       {"recalled_bytes_per_token", r.recalled}});
  }
  std::printf("adaptive: %.3f of the better  %s\n", runs[2].rate / best, out.judge(met));
}

// -- uneven layers ------------------------------------------------------------------------------------------------------

/// What the best slots by layer would leave of the misses that equal ones have: m (h / 3)^-t, h in [1 + ring, 6] budgets.
[[nodiscard]] double best_spread(serving_options const& o, double least, double most)
{
  std::uint32_t const layers = o.decode.workload.layers;
  miss_generator generator{o.decode.workload};
  std::vector<double> share(layers, 0.0);
  for (int step = 0; step < 400; ++step) {
    generator.next_step();
    for (std::uint32_t row = 0; row < o.decode.workload.rows; ++row) {
      for (std::uint32_t l = 0; l < layers; ++l) {
        share[l] += generator.miss_ratio(static_cast<row_id>(row), static_cast<layer_id>(l));
      }
    }
  }
  double const t = o.decode.workload.misses.hot_exponent;
  double low = 0.0, high = 1e9, equal = 0.0, spread = 0.0;
  auto const hot = [&](double m, double height) {
    return std::clamp(std::pow(m, 1.0 / (1.0 + t)) * height, least, most);
  };
  for (int i = 0; i < 100; ++i) {
    double const middle = (low + high) / 2.0;
    double sum = 0.0;
    for (double const m : share) { sum += hot(m, middle); }
    (sum <= 3.0 * layers ? low : high) = middle;
  }
  for (double const m : share) {
    equal += m;
    spread += m * std::pow(hot(m, low) / 3.0, -t);
  }
  return 1.0 - spread / equal;
}

void uneven_layers(report& out)
{
  std::printf(
    "\nuneven layers: recalled bytes with slots dealt out by marginal misses against equal ones (goal: 20 %% fewer)\n");
  std::vector<workload_preset> presets{workload_preset::summary};
  if (!given.quick) { presets.assign(std::begin(workload_presets), std::end(workload_presets)); }
  for (workload_preset const preset : presets) {
    load const l{preset, 25e9};
    serving_options o = options_of(l);
    o.decode.workload.layers = 32;
    o.decode.workload.rows = 8;
    wait_all(o, 7);
    o.max_steps = given.quick ? 800 : 2000;
    double const bound = best_spread(o, 1.05, 6.0);
    serving_options spread = o;
    spread.max_quota_blocks = 6 * given.budget_blocks;
    double bytes[2] = {};
    run_all(
      {[&] {
         serving_result const r = serve(o, adaptive(l));
         for (std::size_t i = r.steps.size() / 2; i < r.steps.size(); ++i) {
           bytes[0] += static_cast<double>(r.steps[i].recalled_blocks) / r.steps[i].rows;
         }
       },
       [&] {
         serving_result const r = serve(spread, adaptive(l));
         for (std::size_t i = r.steps.size() / 2; i < r.steps.size(); ++i) {
           bytes[1] += static_cast<double>(r.steps[i].recalled_blocks) / r.steps[i].rows;
         }
       }});
    double const saved = 1.0 - bytes[1] / bytes[0];
    std::printf(
      "%-15s %4.1f %% fewer; the best slots by layer, if all were known: %4.1f %%  %s\n", name_of(preset),
      saved * 100.0, bound * 100.0, out.judge(saved >= 0.2));
    out.add(
      {{"scenario", "uneven layers"},
       {"preset", name_of(preset)},
       {"policy", "adaptive"},
       {"saved_share", saved},
       {"saved_share_bound", bound}});
  }
}

// -- one that misses everything -----------------------------------------------------------------------------------------

void adversarial_row(report& out)
{
  load const l{workload_preset::summary, 25e9};
  nanoseconds const length = given.quick ? 5s : 10s;
  auto const run = [&](bool with, bool freely) {
    serving_options o = options_of(l);
    o.decode.workload.rows = 24;
    o.slots = slots_for(3, 21);
    o.place_freely = freely;
    o.join_steps = 8;
    o.requests = long_requests(18.0, length);
    std::uint64_t const odd = o.requests.size() / 2;
    o.requests[odd].output_tokens = 600;
    if (with) {
      o.extra_logit = [odd](std::uint64_t number) { return number == odd ? 8.0 : 0.0; };
    }
    nanoseconds const from = o.requests[odd].at;
    o.end = length;
    serving_result const r = freely ? serve(o, adaptive(l)) : serve(o, fixed_admission{});
    double time = 0.0, steps = 0.0;
    for (served_step const& s : r.steps) {
      if (s.end < from || steps == 400.0) { continue; }
      time += static_cast<double>(s.time.count()) * 1e-6;
      ++steps;
    }
    return time / steps;
  };
  double ms[4] = {};
  run_all(
    {[&] { ms[0] = run(false, true); }, [&] { ms[1] = run(true, true); }, [&] { ms[2] = run(false, false); },
     [&] { ms[3] = run(true, false); }});
  double const slower = ms[1] / ms[0] - 1.0;
  std::printf(
    "\nadversarial row: one request that misses everything among 20 (goal: the others' TPOT at most 10 %% longer)\n"
    "adaptive %.2f ms, %.2f without it: %+.1f %%; everything offloaded: %.2f ms, %.2f without it: %+.1f %%  %s\n",
    ms[1], ms[0], slower * 100.0, ms[3], ms[2], (ms[3] / ms[2] - 1.0) * 100.0, out.judge(slower <= 0.1));
  for (std::size_t i = 0; i < 2; ++i) {
    out.add(
      {{"scenario", "adversarial row"},
       {"preset", name_of(l.preset)},
       {"policy", i == 0 ? "adaptive" : "offload all"},
       {"tpot_ms", ms[2 * i + 1]},
       {"tpot_slower_share", ms[2 * i + 1] / ms[2 * i] - 1.0}});
  }
}

// -- memory as the limit ------------------------------------------------------------------------------------------------

void host_memory(report& out)
{
  load const l{workload_preset::summary, 250e9};
  std::uint64_t const of_one = prompt_blocks + answer_tokens / 16;
  nanoseconds const length = given.quick ? 4s : 10s;
  serving_options o = options_of(l);
  o.decode.workload.rows = 32;
  o.host_blocks = 12 * of_one;
  o.join_steps = 8;
  o.requests = long_requests(200.0, length);
  o.requests.insert(
    o.requests.begin() + 3, {.at = o.requests[3].at, .prompt_tokens = 16 * 16 * prompt_blocks, .output_tokens = 8});
  o.end = length;
  serving_options twelve = o;
  twelve.host_blocks = 0;
  twelve.requests.erase(twelve.requests.begin() + 3);
  serving_result r;
  double of_twelve = 0.0;
  run_all(
    {[&] { r = serve(o, adaptive(l)); },
     [&] { of_twelve = settled_rate(serve(twelve, fixed_admission{.max_rows = 12})); }});
  double const rate = settled_rate(r) / of_twelve;
  double const thrashing = static_cast<double>(r.thrash_steps) / static_cast<double>(r.tokens);
  bool const met = r.most_rows <= 12 && r.rejected == 1 && thrashing <= 0.001 && rate >= 0.97 && !r.refusal.empty();
  std::printf(
    "\nhost memory: blocks for 12 requests, one that is longer than all of them together (goals: 12 rows at most, one "
    "rejected, a row in at most one step of a\nthousand recalls more than it finds,\n0.97 of what 12 rows give)\n%u "
    "rows, %llu rejected, %.5f of steps, %.3f; a request that "
    "waits %s  %s\n",
    r.most_rows, static_cast<unsigned long long>(r.rejected), thrashing, rate, r.refusal.c_str(), out.judge(met));
  out.add(
    {{"scenario", "host memory"},
     {"preset", name_of(l.preset)},
     {"policy", "adaptive"},
     {"rows", r.most_rows},
     {"rejected", r.rejected},
     {"thrash_share", thrashing},
     {"ratio_to_best_fixed", rate}});
}

void digests(report& out)
{
  load const l{workload_preset::summary, 250e9};
  constexpr std::uint32_t of_one = (prompt_blocks + answer_tokens / 16) / 64 + 1;  // extents of 64 blocks
  nanoseconds const length = given.quick ? 4s : 10s;
  serving_options o = options_of(l);
  o.decode.workload.rows = 32;
  o.digest_bytes = 16;
  o.digest_extents = 12 * of_one + of_one - 1;
  o.join_steps = 8;
  o.requests = long_requests(200.0, length);
  o.requests.insert(
    o.requests.begin() + 3, {.at = o.requests[3].at, .prompt_tokens = 16 * 16 * prompt_blocks, .output_tokens = 8});
  o.end = length;
  serving_options twelve = o;
  twelve.digest_extents = 0;
  twelve.requests.erase(twelve.requests.begin() + 3);
  serving_result r;
  double of_twelve = 0.0;
  run_all(
    {[&] { r = serve(o, adaptive(l)); },
     [&] { of_twelve = settled_rate(serve(twelve, fixed_admission{.max_rows = 12})); }});
  double const rate = settled_rate(r) / of_twelve;
  double const thrashing = static_cast<double>(r.thrash_steps) / static_cast<double>(r.tokens);
  bool const says = r.refusal.starts_with("lacks digest extents");
  bool const met = r.most_rows == 12 && r.rejected == 1 && thrashing <= 0.001 && rate >= 0.97 && says;
  std::printf(
    "\ndigests: memory for those of 12 requests, one that is longer than all of them together (goals: 12 rows, one "
    "rejected, a row in at most one step of a thousand\nrecalls more than it finds, 0.97 of what 12 rows give)\n%u "
    "rows, %llu rejected, %.5f of steps, %.3f; a request that waits %s  %s\n",
    r.most_rows, static_cast<unsigned long long>(r.rejected), thrashing, rate, r.refusal.c_str(), out.judge(met));
  out.add(
    {{"scenario", "digests"},
     {"preset", name_of(l.preset)},
     {"policy", "adaptive"},
     {"rows", r.most_rows},
     {"rejected", r.rejected},
     {"thrash_share", thrashing},
     {"ratio_to_best_fixed", rate}});
}

struct scenario {
  char const* name;
  void (*run)(report&);
};
constexpr scenario scenarios[] = {
  {"steady", steady},
  {"overload", overload},
  {"bursts", bursts},
  {"light-load", light_load},
  {"placing", placing},
  {"uneven-layers", uneven_layers},
  {"adversarial-row", adversarial_row},
  {"host-memory", host_memory},
  {"digests", digests}};

int write(report const& out, nlohmann::json context, char const* file)
{
  nlohmann::json document = nlohmann::json::object();
  if (std::ifstream in{file}; in) {
    nlohmann::json const before = nlohmann::json::parse(in, nullptr, false);
    if (before.is_object()) { document = before; }
  }
  document["admission"] = out.rows;
  document["admission_context"] = std::move(context);
  std::ofstream to{file};
  to << document.dump(1) << '\n';
  if (to) { return 0; }
  std::fprintf(stderr, "error: cannot write %s\n", file);
  return 1;
}

}  // namespace

int main(int count, char** arguments)
{
  char const *json_file = nullptr, *machine_file = nullptr, *only = nullptr;
  std::uint64_t seeds = 0;
  for (int i = 1; i < count; ++i) {
    bool const more = i + 1 < count;
    if (std::strcmp(arguments[i], "--quick") == 0) {
      given.quick = true;
    } else if (std::strcmp(arguments[i], "--json") == 0 && more) {
      json_file = arguments[++i];
    } else if (std::strcmp(arguments[i], "--machine") == 0 && more) {
      machine_file = arguments[++i];
    } else if (std::strcmp(arguments[i], "--only") == 0 && more) {
      only = arguments[++i];
    } else if (std::strcmp(arguments[i], "--seeds") == 0 && more) {
      seeds = std::strtoull(arguments[++i], nullptr, 10);
    } else {
      std::fprintf(
        stderr,
        "usage: table_scheduler_admission [--quick] [--json FILE] [--machine FILE] [--only SCENARIO] [--seeds N]\n");
      return 2;
    }
  }
  if (seeds == 0) { seeds = given.quick ? 1 : 3; }
  try {
    if (machine_file != nullptr) {
      pulseinfer_bench::machine const read = pulseinfer_bench::read_machine(machine_file);
      given.control = read.options.control;
      given.kernels = read.options.kernels;
      given.select_chain = read.select_chain;
      given.machine = read.name;
      std::printf("%s\n", read.name.c_str());
    }
    auto const began = std::chrono::steady_clock::now();
    report out;
    for (given.seed = 0; given.seed < seeds; ++given.seed) {
      if (seeds > 1) { std::printf("\n== seed %llu\n", static_cast<unsigned long long>(given.seed + 1)); }
      for (scenario const& s : scenarios) {
        if (only == nullptr || std::strcmp(only, s.name) == 0) { s.run(out); }
      }
    }
    std::printf(
      "\nadmission: %d goals missed of %d; %.0f s; %.1f million visits of a row at a layer, %.2f million for each "
      "second of a core\n",
      out.missed, out.judged, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(),
      static_cast<double>(visited) * 1e-6,
      static_cast<double>(visited) * 1e-6 * CLOCKS_PER_SEC / static_cast<double>(std::clock()));
    nlohmann::json context = pulseinfer_bench::context_of(count, arguments, given.machine, seeds);
    return json_file != nullptr ? write(out, std::move(context), json_file) : 0;
  } catch (std::exception const& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
