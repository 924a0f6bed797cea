// The decoders of decode_text beside each other, on models that need no download.
#include "decode_text/comparison.hpp"
#include "decode_text/dense_decoder.hpp"
#include "decode_text/offload_options.hpp"
#include "engine/copying_llama.hpp"
#include "engine/llama_weights.hpp"
#include <pulseinfer/error.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace decode_text;
using token_list = std::vector<std::int32_t>;

host_engine::llama_geometry const small{
  .layers = 3,
  .hidden = 32,
  .query_heads = 6,
  .kv_heads = 2,
  .head_dim = 8,
  .feed_forward = 48,
  .vocabulary = 60,
  .context_tokens = 600};

token_list random_tokens(std::size_t count, std::uint32_t vocabulary, unsigned seed)
{
  std::mt19937 generator{seed};
  token_list tokens(count);
  for (auto& token : tokens) token = static_cast<std::int32_t>(generator() % vocabulary);
  return tokens;
}

// A text of each row, of which the first `prompt` tokens are its prompt.
struct row_text {
  std::size_t prompt = 0;
  token_list tokens;
};

std::vector<row_lengths> lengths_of(std::span<row_text const> texts)
{
  std::vector<row_lengths> lengths;
  for (row_text const& text : texts) {
    lengths.push_back(
      {.prompt_tokens = static_cast<std::uint32_t>(text.prompt - 1),
       .max_tokens = static_cast<std::uint32_t>(text.tokens.size())});
  }
  return lengths;
}

// Logits after each token from the prompt's last on: [step][row][vocabulary]. All rows go on for as many tokens.
std::vector<std::vector<std::vector<float>>> decode(decoder& with, std::span<row_text const> texts)
{
  for (std::uint32_t row = 0; row < texts.size(); ++row) {
    with.prefill(row, std::span{texts[row].tokens}.first(texts[row].prompt), [](std::uint32_t) {});
  }
  std::vector<std::vector<std::vector<float>>> logits;
  for (std::size_t step = 0; step < texts[0].tokens.size() - texts[0].prompt; ++step) {
    token_list now;
    for (row_text const& text : texts) now.push_back(text.tokens[text.prompt + step - (step > 0 ? 1 : 0)]);
    if (step > 0) with.step(now);
    logits.emplace_back();
    for (std::uint32_t row = 0; row < texts.size(); ++row) {
      auto const after = with.logits(row);
      logits.back().emplace_back(after.begin(), after.end());
    }
  }
  return logits;
}

double largest_difference(std::vector<float> const& left, std::vector<float> const& right)
{
  REQUIRE(left.size() == right.size());
  double largest = 0;
  for (std::size_t at = 0; at < left.size(); ++at) {
    largest = std::max(largest, std::abs(double{left[at]} - double{right[at]}));
  }
  return largest;
}

std::vector<std::vector<std::vector<float>>> decode_densely(
  host_engine::llama_weights const& weights, std::span<row_text const> texts)
{
  std::size_t longest = 0;
  for (row_text const& text : texts) longest = std::max(longest, text.tokens.size());
  dense_decoder dense{weights, static_cast<std::uint32_t>(texts.size()), static_cast<std::uint32_t>(longest), 64, 16};
  return decode(dense, texts);
}

std::string message_of(auto&& call)
{
  try {
    call();
    return {};
  } catch (std::exception const& problem) {
    return problem.what();
  }
}

}  // namespace

TEST_SUITE_BEGIN("examples/decode_text");

TEST_CASE("law 3: a budget that covers the text gives the dense logits, whatever the policies")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(small, 3);
  std::vector<row_text> const texts{{.prompt = 100, .tokens = random_tokens(160, small.vocabulary, 1)}};
  auto const dense = decode_densely(weights, texts);
  for (auto const selector : {selector_choice::soft_vote, selector_choice::designated_head}) {
    for (auto const transfer :
         {transfer_choice::gather_scatter, transfer_choice::fragment_copy, transfer_choice::batch_copy}) {
      for (auto const scheduler :
           {scheduler_choice::lockstep, scheduler_choice::lockstep_hits_first, scheduler_choice::interruptible}) {
        for (std::uint32_t const block_tokens : {4U, 16U}) {
          bool const votes = selector == selector_choice::soft_vote;
          offload_options const options{
            .digest = votes ? digest_choice::split_cuboid_mean : digest_choice::mean_key,
            .digest_type = votes ? pulseinfer::dtype::int8 : pulseinfer::dtype::float16,
            .selector = selector,
            .transfer = transfer,
            .scheduler = scheduler,
            .budget_tokens = 160,
            .slots_tokens = 256,
            .block_tokens = block_tokens,
            .designated_heads = {1},
            .chunk = 32};
          auto const sparse = make_offload_decoder(weights, options, lengths_of(texts));
          auto const found = decode(*sparse, texts);
          double largest = 0;
          for (std::size_t step = 0; step < dense.size(); ++step) {
            largest = std::max(largest, largest_difference(found[step][0], dense[step][0]));
          }
          CAPTURE(static_cast<int>(selector));
          CAPTURE(static_cast<int>(transfer));
          CAPTURE(static_cast<int>(scheduler));
          CAPTURE(block_tokens);
          CHECK(largest < 1e-4);
        }
      }
    }
  }
}

TEST_CASE("a batch of eight texts of different lengths decodes as each alone")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(small, 5);
  std::vector<row_text> texts;
  for (unsigned row = 0; row < 8; ++row) {
    // From shorter than the budget, all resident, to several times as long.
    std::size_t const prompt = 20 + 28 * row;
    texts.push_back({.prompt = prompt, .tokens = random_tokens(prompt + 24, small.vocabulary, row)});
  }
  for (auto const scheduler : {scheduler_choice::lockstep, scheduler_choice::interruptible}) {
    offload_options const options{
      .scheduler = scheduler,
      .budget_tokens = 96,
      .slots_tokens = 128,
      .block_tokens = 8,
      .sink_tokens = 8,
      .recent_tokens = 24,
      .chunk = 32};
    auto const together = make_offload_decoder(weights, options, lengths_of(texts));
    auto const found = decode(*together, texts);
    CHECK(together->counters().recalled_blocks > 0);
    for (std::size_t row = 0; row < texts.size(); ++row) {
      std::span<row_text const> const one{&texts[row], 1};
      auto const alone = decode(*make_offload_decoder(weights, options, lengths_of(one)), one);
      double largest = 0;
      for (std::size_t step = 0; step < alone.size(); ++step) {
        largest = std::max(largest, largest_difference(found[step][row], alone[step][0]));
      }
      CAPTURE(static_cast<int>(scheduler));
      CAPTURE(row);
      CHECK(largest < 1e-4);
    }
  }
}

TEST_CASE("with a quarter of the tokens the copying model still copies; with sink and recent tokens alone it can't")
{
  host_engine::llama_weights const weights = host_engine::make_copying_llama(1);
  std::uint32_t const context = 1024, count = 96;
  std::vector<row_text> const texts{{.prompt = context, .tokens = host_engine::make_copying_text(context, count, 2)}};
  dense_decoder dense{weights, 1, context + count, 256, 16};
  dense_decoder window{weights, 1, context + count, 256, 16};
  auto const expected = decode(dense, texts);

  // One digest a block: one for each four tokens takes 4 times its bytes.
  offload_options const options{
    .digest = digest_choice::cuboid_mean, .budget_tokens = 256, .slots_tokens = 320, .chunk = 256};
  auto const sparse = make_offload_decoder(weights, options, lengths_of(texts));
  auto const found = decode(*sparse, texts);
  // The window's prompt is read densely, as the others' is.
  window.prefill(0, std::span{texts[0].tokens}.first(context - 1), [](std::uint32_t) {});
  window.read_only(1, 15);

  comparison sparse_figures, window_figures;
  for (std::size_t step = 0; step < count; ++step) {
    token_list const now{texts[0].tokens[context - 1 + step]};
    window.step(now);
    auto const reference = log_probabilities(expected[step][0]);
    std::int32_t const next = texts[0].tokens[context + step];
    sparse_figures.add(reference, log_probabilities(found[step][0]), next);
    window_figures.add(reference, log_probabilities(window.logits(0)), next);
  }
  CAPTURE(sparse_figures.perplexity_reference());
  CAPTURE(sparse_figures.perplexity_candidate());
  CAPTURE(window_figures.perplexity_candidate());
  // One passage's first token in 64 can't be known, and there the two guess differently.
  CHECK(sparse_figures.top1_agreement() > 0.95);
  CHECK(sparse_figures.perplexity_candidate() < 1.1 * sparse_figures.perplexity_reference());
  CHECK(window_figures.perplexity_candidate() > 100.0);
  CHECK(window_figures.top1_agreement() < 0.2);

  CHECK(sparse->counters().steps == count - 1);
  CHECK(sparse->counters().hit_rate() > 0.9);
  CHECK(sparse->device_bytes() < 2 * dense.bytes() / 5);
  CHECK(sparse->device_bytes_peak() > sparse->device_bytes());  // the prompt was resident as a whole
  CHECK(sparse->memory().host_bytes > dense.bytes() / 2);
}

TEST_CASE("a timeline is one JSON document with the engine's work and the library's in it")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(small, 7);
  std::vector<row_text> const texts{{.prompt = 200, .tokens = random_tokens(220, small.vocabulary, 1)}};
  offload_options const options{
    .budget_tokens = 64,
    .slots_tokens = 80,
    .block_tokens = 8,
    .recent_tokens = 16,
    .chunk = 64,
    .trace_records = 100'000};
  auto const sparse = make_offload_decoder(weights, options, lengths_of(texts));
  (void)decode(*sparse, texts);
  std::ostringstream out;
  sparse->write_timeline(out);
  nlohmann::json const trace = nlohmann::json::parse(out.str());
  for (char const* name : {"project", "attend", "feed forward", "sample", "copy to host", "step 6"}) {
    auto const& events = trace.at("traceEvents");
    CAPTURE(std::string{name});
    CHECK(std::ranges::any_of(events, [&](auto const& event) { return event.at("name") == name; }));
  }
}

TEST_CASE("each digest and head rule chooses in its own way, and a calibration's heads as if they were named")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(small, 13);
  std::vector<row_text> const texts{{.prompt = 200, .tokens = random_tokens(216, small.vocabulary, 2)}};
  auto const with = [](digest_choice digest, selector_choice selector) {
    return offload_options{
      .digest = digest,
      .selector = selector,
      .budget_tokens = 80,
      .slots_tokens = 160,
      .recent_tokens = 16,
      .designated_heads = {0},
      .chunk = 32};
  };
  auto const decoded = [&](offload_options const& options) {
    return decode(*make_offload_decoder(weights, options, lengths_of(texts)), texts);
  };
  using enum digest_choice;
  auto const by_one_head = decoded(with(split_cuboid_mean, selector_choice::designated_head));
  std::vector found{by_one_head, decoded(with(split_cuboid_mean, selector_choice::max_share))};
  for (auto const digest : {split_cuboid_mean, cuboid_mean, split_min_max, min_max, mean_key, log_mass}) {
    found.push_back(decoded(with(digest, selector_choice::soft_vote)));
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      CAPTURE(i);
      CAPTURE(j);
      CHECK((found[i] != found[j]));
    }
  }

  offload_options calibrated = with(split_cuboid_mean, selector_choice::calibrated_heads);
  calibrated.measured = {
    .query_heads = small.query_heads,
    .kv_heads = small.kv_heads,
    .head_dim = small.head_dim,
    .block_tokens = 16,
    .budget_tokens = 80,
    .digest = "cuboid_mean",
    .layers = std::vector<pulseinfer::calibrated_layer>(small.layers, {.heads = {.kv_heads = {0}}})};
  CHECK((decoded(calibrated) == by_one_head));
  calibrated.digest = mean_key;
  CHECK(message_of([&] {
          (void)decoded(calibrated);
        }).find("digests 'cuboid_mean', the selector has 'mean_key'") != std::string::npos);
  calibrated.digest = cuboid_mean;
  calibrated.measured.layers.pop_back();
  CHECK(message_of([&] { (void)decoded(calibrated); }).find("the cache has 3") != std::string::npos);
  CHECK(message_of([] {
          (void)load_calibration("no-such-file.txt");
        }) == "no-such-file.txt: no calibration can be read there");
}

TEST_CASE("options that can't work are refused with their numbers")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(small, 9);
  std::vector<row_lengths> const rows{{.prompt_tokens = 300, .max_tokens = 400}};
  auto const refusal = [&](offload_options const& options) {
    return message_of([&] { (void)make_offload_decoder(weights, options, rows); });
  };
  auto const says = [](std::string const& text, std::initializer_list<char const*> words) {
    for (char const* word : words) {
      CAPTURE(text);
      CAPTURE(word);
      CHECK(text.find(word) != std::string::npos);
    }
  };
  says(refusal({.budget_tokens = 128, .slots_tokens = 64, .recent_tokens = 32}), {"4 slots", "8 blocks"});
  says(refusal({.budget_tokens = 32, .slots_tokens = 64, .recent_tokens = 64}), {"32 tokens", "4 recent"});
  says(refusal({.budget_tokens = 128, .slots_tokens = 256, .dense_layers = {3}}), {"layer 3", "3 layers"});
  says(
    refusal(
      {.selector = selector_choice::designated_head,
       .budget_tokens = 128,
       .slots_tokens = 256,
       .designated_heads = {2}}),
    {"head 2", "2 KV heads"});
  says(
    refusal(
      {.selector = selector_choice::designated_head,
       .budget_tokens = 128,
       .slots_tokens = 256,
       .designated_heads = {0, 1}}),
    {"2 designated heads", "3 layers"});
}

TEST_CASE("layer_groups covers the layers in order, neighbours of one kind together")
{
  auto const groups = layer_groups(6, std::vector<std::uint32_t>{2, 3, 5});
  REQUIRE(groups.size() == 4);
  std::uint32_t next = 0;
  for (auto const& group : groups) {
    CHECK(group.first == next);
    next += group.count;
  }
  CHECK(next == 6);
  CHECK(groups[0].kind == pulseinfer::layer_kind::selected);
  CHECK(groups[1].kind == pulseinfer::layer_kind::dense);
  CHECK(groups[1].count == 2);
  CHECK(layer_groups(4, {}).size() == 1);
}

TEST_SUITE_END();
