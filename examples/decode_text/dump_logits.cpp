// Writes the engine's logits for a stretch of the text, for compare_transformers.py to check.
//
// The first `context` tokens run as a prefill in chunks, the others one by one as in decoding, so that both ways through
// the engine are checked. The output file holds the logits after each of the decoded tokens, [tokens, vocabulary] 32-bit
// floats; a second file with .json appended says which tokens these were.
#include "command_line.hpp"
#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"
#include "engine/llama_weights.hpp"
#include "long_text.hpp"
#include "output_file.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>

namespace {

using host_engine::dense_kv_cache, host_engine::llama_engine;

void run_all_layers(llama_engine& engine, dense_kv_cache& cache, std::span<std::uint32_t const> rows)
{
  for (std::uint32_t layer = 0; layer < engine.geometry().layers; ++layer) {
    engine.project(layer, rows);
    cache.append(layer, rows, engine);
    engine.attend(layer, rows, cache.table_of(layer), host_engine::part::whole);
    engine.feed_forward(layer, rows);
  }
}

double seconds_since(std::chrono::steady_clock::time_point start)
{
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void run(
  std::string const& folder, std::uint32_t context, std::uint32_t count, std::uint32_t chunk, std::string const& path)
{
  decode_text::output_file const logits_file{path}, about_file{path + ".json"};
  auto start = std::chrono::steady_clock::now();
  host_engine::llama_weights const weights = host_engine::load_llama(folder);
  decode_text::long_text const text = decode_text::load_text(folder, weights.geometry.vocabulary);
  std::printf("loaded %s in %.1f s\n", folder.c_str(), seconds_since(start));
  if (std::size_t{context} + count > text.tokens.size()) {
    throw std::out_of_range{
      std::to_string(context) + " + " + std::to_string(count) + " tokens are asked for, the text has " +
      std::to_string(text.tokens.size())};
  }

  llama_engine engine{weights, {.rows = 1, .row_tokens = chunk}};
  dense_kv_cache cache{weights.geometry, 1, context + count};
  std::array<std::uint32_t, 1> const rows{0};
  std::span<std::int32_t const> const tokens{text.tokens};

  start = std::chrono::steady_clock::now();
  for (std::uint32_t position = 0; position < context;) {
    std::uint32_t const now = std::min(chunk, context - position);
    engine.feed(0, tokens.subspan(position, now), position);
    run_all_layers(engine, cache, rows);
    position += now;
  }
  double const prefill_s = seconds_since(start);

  start = std::chrono::steady_clock::now();
  logits_file.write([&](std::ostream& out) {
    for (std::uint32_t position = context; position < context + count; ++position) {
      engine.feed(0, tokens.subspan(position, 1), position);
      run_all_layers(engine, cache, rows);
      engine.sample(rows);
      auto const bytes = std::as_bytes(engine.logits(0));
      out.write(reinterpret_cast<char const*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
  });
  double const decode_s = seconds_since(start);

  nlohmann::json const about{
    {"context_tokens", context},
    {"logits_tokens", count},
    {"vocabulary", weights.geometry.vocabulary},
    {"tokens", std::vector<std::int32_t>(tokens.begin(), tokens.begin() + context + count)}};
  about_file.write([&](std::ostream& out) { out << about << '\n'; });
  std::printf(
    "prefill of %u tokens in %.1f s (%.0f tokens/s), %u tokens decoded in %.1f s (%.1f tokens/s)\n", context, prefill_s,
    context / prefill_s, count, decode_s, count / decode_s);
}

}  // namespace

int main(int argc, char** argv)
{
  CLI::App app{"Writes the engine's logits for a stretch of the text"};
  std::string model = "build/models/smollm2-135m", output = "build/logits.f32";
  std::uint32_t context = 4096, count = 64, chunk = 256;
  app.add_option("--model", model, "folder that convert.py wrote")->capture_default_str();
  app.add_option("--context", context, "tokens of the prefill")->capture_default_str();
  app.add_option("--tokens", count, "tokens decoded after it, whose logits are written")
    ->capture_default_str()
    ->check(CLI::Range(1U, 1U << 20));
  app.add_option("--chunk", chunk, "tokens of the prefill that run together")
    ->capture_default_str()
    ->check(CLI::Range(1U, 4096U));
  app.add_option("--output", output, "file for the logits")->capture_default_str();
  if (std::optional<int> const ended = decode_text::read_command_line(app, argc, argv)) return *ended;
  try {
    run(model, context, count, chunk, output);
  } catch (std::exception const& problem) {
    std::fprintf(stderr, "error: %s\n", problem.what());
    return decode_text::exit_failed;
  }
}
