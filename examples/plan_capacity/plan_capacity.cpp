// How many long-context requests a GPU serves, and how fast, with the KV cache resident or offloaded: an estimate from the
// formulas that admission uses, before anything is installed.

#include "capacity.hpp"
#include "curve_picture.hpp"
#include "step_picture.hpp"

#include <CLI/CLI.hpp>
#include <decode_text/command_line.hpp>
#include <decode_text/output_file.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace {

using namespace plan_capacity;

template <class T, std::size_t N>
std::vector<std::string> names(T const (&list)[N])
{
  std::vector<std::string> result;
  for (T const& entry : list) { result.emplace_back(entry.name); }
  return result;
}

nlohmann::json to_json(operating_point const& p)
{
  return {
    {"requests", p.rows},
    {"offloaded", p.offloaded},
    {"compute_seconds", p.compute},
    {"recall_seconds", p.recall},
    {"tpot_seconds", p.step},
    {"tokens_per_second", p.tokens_per_second},
    {"device_bytes", p.device_bytes},
    {"host_bytes", p.host_bytes}};
}

void write_json(std::ostream& out, setting const& s, std::vector<capacity_plan> const& plans)
{
  nlohmann::json document{
    {"model", s.model.name},
    {"model_source", s.model.source},
    {"gpu", s.gpu.name},
    {"gpu_source", s.gpu.source},
    {"prompt_tokens", s.prompt_tokens},
    {"output_tokens", s.output_tokens},
    {"budget_tokens", s.budget_tokens},
    {"hot_tokens", s.hot_tokens},
    {"miss_ratio", s.miss_ratio},
    {"link_bytes_per_second", s.gpu.link_bytes_per_second},
    {"target_seconds", s.target_seconds}};
  for (capacity_plan const& plan : plans) {
    nlohmann::json entry{{"way", name_of(plan.how)}, {"limit", plan.limit}, {"best", to_json(plan.best)}};
    for (operating_point const& p : plan.curve) { entry["curve"].push_back(to_json(p)); }
    document["plans"].push_back(entry);
  }
  out << document.dump(2) << '\n';
}

void print(setting const& s, std::vector<capacity_plan> const& plans)
{
  std::printf(
    "%s on %s, prompts of %u tokens, %u of output, budget %u, hot slots for %u, misses %.1f %%\n", s.model.name,
    s.gpu.name, s.prompt_tokens, s.output_tokens, s.budget_tokens, s.hot_tokens, s.miss_ratio * 100.0);
  std::printf("  model: %s; GPU: %s\n\n", s.model.source, s.gpu.source);
  std::printf(
    "%-17s %9s %10s %10s %9s %9s %10s %10s  %s\n", "", "requests", "offloaded", "tokens/s", "TPOT ms", "R/C", "GPU GiB",
    "host GiB", "more is limited by");
  constexpr double gib = 1073741824.0;
  double const base = plans.front().best.tokens_per_second;
  for (capacity_plan const& plan : plans) {
    operating_point const& p = plan.best;
    if (p.rows == 0) {
      std::printf("%-17s %9s  %s\n", name_of(plan.how), "none", plan.curve.empty() ? plan.limit.c_str() : "the target");
      continue;
    }
    // One request more: memory ends the curve, or the target forbids it, or it brings fewer tokens a second.
    bool const at_end = p.rows == plan.curve.back().rows;
    bool const too_slow = !at_end && s.target_seconds > 0.0 && plan.curve[p.rows].step > s.target_seconds;
    std::printf(
      "%-17s %9u %10u %10.0f %9.1f %9.2f %10.1f %10.1f  %s", name_of(plan.how), p.rows, p.offloaded,
      p.tokens_per_second, p.step * 1e3, p.recall / p.compute, p.device_bytes / gib, p.host_bytes / gib,
      at_end       ? plan.limit.c_str()
        : too_slow ? "the target"
                   : "the link");
    if (base > 0.0 && plan.how != way::resident_dense) { std::printf(" (%.1fx)", p.tokens_per_second / base); }
    std::printf("\n");
  }
  std::printf("\nAn estimate: formulas in docs/admission.md#before-anything-runs, assumptions in --help. Measure "
              "before you buy.\n");
}

}  // namespace

int main(int argc, char** argv)
{
  setting s;
  std::string model = "qwen3-14b", gpu = "h200", work = "summary", json_path, svg_path;
  double host_gib = 512.0, target_ms = 0.0;
  std::optional<double> link, memory, misses;
  CLI::App app{"Estimates how many long-context requests a GPU serves, by how their KV cache is kept"};
  app.add_option("--model", model, "the model's shape")->check(CLI::IsMember(names(models)))->capture_default_str();
  app.add_option("--gpu", gpu, "the GPU")->check(CLI::IsMember(names(gpus)))->capture_default_str();
  app.add_option("--prompt", s.prompt_tokens, "tokens of a prompt")->capture_default_str();
  app.add_option("--output", s.output_tokens, "tokens of an answer")->capture_default_str();
  app.add_option("--target", target_ms, "longest time per output token in ms; 0: none")->capture_default_str();
  app.add_option("--host-memory", host_gib, "pinned host memory for blocks in GiB")->capture_default_str();
  app.add_option("--gpu-memory", memory, "GPU memory in GiB, if not the preset's");
  app.add_option("--link", link, "GB/s that recalls reach, if not the preset's");
  app.add_option("--budget", s.budget_tokens, "tokens that a selection reads")->capture_default_str();
  app.add_option("--hot", s.hot_tokens, "tokens of hot slots of an offloaded request")->capture_default_str();
  app.add_option("--work", work, "what requests do: sets the miss ratio")
    ->check(CLI::IsMember(names(works)))
    ->capture_default_str();
  app.add_option("--miss-ratio", misses, "share of a selection that is not resident, if you have measured it");
  app.add_option("--weight-bytes", s.weight_bytes, "bytes of a parameter")->capture_default_str();
  app.add_option("--cache-bytes", s.cache_bytes, "bytes of an element of the cache")->capture_default_str();
  app.add_option("--digest-share", s.digest_share, "digests over the bytes of the cache")->capture_default_str();
  app.add_option("--exposed", s.exposed, "part of recall and computing that does not overlap")->capture_default_str();
  app.add_option("--json", json_path, "write the curves there");
  app.add_option("--svg", svg_path, "draw throughput against requests there, and a simulated step of the adaptive way");
  if (auto const code = decode_text::read_command_line(app, argc, argv)) { return *code; }
  try {
    std::optional<decode_text::output_file> json, svg;
    if (!json_path.empty()) { json.emplace(json_path); }
    if (!svg_path.empty()) { svg.emplace(svg_path); }
    s.model = *by_name<model_shape>(models, model);
    s.gpu = *by_name<gpu_shape>(gpus, gpu);
    s.miss_ratio = misses.value_or(by_name<work_kind>(works, work)->miss_ratio);
    s.host_bytes = host_gib * 1073741824.0;
    s.target_seconds = target_ms * 1e-3;
    if (memory) { s.gpu.memory_bytes = *memory * 1073741824.0; }
    if (link) { s.gpu.link_bytes_per_second = *link * 1e9; }
    std::vector<capacity_plan> plans;
    for (way const how : {way::resident_dense, way::resident_sparse, way::offload_all, way::adaptive}) {
      plans.push_back(plan(s, how));
    }
    print(s, plans);
    if (json) {
      json->write([&](std::ostream& out) { write_json(out, s, plans); });
    }
    if (svg) {
      std::optional<step_timeline> step;
      if (plans.back().best.rows != 0) { step = simulate_step(s, plans.back().best); }
      svg->write([&](std::ostream& out) { draw_curves(out, s, plans, step ? &*step : nullptr); });
    }
  } catch (std::exception const& problem) {
    std::fprintf(stderr, "plan_capacity: %s\n", problem.what());
    return decode_text::exit_failed;
  }
  return 0;
}
