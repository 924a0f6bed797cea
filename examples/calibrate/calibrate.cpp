// Measures which heads of a model choose the blocks to read nearly as well as all of them, and writes the file that
// pulseinfer::read_calibration reads. The model runs dense over windows of a text; at some positions of each window, the mass
// that all heads give each block is held against what digests of single heads say.
#include "attention_shares.hpp"
#include "decode_text/command_line.hpp"
#include "decode_text/long_text.hpp"
#include "decode_text/output_file.hpp"
#include "engine/copying_llama.hpp"
#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"
#include "engine/llama_weights.hpp"
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/head_calibrator.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct settings {
  std::string model = "build/models/smollm2-135m", output = "build/calibration.txt", digest = "cuboid_mean",
              type = "float16";
  std::uint32_t budget = 1024, block_tokens = 16, window = 4096, windows = 3, every = 41, chunk = 256, most_heads = 2;
  double coverage = 0.985;
};

class calibration_run {
 public:
  calibration_run(settings const& options, host_engine::llama_weights const& weights)
    : options_{options},
      geometry_{weights.geometry},
      budget_{pulseinfer::resolve_budget({.budget_tokens = options.budget}, options.block_tokens, 1)},
      engine_{weights, {.rows = 1, .row_tokens = options.chunk}},
      cache_{weights.geometry, 1, options.window, options.block_tokens},
      digests_{calibrate::make_digest_book(
        options.digest, options.type == "int8" ? pulseinfer::dtype::int8 : pulseinfer::dtype::float16,
        weights.geometry)},
      calibrators_(
        geometry_.layers,
        pulseinfer::head_calibrator{
          geometry_.kv_heads,
          budget_.budget_blocks - budget_.sink_blocks - budget_.recent_blocks - budget_.open_blocks})
  {}

  /// Positions from the middle of the window on are sampled.
  void take(std::span<std::int32_t const> tokens)
  {
    digests_->clear();
    std::array<std::uint32_t, 1> const rows{0};
    for (std::uint32_t position = 0; position < tokens.size();) {
      std::uint32_t const count =
        std::min<std::uint32_t>(options_.chunk, static_cast<std::uint32_t>(tokens.size()) - position);
      engine_.feed(0, tokens.subspan(position, count), position);
      for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
        engine_.project(layer, rows);
        cache_.append(layer, rows, engine_);
        auto const table = cache_.table_of(layer);
        digests_->update(layer, table.blocks(0, 0));
        for (std::uint32_t i = 0; i < count; ++i) {
          std::uint32_t const at = position + i;
          if (at >= tokens.size() / 2 && at % options_.every == 0) sample(layer, table.blocks(0, 0), i, at + 1);
        }
        engine_.attend(layer, rows, table, host_engine::part::whole);
        engine_.feed_forward(layer, rows);
      }
      position += count;
    }
  }

  [[nodiscard]] pulseinfer::calibration result() const
  {
    pulseinfer::calibration measured{
      .query_heads = geometry_.query_heads,
      .kv_heads = geometry_.kv_heads,
      .head_dim = geometry_.head_dim,
      .block_tokens = options_.block_tokens,
      .budget_tokens = options_.budget,
      .digest = options_.digest};
    for (pulseinfer::head_calibrator const& layer : calibrators_) {
      measured.layers.push_back(layer.result({.coverage = options_.coverage, .most_heads = options_.most_heads}));
    }
    return measured;
  }
  [[nodiscard]] std::size_t samples() const { return calibrators_.front().samples(); }

 private:
  void sample(std::uint32_t layer, host_engine::kv_blocks const& kv, std::uint32_t token, std::uint32_t tokens)
  {
    auto const shares = digests_->shares(layer, kv, engine_.queries().row(token, 0), tokens);
    // Votes decide between the sink blocks and the recent ones.
    std::size_t const full = shares.target.size(), first = budget_.sink_blocks;
    std::size_t const open = (tokens - 1) / options_.block_tokens;
    std::size_t const last = std::max<std::size_t>(first, open - std::min<std::size_t>(open, budget_.recent_blocks));
    std::vector<float> of_heads;
    for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      auto const begin = shares.shares.begin() + static_cast<std::ptrdiff_t>(head * full);
      of_heads.insert(
        of_heads.end(), begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(last));
    }
    calibrators_[layer].add({shares.target.data() + first, last - first}, of_heads);
  }

  settings options_;
  host_engine::llama_geometry geometry_;
  pulseinfer::resolved_budget budget_;
  host_engine::llama_engine engine_;
  host_engine::dense_kv_cache cache_;
  std::unique_ptr<calibrate::digest_book> digests_;
  std::vector<pulseinfer::head_calibrator> calibrators_;
};

void run(settings const& options)
{
  decode_text::output_file const output{options.output};
  bool const synthetic = options.model == "synthetic";
  constexpr std::uint64_t seed = 1;
  host_engine::llama_weights const weights =
    synthetic ? host_engine::make_copying_llama(seed) : host_engine::load_llama(options.model);
  std::vector<std::int32_t> const tokens = synthetic
    ? host_engine::make_copying_text(options.window - options.window / 2, options.window / 2, seed)
    : decode_text::load_text(options.model, weights.geometry.vocabulary).tokens;
  if (tokens.size() < options.window) {
    throw std::out_of_range{
      "a window of " + std::to_string(options.window) + " tokens is asked for, the text has " +
      std::to_string(tokens.size())};
  }
  calibration_run measuring{options, weights};
  for (std::uint32_t i = 0; i < options.windows; ++i) {
    std::size_t const room = tokens.size() - options.window;
    std::size_t const begin = options.windows == 1 ? 0 : room * i / (options.windows - 1);
    measuring.take(std::span{tokens}.subspan(begin, options.window));
    std::printf("window %u of %u: tokens %zu to %zu\n", i + 1, options.windows, begin, begin + options.window);
  }
  pulseinfer::calibration const measured = measuring.result();
  output.write([&](std::ostream& out) { pulseinfer::write_calibration(out, measured); });
  std::size_t one = 0, few = 0;
  for (pulseinfer::calibrated_layer const& layer : measured.layers) {
    one += layer.heads.kv_heads.size() == 1 ? 1U : 0U;
    few += layer.heads.kv_heads.size() > 1 && layer.heads.kv_heads.size() < measured.kv_heads ? 1U : 0U;
  }
  std::printf(
    "%zu positions: one head chooses in %zu layers, a few in %zu, all in %zu. Written to %s\n", measuring.samples(),
    one, few, measured.layers.size() - one - few, options.output.c_str());
}

}  // namespace

int main(int argc, char** argv)
{
  CLI::App app{"Measures which heads of a model choose well, for pulseinfer::calibrated_heads"};
  settings options;
  app.add_option("--model", options.model, "folder that examples/decode_text/convert.py wrote, or 'synthetic'")
    ->capture_default_str();
  app.add_option("--output", options.output, "file for the calibration")->capture_default_str();
  app.add_option("--digest", options.digest, "form of the digests")
    ->capture_default_str()
    ->check(CLI::IsMember({"cuboid_mean", "min_max", "mean_key", "log_mass"}));
  app.add_option("--type", options.type, "type of the digests")
    ->capture_default_str()
    ->check(CLI::IsMember({"float16", "int8"}));
  app.add_option("--budget", options.budget, "tokens that a layer reads")->capture_default_str();
  app.add_option("--block", options.block_tokens, "tokens of a block")->capture_default_str();
  app.add_option("--window", options.window, "tokens of text that the model sees at a time")
    ->capture_default_str()
    ->check(CLI::Range(128U, 1U << 20));
  app.add_option("--windows", options.windows, "windows, evenly over the text")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1U << 10));
  app.add_option("--every", options.every, "tokens from one sampled position to the next")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1U << 20));
  app.add_option("--chunk", options.chunk, "tokens that run together")
    ->capture_default_str()
    ->check(CLI::Range(1U, 4096U));
  app.add_option("--coverage", options.coverage, "part of the vote's coverage that fewer heads must reach")
    ->capture_default_str()
    ->check(CLI::Range(0.0, 1.0));
  app.add_option("--most-heads", options.most_heads, "heads of a choice that is not all of them")
    ->capture_default_str();
  if (std::optional<int> const ended = decode_text::read_command_line(app, argc, argv)) return *ended;
  try {
    run(options);
  } catch (std::exception const& problem) {
    std::fprintf(stderr, "error: %s\n", problem.what());
    return decode_text::exit_failed;
  }
}
