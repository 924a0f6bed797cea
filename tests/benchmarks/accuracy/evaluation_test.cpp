#include "accuracy/document_tasks.hpp"
#include "accuracy/evaluation.hpp"
#include "accuracy/recorded.hpp"
#include "accuracy/statistics.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <thread>
#include <vector>

using namespace accuracy;
using pulseinfer::block_id;

namespace {

constexpr host_engine::llama_geometry tiny{
  .layers = 3,
  .hidden = 32,
  .query_heads = 4,
  .kv_heads = 2,
  .head_dim = 16,
  .feed_forward = 48,
  .vocabulary = 97,
  .context_tokens = 512};

host_engine::llama_weights const& weights()
{
  static host_engine::llama_weights const made = host_engine::make_random_llama(tiny, 5);
  return made;
}

document text_of(std::uint32_t tokens, std::uint32_t scored)
{
  std::mt19937 random{7};
  document result{.name = "random", .kind = "random", .scored = scored};
  for (std::uint32_t i = 0; i < tokens; ++i) { result.tokens.push_back(static_cast<std::int32_t>(random() % 97)); }
  return result;
}

configuration of_blocks(std::uint32_t blocks)
{
  return {.budget_tokens = 16 * blocks, .recent_tokens = 16, .slots_tokens = 16 * blocks};
}

struct scene {
  document text = text_of(300, 40);
  host_engine::llama_engine engine{weights(), {.rows = 1, .row_tokens = document_run::chunk}};
  document_run run{weights(), text};

  scene() { run.attend_densely(engine, of_blocks(6), true); }
};

double sum_of(std::vector<float> const& values)
{
  double sum = 0.0;
  for (float const value : values) { sum += double{value}; }
  return sum;
}

/// A cache of random keys and values, with queries for its last tokens.
struct random_layer {
  attention_geometry geometry{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  std::uint32_t tokens = 77;
  std::vector<float> keys, values, queries;
  layer_cache cache{geometry, 80};

  random_layer()
  {
    std::mt19937 random{3};
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < std::size_t{tokens} * 2 * 16; ++i) {
      keys.push_back(normal(random));
      values.push_back(normal(random));
    }
    for (std::size_t i = 0; i < std::size_t{5} * 4 * 16; ++i) { queries.push_back(normal(random)); }
    cache.write(0, 30, keys.data(), values.data());
    cache.write(30, tokens - 30, keys.data() + 30 * 32, values.data() + 30 * 32);
  }

  /// Softmax attention of one head over the tokens that `reads` names, in doubles; and its mass by blocks of 16.
  template <class Reads>
  std::vector<double> slowly(
    std::uint32_t query, std::uint32_t head, Reads const& reads, std::vector<double>& mass) const
  {
    std::uint32_t const visible = tokens - 5 + query + 1;
    std::vector<double> weight(visible), out(16);
    double total = 0.0;
    for (std::uint32_t t = 0; t < visible; ++t) {
      if (!reads(t / 16)) { continue; }
      double score = 0.0;
      for (std::size_t j = 0; j < 16; ++j) {
        score += double{queries[(query * 4 + head) * 16 + j]} * double{keys[(t * 2 + head / 2) * 16 + j]};
      }
      weight[t] = std::exp(score / 4.0);
      total += weight[t];
    }
    mass.assign(6, 0.0);
    for (std::uint32_t t = 0; t < visible; ++t) {
      mass[t / 16] += weight[t] / total;
      for (std::size_t j = 0; j < 16; ++j) {
        out[j] += weight[t] / total * double{values[(t * 2 + head / 2) * 16 + j]};
      }
    }
    return out;
  }
};

}  // namespace

TEST_CASE("dense attention, its mass by blocks and attention over chosen blocks agree with the definition")
{
  random_layer const layer;
  std::uint32_t const position = layer.tokens - 5;
  std::vector<std::uint32_t> const asked{0, 3, 4};
  share_table shares;
  shares.resize(4, 3, 5);
  std::vector<float> out(3 * 64), chosen_out(32), scratch;
  dense_scratch dense;
  attend_densely(layer.cache, layer.queries.data(), position, asked, 16, &shares, out.data(), dense);
  std::vector<block_id> const blocks{static_cast<block_id>(0), static_cast<block_id>(2), static_cast<block_id>(4)};
  std::vector<double> mass;
  for (std::uint32_t i = 0; i < asked.size(); ++i) {
    for (std::uint32_t head = 0; head < 4; ++head) {
      std::vector<double> const expected = layer.slowly(asked[i], head, [](std::uint32_t) { return true; }, mass);
      for (std::size_t j = 0; j < 16; ++j) {
        CHECK(double{out[(i * 4 + head) * 16 + j]} == doctest::Approx(expected[j]).epsilon(1e-4));
      }
      for (std::uint32_t b = 0; b < 5; ++b) {
        CHECK(double{shares.row(head, i)[b]} == doctest::Approx(mass[b]).epsilon(1e-4));
      }
      std::vector<double> const sparse = layer.slowly(asked[i], head, [](std::uint32_t b) { return b % 2 == 0; }, mass);
      attend_chosen(
        layer.cache, head / 2, layer.queries.data() + (asked[i] * 4 + head / 2 * 2) * 16, blocks, 16,
        position + asked[i] + 1, chosen_out.data(), scratch);
      for (std::size_t j = 0; j < 16; ++j) {
        CHECK(double{chosen_out[(head % 2) * 16 + j]} == doctest::Approx(sparse[j]).epsilon(1e-4));
      }
    }
  }
}

TEST_CASE("digests of blocks whose keys are alike give the true shares, of blocks that are being filled too")
{
  attention_geometry const geometry{.query_heads = 4, .kv_heads = 2, .head_dim = 16};
  constexpr std::uint32_t tokens = 77;
  std::mt19937 random{9};
  std::normal_distribution<float> normal;
  std::vector<float> keys, queries;
  for (std::uint32_t t = 0; t < tokens; ++t) {
    for (std::size_t j = 0; j < 32; ++j) {
      keys.push_back(t % 16 == 0 ? static_cast<float>(pulseinfer::half{normal(random)}) : keys[keys.size() - 32]);
    }
  }
  for (std::size_t i = 0; i < std::size_t{5} * 64; ++i) { queries.push_back(normal(random)); }
  layer_cache cache{geometry, 80};
  cache.write(0, tokens, keys.data(), keys.data());
  std::vector<std::uint32_t> const all{0, 1, 2, 3, 4};
  share_table truth, estimated;
  truth.resize(4, 5, 5);
  estimated.resize(4, 5, 5);
  dense_scratch scratch;
  attend_densely(cache, queries.data(), tokens - 5, all, 16, &truth, nullptr, scratch);
  for (auto const kind :
       {digest_kind::cuboid_mean, digest_kind::min_max, digest_kind::mean_key, digest_kind::log_mass}) {
    CAPTURE(name_of(kind));
    configuration c = of_blocks(5);
    c.digest = kind;
    for (std::uint32_t const digest_tokens : {0U, 4U}) {
      c.digest_tokens = digest_tokens;
      layer_digests digests{geometry, c, 80};
      digests.estimate(cache, queries.data(), tokens - 5, 5, all_heads, estimated);
      for (std::uint32_t head = 0; head < 4; ++head) {
        for (std::uint32_t i = 0; i < 5; ++i) {
          for (std::uint32_t b = 0; b < 5; ++b) {
            CHECK(double{estimated.row(head, i)[b]} == doctest::Approx(double{truth.row(head, i)[b]}).epsilon(1e-3));
          }
        }
      }
    }
  }
}

TEST_CASE("a budget that holds everything, and layers that are all dense, change nothing")
{
  scene s;
  outcome const all = s.run.evaluate(s.engine, of_blocks(19));
  CHECK(sum_of(all.kl) == doctest::Approx(0.0).epsilon(1e-4));
  CHECK(all.mass.quantile(0.01) > 0.999);
  CHECK(all.error.mean() < 1e-4);
  CHECK(all.same_top == 1.0);
  CHECK(all.recalled_bytes == 0.0);
  configuration dense = of_blocks(4);
  dense.dense_layers = {0, 1, 2};
  outcome const same = s.run.evaluate(s.engine, dense);
  CHECK(same.loss == same.dense_loss);
  CHECK(same.mass.count() == 0);
}

TEST_CASE("a small budget costs, the true mass chooses best, and what is skipped is reported")
{
  scene s;
  configuration c = of_blocks(5);
  c.hysteresis = 0.0F;
  c.dense_layers = {1, 2};  // the same queries for every choice
  outcome const digest = s.run.evaluate(s.engine, c);
  CHECK(sum_of(digest.kl) > 1e-4);
  CHECK(digest.mass.mean() < 0.999);
  CHECK(digest.recalled_bytes > 0.0);
  c.scores = score_source::oracle;
  outcome const oracle = s.run.evaluate(s.engine, c);
  CHECK(oracle.mass.mean() > digest.mass.mean());
  // A choice of each KV head for itself holds more of the mass than one for all.
  c.head_groups = 2;
  CHECK(s.run.evaluate(s.engine, c).mass.mean() > oracle.mass.mean());
  c = of_blocks(5);
  c.deferred_share = 0.3;
  outcome const deferring = s.run.evaluate(s.engine, c);
  CHECK(deferring.recalls[0].deferred > 0);
  CHECK(deferring.recalls[0].deferred <= deferring.recalls[0].missing);
  CHECK(deferring.recalls[0].skipped_most <= 0.3);
}

TEST_CASE("replay recalls what the evaluation of a first layer recalls, and calibration covers the most with all heads")
{
  scene s;
  configuration c = of_blocks(5);
  c.dense_layers = {1, 2};
  // The queries of a first layer do not depend on what is read; shares are kept as halves.
  CHECK(s.run.replay(c) == doctest::Approx(s.run.evaluate(s.engine, c).recalled_bytes).epsilon(0.05));
  std::vector<double> const covered = s.run.covered(of_blocks(5), {1U, 2U, 3U});
  for (std::size_t layer = 0; layer < 3; ++layer) {
    for (std::size_t m = 0; m < 3; ++m) { CHECK(covered[layer * 4 + m] <= covered[layer * 4 + 3]); }
  }
}

TEST_CASE("the model writes as the dense one does where everything is read, and the caches go on")
{
  document const text = text_of(120, 1);
  host_engine::llama_engine engine{weights(), {.rows = 1, .row_tokens = document_run::chunk}};
  document_run run{weights(), text, 40};
  generated_text const all = run.generate(engine, of_blocks(20), 40, 1.0, 3);
  CHECK(all.tokens.size() == 40);
  CHECK(sum_of(all.kl) == doctest::Approx(0.0).epsilon(1e-4));
  CHECK(sum_of(run.generate(engine, of_blocks(3), 40, 1.0, 3).kl) > 1e-4);
}

TEST_CASE("slots hold what was used last; what was written since the prompt is there")
{
  auto const ids = [](std::initializer_list<int> blocks) {
    std::vector<block_id> result;
    for (int const b : blocks) { result.push_back(static_cast<block_id>(b)); }
    return result;
  };
  slot_cache slots{3, 10, 6};
  CHECK_FALSE(slots.holds(static_cast<block_id>(2)));
  CHECK(slots.holds(static_cast<block_id>(3)));
  CHECK(slots.holds(static_cast<block_id>(6)));  // not written yet
  slots.use(ids({0, 5, 6}));
  CHECK(slots.holds(static_cast<block_id>(0)));
  CHECK_FALSE(slots.holds(static_cast<block_id>(4)));
  slots.use(ids({0, 6}));
  slots.use(ids({1}));
  CHECK_FALSE(slots.holds(static_cast<block_id>(5)));
  CHECK(slots.holds(static_cast<block_id>(6)));
}

TEST_CASE("a document serves one task at a time, and threads take whatever task is free")
{
  document_tasks tasks{{0, 1, 0, 1, 0}, 2};
  CHECK(tasks.try_take() == std::size_t{0});
  CHECK(tasks.take() == std::size_t{1});
  CHECK_FALSE(tasks.try_take().has_value());
  tasks.give_back(1);
  CHECK(tasks.take() == std::size_t{3});
  CHECK_FALSE(tasks.try_take().has_value());
  tasks.give_back(0);
  CHECK(tasks.take() == std::size_t{2});
  tasks.give_back(2);
  CHECK(tasks.take() == std::size_t{4});
  tasks.give_back(3);
  CHECK_FALSE(tasks.take().has_value());  // none is left, though a document is busy

  // Each runs once, and none while another has its document.
  std::vector<std::size_t> document_of;
  for (std::size_t i = 0; i < 300; ++i) { document_of.push_back(i % 3); }
  document_tasks many{document_of, 3};
  std::atomic<int> users[3] = {}, done = 0, together = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      while (auto const task = many.take()) {
        if (++users[document_of[*task]] != 1) { ++together; }
        std::this_thread::yield();
        --users[document_of[*task]];
        ++done;
        many.give_back(*task);
      }
    });
  }
  for (std::thread& thread : threads) { thread.join(); }
  CHECK(done == 300);
  CHECK(together == 0);
}

TEST_CASE("records of choices count what predictions found")
{
  scene s;
  configuration const c = of_blocks(5);
  recall_record record{3, 40, c.blocks()};
  record.keep_records();
  outcome const o = s.run.evaluate(s.engine, c, [&](choice_event const& event) { record.see(event); }, true);
  CHECK(record.records.size() == 3 * 40);
  CHECK(record.records.front().tokens == s.run.prompt_tokens() + 1);
  CHECK(record.miss(2, 39) >= 0.0F);
  CHECK(record.nearly_chosen.found <= record.nearly_chosen.recalled);
  CHECK(o.recalls[2].steps == 20);
}

TEST_CASE("quantiles and intervals of known values")
{
  histogram h;
  for (int i = 0; i < 1000; ++i) { h.add(i / 1000.0); }
  CHECK(h.quantile(0.01) == doctest::Approx(0.01).epsilon(0.1));
  CHECK(h.mean() == doctest::Approx(0.4995));
  std::vector<double> values;
  for (int i = 1; i <= 100; ++i) { values.push_back(i); }
  CHECK(quantile(values, 0.99) == 99.0);
  auto const [low, high] = bootstrap(values, [](double x) { return x; });
  // The mean's deviation is 2.9.
  CHECK(low == doctest::Approx(50.5 - 1.96 * 2.9).epsilon(0.02));
  CHECK(high == doctest::Approx(50.5 + 1.96 * 2.9).epsilon(0.02));
}
