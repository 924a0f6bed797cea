#include "engine/dense_kv_cache.hpp"
#include "engine/llama_engine.hpp"
#include "engine/llama_weights.hpp"
#include "slow_llama.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using host_engine::dense_kv_cache, host_engine::kv_blocks, host_engine::llama_engine, host_engine::llama_geometry,
  host_engine::llama_weights, host_engine::part;
using rows_list = std::vector<std::uint32_t>;
using token_list = std::vector<std::int32_t>;

llama_geometry const small{
  .layers = 3,
  .hidden = 24,
  .query_heads = 6,
  .kv_heads = 2,
  .head_dim = 10,  // query_width differs from hidden, and no vector length divides it
  .feed_forward = 40,
  .vocabulary = 50,
  .context_tokens = 200};

token_list random_tokens(std::size_t count, std::uint32_t vocabulary, unsigned seed)
{
  std::mt19937 generator{seed};
  token_list tokens(count);
  for (auto& token : tokens) token = static_cast<std::int32_t>(generator() % vocabulary);
  return tokens;
}

void run_layer(llama_engine& engine, dense_kv_cache& cache, rows_list const& rows, std::uint32_t layer)
{
  engine.project(layer, rows);
  cache.append(layer, rows, engine);
  engine.attend(layer, rows, cache.table_of(layer), part::whole);
  engine.feed_forward(layer, rows);
}

void run_step(llama_engine& engine, dense_kv_cache& cache, rows_list const& rows)
{
  for (std::uint32_t layer = 0; layer < engine.geometry().layers; ++layer) run_layer(engine, cache, rows, layer);
  engine.sample(rows);
}

std::vector<float> logits_of(llama_engine const& engine, std::uint32_t row)
{
  auto const logits = engine.logits(row);
  return {logits.begin(), logits.end()};
}

// Feeds the tokens in chunks and returns the logits after each chunk.
std::vector<std::vector<float>> run_chunks(llama_weights const& weights, token_list const& tokens, std::uint32_t chunk)
{
  llama_engine engine{weights, {.rows = 1, .row_tokens = chunk}};
  dense_kv_cache cache{weights.geometry, 1, static_cast<std::uint32_t>(tokens.size())};
  std::vector<std::vector<float>> logits;
  for (std::size_t position = 0; position < tokens.size(); position += chunk) {
    std::size_t const count = std::min<std::size_t>(chunk, tokens.size() - position);
    engine.feed(0, std::span{tokens}.subspan(position, count), static_cast<std::uint32_t>(position));
    run_step(engine, cache, {0});
    logits.push_back(logits_of(engine, 0));
  }
  return logits;
}

template <class Left, class Right>
double largest_difference(Left const& left, Right const& right)
{
  REQUIRE(left.size() == right.size());
  double largest = 0;
  for (std::size_t at = 0; at < left.size(); ++at) {
    largest = std::max(largest, std::abs(static_cast<double>(left[at]) - static_cast<double>(right[at])));
  }
  return largest;
}

// Copies a row's cache into blocks of another size that lie in shuffled order, for all heads or for groups of them.
class scattered_table {
 public:
  scattered_table(
    dense_kv_cache const& cache, std::uint32_t layer, std::uint32_t row, std::uint32_t block_tokens,
    std::uint32_t groups, std::uint32_t head_dim)
    : groups_{groups}, lists_(groups)
  {
    kv_blocks const dense = cache.table_of(layer).blocks(row, 0);
    std::uint32_t const heads = dense.heads / groups;
    std::size_t const plane = std::size_t{heads} * block_tokens * head_dim;
    std::size_t const count = (dense.tokens + block_tokens - 1) / block_tokens;
    storage_.assign(groups * count * 2 * plane, std::nanf(""));
    std::vector<std::size_t> places(groups * count);
    for (std::size_t place = 0; place < places.size(); ++place) places[place] = place;
    std::shuffle(places.begin(), places.end(), std::mt19937{row + layer});
    for (std::uint32_t group = 0; group < groups; ++group) {
      for (std::size_t block = 0; block < count; ++block) {
        float* const to = storage_.data() + places[group * count + block] * 2 * plane;
        lists_[group].push_back(to);
        for (std::uint32_t head = 0; head < heads; ++head) {
          for (std::uint32_t token = 0; token < block_tokens; ++token) {
            std::size_t const source = block * block_tokens + token;
            if (source >= dense.tokens) break;
            float const* const from = dense.blocks[source / dense.block_tokens] +
              ((std::size_t{group} * heads + head) * dense.block_tokens + source % dense.block_tokens) * head_dim;
            std::size_t const at = (std::size_t{head} * block_tokens + token) * head_dim;
            std::copy_n(from, head_dim, to + at);
            std::copy_n(from + std::size_t{dense.heads} * dense.block_tokens * head_dim, head_dim, to + plane + at);
          }
        }
      }
    }
    all_ = {
      .blocks = {},
      .heads = heads,
      .block_tokens = block_tokens,
      .tokens = dense.tokens,
      .new_tokens = dense.new_tokens};
  }

  // Only the blocks [first, last) from now on.
  void show(std::size_t first, std::size_t last)
  {
    first_ = first;
    last_ = last;
  }
  [[nodiscard]] std::size_t count() const { return lists_[0].size(); }

  [[nodiscard]] std::uint32_t head_groups() const { return groups_; }
  [[nodiscard]] kv_blocks blocks(std::uint32_t, std::uint32_t group) const
  {
    kv_blocks shown = all_;
    std::size_t const last = std::min(last_, count());
    shown.blocks = std::span{lists_[group]}.subspan(first_, last - first_);
    if (last < count()) {
      shown.tokens = static_cast<std::uint32_t>(last) * all_.block_tokens;
      shown.new_tokens = 0;
    }
    shown.tokens -= static_cast<std::uint32_t>(first_) * all_.block_tokens;
    return shown;
  }

 private:
  std::uint32_t groups_;
  std::vector<std::vector<float const*>> lists_;
  std::vector<float> storage_;
  kv_blocks all_;
  std::size_t first_ = 0, last_ = static_cast<std::size_t>(-1);
};

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

TEST_SUITE_BEGIN("examples/engine");

TEST_CASE("llama_engine agrees with the formulas written out, for every grouping of heads")
{
  for (auto const& [query_heads, kv_heads, head_dim] :
       {std::array{6U, 2U, 10U}, std::array{4U, 4U, 16U}, std::array{3U, 1U, 32U}, std::array{8U, 2U, 6U}}) {
    llama_geometry geometry = small;
    geometry.query_heads = query_heads;
    geometry.kv_heads = kv_heads;
    geometry.head_dim = head_dim;
    llama_weights const weights = host_engine::make_random_llama(geometry, 7);
    token_list const tokens = random_tokens(40, geometry.vocabulary, 3);
    auto const expected = slow_llama::logits(weights, tokens);
    auto const found = run_chunks(weights, tokens, 1);
    CAPTURE(query_heads);
    CAPTURE(kv_heads);
    for (std::size_t token = 0; token < tokens.size(); ++token) {
      CAPTURE(token);
      CHECK(largest_difference(found[token], expected[token]) < 1e-4);
    }
  }
}

TEST_CASE("llama_engine: a prefill in chunks of any size gives what token by token gives")
{
  llama_weights const weights = host_engine::make_random_llama(small, 11);
  token_list const tokens = random_tokens(150, small.vocabulary, 5);
  auto const one_by_one = run_chunks(weights, tokens, 1);
  for (std::uint32_t const chunk : {2U, 3U, 16U, 23U, 24U, 64U, 149U, 150U}) {
    auto const chunked = run_chunks(weights, tokens, chunk);
    CAPTURE(chunk);
    for (std::size_t index = 0; index < chunked.size(); ++index) {
      std::size_t const last = std::min((index + 1) * std::size_t{chunk}, tokens.size()) - 1;
      CHECK(largest_difference(chunked[index], one_by_one[last]) < 1e-4);
    }
  }
}

TEST_CASE("llama_engine: rows of different lengths run together as each alone")
{
  llama_weights const weights = host_engine::make_random_llama(small, 13);
  std::map<std::uint32_t, token_list> const texts{
    {0, random_tokens(30, small.vocabulary, 1)},
    {1, random_tokens(7, small.vocabulary, 2)},
    {3, random_tokens(61, small.vocabulary, 3)}};
  llama_engine engine{weights, {.rows = 4, .row_tokens = 64}};
  dense_kv_cache cache{small, 4, 100};
  rows_list rows;
  for (auto const& [row, text] : texts) {
    engine.feed(row, text, 0);
    rows.push_back(row);
  }
  run_step(engine, cache, rows);
  for (auto const& [row, text] : texts) {
    auto const alone = run_chunks(weights, text, static_cast<std::uint32_t>(text.size()));
    CHECK(largest_difference(logits_of(engine, row), alone[0]) < 1e-4);
  }
}

TEST_CASE("llama_engine: rows keep their state while others run at other layers")
{
  llama_weights const weights = host_engine::make_random_llama(small, 17);
  token_list const first = random_tokens(20, small.vocabulary, 1), second = random_tokens(33, small.vocabulary, 2);
  auto const first_alone = run_chunks(weights, first, 20), second_alone = run_chunks(weights, second, 33);

  llama_engine engine{weights, {.rows = 2, .row_tokens = 40}};
  dense_kv_cache cache{small, 2, 100};
  engine.feed(0, first, 0);
  engine.feed(1, second, 0);
  // Row 0 is parked at layer 0 between its projection and its attention, while row 1 runs ahead to layer 2.
  engine.project(0, rows_list{0, 1});
  cache.append(0, rows_list{0, 1}, engine);
  engine.attend(0, rows_list{1}, cache.table_of(0), part::whole);
  engine.feed_forward(0, rows_list{1});
  run_layer(engine, cache, {1}, 1);
  engine.attend(0, rows_list{0}, cache.table_of(0), part::whole);
  engine.feed_forward(0, rows_list{0});
  run_layer(engine, cache, {0}, 1);
  run_layer(engine, cache, {1, 0}, 2);  // they merge, in the other order
  engine.sample(rows_list{0, 1});
  CHECK(largest_difference(logits_of(engine, 0), first_alone[0]) < 1e-4);
  CHECK(largest_difference(logits_of(engine, 1), second_alone[0]) < 1e-4);
}

TEST_CASE("llama_engine: where the blocks lie makes no difference to a single bit")
{
  llama_weights const weights = host_engine::make_random_llama(small, 19);
  for (std::uint32_t const length : {1U, 37U, 64U}) {
    for (std::uint32_t const step : {1U, 5U, 30U}) {
      if (step > length) continue;
      token_list const tokens = random_tokens(length, small.vocabulary, length);
      llama_engine engine{weights, {.rows = 1, .row_tokens = 64}};
      dense_kv_cache cache{small, 1, 64};
      if (length > step) {
        engine.feed(0, std::span{tokens}.first(length - step), 0);
        run_step(engine, cache, {0});
      }
      auto const last_step = [&](auto&& attend) {
        engine.feed(0, std::span{tokens}.last(step), length - step);
        for (std::uint32_t layer = 0; layer < small.layers; ++layer) {
          engine.project(layer, rows_list{0});
          cache.append(layer, rows_list{0}, engine);
          attend(layer);
          engine.feed_forward(layer, rows_list{0});
        }
        engine.sample(rows_list{0});
        return logits_of(engine, 0);
      };
      auto const dense =
        last_step([&](std::uint32_t layer) { engine.attend(layer, rows_list{0}, cache.table_of(layer), part::whole); });
      for (std::uint32_t const block_tokens : {1U, 8U, 16U, 100U}) {
        for (std::uint32_t const groups : {1U, 2U}) {
          auto const scattered = last_step([&](std::uint32_t layer) {
            scattered_table const table{cache, layer, 0, block_tokens, groups, small.head_dim};
            engine.attend(layer, rows_list{0}, table, part::whole);
          });
          CAPTURE(length);
          CAPTURE(step);
          CAPTURE(block_tokens);
          CAPTURE(groups);
          CHECK(scattered == dense);
        }
      }
    }
  }
}

TEST_CASE("llama_engine: hits first and the landed blocks after them give the whole, up to rounding")
{
  llama_weights const weights = host_engine::make_random_llama(small, 23);
  token_list const tokens = random_tokens(70, small.vocabulary, 9);
  llama_engine engine{weights, {.rows = 1, .row_tokens = 70}};
  dense_kv_cache cache{small, 1, 70};
  engine.feed(0, std::span{tokens}.first(67), 0);
  run_step(engine, cache, {0});

  // `split` blocks land late; the newest ones, with this step's tokens, are always hits.
  auto const last_step = [&](std::size_t split) {
    engine.feed(0, std::span{tokens}.last(3), 67);
    for (std::uint32_t layer = 0; layer < small.layers; ++layer) {
      engine.project(layer, rows_list{0});
      cache.append(layer, rows_list{0}, engine);
      scattered_table table{cache, layer, 0, 8, 1, small.head_dim};
      if (split == 0) {
        engine.attend(layer, rows_list{0}, table, part::whole);
      } else {
        table.show(split, table.count());
        engine.attend(layer, rows_list{0}, table, part::hits);
        table.show(0, split);
        engine.attend(layer, rows_list{0}, table, part::landed);
      }
      engine.feed_forward(layer, rows_list{0});
    }
    engine.sample(rows_list{0});
    return logits_of(engine, 0);
  };
  auto const whole = last_step(0);
  for (std::size_t const split : {1U, 4U, 8U}) {
    CAPTURE(split);
    CHECK(largest_difference(last_step(split), whole) < 1e-5);
  }
}

TEST_CASE("dense_kv_cache::window_of shows the first and the last blocks alone")
{
  llama_weights const weights = host_engine::make_random_llama(small, 31);
  llama_engine engine{weights, {.rows = 3, .row_tokens = 50}};
  dense_kv_cache cache{small, 3, 60, 8};
  engine.feed(0, random_tokens(43, small.vocabulary, 1), 0);
  run_step(engine, cache, {0});
  cache.copy_row(cache, 0, 2);

  kv_blocks const all = cache.table_of(1).blocks(0, 0);
  CHECK(all.blocks.size() == 6);
  CHECK(all.tokens == 43);
  auto const table = cache.window_of(1, 1, 2);
  kv_blocks const window = table.blocks(0, 0);
  REQUIRE(window.blocks.size() == 3);
  CHECK(window.blocks[0] == all.blocks[0]);
  CHECK(window.blocks[1] == all.blocks[4]);
  CHECK(window.blocks[2] == all.blocks[5]);
  CHECK(window.tokens == 8 + 8 + 3);
  CHECK(cache.window_of(1, 4, 2).blocks(0, 0).tokens == 43);  // nothing is left out

  kv_blocks const copied = cache.table_of(1).blocks(2, 0);
  REQUIRE(copied.tokens == 43);
  std::size_t const block_floats = std::size_t{2} * small.kv_width() * 8;
  for (std::size_t block = 0; block < 5; ++block) {
    CHECK(copied.blocks[block] != all.blocks[block]);
    CHECK(std::equal(copied.blocks[block], copied.blocks[block] + block_floats, all.blocks[block]));
  }
}

TEST_CASE("attend_blocks: without any token a part counts for nothing")
{
  std::vector<float> outputs{1.0F, 2.0F}, empty(2, 5.0F);
  float log_sum = 0.5F, empty_log_sum = 0.0F;
  std::vector<float> const query{1.0F, 1.0F};
  host_engine::attention_scratch scratch;
  host_engine::attend_blocks(
    {.queries_per_kv_head = 1, .head_dim = 2, .scale = 1.0F},
    {.blocks = {}, .heads = 1, .block_tokens = 4, .tokens = 0, .new_tokens = 0},
    {.queries = query.data(),
     .outputs = empty.data(),
     .stride = 2,
     .log_sums = &empty_log_sum,
     .log_sum_stride = 1,
     .tokens = 1},
    scratch);
  CHECK(empty == std::vector<float>{0.0F, 0.0F});
  CHECK(std::isinf(empty_log_sum));
  host_engine::merge_attention(outputs.data(), log_sum, empty.data(), empty_log_sum, 2);
  CHECK(outputs == std::vector<float>{1.0F, 2.0F});
  CHECK(log_sum == 0.5F);
  host_engine::merge_attention(empty.data(), empty_log_sum, outputs.data(), log_sum, 2);
  CHECK(empty == outputs);
  CHECK(empty_log_sum == 0.5F);
}

TEST_CASE("attend_blocks stays finite where scores are far apart")
{
  // One key scores 400 more than the other: exp would overflow without the maximum taken off.
  std::vector<float> block(8);
  block[0] = 200.0F;   // key 0
  block[2] = -200.0F;  // key 1
  block[4] = 3.0F;     // value 0
  block[6] = 9.0F;     // value 1
  float const* const blocks[]{block.data()};
  std::vector<float> const query{1.0F, 0.0F};
  std::vector<float> outputs(2);
  float log_sum = 0.0F;
  host_engine::attention_scratch scratch;
  host_engine::attend_blocks(
    {.queries_per_kv_head = 1, .head_dim = 2, .scale = 1.0F},
    {.blocks = blocks, .heads = 1, .block_tokens = 2, .tokens = 2, .new_tokens = 0},
    {.queries = query.data(),
     .outputs = outputs.data(),
     .stride = 2,
     .log_sums = &log_sum,
     .log_sum_stride = 1,
     .tokens = 1},
    scratch);
  CHECK(outputs[0] == doctest::Approx(3.0));
  CHECK(log_sum == doctest::Approx(200.0));
}

TEST_CASE("llama_engine says with numbers what it can't take")
{
  llama_weights const weights = host_engine::make_random_llama(small, 29);
  llama_engine engine{weights, {.rows = 2, .row_tokens = 4}};
  auto const says = [](std::string const& text, std::initializer_list<char const*> words) {
    for (char const* word : words) {
      CAPTURE(text);
      CAPTURE(word);
      CHECK(text.find(word) != std::string::npos);
    }
  };
  says(message_of([&] { engine.feed(2, token_list{1}, 0); }), {"row 2", "2 rows"});
  says(message_of([&] { engine.feed(0, token_list{1, 2, 3, 4, 5}, 0); }), {"5 tokens", "1 to 4"});
  says(message_of([&] { engine.feed(0, token_list{}, 0); }), {"0 tokens"});
  says(message_of([&] { engine.feed(0, token_list{1, 2}, 199); }), {"201", "200"});
  says(message_of([&] { engine.feed(0, token_list{50}, 0); }), {"token 50", "50"});
  says(message_of([&] { engine.feed(0, token_list{-1}, 0); }), {"token -1"});

  says(message_of([&] { engine.project(0, rows_list{1}); }), {"row 1", "no tokens"});
  engine.feed(0, token_list{1, 2}, 0);
  says(message_of([&] { engine.project(1, rows_list{0}); }), {"project", "row 0", "layer 1", "layer 0"});
  says(message_of([&] { engine.sample(rows_list{0}); }), {"sample", "layer 3", "layer 0"});

  dense_kv_cache cache{small, 2, 1};
  engine.feed(0, token_list{1, 2}, 16);
  engine.project(0, rows_list{0});
  says(message_of([&] { cache.append(0, rows_list{0}, engine); }), {"row 0", "18 tokens", "holds 16"});
  CHECK_THROWS_AS((llama_engine{weights, {.rows = 0, .row_tokens = 4}}), std::invalid_argument);
}

TEST_CASE("attend_blocks refuses lists that don't hold their tokens")
{
  std::vector<float> block(64);
  float const* const blocks[]{block.data(), block.data()};
  std::vector<float> query(4), outputs(4);
  float log_sum = 0.0F;
  host_engine::attention_scratch scratch;
  auto const attend = [&](std::uint32_t tokens, std::uint32_t new_tokens) {
    return message_of([&] {
      host_engine::attend_blocks(
        {.queries_per_kv_head = 1, .head_dim = 4, .scale = 1.0F},
        {.blocks = blocks, .heads = 1, .block_tokens = 8, .tokens = tokens, .new_tokens = new_tokens},
        {.queries = query.data(),
         .outputs = outputs.data(),
         .stride = 4,
         .log_sums = &log_sum,
         .log_sum_stride = 1,
         .tokens = 1},
        scratch);
    });
  };
  CHECK(attend(16, 1).empty());
  CHECK(attend(9, 0).empty());
  CHECK(attend(17, 1).find("need 3 blocks of 8, given are 2") != std::string::npos);
  CHECK(attend(8, 1).find("need 1 blocks") != std::string::npos);
  CHECK(attend(16, 2).find("2 are new") != std::string::npos);
}

TEST_CASE("make_random_llama gives the same weights for the same seed, others for another")
{
  auto const first = host_engine::make_random_llama(small, 1), again = host_engine::make_random_llama(small, 1),
             other = host_engine::make_random_llama(small, 2);
  CHECK(first.embedding == again.embedding);
  CHECK(first.layers[2].down == again.layers[2].down);
  CHECK(first.embedding != other.embedding);
  CHECK(first.embedding[0] == doctest::Approx(-0.634144));  // on every machine
}

TEST_SUITE_END();
