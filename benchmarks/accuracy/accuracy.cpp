// What block selection costs a real model, against dense attention of the same model on the same text.
//   accuracy table --model FOLDER --documents FILE [--quick] [--json FILE]     every configuration of the table
//   accuracy layers | closed-loop | trace ...                                  see --help
// scripts/bench accuracy prepares model and documents.

#include "document_tasks.hpp"
#include "evaluation.hpp"
#include "recorded.hpp"
#include "statistics.hpp"
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/observe/selection_trace.hpp>
#include <pulseinfer/selector/calibration.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

extern "C" void openblas_set_num_threads(int);
extern "C" char* openblas_get_corename();

namespace {

using namespace accuracy;
using nlohmann::json;
using clock_type = std::chrono::steady_clock;

struct command_options {
  std::filesystem::path model, documents, json_file, output;
  std::vector<std::size_t> range;  // first document, and the one behind the last
  unsigned threads = std::max(1U, std::thread::hardware_concurrency());
  double seconds = 1e9;
  bool quick = false;
  std::string only = {};
  std::vector<std::uint32_t> dense_layers = {};
  std::filesystem::path calibration = {};
  std::uint32_t budget = 1024, tokens = 2048;
  double temperature = 1.0, deferred_share = 0.0;
  std::uint32_t block_tokens = 16, recent_tokens = 0, digest_tokens = 4, slots = 0, head_groups = 1;
  float hysteresis = 0.25F;
  std::string digest = "cuboid_mean", digest_type = "int8", rule = "soft_vote";
  bool oracle = false, one_row = false;
};

double elapsed()
{
  static auto const start = clock_type::now();
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

void say(std::string const& text)
{
  static std::mutex mutex;
  std::lock_guard const lock{mutex};
  std::fprintf(stderr, "[%6.1f s] %s\n", elapsed(), text.c_str());
}

std::vector<document> read_documents(command_options const& options, json& context)
{
  std::ifstream stream{options.documents};
  if (!stream) { throw std::runtime_error{options.documents.string() + ": cannot be opened"}; }
  json const file = json::parse(stream);
  std::vector<document> documents;
  for (json const& each : file.at("documents")) {
    documents.push_back(
      {.name = each.at("name"),
       .kind = each.at("kind"),
       .tokens = each.at("tokens").get<std::vector<std::int32_t>>(),
       .scored = each.at("scored")});
  }
  std::size_t const first = options.range.empty() ? 0 : options.range.at(0);
  std::size_t const last = options.range.empty() ? documents.size() : options.range.at(1);
  if (first >= last || last > documents.size()) {
    throw std::runtime_error{
      "documents " + std::to_string(first) + " to " + std::to_string(last) + " of " + std::to_string(documents.size())};
  }
  documents = {
    documents.begin() + static_cast<std::ptrdiff_t>(first), documents.begin() + static_cast<std::ptrdiff_t>(last)};
  for (document const& each : documents) {
    context["documents"].push_back({{"name", each.name}, {"kind", each.kind}, {"tokens", each.tokens.size()}});
  }
  return documents;
}

/// Threads that take one task after the other. Nothing is shared but the weights.
class workers {
 public:
  workers(host_engine::llama_weights const& weights, unsigned threads, std::size_t tasks)
    : threads_{static_cast<unsigned>(std::min<std::size_t>(threads, tasks))}
  {
    for (unsigned i = 0; i < threads_; ++i) {
      engines_.push_back(std::make_unique<host_engine::llama_engine>(
        weights, host_engine::llama_engine::size_limits{.rows = 1, .row_tokens = document_run::chunk}));
    }
  }

  /// Calls `body(engine, document)` for each document, as soon as a thread is free.
  void each(std::size_t documents, std::function<void(host_engine::llama_engine&, std::size_t)> const& body)
  {
    std::vector<std::size_t> all(documents);
    std::iota(all.begin(), all.end(), std::size_t{0});
    each_task(all, documents, body);
  }

  /// Calls `body(engine, task)` for each task, as soon as a thread and the task's document are free.
  /// @param document_of [tasks]
  void each_task(
    std::vector<std::size_t> const& document_of, std::size_t documents,
    std::function<void(host_engine::llama_engine&, std::size_t)> const& body)
  {
    document_tasks tasks{document_of, documents};
    std::exception_ptr problem;
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < threads_; ++i) {
      threads.emplace_back([&, i] {
        while (std::optional<std::size_t> const task = tasks.take()) {
          try {
            body(*engines_[i], *task);
          } catch (...) {
            std::lock_guard const lock{mutex};
            problem = std::current_exception();
          }
          tasks.give_back(*task);
        }
      });
    }
    for (std::thread& thread : threads) { thread.join(); }
    if (problem) { std::rethrow_exception(problem); }
  }

 private:
  unsigned threads_;
  std::vector<std::unique_ptr<host_engine::llama_engine>> engines_;
};

/// Documents of a kind take turns in two folds: what is calibrated on one is judged on the other.
std::vector<std::size_t> folds_of(std::vector<document> const& documents)
{
  std::map<std::string, std::size_t> seen;
  std::vector<std::size_t> folds;
  for (document const& each : documents) { folds.push_back(seen[each.kind]++ % 2); }
  return folds;
}

/// A row of the table before its documents have run.
struct plan {
  configuration options;
  std::size_t documents = 32;                    // the first so many
  std::vector<head_mask> heads_of_fold[2] = {};  // empty: as in the options
  std::string calibrated = {};                   // "designated_head", "few_heads", "fallback"
};

/// Three budgets where the budget is small; less of a large one, since the texts have 7,000 tokens in all.
std::uint32_t slots_of(std::uint32_t budget) { return std::max(3 * std::min(budget, 512U), budget + 1024); }

/// Bytes for each 4 tokens are what the examples take.
configuration base(std::string name, std::uint32_t budget)
{
  return {
    .name = std::move(name),
    .digest_type = pulseinfer::dtype::int8,
    .digest_tokens = 4,
    .budget_tokens = budget,
    .recent_tokens = std::max(128U, budget / 8),
    .slots_tokens = slots_of(budget)};
}

/// The rows of the table. `lookup` are the layers that stay dense where a row says nothing else.
class table_plans {
 public:
  explicit table_plans(std::vector<std::uint32_t> lookup) : lookup_{std::move(lookup)} {}

  [[nodiscard]] std::vector<plan> quick() &&
  {
    rules(score_source::digest, lookup_, {{"soft_vote", 4}, {"group", 4}, {"headwise", 4}, {"fallback", 4}});
    row("digests", 4, [](configuration& c) { whole_blocks(c, digest_kind::cuboid_mean); });
    row("digests", 4, [](configuration& c) { c.digest = digest_kind::min_max; });
    row("levers", 4, [](configuration& c) { c.scores = score_source::oracle; });
    return std::move(plans_);
  }

  [[nodiscard]] std::vector<plan> all() &&
  {
    using enum digest_kind;
    constexpr auto oracle = score_source::oracle;
    constexpr std::size_t shown = 16, few = 8;
    rules(score_source::digest, lookup_, {{"soft_vote", 32}, {"group", 32}, {"fallback", 32}, {"headwise", shown}});
    rules(oracle, {}, {{"soft_vote", 32}, {"group", 32}, {"headwise", shown}});
    row("budgets", 32, [](configuration& c) { c = with_budget(c, 2048); });
    row("digests", 32, [](configuration& c) { whole_blocks(c, cuboid_mean); });
    row("levers", 32, [](configuration& c) { c.deferred_share = 0.02; });

    row("levers", shown, [](configuration& c) { c.scores = oracle; });
    row("budgets", shown, [](configuration& c) { c = with_budget(c, 512); });
    row("budgets", shown, [](configuration& c) {
      c = with_budget(c, 2048);
      c.scores = oracle;
    });
    for (bool const pieces : {false, true}) {
      row("levers", shown, [pieces](configuration& c) {
        c.dense_layers = {};
        if (!pieces) { whole_blocks(c, cuboid_mean); }
      });
    }
    row("digests", shown, [](configuration& c) { c.digest_type = pulseinfer::dtype::float16; });
    row("digests", shown, [](configuration& c) {
      whole_blocks(c, cuboid_mean);
      c.digest_type = pulseinfer::dtype::int8;
    });
    row("digests", shown, [](configuration& c) { c.digest = min_max; });
    row("digests", shown, [](configuration& c) { c.digest = log_mass; });
    row("digests", shown, [](configuration& c) {
      c.digest = mean_key;
      c.digest_tokens = 2;
    });

    row("digests", few, [](configuration& c) { c.digest = mean_key; });
    row("digests", few, [](configuration& c) { c.digest_tokens = 8; });
    row("digests", few, [](configuration& c) {
      c.digest = mean_key;
      c.digest_tokens = 1;
    });
    for (auto const kind : {min_max, mean_key, log_mass}) {
      row("digests", few, [kind](configuration& c) { whole_blocks(c, kind); });
    }
    row("digests", few, [](configuration& c) {
      whole_blocks(c, log_mass);
      c.digest_type = pulseinfer::dtype::int8;
    });
    if (lookup_.size() > 1) {
      row("levers", few, [](configuration& c) { c.dense_layers.erase(c.dense_layers.begin() + 1); });
    }
    row("levers", few, [](configuration& c) { c.dense_layers.insert(c.dense_layers.begin(), {0, 1}); });
    row("levers", few, [](configuration& c) { c.block_tokens = 32; });
    row("levers", few, [](configuration& c) { c.hysteresis = 0.0F; });
    row("levers", few, [](configuration& c) { c.recent_tokens = c.budget_tokens / 4; });
    row(
      "levers", few, [](configuration& c) { c.recent_tokens = c.budget_tokens - 64; });  // a window, and nothing chosen
    row("levers", few, [](configuration& c) {
      c.digest = log_mass;
      c.deferred_share = 0.02;
    });
    row("budgets", few, [](configuration& c) {
      c = with_budget(c, 2048);
      c.dense_layers = {};
    });
    row("budgets", few, [](configuration& c) {
      c = with_budget(c, 512);
      c.scores = oracle;
    });
    return std::move(plans_);
  }

 private:
  struct rule_row {
    char const* rule;
    std::size_t documents;
  };

  static void whole_blocks(configuration& c, digest_kind kind)
  {
    c.digest = kind;
    c.digest_type = pulseinfer::dtype::float16;
    c.digest_tokens = 0;
  }
  static configuration with_budget(configuration const& c, std::uint32_t budget)
  {
    configuration result = base(c.name, budget);
    result.dense_layers = c.dense_layers;
    return result;
  }

  void row(char const* name, std::size_t documents, std::function<void(configuration&)> const& change)
  {
    configuration c = base(name, 1024);
    c.dense_layers = lookup_;
    change(c);
    plans_.push_back({.options = std::move(c), .documents = documents});
  }

  /// Head rules that recall as many bytes as the first of them.
  void rules(score_source scores, std::vector<std::uint32_t> const& dense_layers, std::vector<rule_row> const& rows)
  {
    for (rule_row const& each : rows) {
      configuration c = base("rules", 1024);
      std::string const rule = each.rule;
      c.scores = scores;
      c.dense_layers = dense_layers;
      c.rule = rule == "headwise" ? head_rule::headwise
        : rule == "max_share"     ? head_rule::max_share
                                  : head_rule::soft_vote;
      c.rule_name = rule == "fallback" ? "designated_head or fallback" : rule == "group" ? "soft_vote" : rule;
      c.head_groups = rule == "headwise" || rule == "group" ? 0 : 1;  // 0: a lane for each KV head
      c.equal_bytes = &each != rows.data();
      // Where the search begins. Queries that choose for themselves agree in part of what they read.
      if (rule == "headwise") { c.budget_blocks = 0.56 * c.blocks(); }
      if (rule == "max_share") { c.budget_blocks = 0.79 * c.blocks(); }
      plans_.push_back(
        {.options = std::move(c), .documents = each.documents, .calibrated = rule == "fallback" ? rule : ""});
    }
  }

  std::vector<std::uint32_t> lookup_;
  std::vector<plan> plans_;
};

configuration configured(command_options const& options, std::string name)
{
  configuration c = base(std::move(name), options.budget);
  c.dense_layers = options.dense_layers;
  c.block_tokens = options.block_tokens;
  c.digest_tokens = options.digest_tokens;
  if (options.slots != 0) { c.slots_tokens = options.slots; }
  c.hysteresis = options.hysteresis;
  c.deferred_share = options.deferred_share;
  c.scores = options.oracle ? score_source::oracle : score_source::digest;
  if (options.recent_tokens != 0) { c.recent_tokens = options.recent_tokens; }
  using pulseinfer::dtype;
  c.digest_type = options.digest_type == "float16" ? dtype::float16
    : options.digest_type == "float32"             ? dtype::float32
                                                   : dtype::int8;
  c.head_groups = options.head_groups;
  c.rule_name = options.rule;
  c.rule = options.rule == "headwise" ? head_rule::headwise
    : options.rule == "max_share"     ? head_rule::max_share
                                      : head_rule::soft_vote;
  bool known = false;
  for (auto const kind :
       {digest_kind::cuboid_mean, digest_kind::min_max, digest_kind::mean_key, digest_kind::log_mass}) {
    if (options.digest == name_of(kind)) {
      c.digest = kind;
      known = true;
    }
  }
  if (!known) { throw std::runtime_error{"no digest is named " + options.digest}; }
  return c;
}

/// As the library's types are named.
std::string digest_name(configuration const& c)
{
  std::string form = name_of(c.digest);
  if (c.digest_tokens != 0 && c.digest_tokens != c.block_tokens) {
    form = "split<" + form + ", " + std::to_string(c.block_tokens / c.digest_tokens) + ">";
  }
  return form + " " + pulseinfer::name_of(c.digest_type);
}

/// Of one block and KV head.
std::uint64_t digest_bytes(configuration const& c, std::uint32_t head_dim)
{
  std::uint32_t const parts = c.digest == digest_kind::mean_key ? 1 : 2;
  std::uint32_t const pieces = c.digest_tokens == 0 ? 1 : c.block_tokens / c.digest_tokens;
  return pieces * pulseinfer::device::digest_bytes(c.digest_type, parts, head_dim);
}

std::string describe(configuration const& c)
{
  std::string text = c.name + ": " + c.rule_name + " x" + std::to_string(c.head_groups) + ", " + digest_name(c) +
    (c.scores == score_source::oracle ? ", oracle" : "") + ", k " + std::to_string(c.budget_tokens) + " (" +
    std::to_string(c.blocks()) + " blocks of " + std::to_string(c.block_tokens) + ")";
  if (!c.dense_layers.empty()) {
    text += ", dense";
    for (std::uint32_t const layer : c.dense_layers) { text += " " + std::to_string(layer); }
  }
  return text;
}

/// Documents of one kind.
json kind_of(std::vector<outcome> const& outcomes, std::vector<document> const& documents, std::string const& kind)
{
  std::vector<double> loss, kl, all_kl, top, mass;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    if (documents[i].kind != kind) { continue; }
    outcome const& o = outcomes[i];
    loss.push_back(o.loss - o.dense_loss);
    std::vector<double> const here(o.kl.begin(), o.kl.end());
    all_kl.insert(all_kl.end(), here.begin(), here.end());
    kl.push_back(mean(here));
    top.push_back(o.same_top);
    mass.push_back(o.mass.mean());
  }
  auto const percent = [](double x) { return 100.0 * (std::exp(x) - 1.0); };
  return {
    {"documents", loss.size()},
    {"perplexity_change", percent(mean(loss))},
    {"perplexity_change_ci", bootstrap(loss, percent)},
    {"kl_mean", mean(kl)},
    {"kl_mean_ci", bootstrap(kl, [](double x) { return x; })},
    {"kl_p99", quantile(all_kl, 0.99)},
    {"top1_agreement", 100.0 * mean(top)},
    {"mass_mean", mean(mass)}};
}

/// How near estimates of skipped mass come to the truth: parts of all that lie within twice of it, for each query head of a
/// position; for the mean over the heads of a layer; and for that, summed over the layers. Below 1e-3 of both nothing is asked.
json estimates_within_twice(
  std::vector<outcome> const& outcomes, attention_geometry const& geometry,
  std::function<double(std::size_t, skipped_mass const&)> const& estimate)
{
  std::uint64_t of_heads[2] = {}, of_layers[2] = {}, of_steps[2] = {};
  auto const count = [](std::uint64_t(&counts)[2], double estimated, double truth) {
    if (estimated <= 1e-3 && truth <= 1e-3) { return; }
    ++counts[0];
    counts[1] += estimated <= 2.0 * truth && truth <= 2.0 * estimated ? 1U : 0U;
  };
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    std::map<std::uint64_t, std::pair<double, double>> layers, steps;
    for (skipped_mass const& each : outcomes[i].skipped) {
      double const truth = std::exp(double{each.truth}), estimated = std::exp(estimate(i, each));
      count(of_heads, estimated, truth);
      auto& layer = layers[std::uint64_t{each.index} << 32U | each.layer];
      layer.first += estimated / geometry.query_heads;
      layer.second += truth / geometry.query_heads;
    }
    for (auto const& [at, sums] : layers) {
      count(of_layers, sums.first, sums.second);
      auto& step = steps[at >> 32U];
      step.first += sums.first;
      step.second += sums.second;
    }
    for (auto const& [at, sums] : steps) { count(of_steps, sums.first, sums.second); }
  }
  auto const part = [](std::uint64_t const(&counts)[2]) {
    return counts[0] == 0 ? json(nullptr) : json(static_cast<double>(counts[1]) / static_cast<double>(counts[0]));
  };
  return {{"heads", part(of_heads)}, {"layers", part(of_layers)}, {"steps", part(of_steps)}, {"of_heads", of_heads[0]}};
}

/// For each fold the median over the documents of the other of ln of an estimate over the truth, by query head.
/// @return [folds][layers * query_heads]
std::vector<std::vector<double>> estimate_factors(
  std::vector<outcome> const& outcomes, std::vector<std::size_t> const& folds, attention_geometry const& geometry,
  std::function<double(skipped_mass const&)> const& estimate)
{
  std::size_t const heads = outcomes.front().head_mass.size();
  std::vector<std::vector<double>> result(2, std::vector<double>(heads));
  for (std::size_t fold = 0; fold < 2; ++fold) {
    std::vector<std::vector<double>> all(heads), large(heads);
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      if (folds[i] == fold) { continue; }
      for (skipped_mass const& each : outcomes[i].skipped) {
        std::size_t const head = std::size_t{each.layer} * geometry.query_heads + each.head;
        all[head].push_back(estimate(each) - double{each.truth});
        if (double{each.truth} > std::log(5e-4)) { large[head].push_back(all[head].back()); }
      }
    }
    for (std::size_t head = 0; head < heads; ++head) {
      std::vector<double>& from = large[head].size() > 5 ? large[head] : all[head];
      if (!from.empty()) { result[fold][head] = quantile(from, 0.5); }
    }
  }
  return result;
}

json estimates_of(
  std::vector<outcome> const& outcomes, std::vector<std::size_t> const& folds, attention_geometry const& geometry)
{
  auto const told = [](skipped_mass const& each) { return double{each.told}; };
  auto const centres = [](skipped_mass const& each) { return double{each.centres}; };
  json result{{"told", estimates_within_twice(outcomes, geometry, [&](std::size_t, skipped_mass const& each) {
                 return told(each);
               })}};
  auto const calibrated = [&](char const* name, auto const& estimate) {
    auto const factors = estimate_factors(outcomes, folds, geometry, estimate);
    result[name] = estimates_within_twice(outcomes, geometry, [&](std::size_t i, skipped_mass const& each) {
      return estimate(each) - factors[folds[i]][std::size_t{each.layer} * geometry.query_heads + each.head];
    });
  };
  calibrated("told_calibrated", told);
  calibrated("centres_calibrated", centres);
  return result;
}

json row_of(
  plan const& p, std::vector<outcome> const& outcomes, std::vector<document> const& documents,
  attention_geometry const& geometry)
{
  configuration const& c = p.options;
  std::vector<double> loss, kl, all_kl, top, mass, bytes, base_loss;
  histogram all_mass, error;
  std::vector<double> heads(outcomes.front().head_mass.size());
  recall_counts recalls;
  for (outcome const& o : outcomes) {
    loss.push_back(o.loss - o.dense_loss);
    base_loss.push_back(o.dense_loss);
    double sum = 0.0;
    for (float const value : o.kl) {
      sum += double{value};
      all_kl.push_back(double{value});
    }
    kl.push_back(sum / static_cast<double>(o.kl.size()));
    top.push_back(o.same_top);
    mass.push_back(o.mass.mean());
    bytes.push_back(o.recalled_bytes);
    all_mass.add(o.mass);
    error.add(o.error);
    for (std::size_t i = 0; i < heads.size(); ++i) {
      heads[i] += o.head_mass[i] / static_cast<double>(outcomes.size());
    }
    for (recall_counts const& layer : o.recalls) { recalls.add(layer); }
  }
  auto const layers = heads.size() / geometry.query_heads;
  double worst = 1.0;
  json layer_mass = json::array();
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (c.dense(static_cast<std::uint32_t>(layer))) {
      layer_mass.push_back(nullptr);
      continue;
    }
    double sum = 0.0;
    for (std::size_t head = 0; head < geometry.query_heads; ++head) {
      double const value = heads[layer * geometry.query_heads + head];
      worst = std::min(worst, value);
      sum += value / geometry.query_heads;
    }
    layer_mass.push_back(std::round(sum * 1e5) / 1e5);
  }
  auto const percent = [](double x) { return 100.0 * (std::exp(x) - 1.0); };
  auto const same = [](double x) { return x; };
  double const steps = static_cast<double>(recalls.steps);
  auto const rounded = [](std::vector<double> const& values, double unit) {
    json result = json::array();
    for (double const value : values) { result.push_back(std::round(value / unit) * unit); }
    return result;
  };
  json row{
    {"comparison", c.name},
    {"head_rule", c.rule_name},
    {"head_groups", c.head_groups},
    {"digest", digest_name(c)},
    {"digest_bytes", digest_bytes(c, geometry.head_dim)},
    {"scores", c.scores == score_source::oracle ? "oracle" : "digest"},
    {"digest_tokens", c.digest_tokens == 0 ? c.block_tokens : c.digest_tokens},
    {"block_tokens", c.block_tokens},
    {"budget_tokens", c.budget_tokens},
    {"budget_blocks", c.blocks()},
    {"sink_tokens", c.sink_tokens},
    {"recent_tokens", c.recent_tokens},
    {"slots_tokens", c.slots_tokens},
    {"hysteresis", c.hysteresis},
    {"deferred_share", c.deferred_share},
    {"dense_layers", c.dense_layers},
    {"equal_bytes", c.equal_bytes},
    {"documents", outcomes.size()},
    {"dense_perplexity", std::exp(mean(base_loss))},
    {"perplexity_change", percent(mean(loss))},
    {"perplexity_change_ci", bootstrap(loss, percent)},
    {"kl_mean", mean(kl)},
    {"kl_mean_ci", bootstrap(kl, same)},
    {"kl_p99", quantile(all_kl, 0.99)},
    {"top1_agreement", 100.0 * mean(top)},
    {"top1_agreement_ci", bootstrap(top, [](double x) { return 100.0 * x; })},
    {"mass_mean", mean(mass)},
    {"mass_mean_ci", bootstrap(mass, same)},
    {"mass_p1", all_mass.quantile(0.01)},
    {"mass_worst_head", worst},
    {"mass_of_layer", layer_mass},
    {"output_error_mean", error.mean()},
    {"output_error_p99", error.quantile(0.99)},
    {"recalled_bytes_per_step", mean(bytes)},
    {"recalled_of_selection",
     recalls.selected == 0 ? 0.0 : static_cast<double>(recalls.missing) / static_cast<double>(recalls.selected)},
    {"of_documents",
     {{"loss_change", rounded(loss, 1e-6)},
      {"kl_mean", rounded(kl, 1e-7)},
      {"mass_mean", rounded(mass, 1e-6)},
      {"recalled_bytes", rounded(bytes, 1.0)}}}};
  for (document const& each : documents) {
    if (!row["of_kinds"].contains(each.kind)) { row["of_kinds"][each.kind] = kind_of(outcomes, documents, each.kind); }
  }
  if (c.deferred_share > 0.0) {
    row["deferred_of_recalled"] =
      recalls.missing == 0 ? 0.0 : static_cast<double>(recalls.deferred) / static_cast<double>(recalls.missing);
    row["skipped_share_mean"] = recalls.skipped_share / std::max(1.0, steps);
    row["skipped_share_most"] = recalls.skipped_most;
    row["estimates_within_twice"] = estimates_of(outcomes, folds_of(documents), geometry);
  }
  if (!p.calibrated.empty()) {
    for (auto const& heads_of_layer : p.heads_of_fold) {
      json counts{{"one", 0}, {"few", 0}, {"all", 0}};
      for (head_mask const mask : heads_of_layer) {
        auto const bits = static_cast<std::uint32_t>(std::popcount(mask & ((1U << geometry.kv_heads) - 1U)));
        auto& count = counts[bits == 1 ? "one" : bits < geometry.kv_heads ? "few" : "all"];
        count = count.get<int>() + 1;
      }
      row["layers_by_heads"].push_back(counts);
    }
  }
  return row;
}

json begin_context(command_options const& options, host_engine::llama_weights const& weights, int argc, char** argv)
{
  std::string command;
  for (int i = 0; i < argc; ++i) {
    command += (i == 0 ? "" : " ") + std::filesystem::path{argv[i]}.filename().string();
  }
  char const* const commit = std::getenv("PULSEINFER_COMMIT");
  std::string cpu;
  std::ifstream info{"/proc/cpuinfo"};
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) {
      cpu = line.substr(line.find(':') + 2);
      break;
    }
  }
  return {
    {"command", command},
    {"commit", commit == nullptr ? "" : commit},
    {"cpu", cpu},
    {"threads", options.threads},
    {"blas", openblas_get_corename()},
    {"model", options.model.filename().string()},
    {"layers", weights.geometry.layers},
    {"query_heads", weights.geometry.query_heads},
    {"kv_heads", weights.geometry.kv_heads},
    {"head_dim", weights.geometry.head_dim}};
}

void write_json(std::filesystem::path const& path, json const& content)
{
  if (path.empty()) { return; }
  std::ofstream stream{path};
  stream << content.dump(1) << '\n';
  if (!stream) { throw std::runtime_error{path.string() + ": cannot be written"}; }
}

/// Those that are named, else those that a calibration found.
std::vector<std::uint32_t> dense_layers_of(command_options const& options, host_engine::llama_geometry const& geometry)
{
  if (!options.dense_layers.empty() || options.calibration.empty()) { return options.dense_layers; }
  std::ifstream stream{options.calibration};
  if (!stream) { throw std::runtime_error{options.calibration.string() + ": cannot be opened"}; }
  pulseinfer::calibration const measured = pulseinfer::read_calibration(stream);
  pulseinfer::validate(
    measured,
    {.layers = geometry.layers,
     .query_heads = geometry.query_heads,
     .kv_heads = geometry.kv_heads,
     .head_dim = geometry.head_dim,
     .block_tokens = measured.block_tokens});
  return pulseinfer::dense_layers(measured);
}

/// Sets the heads that calibration chooses, for each fold from the documents of the other.
json calibrate(
  std::vector<plan>& plans, std::vector<std::unique_ptr<document_run>> const& runs,
  std::vector<std::size_t> const& folds, attention_geometry const& geometry, workers& pool)
{
  json report = json::array();
  std::vector<head_mask> masks;
  for (head_mask mask = 1; mask < (1U << geometry.kv_heads); ++mask) {
    if (std::popcount(mask) <= 2 || mask + 1 == 1U << geometry.kv_heads) { masks.push_back(mask); }
  }
  std::map<std::uint32_t, std::vector<double>> sums_of[2];
  for (plan& p : plans) {
    if (p.calibrated.empty()) { continue; }
    std::uint32_t const budget = p.options.budget_tokens;
    if (!sums_of[0].contains(budget)) {
      std::vector<std::vector<double>> parts(runs.size());
      pool.each(
        runs.size(), [&](host_engine::llama_engine&, std::size_t i) { parts[i] = runs[i]->covered(p.options, masks); });
      for (std::size_t fold = 0; fold < 2; ++fold) {
        auto& sums = sums_of[fold][budget];
        sums.assign(parts.front().size(), 0.0);
        for (std::size_t i = 0; i < parts.size(); ++i) {
          if (folds[i] == fold) { continue; }
          for (std::size_t at = 0; at < sums.size(); ++at) { sums[at] += parts[i][at]; }
        }
      }
    }
    for (std::size_t fold = 0; fold < 2; ++fold) {
      auto const& sums = sums_of[fold][budget];
      std::size_t const width = masks.size() + 1;
      p.heads_of_fold[fold].clear();
      for (std::size_t layer = 0; layer < sums.size() / width; ++layer) {
        double const* const of = sums.data() + layer * width;
        auto const cover = [&](std::size_t m) { return of[m] / std::max(of[masks.size()], 1e-30); };
        auto const best = [&](int heads) {
          std::size_t result = masks.size();
          for (std::size_t m = 0; m < masks.size(); ++m) {
            if (std::popcount(masks[m]) == heads && (result == masks.size() || of[m] > of[result])) { result = m; }
          }
          return result;
        };
        std::size_t const one = best(1), two = geometry.kv_heads > 2 ? best(2) : one;
        // Against what the vote of all covers: the digests' own loss is not the designated head's.
        double const all = cover(masks.size() - 1);
        constexpr double enough = 0.985;
        std::size_t chosen = p.calibrated == "few_heads" ? two : one;
        if (p.calibrated == "fallback") {
          chosen = cover(one) >= enough * all ? one : cover(two) >= enough * all ? two : masks.size() - 1;
        }
        p.heads_of_fold[fold].push_back(masks[chosen]);
        if (p.calibrated == "fallback" && fold == 0) {
          report.push_back(
            {{"budget_tokens", budget},
             {"layer", layer},
             {"one_head", cover(one)},
             {"two_heads", cover(two)},
             {"all_heads", all},
             {"chosen", masks[chosen]}});
        }
      }
    }
  }
  return report;
}

/// Runs plans over documents, as many as the time allows.
class table_runs {
 public:
  table_runs(
    std::vector<std::unique_ptr<document_run>> const& runs, std::vector<std::size_t> const& folds, workers& pool,
    double seconds)
    : runs_{runs}, folds_{folds}, pool_{pool}, seconds_{seconds}
  {}

  /// @return [plans][documents], empty where the time was over
  [[nodiscard]] std::vector<std::vector<outcome>> over(std::vector<plan*> const& plans)
  {
    std::vector<std::vector<outcome>> results(plans.size());
    std::vector<std::pair<std::size_t, std::size_t>> tasks;
    for (std::size_t p = 0; p < plans.size(); ++p) {
      results[p].resize(std::min(plans[p]->documents, runs_.size()));
      for (std::size_t i = 0; i < results[p].size(); ++i) { tasks.emplace_back(p, i); }
    }
    std::vector<std::size_t> document_of;
    for (auto const& task : tasks) { document_of.push_back(task.second); }
    pool_.each_task(document_of, runs_.size(), [&](host_engine::llama_engine& engine, std::size_t task) {
      if (over_time()) { return; }
      auto const [p, i] = tasks[task];
      configuration c = plans[p]->options;
      if (!plans[p]->calibrated.empty()) { c.heads = plans[p]->heads_of_fold[folds_[i]]; }
      results[p][i] = runs_[i]->evaluate(engine, c);
      if (i + 1 == results[p].size()) { say(describe(c)); }
    });
    for (auto& result : results) {
      if (!std::all_of(result.begin(), result.end(), [](outcome const& o) { return o.done; })) { result.clear(); }
    }
    return results;
  }

  [[nodiscard]] bool over_time() const { return elapsed() > seconds_; }

 private:
  std::vector<std::unique_ptr<document_run>> const& runs_;
  std::vector<std::size_t> const& folds_;
  workers& pool_;
  double seconds_;
};

double mean_bytes(std::vector<outcome> const& outcomes, std::size_t count)
{
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) { sum += outcomes[i].recalled_bytes; }
  return sum / static_cast<double>(count);
}

/// Runs plans, and those again that are to recall as many bytes as the last one before them that needn't, until they do within
/// 2 %.
std::vector<std::vector<outcome>> at_equal_bytes(table_runs& runs, std::vector<plan>& plans)
{
  std::vector<std::vector<outcome>> results(plans.size());
  std::vector<std::size_t> reference(plans.size()), waiting(plans.size());
  std::iota(waiting.begin(), waiting.end(), std::size_t{0});
  for (std::size_t p = 0; p < plans.size(); ++p) { reference[p] = plans[p].options.equal_bytes ? reference[p - 1] : p; }
  std::vector<double> blocks_read(plans.size());  // that the results are of
  constexpr int attempts = 3;
  for (int attempt = 0; attempt < attempts && !waiting.empty(); ++attempt) {
    std::vector<plan*> of_pass;
    for (std::size_t const p : waiting) { of_pass.push_back(&plans[p]); }
    auto made = runs.over(of_pass);
    std::vector<std::size_t> again;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (made[i].empty()) { continue; }
      results[waiting[i]] = std::move(made[i]);
      blocks_read[waiting[i]] = plans[waiting[i]].options.blocks();
    }
    for (std::size_t const p : waiting) {
      auto const& mine = results[p];
      auto const& theirs = results[reference[p]];
      if (reference[p] == p || mine.empty() || theirs.empty()) { continue; }
      std::size_t const count = std::min(mine.size(), theirs.size());
      double const ratio = mean_bytes(mine, count) / mean_bytes(theirs, count);
      say(describe(plans[p].options) + ": bytes x " + std::to_string(ratio));
      if (!(std::abs(ratio - 1.0) > 0.02)) { continue; }  // nor where nothing is recalled
      if (attempt + 1 == attempts || runs.over_time()) { continue; }
      // Slots stay as they are, so that bytes grow as a power of the budget: 2.5, as measured.
      plans[p].options.budget_blocks = plans[p].options.blocks() * std::pow(ratio, -0.4);
      again.push_back(p);
    }
    waiting = again;
  }
  for (std::size_t p = 0; p < plans.size(); ++p) {
    if (!results[p].empty()) { plans[p].options.budget_blocks = blocks_read[p]; }
  }
  return results;
}

int run_table(command_options const& options, int argc, char** argv)
{
  host_engine::llama_weights const weights = host_engine::load_llama(options.model);
  json result{{"context", begin_context(options, weights, argc, argv)}, {"rows", json::array()}};
  std::vector<document> const documents = read_documents(options, result["context"]);
  std::vector<std::size_t> const folds = folds_of(documents);
  attention_geometry const geometry = geometry_of(weights.geometry);
  std::vector<std::uint32_t> lookup = dense_layers_of(options, weights.geometry);
  std::vector<plan> plans;
  if (options.one_row) {
    plans.push_back({.options = configured(options, "row")});
    plans.front().options.dense_layers = lookup;
    plans.front().documents = documents.size();
  } else {
    plans = options.quick ? table_plans{lookup}.quick() : table_plans{lookup}.all();
  }
  std::erase_if(plans, [&](plan const& p) {
    return !options.only.empty() && ("," + options.only + ",").find("," + p.options.name + ",") == std::string::npos;
  });
  for (plan& p : plans) {
    if (p.options.head_groups == 0) { p.options.head_groups = geometry.kv_heads; }
    std::erase_if(p.options.dense_layers, [&](std::uint32_t layer) { return layer >= weights.geometry.layers; });
  }
  bool const calibrates = std::any_of(plans.begin(), plans.end(), [](plan const& p) { return !p.calibrated.empty(); });
  std::vector<std::unique_ptr<document_run>> runs(documents.size());
  workers pool{weights, options.threads, documents.size()};
  say(std::to_string(documents.size()) + " documents, " + std::to_string(plans.size()) + " rows");
  pool.each(documents.size(), [&](host_engine::llama_engine& engine, std::size_t i) {
    runs[i] = std::make_unique<document_run>(weights, documents[i]);
    runs[i]->attend_densely(engine, base("", 1024), calibrates);
    say("dense: " + documents[i].name);
  });
  result["calibration"] = calibrate(plans, runs, folds, geometry, pool);
  table_runs running{runs, folds, pool, options.seconds};
  // Comparisons one after the other, so that what comes first is whole where the time is short.
  for (std::size_t begin = 0, end = 0; begin < plans.size(); begin = end) {
    auto const same = [&](plan const& p) {
      plan const& first = plans[begin];
      return p.options.name == "rules" || first.options.name == "rules"
        ? p.options.name == first.options.name && p.options.scores == first.options.scores
        : p.documents == first.documents;
    };
    end = static_cast<std::size_t>(
      std::find_if_not(plans.begin() + static_cast<std::ptrdiff_t>(begin), plans.end(), same) - plans.begin());
    std::vector<plan> stage{
      plans.begin() + static_cast<std::ptrdiff_t>(begin), plans.begin() + static_cast<std::ptrdiff_t>(end)};
    auto const outcomes = at_equal_bytes(running, stage);
    for (std::size_t p = 0; p < stage.size(); ++p) {
      if (outcomes[p].empty()) { continue; }
      std::vector<document> const read{
        documents.begin(), documents.begin() + static_cast<std::ptrdiff_t>(outcomes[p].size())};
      result["rows"].push_back(row_of(stage[p], outcomes[p], read, geometry));
    }
    write_json(options.json_file, result);
  }
  std::printf(
    "%-14s %-28s %2s %-20s %2s %-6s %3s %5s %6s %5s  %8s %7s %7s %6s %6s %6s %6s %8s %5s\n", "comparison", "head rule",
    "g", "digest", "of", "scores", "p", "k", "blocks", "texts", "ppl %", "KL", "KL p99", "top1", "mass", "p1", "error",
    "KB/step", "recall");
  for (json const& row : result["rows"]) {
    std::printf(
      "%-14s %-28s %2u %-20s %2u %-6s %3u %5u %6.2f %5u  %+8.3f %7.5f %7.4f %6.2f %6.4f %6.4f %6.4f %8.1f %5.3f\n",
      row["comparison"].get<std::string>().c_str(), row["head_rule"].get<std::string>().c_str(),
      row["head_groups"].get<unsigned>(), row["digest"].get<std::string>().c_str(),
      row["digest_tokens"].get<unsigned>(), row["scores"].get<std::string>().c_str(),
      row["block_tokens"].get<unsigned>(), row["budget_tokens"].get<unsigned>(), row["budget_blocks"].get<double>(),
      row["documents"].get<unsigned>(), row["perplexity_change"].get<double>(), row["kl_mean"].get<double>(),
      row["kl_p99"].get<double>(), row["top1_agreement"].get<double>(), row["mass_mean"].get<double>(),
      row["mass_p1"].get<double>(), row["output_error_mean"].get<double>(),
      row["recalled_bytes_per_step"].get<double>() / 1e3, row["recalled_of_selection"].get<double>());
  }
  return 0;
}

int run_layers(command_options const& options, int argc, char** argv)
{
  host_engine::llama_weights const weights = host_engine::load_llama(options.model);
  json result{{"context", begin_context(options, weights, argc, argv)}, {"layers", json::array()}};
  std::vector<document> const documents = read_documents(options, result["context"]);
  std::uint32_t const layers = weights.geometry.layers;
  std::vector<std::unique_ptr<document_run>> runs(documents.size());
  workers pool{weights, options.threads, documents.size()};
  pool.each(documents.size(), [&](host_engine::llama_engine& engine, std::size_t i) {
    runs[i] = std::make_unique<document_run>(weights, documents[i]);
    runs[i]->attend_densely(engine, base("", options.budget), false);
    say("dense: " + documents[i].name);
  });
  std::vector<std::vector<double>> kl(layers), loss(layers);
  std::mutex mutex;
  pool.each(documents.size(), [&](host_engine::llama_engine& engine, std::size_t i) {
    for (std::uint32_t layer = 0; layer < layers && elapsed() < options.seconds; ++layer) {
      outcome const o = runs[i]->evaluate_layer(engine, configured(options, "layers"), layer);
      double sum = 0.0;
      for (float const value : o.kl) { sum += double{value}; }
      std::lock_guard const lock{mutex};
      kl[layer].push_back(sum / static_cast<double>(o.kl.size()));
      loss[layer].push_back(o.loss - o.dense_loss);
    }
    say("layers: " + documents[i].name);
  });
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    result["layers"].push_back(
      {{"layer", layer},
       {"budget_tokens", options.budget},
       {"documents", kl[layer].size()},
       {"kl_mean", mean(kl[layer])},
       {"kl_mean_ci", bootstrap(kl[layer], [](double x) { return x; })},
       {"perplexity_change", 100.0 * (std::exp(mean(loss[layer])) - 1.0)}});
    std::printf(
      "layer %2u alone sparse: KL %.6f, perplexity %+.3f %%\n", layer, mean(kl[layer]),
      100.0 * (std::exp(mean(loss[layer])) - 1.0));
  }
  write_json(options.json_file, result);
  return 0;
}

int run_closed_loop(command_options const& options, int argc, char** argv)
{
  host_engine::llama_weights const weights = host_engine::load_llama(options.model);
  json result{{"context", begin_context(options, weights, argc, argv)}};
  std::vector<document> documents = read_documents(options, result["context"]);
  configuration c = configured(options, "closed loop");
  c.dense_layers = dense_layers_of(options, weights.geometry);
  std::uint32_t const context = weights.geometry.context_tokens;
  if (options.tokens + 1024 > context) {
    throw std::runtime_error{
      std::to_string(options.tokens) + " tokens leave no prompt in a context of " + std::to_string(context)};
  }
  // Cut in front, so that all end at the model's context.
  for (document& each : documents) {
    std::size_t const prompt = std::min<std::size_t>(each.tokens.size(), context - options.tokens);
    each.tokens.resize(prompt);
    each.scored = 1;
  }
  std::vector<generated_text> texts(documents.size());
  workers pool{weights, options.threads, documents.size()};
  pool.each(documents.size(), [&](host_engine::llama_engine& engine, std::size_t i) {
    document_run run{weights, documents[i], options.tokens};
    texts[i] =
      run.generate(engine, c, options.tokens, options.temperature, i + 1, [&] { return elapsed() < options.seconds; });
    say("closed loop: " + documents[i].name + ", " + std::to_string(texts[i].kl.size()) + " tokens");
  });
  std::size_t written = options.tokens;
  for (generated_text const& text : texts) { written = std::min(written, text.kl.size()); }
  constexpr std::uint32_t piece = 256;
  json pieces = json::array();
  for (std::size_t from = 0; from + piece <= written; from += piece) {
    std::vector<double> of_document;
    for (generated_text const& text : texts) {
      double sum = 0.0;
      for (std::size_t i = from; i < from + piece; ++i) { sum += double{text.kl[i]}; }
      of_document.push_back(sum / piece);
    }
    std::vector<double> sorted = of_document;
    pieces.push_back(
      {{"first_token", from},
       {"kl_mean", mean(of_document)},
       {"kl_median", quantile(sorted, 0.5)},
       {"kl_mean_ci", bootstrap(of_document, [](double x) { return x; })},
       {"of_documents", of_document}});
    std::printf(
      "tokens from %4zu: KL %.5f, median of documents %.5f\n", from, mean(of_document), quantile(sorted, 0.5));
  }
  result["closed_loop"] = {
    {"budget_tokens", c.budget_tokens},
    {"dense_layers", c.dense_layers},
    {"digest", digest_name(c)},
    {"temperature", options.temperature},
    {"tokens", written},
    {"prompt_tokens", context - options.tokens},
    {"documents", documents.size()},
    {"pieces", pieces}};
  write_json(options.json_file, result);
  return 0;
}

int run_trace(command_options const& options, int argc, char** argv)
{
  host_engine::llama_weights const weights = host_engine::load_llama(options.model);
  json result{{"context", begin_context(options, weights, argc, argv)}};
  std::vector<document> const documents = read_documents(options, result["context"]);
  configuration c = configured(options, "trace");
  c.dense_layers = dense_layers_of(options, weights.geometry);
  std::uint32_t const layers = weights.geometry.layers, steps = documents.front().scored;
  std::vector<recall_record> records(documents.size(), recall_record{layers, steps, c.blocks()});
  std::vector<double> slots{1.0, 1.5, 2.0, 3.0, 4.0}, bytes(slots.size());
  workers pool{weights, options.threads, documents.size()};
  if (!options.output.empty()) { records.front().keep_records(); }
  std::mutex mutex;
  double perplexity = 0.0;
  pool.each(documents.size(), [&](host_engine::llama_engine& engine, std::size_t i) {
    document_run run{weights, documents[i]};
    run.attend_densely(engine, c, true);
    for (std::size_t s = 0; s < slots.size(); ++s) {
      configuration other = c;
      other.slots_tokens = static_cast<std::uint32_t>(slots[s] * c.budget_tokens);
      double const here = run.replay(other);
      std::lock_guard const lock{mutex};
      bytes[s] += here / static_cast<double>(documents.size());
    }
    outcome const o = run.evaluate(engine, c, [&](choice_event const& event) { records[i].see(event); }, true);
    std::lock_guard const lock{mutex};
    perplexity += (o.loss - o.dense_loss) / static_cast<double>(documents.size());
    say("trace: " + documents[i].name);
  });
  fitted_misses const f = fit(records, layers, steps, c.blocks());
  prediction nearly, guessed, wide;
  double kept = 0.0, missing_share = 0.0, whole_share = 0.0;
  for (recall_record const& record : records) {
    nearly.add(record.nearly_chosen);
    guessed.add(record.guessed);
    wide.add(record.guessed_wide);
    kept += record.kept_of_selection / static_cast<double>(record.compared * records.size());
    missing_share += record.missing_share;
    whole_share += record.whole_share;
  }
  auto const of = [](prediction const& p) {
    double const recalled = static_cast<double>(std::max<std::uint64_t>(p.recalled, 1));
    return json{
      {"recalled_that_were_named", static_cast<double>(p.found) / recalled},
      {"named_for_each_recalled", static_cast<double>(p.named) / recalled},
      {"named_that_were_recalled",
       static_cast<double>(p.found) / static_cast<double>(std::max<std::uint64_t>(p.named, 1))}};
  };
  result["trace"] = {
    {"budget_tokens", c.budget_tokens},
    {"digest", digest_name(c)},
    {"dense_layers", c.dense_layers},
    {"slots_tokens", c.slots_tokens},
    {"hysteresis", c.hysteresis},
    {"documents", documents.size()},
    {"perplexity_change", 100.0 * (std::exp(perplexity) - 1.0)},
    {"selection_kept_from_step_to_step", kept},
    {"share_of_recalled_blocks", missing_share / std::max(whole_share, 1e-30)},
    {"generator",
     {{"mean", f.mean},
      {"mu", f.mu},
      {"layer_deviation", f.layer_deviation},
      {"request_deviation", f.request_deviation},
      {"drift_deviation", f.drift_deviation},
      {"drift_correlation", f.drift_correlation},
      {"cell_deviation", f.cell_deviation},
      {"jump_part", f.jump_part},
      {"cell_variation", f.cell_variation},
      {"step_variation", f.step_variation},
      {"p99_of_mean", f.p99_of_mean},
      {"layer_means", f.layer_means}}},
    {"ranks_below_the_cut", of(nearly)},
    {"queries_guessed_a_layer_early", of(guessed)},
    {"queries_guessed_a_layer_early_1.25", of(wide)}};
  json curve = json::array();
  for (std::size_t s = 0; s < slots.size(); ++s) {
    curve.push_back({{"slots_of_budget", slots[s]}, {"recalled_bytes_per_step", bytes[s]}});
  }
  // Misses fall as a power of the slots.
  result["trace"]["slot_curve"] = curve;
  result["trace"]["theta"] = -std::log(bytes[3] / bytes[0]) / std::log(slots[3] / slots[0]);
  write_json(options.json_file, result);
  if (!options.output.empty()) {
    std::ofstream stream{options.output};
    pulseinfer::write_selections(stream, records.front().records);
    if (!stream) { throw std::runtime_error{options.output.string() + ": cannot be written"}; }
  }
  std::printf("%s\n", result["trace"].dump(1).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv)
{
  openblas_set_num_threads(1);
  elapsed();
  command_options options;
  CLI::App app{"What block selection costs a real model, against dense attention on the same text"};
  app.require_subcommand(1);
  auto const common = [&](CLI::App* command) {
    command->add_option("--model", options.model, "folder with config.json and model.safetensors")->required();
    command->add_option("--documents", options.documents, "what documents.py wrote")->required();
    command->add_option("--range", options.range, "first document and the one behind the last")->expected(2);
    command->add_option("--json", options.json_file, "file for all figures");
    command->add_option("--threads", options.threads, "documents at once")->check(CLI::PositiveNumber);
    command->add_option("--seconds", options.seconds, "no row begins later");
    command->add_option("--budget", options.budget, "tokens");
    command->add_option("--digest", options.digest, "cuboid_mean, min_max, mean_key, log_mass");
    command->add_option("--digest-type", options.digest_type, "int8, float16 or float32")
      ->check(CLI::IsMember({"int8", "float16", "float32"}));
    command->add_option("--rule", options.rule, "soft_vote, max_share or headwise")
      ->check(CLI::IsMember({"soft_vote", "max_share", "headwise"}));
    command->add_option("--head-groups", options.head_groups, "groups of KV heads that choose for themselves")
      ->check(CLI::PositiveNumber);
    command->add_option("--dense-layers", options.dense_layers, "layers that are not sparse")->delimiter(',');
    command->add_option("--calibration", options.calibration, "file whose dense layers are taken where none are named");
    command->add_option("--block", options.block_tokens, "tokens of a block");
    command->add_option(
      "--digest-tokens", options.digest_tokens, "of which one digest is made, split<...> of a block; 0: a block");
    command->add_option("--slots", options.slots, "tokens of the hot slots");
    command->add_option(
      "--recent", options.recent_tokens, "tokens that are always selected; 0: an eighth of the budget");
    command->add_option("--hysteresis", options.hysteresis, "nat");
    command->add_option("--deferred", options.deferred_share, "share of each head's mass that may be skipped");
    command->add_flag("--oracle", options.oracle, "choose by the true mass");
    return command;
  };
  auto* const table = common(app.add_subcommand("table", "head rules, digests, budgets and levers"));
  table->add_flag("--quick", options.quick, "a few rows");
  table->add_option("--only", options.only, "comparisons, with commas: rules,digests,...");
  auto* const row = common(app.add_subcommand("row", "one configuration, from the options"));
  auto* const layers = common(app.add_subcommand("layers", "each layer alone sparse"));
  auto* const closed = common(app.add_subcommand("closed-loop", "the sparse model writes, the dense one reads"));
  closed->add_option("--tokens", options.tokens, "to write");
  closed->add_option("--temperature", options.temperature, "0: the likeliest token");
  auto* const trace = common(app.add_subcommand("trace", "records selections, and says how predictable recalls are"));
  trace->add_option("--output", options.output, "file for the selections of the first document");
  CLI11_PARSE(app, argc, argv);
  try {
    options.one_row = row->parsed();
    if (table->parsed() || row->parsed()) { return run_table(options, argc, argv); }
    if (layers->parsed()) { return run_layers(options, argc, argv); }
    if (closed->parsed()) { return run_closed_loop(options, argc, argv); }
    if (trace->parsed()) { return run_trace(options, argc, argv); }
  } catch (std::exception const& problem) {
    std::fprintf(stderr, "error: %s\n", problem.what());
    return 1;
  }
  return 1;
}
