#include "run_options.hpp"

#include "command_line.hpp"
#include <pulseinfer/error.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <CLI/CLI.hpp>

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace decode_text {
namespace {

// "7,17,18" or "none".
std::string parse_layers(std::string const& text, std::vector<std::uint32_t>& layers)
{
  layers.clear();
  if (text == "none") return {};
  std::istringstream stream{text};
  for (std::string item; std::getline(stream, item, ',');) {
    std::uint32_t layer = 0;
    auto const [end, error] = std::from_chars(item.data(), item.data() + item.size(), layer);
    if (error != std::errc{} || end != item.data() + item.size()) {
      return "'" + item + "' is no layer; expected are numbers with commas between them, or none";
    }
    layers.push_back(layer);
  }
  return {};
}

bool same_file(std::string const& left, std::string const& right)
{
  auto const name = [](std::string const& path) {
    std::error_code ignored;
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
  };
  return name(left) == name(right);
}

// An option that is one of some words; the first is the default.
template <class Choice>
void add_choice(
  CLI::App& app, std::string const& name, Choice& choice, std::string const& help, std::vector<Choice> const& choices)
{
  std::vector<std::string> names;
  for (Choice const one : choices) names.emplace_back(name_of(one));
  app
    .add_option_function<std::string>(
      name,
      [&choice, choices](std::string const& given) {
        for (Choice const one : choices) {
          if (name_of(one) == given) choice = one;
        }
      },
      help)
    ->check(CLI::IsMember(names))
    ->default_str(names.front());
  choice = choices.front();
}

// Why no selector can be made of these numbers; nothing where one can. The model need not be read for that.
std::string wrong_budget(offload_options const& offload)
{
  pulseinfer::solo_head_selector<> const selector{
    .budget_tokens = offload.budget_tokens, .sink_tokens = offload.sink_tokens, .recent_tokens = offload.recent_tokens};
  try {
    static_cast<void>(selector.resolve(pulseinfer::layer_id{0}, offload.block_tokens));
  } catch (pulseinfer::configuration_error const& problem) {
    return problem.what();
  }
  return {};
}

}  // namespace

std::optional<run_options> parse_options(int argc, char const* const* argv, int& exit_code)
{
  run_options options;
  offload_options& offload = options.offload;
  CLI::App app{"Decodes the continuation of a long text three times: with a dense KV cache, with the cache offloaded "
               "and selected by "
               "PulseInfer, and with the first and the most recent tokens alone."};
  app
    .add_option(
      "--model", options.model,
      "folder that convert.py wrote; or 'synthetic', which needs no download: a small model constructed to continue "
      "passages as they stood in its context before")
    ->capture_default_str();
  app.add_option("--context", options.context_tokens, "tokens of the prompt")
    ->capture_default_str()
    ->check(CLI::Range(2U, 1U << 24));
  app.add_option("--decode", options.decode_tokens, "tokens of the continuation, against which is measured")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1U << 24));
  app.add_option("--generate", options.generate_tokens, "tokens that each then writes by itself")
    ->capture_default_str();
  app.add_option("--batch", options.batch, "texts that are decoded together, each with a prompt of its own length")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1024U));
  app.add_option("--seed", options.seed, "of the synthetic model and its text")->capture_default_str();
  add_choice(
    app, "--device", options.device,
    "where all of it runs: on the GPU if there is one, on the CPU, or on the GPU or not at all",
    {device_choice::automatic, device_choice::cpu, device_choice::gpu});
  std::vector<std::string> notes;
  app
    .add_option(
      "--note", notes, "KEY=VALUE, an entry of the JSON file that says what the program can't know: commit=1a2b3c")
    ->take_all()
    ->allow_extra_args(false)
    ->check([](std::string const& text) {
      return text.find('=') == 0 || text.find('=') == std::string::npos ? "'" + text + "' is no KEY=VALUE" : "";
    });
  app.add_option("--json", options.json_path, "file for the figures, replaced at the end of the run");
  CLI::Option* const timeline = app.add_option(
    "--timeline", options.timeline_path, "file for a trace of the PulseInfer run, which Perfetto opens; likewise");
  timeline->check([&options](std::string const& path) {
    return !options.json_path.empty() && same_file(path, options.json_path) ? "is the file of --json" : "";
  });

  app.add_option("--budget", offload.budget_tokens, "tokens that attention reads in a layer")->capture_default_str();
  CLI::Option const* const slots =
    app.add_option("--slots", offload.slots_tokens, "tokens of a layer that stay on the GPU (default: 1.25 budgets)");
  app.add_option("--block", offload.block_tokens, "tokens of a block")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1024U));
  app.add_option("--sink", offload.sink_tokens, "first tokens, always read")->capture_default_str();
  app.add_option(
    "--recent", offload.recent_tokens, "last tokens, always read (default: an eighth of the budget, at least 128)");
  app.add_option("--hysteresis", offload.hysteresis, "nats by which blocks of the last selection are favoured")
    ->capture_default_str()
    ->check(CLI::Range(0.0F, 80.0F));
  std::string dense_layers;
  app
    .add_option(
      "--dense-layers", dense_layers,
      "layers that keep all their blocks on the GPU, or none (default: those that the calibration says)")
    ->check([](std::string const& text) {
      std::vector<std::uint32_t> layers;
      return parse_layers(text, layers);
    });
  app.add_option(
    "--calibration", options.calibration_path,
    "what examples/calibrate wrote of the model: which layers stay dense, and which heads choose for calibrated_heads "
    "(default: examples/calibrate/smollm2-135m.txt where the model is like it)");
  add_choice(
    app, "--digest", offload.digest, "what scores a block; split_...: a digest for each quarter of its tokens",
    {digest_choice::split_cuboid_mean, digest_choice::cuboid_mean, digest_choice::split_min_max, digest_choice::min_max,
     digest_choice::mean_key, digest_choice::log_mass});
  add_choice(
    app, "--digest-type", offload.digest_type, "how digests are stored",
    {pulseinfer::dtype::int8, pulseinfer::dtype::float16, pulseinfer::dtype::float32});
  add_choice(
    app, "--head-rule,--selector", offload.selector,
    "whose shares choose the blocks: of all heads in sum, the largest of any, of one head for all, or of those that a "
    "calibration names for each layer",
    {selector_choice::soft_vote, selector_choice::max_share, selector_choice::designated_head,
     selector_choice::calibrated_heads});
  offload.designated_heads = {0};
  app
    .add_option("--designated-heads", offload.designated_heads, "KV head that chooses: one for all layers, or one each")
    ->delimiter(',')
    ->capture_default_str();
  add_choice(
    app, "--transfer", offload.transfer,
    "how blocks move: all in one operation; or, planned on the host, with many copies or all fragments in one",
    {transfer_choice::gather_scatter, transfer_choice::fragment_copy, transfer_choice::batch_copy});
  add_choice(
    app, "--scheduler", offload.scheduler,
    "who runs while blocks travel: other rows; or all rows wait, without or with their hits attended first",
    {scheduler_choice::interruptible, scheduler_choice::lockstep, scheduler_choice::lockstep_hits_first});
  app.add_option("--chunk", offload.chunk, "tokens of a prompt that run together")
    ->capture_default_str()
    ->check(CLI::Range(1U, 4096U));

  if (std::optional<int> const ended = read_command_line(app, argc, argv)) {
    exit_code = *ended;
    return std::nullopt;
  }
  if (std::string const wrong = wrong_budget(offload); !wrong.empty()) {
    app.exit(CLI::ValidationError{"--budget, --sink, --recent, --block", wrong});
    exit_code = exit_usage;
    return std::nullopt;
  }
  for (std::string const& note : notes) {
    std::size_t const split = note.find('=');
    options.notes.emplace_back(note.substr(0, split), note.substr(split + 1));
  }
  if (slots->count() == 0) offload.slots_tokens = offload.budget_tokens + offload.budget_tokens / 4;
  if (!dense_layers.empty()) {
    options.dense_layers.emplace();
    static_cast<void>(parse_layers(dense_layers, *options.dense_layers));
  }
  if (!options.timeline_path.empty()) offload.trace_records = 1U << 19;
  return options;
}

}  // namespace decode_text
