// What block selection costs a real model, against dense attention of the same model on the same text.
//   accuracy table --model FOLDER --documents FILE [--quick] [--json FILE]     every configuration of the table
//   accuracy layers | closed-loop | trace ...                                  see --help
// scripts/bench accuracy prepares model and documents.

#include "evaluation.hpp"
#include "recorded.hpp"
#include "statistics.hpp"
#include <pulseinfer/observe/selection_trace.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

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
#include <thread>

extern "C" void openblas_set_num_threads(int);
extern "C" char* openblas_get_corename();

namespace {

using namespace accuracy;
using nlohmann::json;
using clock_type = std::chrono::steady_clock;

struct command_options {
  std::filesystem::path model, documents, json_file, output, budgets;
  std::vector<std::size_t> range;  // first document, and the one behind the last
  unsigned threads = std::max(1U, std::thread::hardware_concurrency());
  double seconds = 1e9;
  bool quick = false;
  std::string only = {};
  std::vector<std::uint32_t> dense_layers = {};
  std::uint32_t budget = 1024, tokens = 2048;
  double temperature = 1.0, deferred_share = 0.0;
  std::uint32_t block_tokens = 16, recent_tokens = 0, digest_tokens = 0, slots = 0;
  float hysteresis = 0.25F;
  std::string digest = "cuboid_mean", digest_type = "float16";
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

/// Threads that own documents: document i belongs to thread i % threads. Nothing is shared but the weights.
class workers {
 public:
  workers(host_engine::llama_weights const& weights, unsigned threads, std::size_t documents)
    : threads_{static_cast<unsigned>(std::min<std::size_t>(threads, documents))}, documents_{documents}
  {
    for (unsigned i = 0; i < threads_; ++i) {
      engines_.push_back(std::make_unique<host_engine::llama_engine>(
        weights, host_engine::llama_engine::size_limits{.rows = 1, .row_tokens = document_run::chunk}));
    }
  }

  /// Calls `body(engine, document)` until all documents are done, or `body` returns false.
  void each_document(std::function<bool(host_engine::llama_engine&, std::size_t)> const& body)
  {
    each_thread([&](unsigned thread) {
      for (std::size_t i = thread; i < documents_; i += threads_) {
        if (!body(*engines_[thread], i)) { return; }
      }
    });
  }

  void each_thread(std::function<void(unsigned)> const& body)
  {
    std::exception_ptr problem;
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < threads_; ++i) {
      threads.emplace_back([&, i] {
        try {
          body(i);
        } catch (...) {
          std::lock_guard const lock{mutex};
          problem = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) { thread.join(); }
    if (problem) { std::rethrow_exception(problem); }
  }

  [[nodiscard]] unsigned threads() const { return threads_; }
  [[nodiscard]] host_engine::llama_engine& engine(unsigned thread) { return *engines_[thread]; }

 private:
  unsigned threads_;
  std::size_t documents_;
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
  std::vector<head_mask> heads_of_fold[2] = {};  // empty: as in the options
  std::string calibrated = {};                   // "designated_head", "few_heads", "fallback"
};

/// Three budgets where the budget is small; less of a large one, since the texts have 7,000 tokens in all.
std::uint32_t slots_of(std::uint32_t budget) { return std::max(3 * std::min(budget, 512U), budget + 1024); }

configuration base(std::string name, std::uint32_t budget)
{
  return {
    .name = std::move(name),
    .budget_tokens = budget,
    .recent_tokens = std::max(128U, budget / 8),
    .slots_tokens = slots_of(budget)};
}

/// Head rules with as many recalled bytes as the first of them, which is the soft vote of all heads.
enum class rule_set : std::uint8_t { all, without_calibration, main, groups };

std::vector<plan> rules(
  std::uint32_t budget, score_source scores, rule_set which, std::vector<std::uint32_t> const& dense_layers = {})
{
  std::vector<plan> result;
  auto const add = [&](std::string const& rule, std::uint32_t groups, std::string const& calibrated) {
    configuration c = base("rules", budget);
    c.rule_name = rule;
    c.head_groups = groups;
    c.scores = scores;
    c.dense_layers = dense_layers;
    c.rule = rule == "headwise" ? head_rule::headwise
      : rule == "max_share"     ? head_rule::max_share
                                : head_rule::soft_vote;
    c.equal_bytes = !result.empty();
    result.push_back({.options = c, .calibrated = calibrated});
  };
  add("soft_vote", 1, "");
  add("soft_vote", 0, "");  // a lane for each KV head
  if (which == rule_set::groups) { return result; }
  add("headwise", 0, "");
  if (which != rule_set::main) { add("max_share", 1, ""); }
  if (which == rule_set::all) {
    add("designated_head", 1, "designated_head");
    add("few_heads", 1, "few_heads");
  }
  if (which != rule_set::without_calibration) { add("designated_head or fallback", 1, "fallback"); }
  return result;
}

/// Layers of SmolLM2-135M that look up the most: `accuracy layers` finds them. The table takes them as one of its levers.
std::vector<std::uint32_t> const lookup_layers{7, 18, 20};

std::vector<plan> table_plans(bool quick)
{
  std::vector<plan> plans;
  auto const append = [&](std::vector<plan> const& more) { plans.insert(plans.end(), more.begin(), more.end()); };
  auto const with = [&](char const* name, std::uint32_t budget, std::function<void(configuration&)> const& change) {
    configuration c = base(name, budget);
    change(c);
    plans.push_back({.options = std::move(c)});
  };
  using enum digest_kind;
  using pulseinfer::dtype;
  constexpr auto digest = score_source::digest;
  constexpr auto oracle = score_source::oracle;
  if (quick) {
    append(rules(1024, digest, rule_set::main, lookup_layers));
    for (auto const kind : {log_mass, min_max}) {
      with("digests", 1024, [&](configuration& c) {
        c.dense_layers = lookup_layers;
        c.digest = kind;
      });
    }
    with("levers", 1024, [](configuration& c) {
      c.dense_layers = lookup_layers;
      c.scores = score_source::oracle;
    });
    return plans;
  }
  append(rules(1024, digest, rule_set::all, lookup_layers));
  append(rules(1024, oracle, rule_set::without_calibration, lookup_layers));
  for (auto const kind : {cuboid_mean, log_mass, mean_key, min_max}) {
    for (auto const type : {dtype::float16, dtype::int8}) {
      if (kind == cuboid_mean && type == dtype::float16) { continue; }
      with("digests", 1024, [&](configuration& c) {
        c.dense_layers = lookup_layers;
        c.digest = kind;
        c.digest_type = type;
      });
    }
  }
  for (std::uint32_t const budget : {2048U, 512U}) { append(rules(budget, digest, rule_set::groups, lookup_layers)); }
  append(rules(1024, digest, rule_set::groups));
  auto const lever = [&](std::function<void(configuration&)> const& change) {
    with("levers", 1024, [&](configuration& c) {
      c.dense_layers = lookup_layers;
      change(c);
    });
  };
  lever([](configuration& c) { c.deferred_share = 0.02; });
  lever([](configuration& c) {
    c.dense_layers = {};
    c.scores = oracle;
  });
  lever([](configuration& c) { c.digest_tokens = 4; });
  lever([](configuration& c) { c.block_tokens = 32; });
  lever([](configuration& c) { c.recent_tokens = c.budget_tokens - 64; });  // a window, and nothing chosen
  lever([](configuration& c) { c.dense_layers = {0, 1}; });
  lever([](configuration& c) { c.hysteresis = 0.0F; });
  lever([](configuration& c) { c.recent_tokens = c.budget_tokens / 4; });
  lever([](configuration& c) {
    c.digest = mean_key;
    c.digest_tokens = 4;
  });
  lever([](configuration& c) { c.dense_layers = {0}; });
  for (std::uint32_t const budget : {2048U, 512U}) {
    with("budgets", budget, [](configuration&) {});
    with("budgets", budget, [](configuration& c) { c.scores = oracle; });
  }
  return plans;
}

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
  if (options.digest_type == "int8") { c.digest_type = pulseinfer::dtype::int8; }
  if (options.digest_type == "float32") { c.digest_type = pulseinfer::dtype::float32; }
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

std::string describe(configuration const& c)
{
  std::string text = c.name + ": " + c.rule_name + " x" + std::to_string(c.head_groups) + ", " + name_of(c.digest) +
    " " + pulseinfer::name_of(c.digest_type) + (c.scores == score_source::oracle ? ", oracle" : "") + ", k " +
    std::to_string(c.budget_tokens) + " (" + std::to_string(c.blocks()) + " blocks of " +
    std::to_string(c.block_tokens) + ")";
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

json row_of(
  plan const& p, std::vector<outcome> const& outcomes, std::vector<document> const& documents,
  attention_geometry const& geometry)
{
  configuration const& c = p.options;
  std::vector<double> loss, kl, all_kl, top, mass, bytes, base_loss;
  histogram all_mass, error;
  std::vector<double> heads(outcomes.front().head_mass.size());
  recall_counts recalls;
  std::uint64_t estimates = 0, close_estimates = 0;
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
    estimates += o.estimates;
    close_estimates += o.close_estimates;
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
    {"digest", std::string{name_of(c.digest)} + " " + pulseinfer::name_of(c.digest_type)},
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
    row["estimates_within_twice"] =
      estimates == 0 ? 1.0 : static_cast<double>(close_estimates) / static_cast<double>(estimates);
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
      pool.each_document([&](host_engine::llama_engine&, std::size_t i) {
        parts[i] = runs[i]->covered(p.options, masks);
        return true;
      });
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

/// What makes an equal-bytes budget: of two plans that agree in it one search serves.
json budget_key(configuration const& c)
{
  return {
    {"head_rule", c.rule_name},
    {"head_groups", c.head_groups},
    {"budget_tokens", c.budget_tokens},
    {"slots_tokens", c.slots_tokens},
    {"scores", c.scores == score_source::oracle ? "oracle" : "digest"},
    {"dense_layers", c.dense_layers}};
}

/// The budgets with which other rules recall as many bytes as soft_vote where the dense pass's queries choose: from `known`,
/// else by search over the first documents.
json equalise(
  std::vector<plan>& plans, std::vector<std::unique_ptr<document_run>> const& runs,
  std::vector<std::size_t> const& folds, workers& pool, json const& known)
{
  constexpr std::size_t most_documents = 16;
  json found = json::array();
  auto const bytes = [&](plan const& p) {
    std::vector<double> each(std::min(runs.size(), most_documents));
    pool.each_document([&](host_engine::llama_engine&, std::size_t i) {
      if (i >= each.size()) { return true; }
      configuration options = p.options;
      if (!p.calibrated.empty()) { options.heads = p.heads_of_fold[folds[i]]; }
      each[i] = runs[i]->replay(options);
      return true;
    });
    return mean(each);
  };
  plan const* reference_plan = nullptr;
  double reference = 0.0;
  for (plan& p : plans) {
    if (p.options.name != "rules") { continue; }
    if (!p.options.equal_bytes) {
      reference_plan = &p;
      reference = 0.0;
      continue;
    }
    json entry = budget_key(p.options);
    for (json const& each : known) {
      json key = each;
      key.erase("budget_blocks");
      if (key == entry) { p.options.budget_blocks = each.at("budget_blocks"); }
    }
    if (p.options.budget_blocks == 0.0 && reference_plan != nullptr) {
      if (reference == 0.0) { reference = bytes(*reference_plan); }
      double low = p.options.blocks() / 5.0, high = 1.6 * p.options.blocks();
      // What is always selected has to fit.
      double const least = 3.0 + p.options.recent_tokens / static_cast<double>(p.options.block_tokens);
      double at = p.options.rule == head_rule::headwise ? 0.6 * p.options.blocks() : p.options.blocks();
      for (int attempt = 0; attempt < 6; ++attempt) {
        p.options.budget_blocks = std::max(at, least);
        double const now = bytes(p);
        if (std::abs(now / reference - 1.0) < 0.01) { break; }
        (now > reference ? high : low) = at;
        // Bytes grow nearly in proportion to the budget.
        double const guess = at * std::pow(reference / now, 0.8);
        at = guess > low && guess < high ? guess : 0.5 * (low + high);
      }
      say("equal bytes: " + describe(p.options));
    }
    entry["budget_blocks"] = p.options.budget_blocks;
    found.push_back(entry);
  }
  return found;
}

int run_table(command_options const& options, int argc, char** argv)
{
  host_engine::llama_weights const weights = host_engine::load_llama(options.model);
  json result{{"context", begin_context(options, weights, argc, argv)}, {"rows", json::array()}};
  std::vector<document> const documents = read_documents(options, result["context"]);
  std::vector<std::size_t> const folds = folds_of(documents);
  attention_geometry const geometry = geometry_of(weights.geometry);
  std::vector<plan> plans =
    options.one_row ? std::vector<plan>{{.options = configured(options, "row")}} : table_plans(options.quick);
  std::erase_if(plans, [&](plan const& p) {
    return !options.only.empty() && ("," + options.only + ",").find("," + p.options.name + ",") == std::string::npos;
  });
  for (plan& p : plans) {
    if (p.options.head_groups == 0) { p.options.head_groups = geometry.kv_heads; }
    std::erase_if(p.options.dense_layers, [&](std::uint32_t layer) { return layer >= weights.geometry.layers; });
  }
  std::vector<std::unique_ptr<document_run>> runs(documents.size());
  workers pool{weights, options.threads, documents.size()};
  say(std::to_string(documents.size()) + " documents, " + std::to_string(plans.size()) + " rows");
  pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
    runs[i] = std::make_unique<document_run>(weights, documents[i]);
    runs[i]->attend_densely(engine, base("", 1024), true);
    say("dense: " + documents[i].name);
    return true;
  });
  result["calibration"] = calibrate(plans, runs, folds, geometry, pool);
  json known = json::array();
  if (!options.budgets.empty()) {
    std::ifstream stream{options.budgets};
    if (!stream) { throw std::runtime_error{options.budgets.string() + ": cannot be opened"}; }
    known = json::parse(stream).at("equal_bytes_budgets");
  }
  result["equal_bytes_budgets"] = equalise(plans, runs, folds, pool, known);
  std::vector<outcome> outcomes(documents.size());
  double reference = 0.0;
  for (plan& p : plans) {
    configuration& options_of_row = p.options;
    // What a sparse model recalls differs from what the dense pass foretold: the budget is set right where it does.
    for (int attempt = 0; attempt < 3 && elapsed() < options.seconds; ++attempt) {
      pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
        configuration c = options_of_row;
        if (!p.calibrated.empty()) { c.heads = p.heads_of_fold[folds[i]]; }
        outcomes[i] = runs[i]->evaluate(engine, c);
        return true;
      });
      std::vector<double> bytes;
      for (outcome const& each : outcomes) { bytes.push_back(each.recalled_bytes); }
      say(describe(options_of_row) + ": " + std::to_string(mean(bytes) / 1e3) + " kB");
      if (!options_of_row.equal_bytes) {
        if (options_of_row.name == "rules") { reference = mean(bytes); }
      } else if (double const ratio = mean(bytes) / reference; attempt < 2 && std::abs(ratio - 1.0) > 0.02) {
        options_of_row.budget_blocks *= std::pow(ratio, -0.9);
        continue;
      }
      result["rows"].push_back(row_of(p, outcomes, documents, geometry));
      write_json(options.json_file, result);
      break;
    }
  }
  write_json(options.json_file, result);
  std::printf(
    "%-14s %-28s %2s %-20s %2s %-6s %3s %5s %6s  %8s %7s %7s %6s %6s %6s %6s %8s %5s\n", "comparison", "head rule", "g",
    "digest", "of", "scores", "p", "k", "blocks", "ppl %", "KL", "KL p99", "top1", "mass", "p1", "error", "KB/step",
    "recall");
  for (json const& row : result["rows"]) {
    std::printf(
      "%-14s %-28s %2u %-20s %2u %-6s %3u %5u %6.2f  %+8.3f %7.5f %7.4f %6.2f %6.4f %6.4f %6.4f %8.1f %5.3f\n",
      row["comparison"].get<std::string>().c_str(), row["head_rule"].get<std::string>().c_str(),
      row["head_groups"].get<unsigned>(), row["digest"].get<std::string>().c_str(),
      row["digest_tokens"].get<unsigned>(), row["scores"].get<std::string>().c_str(),
      row["block_tokens"].get<unsigned>(), row["budget_tokens"].get<unsigned>(), row["budget_blocks"].get<double>(),
      row["perplexity_change"].get<double>(), row["kl_mean"].get<double>(), row["kl_p99"].get<double>(),
      row["top1_agreement"].get<double>(), row["mass_mean"].get<double>(), row["mass_p1"].get<double>(),
      row["output_error_mean"].get<double>(), row["recalled_bytes_per_step"].get<double>() / 1e3,
      row["recalled_of_selection"].get<double>());
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
  pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
    runs[i] = std::make_unique<document_run>(weights, documents[i]);
    runs[i]->attend_densely(engine, base("", options.budget), false);
    say("dense: " + documents[i].name);
    return true;
  });
  std::vector<std::vector<double>> kl(layers), loss(layers);
  std::mutex mutex;
  pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
    for (std::uint32_t layer = 0; layer < layers && elapsed() < options.seconds; ++layer) {
      outcome const o = runs[i]->evaluate_layer(engine, configured(options, "layers"), layer);
      double sum = 0.0;
      for (float const value : o.kl) { sum += double{value}; }
      std::lock_guard const lock{mutex};
      kl[layer].push_back(sum / static_cast<double>(o.kl.size()));
      loss[layer].push_back(o.loss - o.dense_loss);
    }
    say("layers: " + documents[i].name);
    return true;
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
  configuration const c = configured(options, "closed loop");
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
  pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
    document_run run{weights, documents[i], options.tokens};
    texts[i] = run.generate(engine, c, options.tokens, options.temperature, i + 1);
    say("closed loop: " + documents[i].name);
    return true;
  });
  constexpr std::uint32_t piece = 256;
  json pieces = json::array();
  for (std::uint32_t from = 0; from < options.tokens; from += piece) {
    std::vector<double> of_document;
    for (generated_text const& text : texts) {
      double sum = 0.0;
      std::uint32_t const to = std::min(from + piece, options.tokens);
      for (std::uint32_t i = from; i < to; ++i) { sum += double{text.kl[i]}; }
      of_document.push_back(sum / (to - from));
    }
    std::vector<double> sorted = of_document;
    pieces.push_back(
      {{"first_token", from},
       {"kl_mean", mean(of_document)},
       {"kl_median", quantile(sorted, 0.5)},
       {"kl_mean_ci", bootstrap(of_document, [](double x) { return x; })},
       {"of_documents", of_document}});
    std::printf("tokens from %4u: KL %.5f, median of documents %.5f\n", from, mean(of_document), quantile(sorted, 0.5));
  }
  result["closed_loop"] = {
    {"budget_tokens", c.budget_tokens},
    {"dense_layers", c.dense_layers},
    {"digest", name_of(c.digest)},
    {"temperature", options.temperature},
    {"tokens", options.tokens},
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
  configuration const c = configured(options, "trace");
  std::uint32_t const layers = weights.geometry.layers, steps = documents.front().scored;
  std::vector<recall_record> records(documents.size(), recall_record{layers, steps, c.blocks()});
  std::vector<double> slots{1.0, 1.5, 2.0, 3.0, 4.0}, bytes(slots.size());
  workers pool{weights, options.threads, documents.size()};
  if (!options.output.empty()) { records.front().keep_records(); }
  std::mutex mutex;
  double perplexity = 0.0;
  pool.each_document([&](host_engine::llama_engine& engine, std::size_t i) {
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
    return true;
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
    {"digest", name_of(c.digest)},
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
    command->add_option("--digest-type", options.digest_type, "float16, float32 or int8");
    command->add_option("--dense-layers", options.dense_layers, "layers that are not sparse")->delimiter(',');
    command->add_option("--block", options.block_tokens, "tokens of a block");
    command->add_option("--digest-tokens", options.digest_tokens, "of which one digest is made; 0: of a block");
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
  table->add_option("--budgets", options.budgets, "a table's JSON file, whose equal-bytes budgets are used again");
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
