// The decoders of decode_text on a GPU beside those on the CPU. Both compute in 32-bit floats, in other orders.
#include "decode_text/comparison.hpp"
#include "decode_text/decoder.hpp"
#include "decode_text/device.hpp"
#include "engine/copying_llama.hpp"
#include "engine/llama_weights.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace decode_text;
using token_list = std::vector<std::int32_t>;
using logit_list = std::vector<std::vector<float>>;  // [step * rows + row][vocabulary]

// Logits of the random models are between -8 and 8; products of 48 to 192 floats differ by a few units in the last place.
constexpr double tolerance = 2e-4;

struct row_text {
  std::size_t prompt = 0;
  token_list tokens;
};

device& gpu()
{
  static std::string why_not;
  static std::unique_ptr<device> const made = make_gpu_device(why_not);
  if (!made) throw std::runtime_error{why_not};
  return *made;
}

host_engine::llama_geometry shaped(
  std::uint32_t query_heads, std::uint32_t kv_heads, std::uint32_t head_dim, std::uint32_t hidden)
{
  return {
    .layers = 3,
    .hidden = hidden,
    .query_heads = query_heads,
    .kv_heads = kv_heads,
    .head_dim = head_dim,
    .feed_forward = 80,
    .vocabulary = 300,
    .context_tokens = 600};
}

std::vector<row_text> texts_of(
  std::initializer_list<std::size_t> prompts, std::size_t decoded, std::uint32_t vocabulary)
{
  std::mt19937 random{17};
  std::vector<row_text> texts;
  for (std::size_t const prompt : prompts) {
    row_text text{.prompt = prompt, .tokens = token_list(prompt + decoded)};
    for (std::int32_t& token : text.tokens) token = static_cast<std::int32_t>(random() % vocabulary);
    texts.push_back(std::move(text));
  }
  return texts;
}

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

void take_prompts(decoder& with, std::span<row_text const> texts)
{
  for (std::uint32_t row = 0; row < texts.size(); ++row) {
    with.prefill(row, std::span{texts[row].tokens}.first(texts[row].prompt), [](std::uint32_t) {});
  }
}

// Of all steps behind the prompts.
logit_list steps(decoder& with, std::span<row_text const> texts)
{
  logit_list logits;
  for (std::size_t step = 0; step < texts[0].tokens.size() - texts[0].prompt; ++step) {
    token_list now;
    for (row_text const& text : texts) now.push_back(text.tokens[text.prompt + step]);
    with.step(now);
    for (std::uint32_t row = 0; row < texts.size(); ++row) {
      auto const after = with.logits(row);
      logits.emplace_back(after.begin(), after.end());
    }
  }
  return logits;
}

std::unique_ptr<reference_decoder> dense_on(
  loaded_model const& model, std::span<row_text const> texts, std::uint32_t block_tokens)
{
  std::size_t longest = 0;
  for (row_text const& text : texts) longest = std::max(longest, text.tokens.size());
  return model.make_dense(
    static_cast<std::uint32_t>(texts.size()), static_cast<std::uint32_t>(longest), 48, block_tokens);
}

double difference(std::span<float const> left, std::span<float const> right)
{
  REQUIRE(left.size() == right.size());
  double largest = 0.0;
  for (std::size_t at = 0; at < left.size(); ++at) {
    double const apart = std::abs(double{left[at]} - double{right[at]});
    largest = apart <= largest ? largest : apart;  // a NaN stays
  }
  return largest;
}

double difference(logit_list const& left, logit_list const& right)
{
  REQUIRE(left.size() == right.size());
  double largest = 0.0;
  for (std::size_t at = 0; at < left.size(); ++at) {
    double const apart = difference(std::span{left[at]}, std::span{right[at]});
    largest = apart <= largest ? largest : apart;
  }
  return largest;
}

}  // namespace

TEST_SUITE_BEGIN("gpu");

TEST_CASE("a model on the GPU gives the logits of the CPU: rows of different lengths, all of the cache and parts of it")
{
  std::unique_ptr<device> const cpu = make_cpu_device();
  // Heads as SmolLM2's, which attention has a kernel for, and heads that the generic body takes.
  for (auto const& geometry : {shaped(9, 3, 64, 96), shaped(4, 4, 128, 48), shaped(6, 2, 6, 33)}) {
    CAPTURE(geometry.head_dim);
    host_engine::llama_weights const weights = host_engine::make_random_llama(geometry, 3);
    std::vector<row_text> const texts = texts_of({200, 131, 2, 49}, 24, geometry.vocabulary);
    auto const here = cpu->load(weights), there = gpu().load(weights);
    auto const expected = dense_on(*here, texts, 16), found = dense_on(*there, texts, 16);
    take_prompts(*expected, texts);
    take_prompts(*found, texts);
    for (std::uint32_t row = 0; row < texts.size(); ++row) {
      CHECK(difference(expected->logits(row), found->logits(row)) < tolerance);
    }
    CHECK(found->bytes() == expected->bytes());

    auto const window = dense_on(*here, texts, 16), gpu_window = dense_on(*there, texts, 16);
    window->copy_prompts_from(*expected);
    gpu_window->copy_prompts_from(*found);
    window->read_only(1, 3);
    gpu_window->read_only(1, 3);
    logit_list const all = steps(*expected, texts), all_there = steps(*found, texts);
    logit_list const few = steps(*window, texts), few_there = steps(*gpu_window, texts);
    CHECK(difference(all, all_there) < tolerance);
    CHECK(difference(few, few_there) < tolerance);
    CHECK(difference(all, few) > 100.0 * tolerance);  // leaving most of the cache out shows
    MESSAGE("largest difference " << difference(all, all_there) << ", window " << difference(few, few_there));
  }
}

TEST_CASE("law 3 on the GPU: a budget that covers the texts gives the dense logits, whatever the policies")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(shaped(9, 3, 64, 96), 5);
  std::vector<row_text> const texts = texts_of({100, 61}, 40, 300);
  auto const model = gpu().load(weights);
  auto const dense = dense_on(*model, texts, 16);
  take_prompts(*dense, texts);
  logit_list const expected = steps(*dense, texts);
  for (auto const selector : {selector_choice::soft_vote, selector_choice::designated_head}) {
    for (auto const transfer :
         {transfer_choice::gather_scatter, transfer_choice::fragment_copy, transfer_choice::batch_copy}) {
      for (auto const scheduler :
           {scheduler_choice::lockstep, scheduler_choice::lockstep_hits_first, scheduler_choice::interruptible}) {
        auto const sparse = model->make_offload(
          {.selector = selector,
           .transfer = transfer,
           .scheduler = scheduler,
           .budget_tokens = 160,
           .slots_tokens = 256,
           .designated_heads = {1},
           .chunk = 48},
          lengths_of(texts));
        take_prompts(*sparse, texts);
        CAPTURE(name_of(selector));
        CAPTURE(name_of(transfer));
        CAPTURE(name_of(scheduler));
        CHECK(difference(expected, steps(*sparse, texts)) < tolerance);
      }
    }
  }
}

// Where a block's vote is nearest to the cut, rounding may choose another one: then both are about as little worth.
TEST_CASE("with a part of the cache the GPU selects and recalls as the CPU, and predicts the same")
{
  std::unique_ptr<device> const cpu = make_cpu_device();
  host_engine::llama_weights const weights = host_engine::make_copying_llama(1);
  std::uint32_t const context = 1024, count = 96;
  std::vector<row_text> texts;
  for (std::uint32_t const prompt : {context, context / 2}) {
    texts.push_back({.prompt = prompt, .tokens = host_engine::make_copying_text(prompt, count, prompt)});
  }
  auto const model_here = cpu->load(weights), model_there = gpu().load(weights);
  for (auto const scheduler : {scheduler_choice::lockstep, scheduler_choice::interruptible}) {
    offload_options const options{
      .scheduler = scheduler, .budget_tokens = 128, .slots_tokens = 192, .recent_tokens = 32, .chunk = 256};
    auto const here = model_here->make_offload(options, lengths_of(texts));
    auto const there = model_there->make_offload(options, lengths_of(texts));
    take_prompts(*here, texts);
    take_prompts(*there, texts);
    logit_list const expected = steps(*here, texts), found = steps(*there, texts);
    std::size_t same = 0, near = 0;
    for (std::size_t at = 0; at < expected.size(); ++at) {
      same += likeliest(expected[at]) == likeliest(found[at]) ? 1U : 0U;
      near += difference(std::span{expected[at]}, std::span{found[at]}) < 0.02 ? 1U : 0U;
    }
    auto const recalled = static_cast<double>(here->counters().recalled_blocks);
    CAPTURE(name_of(scheduler));
    CAPTURE(recalled);
    CAPTURE(there->counters().recalled_blocks);
    CHECK(recalled > 10.0);
    CHECK(std::abs(static_cast<double>(there->counters().recalled_blocks) - recalled) < 0.05 * recalled);
    CHECK(same >= expected.size() - 2);
    CHECK(near >= expected.size() - expected.size() / 20);
    CHECK(there->device_bytes() == here->device_bytes());
    // All steps but the first: one graph each, or one for each layer and one before them.
    std::size_t const layers = weights.geometry.layers;
    CHECK(there->graph_launches() == (count - 1) * (scheduler == scheduler_choice::lockstep ? 1 : layers + 1));
    CHECK(here->graph_launches() == 0);
    MESSAGE(
      same << " of " << expected.size() << " steps predict the same token, " << near << " have near logits; recalled "
           << recalled << " and " << there->counters().recalled_blocks << " blocks");
  }
}

// Of random keys many blocks are about as near, so here rounding does choose others now and then; what moves stays the same.
TEST_CASE(
  "where most of the cache is recalled, step by step, the GPU recalls as much as the CPU and predicts nearly the same")
{
  std::unique_ptr<device> const cpu = make_cpu_device();
  host_engine::llama_weights const weights = host_engine::make_random_llama(shaped(9, 3, 64, 96), 7);
  std::vector<row_text> const texts = texts_of({500, 391, 280}, 60, 300);
  auto const model_here = cpu->load(weights), model_there = gpu().load(weights);
  offload_options const options{
    .budget_tokens = 128, .slots_tokens = 192, .recent_tokens = 32, .hysteresis = 0.0F, .chunk = 64};
  auto const here = model_here->make_offload(options, lengths_of(texts));
  auto const there = model_there->make_offload(options, lengths_of(texts));
  take_prompts(*here, texts);
  take_prompts(*there, texts);
  logit_list const expected = steps(*here, texts), found = steps(*there, texts);
  std::size_t near = 0, same = 0;
  for (std::size_t at = 0; at < expected.size(); ++at) {
    near += difference(std::span{expected[at]}, std::span{found[at]}) < 10.0 * tolerance ? 1U : 0U;
    same += likeliest(expected[at]) == likeliest(found[at]) ? 1U : 0U;
  }
  auto const recalled = static_cast<double>(here->counters().recalled_blocks);
  auto const recalled_there = static_cast<double>(there->counters().recalled_blocks);
  CHECK(recalled > 1000.0);
  CHECK(std::abs(recalled_there - recalled) < 0.02 * recalled);
  CHECK(near > expected.size() * 9 / 10);
  CHECK(same > expected.size() * 9 / 10);
  MESSAGE(
    near << " of " << expected.size() << " steps have near logits, " << same << " the same likeliest token; recalled "
         << recalled << " and " << recalled_there << " blocks");
}

TEST_CASE("an engine on the GPU refuses what the CPU's refuses, and more rows than it has place for")
{
  host_engine::llama_weights const weights = host_engine::make_random_llama(shaped(2, 1, 8, 16), 5);
  auto const model = gpu().load(weights);
  auto const dense = model->make_dense(1, 32, 8, 16);
  CHECK_THROWS_AS(dense->step(token_list{300}), std::out_of_range);
  CHECK_THROWS_AS((void)model->make_dense(257, 32, 8, 16), std::invalid_argument);
  CHECK_THROWS_AS(
    (void)model->make_offload(
      {.budget_tokens = 128, .slots_tokens = 64, .recent_tokens = 32},
      std::vector<row_lengths>{{.prompt_tokens = 300, .max_tokens = 400}}),
    std::exception);
}

TEST_SUITE_END();
