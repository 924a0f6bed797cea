#include "engine/copying_llama.hpp"
#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

TEST_SUITE_BEGIN("examples/engine");

TEST_CASE("the copying model continues each passage as it went on before")
{
  host_engine::llama_weights const weights = host_engine::make_copying_llama(1);
  std::uint32_t const prompt = 1024, count = 192;
  std::vector<std::int32_t> const text = host_engine::make_copying_text(prompt, count, 2);
  REQUIRE(text.size() == prompt + count);
  CHECK(std::set(text.begin(), text.begin() + prompt).size() == prompt);

  host_engine::llama_engine engine{weights, {.rows = 1, .row_tokens = 256}};
  host_engine::dense_kv_cache cache{weights.geometry, 1, prompt + count};
  std::array<std::uint32_t, 1> const rows{0};
  auto const step = [&](std::uint32_t position, std::uint32_t tokens) {
    engine.feed(0, std::span{text}.subspan(position, tokens), position);
    for (std::uint32_t layer = 0; layer < weights.geometry.layers; ++layer) {
      engine.project(layer, rows);
      cache.append(layer, rows, engine);
      engine.attend(layer, rows, cache.table_of(layer), host_engine::part::whole);
      engine.feed_forward(layer, rows);
    }
    engine.sample(rows);
  };
  for (std::uint32_t position = 0; position < prompt; position += 256) step(position, 256);

  std::uint32_t right = 0;
  double nats = 0;
  for (std::uint32_t position = prompt; position + 1 < prompt + count; ++position) {
    step(position, 1);
    auto const logits = engine.logits(0);
    double sum = 0;
    for (float const logit : logits) sum += std::exp(double{logit});
    nats += std::log(sum) - double{logits[static_cast<std::size_t>(text[position + 1])]};
    bool const inside = (position + 1) % host_engine::copying_text_shape::passage_tokens != 0;
    CAPTURE(position);
    if (inside) CHECK(engine.sampled(0) == text[position + 1]);
    right += engine.sampled(0) == text[position + 1] ? 1U : 0U;
  }
  CHECK(right >= count - 1 - count / host_engine::copying_text_shape::passage_tokens);
  double const perplexity = std::exp(nats / (count - 1));
  CAPTURE(perplexity);
  CHECK(perplexity < 2.0);
  CHECK(perplexity > 1.0);
}

TEST_CASE("make_copying_text refuses a prompt that it can't make")
{
  CHECK_THROWS_AS((void)host_engine::make_copying_text(8193, 1, 0), std::invalid_argument);
  CHECK_THROWS_AS((void)host_engine::make_copying_text(63, 1, 0), std::invalid_argument);
  CHECK(host_engine::make_copying_text(8192, 100, 0).size() == 8292);
}

TEST_SUITE_END();
