// Measures which heads of a model choose the blocks to read nearly as well as all of them, and which layers cost too much to
// leave blocks out of; and writes the file that pulseinfer::read_calibration reads. The model runs dense over windows of a text.
// At some positions of each window, the mass that all heads give each block is held against what digests of single heads say.
// Then the window's last tokens run again for each layer, with this one sparse, and predictions are held against the dense ones:
// once as they stand, once with a passage from the window's begin in their place, word for word, which layers that look things
// up find again.
#include "attention_shares.hpp"
#include "decode_text/command_line.hpp"
#include "decode_text/comparison.hpp"
#include "decode_text/long_text.hpp"
#include "decode_text/output_file.hpp"
#include "engine/block_attention.hpp"
#include "engine/copying_llama.hpp"
#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"
#include "engine/llama_weights.hpp"
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/head_calibrator.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct settings {
  std::string model = "build/models/smollm2-135m", output = "build/calibration.txt", digest = "cuboid_mean",
              type = "int8";
  std::uint32_t budget = 1024, block_tokens = 16, pieces = 4, window = 4096, windows = 3, every = 41, chunk = 256,
                most_heads = 2, scored = 128;
  double coverage = 0.985, outlier = 10.0;
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
        options.digest, options.type == "int8" ? pulseinfer::dtype::int8 : pulseinfer::dtype::float16, options.pieces,
        options.block_tokens, weights.geometry)},
      dense_hidden_(weights.geometry.layers),
      divergence_(weights.geometry.layers, 0.0),
      calibrators_(
        geometry_.layers,
        pulseinfer::head_calibrator{
          geometry_.kv_heads,
          budget_.budget_blocks - budget_.sink_blocks - budget_.recent_blocks - budget_.open_blocks})
  {}

  /// Positions from the middle of the window on are sampled, and the layers measured at its end.
  void take(std::span<std::int32_t const> tokens)
  {
    digests_->keep(0);
    auto const length = static_cast<std::uint32_t>(tokens.size());
    for (std::uint32_t position = 0; position < length;) {
      std::uint32_t const count = std::min(options_.chunk, length - position);
      run_densely(
        tokens.subspan(position, count), position, [&](std::uint32_t layer, host_engine::kv_blocks const& kv) {
          for (std::uint32_t i = 0; i < count; ++i) {
            std::uint32_t const at = position + i;
            if (at >= length / 2 && at % options_.every == 0) sample(layer, kv, i, at + 1);
          }
        });
      position += count;
    }
    std::uint32_t const scored = options_.scored, begin = length - 2 * scored;
    measure_layers(tokens.subspan(begin + scored), begin + scored);
    digests_->keep(begin / options_.block_tokens);
    std::span<std::int32_t const> const passage = tokens.subspan(length / 8, 2 * scored);
    run_densely(passage.first(scored), begin, [](std::uint32_t, host_engine::kv_blocks const&) {});
    measure_layers(passage.last(scored), begin + scored);
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
      measured.layers.back().divergence = divergence_[measured.layers.size() - 1] / static_cast<double>(predictions_);
    }
    for (std::uint32_t const layer : pulseinfer::lookup_layers(divergence_, options_.outlier)) {
      measured.layers[layer].kind = pulseinfer::layer_kind::dense;
    }
    return measured;
  }
  [[nodiscard]] std::size_t samples() const { return calibrators_.front().samples(); }

 private:
  template <class Look>
  void run_densely(std::span<std::int32_t const> tokens, std::uint32_t position, Look const& look)
  {
    engine_.feed(0, tokens, position);
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      std::span<float const> const hidden = engine_.hidden(0);
      dense_hidden_[layer].assign(hidden.begin(), hidden.end());
      engine_.project(layer, row);
      cache_.append(layer, row, engine_);
      auto const table = cache_.table_of(layer);
      digests_->update(layer, table.blocks(0, 0));
      look(layer, table.blocks(0, 0));
      engine_.attend(layer, row, table, host_engine::part::whole);
      engine_.feed_forward(layer, row);
    }
  }

  /// Adds, for each layer, how far predictions are from the dense ones where this layer alone is sparse. All tokens before are
  /// in the cache.
  void measure_layers(std::span<std::int32_t const> tokens, std::uint32_t position)
  {
    auto const count = static_cast<std::uint32_t>(tokens.size());
    run_densely(tokens, position, [](std::uint32_t, host_engine::kv_blocks const&) {});
    std::vector<float> const dense = log_probabilities(count);
    for (std::uint32_t sparse = 0; sparse < geometry_.layers; ++sparse) {
      engine_.resume(0, dense_hidden_[sparse], position, sparse);
      for (std::uint32_t layer = sparse; layer < geometry_.layers; ++layer) {
        engine_.project(layer, row);
        cache_.append(layer, row, engine_);
        auto const table = cache_.table_of(layer);
        if (layer == sparse) {
          attend_chosen(layer, table.blocks(0, 0), position, count);
        } else {
          engine_.attend(layer, row, table, host_engine::part::whole);
        }
        engine_.feed_forward(layer, row);
      }
      std::vector<float> const found = log_probabilities(count);
      double divergence = 0.0;
      for (std::size_t i = 0; i < dense.size(); ++i) {
        divergence +=
          std::exp(static_cast<double>(dense[i])) * (static_cast<double>(dense[i]) - static_cast<double>(found[i]));
      }
      divergence_[sparse] += std::max(divergence, 0.0);
    }
    predictions_ += count;
  }

  [[nodiscard]] std::vector<float> log_probabilities(std::uint32_t count)
  {
    std::vector<float> result, logits(geometry_.vocabulary);
    for (std::uint32_t i = 0; i < count; ++i) {
      engine_.token_logits(0, i, 1, logits.data());
      std::vector<float> const one = decode_text::log_probabilities(logits);
      result.insert(result.end(), one.begin(), one.end());
    }
    return result;
  }

  /// Each token reads the blocks that the vote of all heads' digests gives it.
  void attend_chosen(std::uint32_t layer, host_engine::kv_blocks const& kv, std::uint32_t position, std::uint32_t count)
  {
    std::size_t const width = std::size_t{geometry_.query_heads} * geometry_.head_dim;
    std::vector<float> log_sums(geometry_.query_heads);
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint32_t const tokens = position + i + 1;
      auto const blocks = chosen_blocks(layer, kv, engine_.queries().row(i, 0), tokens);
      std::vector<float const*> addresses;
      for (std::size_t const block : blocks) addresses.push_back(kv.blocks[block]);
      std::size_t const of_last = tokens - blocks.back() * kv.block_tokens;
      host_engine::kv_blocks const read{
        .blocks = addresses,
        .heads = kv.heads,
        .block_tokens = kv.block_tokens,
        .tokens = static_cast<std::uint32_t>((blocks.size() - 1) * kv.block_tokens + of_last)};
      host_engine::attend_blocks(
        {.queries_per_kv_head = geometry_.query_heads / geometry_.kv_heads,
         .head_dim = geometry_.head_dim,
         .scale = 1.0F / std::sqrt(static_cast<float>(geometry_.head_dim))},
        read,
        {.queries = engine_.queries().row(i, 0),
         .outputs = engine_.attended(0).data() + i * width,
         .stride = width,
         .log_sums = log_sums.data(),
         .log_sum_stride = geometry_.query_heads,
         .tokens = 1},
        scratch_);
    }
  }

  /// Ascending; the last is the one that the position's own token stands in.
  [[nodiscard]] std::vector<std::size_t> chosen_blocks(
    std::uint32_t layer, host_engine::kv_blocks const& kv, float const* queries, std::uint32_t tokens) const
  {
    std::size_t const all = (std::size_t{tokens} + kv.block_tokens - 1) / kv.block_tokens;
    std::vector<std::size_t> blocks(all);
    std::iota(blocks.begin(), blocks.end(), std::size_t{0});
    if (all <= budget_.budget_blocks) return blocks;
    auto const shares = digests_->shares(layer, kv, queries, tokens);
    std::size_t const full = shares.target.size();
    std::vector<float> votes(full, 0.0F);
    for (std::size_t at = 0; at < shares.shares.size(); ++at) votes[at % full] += shares.shares[at];
    auto const at = [&](std::size_t block) { return blocks.begin() + static_cast<std::ptrdiff_t>(block); };
    std::size_t const first = budget_.sink_blocks, last = all - 1 - budget_.recent_blocks;
    std::size_t const chosen = budget_.budget_blocks - 1 - budget_.recent_blocks - first;
    std::partial_sort(at(first), at(first + chosen), at(last), [&](std::size_t a, std::size_t b) {
      return votes[a] != votes[b] ? votes[a] > votes[b] : a < b;
    });
    std::sort(at(first), at(first + chosen));
    blocks.erase(at(first + chosen), at(last));
    return blocks;
  }

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

  static constexpr std::array<std::uint32_t, 1> row{0};

  settings options_;
  host_engine::llama_geometry geometry_;
  pulseinfer::resolved_budget budget_;
  host_engine::llama_engine engine_;
  host_engine::dense_kv_cache cache_;
  std::unique_ptr<calibrate::digest_book> digests_;
  std::vector<std::vector<float>> dense_hidden_;  // [layer][tokens, hidden] of the last dense run
  std::vector<double> divergence_;                // [layer] nat, of all predictions
  std::uint64_t predictions_ = 0;
  host_engine::attention_scratch scratch_;
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
  if (2 * options.scored + options.window / 8 > options.window - 2 * options.scored || options.scored > options.chunk) {
    throw std::out_of_range{
      "the last " + std::to_string(options.scored) + " tokens of a window of " + std::to_string(options.window) +
      " are scored, in chunks of " + std::to_string(options.chunk) +
      ": that needs a chunk as large and a window about five times as large"};
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
  std::string dense;
  for (std::uint32_t const layer : pulseinfer::dense_layers(measured)) dense += " " + std::to_string(layer);
  std::printf(
    "%zu positions: one head chooses in %zu layers, a few in %zu, all in %zu. Layers to keep dense:%s. Written to %s\n",
    measuring.samples(), one, few, measured.layers.size() - one - few, dense.empty() ? " none" : dense.c_str(),
    options.output.c_str());
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
  app.add_option("--pieces", options.pieces, "of a block, each with a digest of its own: split<digest, pieces>")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1024U));
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
  app.add_option("--scored", options.scored, "last tokens of a window, for which each layer is sparse in turn")
    ->capture_default_str()
    ->check(CLI::Range(1U, 4096U));
  app.add_option("--outlier", options.outlier, "layers that cost so many times the median of all are to stay dense")
    ->capture_default_str()
    ->check(CLI::Range(1.0, 1e9));
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
