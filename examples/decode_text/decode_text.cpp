// Decodes the continuation of a long text with a dense KV cache and with PulseInfer, side by side, and says what it cost.
//
// Every decoder is fed the true continuation, token by token, so that all predict after the same tokens: perplexity is that
// of the true text, and predictions can be compared. Afterwards each writes on by itself, for a reader to see.
#include "caution.hpp"
#include "command_line.hpp"
#include "comparison.hpp"
#include "device.hpp"
#include "engine/copying_llama.hpp"
#include "engine/llama_weights.hpp"
#include "engine/safetensors.hpp"
#include "long_text.hpp"
#include "offload_options.hpp"
#include "output_file.hpp"
#include "run_options.hpp"
#include <pulseinfer/error.hpp>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/selector/calibration.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

using namespace decode_text;

// Of a row: its prompt, and the tokens that follow it.
struct row_text {
  std::vector<std::int32_t> prompt, continuation;
};

struct subject {
  std::string title;
  host_engine::llama_weights weights;
  std::vector<row_text> rows;
  std::optional<vocabulary> words;
};

// Rows have prompts of different lengths, the longest first, the shortest half as long.
std::uint32_t context_of_row(run_options const& options, std::uint32_t row)
{
  std::uint32_t const shorter = options.context_tokens / 2 / options.batch * row;
  return std::max(options.context_tokens - shorter, 2U);
}

subject synthetic_subject(run_options const& options)
{
  subject made{
    .title = "passages that come again",
    .weights = host_engine::make_copying_llama(options.seed),
    .rows = {},
    .words = {}};
  for (std::uint32_t row = 0; row < options.batch; ++row) {
    std::uint32_t const context = context_of_row(options, row);
    std::vector<std::int32_t> const text =
      host_engine::make_copying_text(context, options.decode_tokens, options.seed + row + 1);
    auto const end = text.begin() + static_cast<std::ptrdiff_t>(context);
    made.rows.push_back({.prompt = {text.begin(), end}, .continuation = {end, text.end()}});
  }
  return made;
}

subject model_subject(run_options const& options)
{
  if (!std::filesystem::exists(options.model)) {
    throw host_engine::model_file_error{
      options.model +
      " is not there. scripts/demo prepares it, or run examples/decode_text/convert.py; --model synthetic needs no "
      "download"};
  }
  subject made{.title = {}, .weights = host_engine::load_llama(options.model), .rows = {}, .words = {}};
  long_text const text = load_text(options.model, made.weights.geometry.vocabulary);
  made.title = text.title + " (" + text.source + "; " + text.licence + ")";
  made.words.emplace(options.model);
  if (options.context_tokens > text.continuation || options.decode_tokens > text.tokens.size() - text.continuation) {
    throw std::out_of_range{
      "a prompt of " + std::to_string(options.context_tokens) + " tokens and " + std::to_string(options.decode_tokens) +
      " after it; the text has " + std::to_string(text.continuation) + " and " +
      std::to_string(text.tokens.size() - text.continuation)};
  }
  auto const split = text.tokens.begin() + static_cast<std::ptrdiff_t>(text.continuation);
  for (std::uint32_t row = 0; row < options.batch; ++row) {
    made.rows.push_back(
      {.prompt = {split - static_cast<std::ptrdiff_t>(context_of_row(options, row)), split},
       .continuation = {split, split + static_cast<std::ptrdiff_t>(options.decode_tokens)}});
  }
  return made;
}

// What was measured of the model: the file that is named, else the shipped one where the model is like the one that it is of.
std::optional<pulseinfer::calibration> calibration_of(
  run_options const& options, host_engine::llama_geometry const& model)
{
  std::string const shipped = "examples/calibrate/smollm2-135m.txt";
  if (!options.calibration_path && !std::filesystem::exists(shipped)) return std::nullopt;
  pulseinfer::calibration measured = load_calibration(options.calibration_path.value_or(shipped));
  bool const fits = measured.layers.size() == model.layers && measured.query_heads == model.query_heads &&
    measured.kv_heads == model.kv_heads && measured.head_dim == model.head_dim;
  if (!fits && options.calibration_path) {
    throw pulseinfer::configuration_error{
      *options.calibration_path + " is of a model of " + std::to_string(measured.layers.size()) + " layers, " +
      std::to_string(measured.query_heads) + " query heads and " + std::to_string(measured.kv_heads) + " KV heads of " +
      std::to_string(measured.head_dim) + "; this one has " + std::to_string(model.layers) + ", " +
      std::to_string(model.query_heads) + " and " + std::to_string(model.kv_heads) + " of " +
      std::to_string(model.head_dim)};
  }
  return fits ? std::optional{std::move(measured)} : std::nullopt;
}

class stopwatch {
 public:
  template <class Work>
  void time(Work&& work)
  {
    auto const start = std::chrono::steady_clock::now();
    work();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  [[nodiscard]] double per_second(double count) const { return seconds_ > 0.0 ? count / seconds_ : 0.0; }
  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  double seconds_ = 0.0;
};

// On a terminal one line that is drawn over; elsewhere a line for each tenth.
class progress_bar {
 public:
  progress_bar(std::string label, std::uint64_t total)
    : label_{std::move(label)}, total_{std::max<std::uint64_t>(total, 1)}
  {}

  void show(std::uint64_t done)
  {
    bool const terminal = isatty(STDERR_FILENO) != 0;
    std::uint64_t const tenth = 10 * done / total_;
    if (terminal) {
      int const filled = static_cast<int>(40 * done / total_);
      std::fprintf(
        stderr, "\r%-20s [%.*s%*s] %3u %%%s", label_.c_str(), filled, "########################################",
        40 - filled, "", static_cast<unsigned>(100 * done / total_), done >= total_ ? "\n" : "");
    } else if (tenth != shown_) {
      std::fprintf(stderr, "%s %u0 %%\n", label_.c_str(), static_cast<unsigned>(tenth));
    }
    shown_ = tenth;
  }

 private:
  std::string label_;
  std::uint64_t total_, shown_ = 0;
};

void take_prompts(char const* label, decoder& to, std::span<row_text const> rows, stopwatch& watch)
{
  std::uint64_t total = 0, before = 0;
  for (row_text const& row : rows) total += row.prompt.size();
  progress_bar bar{label, total};
  for (std::uint32_t row = 0; row < rows.size(); ++row) {
    watch.time([&] { to.prefill(row, rows[row].prompt, [&](std::uint32_t done) { bar.show(before + done); }); });
    before += rows[row].prompt.size();
  }
}

struct result {
  comparison sparse, window;
  stopwatch dense_prefill, sparse_prefill;
  stopwatch dense_watch, sparse_watch, window_watch;
  pulseinfer::counters counters;
  pulseinfer::memory_use memory;
  std::uint64_t dense_bytes = 0, sparse_bytes = 0, peak_bytes = 0;
  std::string schedule;
  std::uint64_t graph_launches = 0;
};

// Feeds all three the true continuation and compares what they predict for each of its tokens.
result follow_text(subject const& what, reference_decoder& dense, offload_decoder& sparse, reference_decoder& window)
{
  result found;
  std::size_t const steps = what.rows.front().continuation.size();
  progress_bar bar{"decode", steps};
  std::vector<std::int32_t> tokens(what.rows.size());
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::uint32_t row = 0; row < tokens.size(); ++row) {
      tokens[row] = what.rows[row].continuation[step];
      std::vector<float> const reference = log_probabilities(dense.logits(row));
      found.sparse.add(reference, log_probabilities(sparse.logits(row)), tokens[row]);
      // What follows the prompt itself is the dense prediction for both.
      std::vector<float> const seen = step == 0 ? reference : log_probabilities(window.logits(row));
      found.window.add(reference, seen, tokens[row]);
    }
    found.dense_watch.time([&] { dense.step(tokens); });
    found.sparse_watch.time([&] { sparse.step(tokens); });
    found.window_watch.time([&] { window.step(tokens); });
    bar.show(step + 1);
  }
  found.counters = sparse.counters();
  found.memory = sparse.memory();
  found.dense_bytes = dense.bytes();
  found.sparse_bytes = sparse.device_bytes();
  found.peak_bytes = sparse.device_bytes_peak();
  found.schedule = sparse.schedule();
  found.graph_launches = sparse.graph_launches();
  return found;
}

// Lets a decoder choose its own tokens; returns those of row 0.
std::vector<std::int32_t> write_on(subject const& what, decoder& with, std::uint32_t count)
{
  std::vector<std::int32_t> written, tokens(what.rows.size());
  for (std::uint32_t step = 0; step < count; ++step) {
    for (std::uint32_t row = 0; row < tokens.size(); ++row) { tokens[row] = likeliest(with.logits(row)); }
    written.push_back(tokens[0]);
    with.step(tokens);
  }
  return written;
}

std::string show(subject const& what, std::span<std::int32_t const> tokens)
{
  if (what.words) return what.words->text(tokens);
  std::string numbers;
  for (std::int32_t const token : tokens) numbers += std::to_string(token) + " ";
  return numbers;
}

void print_text(char const* heading, std::string const& text) { std::printf("\n--- %s\n%s\n", heading, text.c_str()); }

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }

void print_figures(run_options const& options, subject const& what, result const& found)
{
  auto const tokens = static_cast<double>(found.sparse.steps());
  auto const steps = static_cast<double>(found.counters.steps);
  auto const share = [&](std::uint64_t bytes) {
    return 100.0 * static_cast<double>(bytes) / static_cast<double>(found.dense_bytes);
  };
  // In percent, or as a factor where that says more.
  auto const worse = [&](double perplexity) {
    double const factor = perplexity / found.sparse.perplexity_reference();
    char text[32];
    std::snprintf(
      text, sizeof text, factor < 10.0 ? "%+.2f%%" : "x %.0f", factor < 10.0 ? 100.0 * (factor - 1.0) : factor);
    return std::string{text};
  };
  std::printf("\n%-34s %14s %14s %14s\n", "", "dense", "PulseInfer", "sink + recent");
  std::printf(
    "%-34s %14.3f %14.3f %14.3f\n", "perplexity of the true text", found.sparse.perplexity_reference(),
    found.sparse.perplexity_candidate(), found.window.perplexity_candidate());
  std::printf(
    "%-34s %14s %14s %14s\n", "  against dense", "", worse(found.sparse.perplexity_candidate()).c_str(),
    worse(found.window.perplexity_candidate()).c_str());
  std::printf(
    "%-34s %14s %14.5f %14.5f\n", "mean KL from dense, nats", "", found.sparse.kl_mean(), found.window.kl_mean());
  std::printf(
    "%-34s %14s %13.1f%% %13.1f%%\n", "same likeliest token", "", 100.0 * found.sparse.top1_agreement(),
    100.0 * found.window.top1_agreement());
  std::printf(
    "%-34s %14.1f %14.1f %14.1f\n", "tokens/s", found.dense_watch.per_second(tokens),
    found.sparse_watch.per_second(tokens), found.window_watch.per_second(tokens));
  std::printf(
    "%-34s %14.1f %14.1f\n", "GPU-tier MB while decoding", megabytes(found.dense_bytes), megabytes(found.sparse_bytes));
  std::printf("%-34s %14s %13.1f%%\n", "  of the dense cache", "", share(found.sparse_bytes));
  std::printf("%-34s %14s %14.1f\n", "  at its peak, with the prompt", "", megabytes(found.peak_bytes));
  std::printf("%-34s %14s %14.1f\n", "host-tier MB", "", megabytes(found.memory.host_bytes));
  std::printf(
    "%-34s %14s %14.1f\n", "recalled kB per step", "",
    static_cast<double>(found.counters.recalled_bytes) / 1e3 / steps);
  std::printf("%-34s %14s %14.1f\n", "misses per step, blocks", "", found.counters.recalled_blocks_per_step());
  std::printf("%-34s %14s %13.1f%%\n", "hit rate", "", 100.0 * found.counters.hit_rate());
  std::printf(
    "\nGPU tier of PulseInfer: %.1f MB slots, %.1f MB digests, %.1f MB books; %zu row(s), %u layers\n",
    megabytes(found.memory.slot_bytes), megabytes(found.memory.digest_bytes), megabytes(found.memory.book_bytes),
    what.rows.size(), what.weights.geometry.layers);
  std::printf(
    "budget %u tokens, slots %u tokens, blocks of %u tokens\n", options.offload.budget_tokens,
    options.offload.slots_tokens, options.offload.block_tokens);
  std::printf("schedule: %s\n", found.schedule.c_str());
}

nlohmann::ordered_json figures(run_options const& options, device const& on, subject const& what, result const& found)
{
  auto const tokens = static_cast<double>(found.sparse.steps());
  nlohmann::ordered_json all{
    {"device", on.name()},
    {"computed_by", on.details()},
    {"model", what.weights.name},
    {"batch", options.batch},
    {"seed", options.seed},
    {"context_tokens", options.context_tokens},
    {"budget_tokens", options.offload.budget_tokens},
    {"slots_tokens", options.offload.slots_tokens},
    {"block_tokens", options.offload.block_tokens},
    {"sink_tokens", options.offload.sink_tokens},
    {"hysteresis", options.offload.hysteresis},
    {"dense_layers", options.offload.dense_layers},
    {"digest", name_of(options.offload.digest)},
    {"digest_type", pulseinfer::name_of(options.offload.digest_type)},
    {"selector", name_of(options.offload.selector)},
    {"transfer", name_of(options.offload.transfer)},
    {"scheduler", name_of(options.offload.scheduler)},
    {"schedule", found.schedule},
    {"graph_launches_per_step", static_cast<double>(found.graph_launches) / static_cast<double>(found.counters.steps)},
    {"decode_tokens", options.decode_tokens},
    {"perplexity_dense", found.sparse.perplexity_reference()},
    {"perplexity_sparse", found.sparse.perplexity_candidate()},
    {"perplexity_window", found.window.perplexity_candidate()},
    {"kl_mean", found.sparse.kl_mean()},
    {"kl_mean_window", found.window.kl_mean()},
    {"top1_agreement", found.sparse.top1_agreement()},
    {"hit_rate", found.counters.hit_rate()},
    {"recall_bytes_per_step", found.counters.recalled_bytes_per_step()},
    {"visits_per_step", static_cast<double>(found.counters.visits) / static_cast<double>(found.counters.steps)},
    {"device_bytes_dense", found.dense_bytes},
    {"device_bytes_sparse", found.sparse_bytes},
    {"device_bytes_peak", found.peak_bytes},
    {"prefill_seconds_dense", found.dense_prefill.seconds()},
    {"prefill_seconds_sparse", found.sparse_prefill.seconds()},
    {"tokens_per_second_dense", found.dense_watch.per_second(tokens)},
    {"tokens_per_second_sparse", found.sparse_watch.per_second(tokens)}};
  for (auto const& [key, value] : options.notes) all[key] = value;
  return all;
}

// A path that can't be written is said before the work begins.
std::optional<output_file> asked_for(std::string const& path)
{
  return path.empty() ? std::nullopt : std::optional{output_file{path}};
}

void run(run_options options)
{
  std::optional<output_file> const json_file = asked_for(options.json_path);
  std::optional<output_file> const timeline_file = asked_for(options.timeline_path);

  std::string why_not;
  std::unique_ptr<device> const on = make_device(options.device, why_not);
  std::printf(
    "device: %s (%s)%s%s\n", on->name().c_str(), on->details().c_str(),
    why_not.empty() ? "" : "; no GPU: ", why_not.c_str());

  subject const what = options.model == "synthetic" ? synthetic_subject(options) : model_subject(options);
  offload_options& offload = options.offload;
  if (std::optional<pulseinfer::calibration> measured = calibration_of(options, what.weights.geometry)) {
    offload.dense_layers = pulseinfer::dense_layers(*measured);
    offload.measured = std::move(*measured);
  } else if (offload.selector == selector_choice::calibrated_heads) {
    throw pulseinfer::configuration_error{"calibrated_heads, and no calibration of this model is named"};
  }
  if (options.dense_layers) offload.dense_layers = *options.dense_layers;
  std::printf(
    "%s: %s\n%u tokens of prompt, %u tokens after it\n", what.weights.name.c_str(), what.title.c_str(),
    options.context_tokens, options.decode_tokens);

  std::vector<row_lengths> lengths;
  std::vector<std::uint32_t> prompts;
  std::uint32_t const after = options.decode_tokens + options.generate_tokens;
  for (row_text const& row : what.rows) {
    auto const prompt = static_cast<std::uint32_t>(row.prompt.size());
    lengths.push_back({.prompt_tokens = prompt - 1, .max_tokens = prompt + after});
    prompts.push_back(prompt);
  }
  for (std::string const& caution : cautions(prompts, options.decode_tokens, offload.budget_tokens)) {
    std::printf("note: %s\n", caution.c_str());
  }
  auto const rows = static_cast<std::uint32_t>(what.rows.size());
  std::uint32_t const longest = lengths.front().max_tokens;
  std::unique_ptr<loaded_model> const model = on->load(what.weights);
  std::unique_ptr<offload_decoder> const sparse = model->make_offload(offload, lengths);
  auto const dense_owned = model->make_dense(rows, longest, offload.chunk, offload.block_tokens);
  auto const window_owned = model->make_dense(rows, longest, 1, offload.block_tokens);
  reference_decoder &dense = *dense_owned, &window = *window_owned;

  stopwatch dense_prefill, sparse_prefill;
  take_prompts("prefill, dense", dense, what.rows, dense_prefill);
  take_prompts("prefill, PulseInfer", *sparse, what.rows, sparse_prefill);
  std::printf("prefill: dense %.1f s, PulseInfer %.1f s\n", dense_prefill.seconds(), sparse_prefill.seconds());
  // The same number of blocks as PulseInfer reads, but always the first and the last ones.
  std::uint32_t const sink_blocks = (offload.sink_tokens + offload.block_tokens - 1) / offload.block_tokens;
  std::uint32_t const blocks = offload.budget_tokens / offload.block_tokens;
  window.copy_prompts_from(dense);
  window.read_only(sink_blocks, blocks - sink_blocks);

  result found = follow_text(what, dense, *sparse, window);
  found.dense_prefill = dense_prefill;
  found.sparse_prefill = sparse_prefill;
  if (timeline_file) {
    timeline_file->write([&](std::ostream& out) { sparse->write_timeline(out); });
  }

  row_text const& first = what.rows.front();
  std::size_t const excerpt = 64;
  print_text("the prompt ends", show(what, std::span{first.prompt}.last(std::min(excerpt, first.prompt.size()))));
  print_text(
    "the text goes on", show(what, std::span{first.continuation}.first(std::min(excerpt, first.continuation.size()))));
  if (options.generate_tokens > 0) {
    print_text(
      "after all of its continuation, which ends",
      show(what, std::span{first.continuation}.last(std::min(excerpt, first.continuation.size()))));
    print_text("dense writes", show(what, write_on(what, dense, options.generate_tokens)));
    print_text("PulseInfer writes", show(what, write_on(what, *sparse, options.generate_tokens)));
    print_text("sink + recent writes", show(what, write_on(what, window, options.generate_tokens)));
  }
  print_figures(options, what, found);
  if (json_file) {
    json_file->write([&](std::ostream& out) { out << figures(options, *on, what, found).dump(2) << '\n'; });
  }
}

}  // namespace

int main(int argc, char** argv)
{
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // in order with the progress on standard error
  int exit_code = 0;
  std::optional<run_options> const options = parse_options(argc, argv, exit_code);
  if (!options) return exit_code;
  try {
    run(*options);
  } catch (std::exception const& problem) {
    std::fprintf(stderr, "error: %s\n", problem.what());
    return exit_failed;
  }
}
