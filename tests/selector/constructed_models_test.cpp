// Attention whose right answer is known: keys asked for by name, needles of which each head sees one, queries that turn and jump.

#include "support/cache.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/selector/designated_head.hpp>
#include <pulseinfer/selector/head_calibrator.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/max_share.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <random>
#include <vector>

using pulseinfer::dtype;
using pulseinfer::solo_head_selector;
using pulseinfer_test::cache;
using pulseinfer_test::harness;
using pulseinfer_test::numbers;

namespace {

constexpr std::uint32_t bt = 16;
using vector = std::vector<float>;

vector unit(std::mt19937& random, std::size_t dim)
{
  std::normal_distribution<float> normal;
  vector result(dim);
  for (float& x : result) { x = normal(random); }
  float const norm = std::sqrt(std::inner_product(result.begin(), result.end(), result.begin(), 0.0F));
  for (float& x : result) { x /= norm; }
  return result;
}

/// Distance of a head's attention over some blocks from the value of one token.
double distance_from_value(
  cache const& c, pulseinfer_test::tensor const& queries, std::uint64_t query, std::uint32_t head,
  numbers const& blocks, std::uint32_t token)
{
  std::uint32_t const kv_head = head / c.geometry.query_group();
  std::vector<double> out(c.layout.value_dim, 0.0);
  double total = 0;
  for (std::uint32_t const block : blocks) {
    for (std::uint32_t t = block * bt; t < block * bt + c.info[0].valid_tokens(block, bt); ++t) {
      double logit = 0;
      for (std::uint32_t j = 0; j < c.geometry.head_dim; ++j) {
        logit += static_cast<double>(queries.at(query, head, j) * c.key(0, 0, kv_head, t, j));
      }
      double const mass = std::exp(logit);
      total += mass;
      for (std::size_t j = 0; j < out.size(); ++j) {
        out[j] += mass * static_cast<double>(c.value(0, 0, kv_head, t, static_cast<std::uint32_t>(j)));
      }
    }
  }
  double square = 0;
  for (std::size_t j = 0; j < out.size(); ++j) {
    square +=
      std::pow(out[j] / total - static_cast<double>(c.value(0, 0, kv_head, token, static_cast<std::uint32_t>(j))), 2.0);
  }
  return std::sqrt(square);
}

/// Each of `heads` KV heads looks for a block of its own with half of its mass; the other half lies over all others alike.
struct needles {
  needles(std::uint32_t heads, std::uint32_t blocks, std::uint32_t seed)
    : c{{.layers = 1,
         .query_heads = heads,
         .kv_heads = heads,
         .head_dim = 16,
         .block_tokens = bt,
         .key_type = dtype::float32},
        {{blocks * bt + 1, 1}},
        seed},
      wanted(heads)
  {
    numbers order(blocks);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), c.random);
    std::copy_n(order.begin(), heads, wanted.begin());
    for (std::uint32_t head = 0; head < heads; ++head) {
      for (std::uint32_t t = 0; t <= blocks * bt; ++t) {
        for (std::uint32_t j = 0; j < 16; ++j) {
          c.set_key(0, 0, head, t, j, j == 0 && t / bt == wanted[head] ? 1.0F : 0.0F);
        }
      }
    }
  }
  template <class Harness>
  void ask(Harness& h) const
  {
    float const half = std::log(static_cast<float>(c.info[0].blocks(bt)) - 1.0F);
    for (std::uint32_t head = 0; head < c.geometry.query_heads; ++head) {
      for (std::uint32_t j = 0; j < 16; ++j) {
        h.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), head, j, j == 0 ? half : 0.0F);
      }
    }
  }
  [[nodiscard]] std::size_t kept(numbers const& selected) const
  {
    return static_cast<std::size_t>(std::count_if(wanted.begin(), wanted.end(), [&](std::uint32_t block) {
      return std::binary_search(selected.begin(), selected.end(), block);
    }));
  }
  cache c;
  numbers wanted;
};

}  // namespace

TEST_SUITE("selector")
{
  // What a previous-token head leaves behind: each token's key is the code of the one before it, its value its own. Codes of a
  // block are related, as words of a paragraph are; no digest of sixteen unrelated keys could tell them apart.
  TEST_CASE_TEMPLATE(
    "1 to 64 keys are all retrieved from a budget that holds them, as dense attention does, with any digest", Digest,
    pulseinfer::cuboid_mean, pulseinfer::min_max, pulseinfer::mean_key, pulseinfer::log_mass)
  {
    constexpr std::uint32_t blocks = 128;
    constexpr std::uint32_t dim = 64;
    for (dtype const type : {dtype::float16, dtype::int8}) {
      for (std::uint32_t const keys : type == dtype::int8 ? numbers{16} : numbers{1, 2, 8, 64}) {
        CAPTURE(keys);
        pulseinfer::kv_geometry const geometry{
          .layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = dim, .block_tokens = bt};
        std::uint32_t const context = blocks * bt;
        cache c{geometry, {{context + keys, keys}}, keys};
        std::vector<vector> codes;
        vector passage;
        for (std::uint32_t t = 0; t < context + keys; ++t) {
          if (t % bt == 0) { passage = unit(c.random, dim); }
          vector code = unit(c.random, dim);
          vector const value = unit(c.random, dim);
          for (std::uint32_t j = 0; j < dim; ++j) {
            code[j] = std::sqrt(0.5F) * (code[j] + passage[j]);
            c.set_key(0, 0, 0, t, j, t < context ? code[j] : 0.0F);
            c.set_value(0, 0, 0, t, j, value[j]);
          }
          codes.push_back(code);
        }
        std::uint32_t const open = (keys + bt - 1) / bt;
        harness h{
          solo_head_selector<Digest>{
            .budget_tokens = (keys + open + 2) * bt,
            .sink_tokens = bt,
            .recent_tokens = bt,
            .scale = 1.0F,
            .digest = {.type = type}},
          c, 0, keys};
        // Each query token asks for one key, each in a block of its own.
        numbers order(blocks);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), c.random);
        numbers asked;
        for (std::uint32_t i = 0; i < keys; ++i) {
          asked.push_back(order[i] * bt + i % bt);
          for (std::uint32_t head = 0; head < 2; ++head) {
            for (std::uint32_t j = 0; j < dim; ++j) {
              h.queries.set(
                static_cast<std::uint64_t>(c.info[0].token_offset) + i, head, j, 60.0F * codes[asked[i]][j]);
            }
          }
        }
        h.select();
        numbers const selected = h.arrays.selected(0);
        numbers all(c.info[0].blocks(bt));
        std::iota(all.begin(), all.end(), 0U);
        std::uint32_t dense = 0;
        std::uint32_t sparse = 0;
        for (std::uint32_t i = 0; i < keys; ++i) {
          std::uint64_t const query = static_cast<std::uint64_t>(c.info[0].token_offset) + i;
          // Dense attention need not be asked for every key: it is the same sum over more blocks.
          dense += i % 8 != 0 || distance_from_value(c, h.queries, query, 1, all, asked[i]) < 0.05 ? 1U : 0U;
          sparse += distance_from_value(c, h.queries, query, 1, selected, asked[i]) < 0.05 ? 1U : 0U;
        }
        CHECK(dense == keys);
        CHECK(sparse == keys);
      }
    }
  }

  TEST_CASE(
    "8 and 32 heads that look for different needles keep all of them by a shared vote, and lose them by one head")
  {
    for (std::uint32_t const heads : {8U, 32U}) {
      CAPTURE(heads);
      needles scene{heads, 128, heads};
      std::uint32_t const budget = (heads + 1) * bt;
      harness vote{
        solo_head_selector<>{.budget_tokens = budget, .sink_tokens = 0, .recent_tokens = 0, .scale = 1.0F}, scene.c, 0,
        1};
      scene.ask(vote);
      vote.select();
      CHECK(scene.kept(vote.arrays.selected(0)) == heads);
      harness largest{
        solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::max_share>{
          .budget_tokens = budget, .sink_tokens = 0, .recent_tokens = 0, .scale = 1.0F},
        scene.c, 0, 1};
      scene.ask(largest);
      largest.select();
      CHECK(scene.kept(largest.arrays.selected(0)) == heads);
      harness one{
        solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::designated_head>{
          .budget_tokens = budget,
          .sink_tokens = 0,
          .recent_tokens = 0,
          .scale = 1.0F,
          .heads = {.head_of_layer = {heads - 1}}},
        scene.c, 0, 1};
      scene.ask(one);
      one.select();
      CHECK(scene.kept(one.arrays.selected(0)) < heads);
      numbers const selected = one.arrays.selected(0);
      CHECK(std::binary_search(selected.begin(), selected.end(), scene.wanted[heads - 1]));
    }
  }

  TEST_CASE("calibration of heads that look for different needles falls back to all of them")
  {
    for (std::uint32_t const heads : {8U, 32U}) {
      CAPTURE(heads);
      pulseinfer::head_calibrator calibrator{heads, heads};
      for (std::uint32_t step = 0; step < 12; ++step) {
        needles const scene{heads, 128, 100 * heads + step};
        std::vector<float> target(128, 0.5F / 127.0F);
        std::vector<float> shares(heads * target.size(), 0.5F / 127.0F);
        for (std::uint32_t head = 0; head < heads; ++head) {
          shares[head * target.size() + scene.wanted[head]] = 0.5F;
          target[scene.wanted[head]] += 0.5F / static_cast<float>(heads);
        }
        calibrator.add(target, shares);
      }
      auto const found = calibrator.result();
      CHECK(found.heads.kv_heads.size() == heads);
      CHECK(found.heads.weights.empty());
      CHECK(found.vote_coverage == doctest::Approx(1.0));
      CHECK(calibrator.cover({.kv_heads = {0}}) < 0.5);
    }
  }

  // Blocks lie on a circle and the query points at one place of it, which moves a little each step and jumps now and then.
  TEST_CASE(
    "a query that turns and jumps is followed at once; hysteresis brings fewer newcomers and costs less than it may")
  {
    constexpr std::uint32_t blocks = 96;
    constexpr double favour = 0.25;
    pulseinfer::kv_geometry const geometry{
      .layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 16, .block_tokens = 1, .key_type = dtype::float32};
    cache c{geometry, {{blocks + 1, 1}}, 11};
    std::normal_distribution<float> noise{0.0F, 0.15F};
    for (std::uint32_t t = 0; t <= blocks; ++t) {
      double const angle = 2 * std::numbers::pi * t / blocks;
      for (std::uint32_t j = 0; j < 16; ++j) {
        float const on_circle = j == 0 ? static_cast<float>(std::cos(angle))
          : j == 1                     ? static_cast<float>(std::sin(angle))
                                       : 0.0F;
        c.set_key(0, 0, 0, t, j, t < blocks ? on_circle + noise(c.random) : 0.0F);
      }
    }
    auto const options = [&](float hysteresis) {
      return solo_head_selector<>{
        .budget_tokens = 25,
        .sink_tokens = 0,
        .recent_tokens = 0,
        .hysteresis = hysteresis,
        .scale = 1.0F,
        .digest = {.type = dtype::float32}};
    };
    harness calm{options(static_cast<float>(favour)), c, 0, 1};
    harness eager{options(0.0F), c, 0, 1};
    std::uint32_t newcomers[2] = {0, 0};
    std::vector<numbers> before(2);
    double angle = 0;
    std::uint32_t jumps = 0;
    double least = 1;
    for (int step = 0; step < 256; ++step) {
      bool const jump = step > 0 && c.random() % 64 == 0;
      angle += jump ? std::numbers::pi * (0.5 + static_cast<double>(c.random() % 1000) / 1000.0) : 0.03;
      jumps += jump ? 1U : 0U;
      vector query(16);
      for (std::uint32_t j = 0; j < 16; ++j) {
        query[j] = j == 0 ? 8.0F * static_cast<float>(std::cos(angle))
          : j == 1        ? 8.0F * static_cast<float>(std::sin(angle))
                          : 4.0F * noise(c.random);
        calm.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), 0, j, query[j]);
        eager.queries.set(static_cast<std::uint64_t>(c.info[0].token_offset), 0, j, query[j]);
      }
      calm.select();
      eager.select();
      std::vector<double> mass(blocks + 1);
      double total = 0;
      for (std::uint32_t t = 0; t <= blocks; ++t) {
        double logit = 0;
        for (std::uint32_t j = 0; j < 16; ++j) { logit += static_cast<double>(query[j] * c.key(0, 0, 0, t, j)); }
        total += mass[t] = std::exp(logit);
      }
      double recovered[2] = {0, 0};
      for (std::size_t i = 0; i < 2; ++i) {
        numbers const selected = (i == 0 ? calm : eager).arrays.selected(0);
        for (std::uint32_t const block : selected) {
          recovered[i] += mass[block] / total;
          newcomers[i] += std::binary_search(before[i].begin(), before[i].end(), block) ? 0U : 1U;
        }
        before[i] = selected;
      }
      // Of a block for each token the digest is exact: what hysteresis keeps has e^-delta of the best choice's mass at least.
      CHECK(recovered[0] >= std::exp(-favour) * recovered[1] - 1e-5);
      least = std::min(least, recovered[0]);
    }
    CHECK(jumps >= 2);
    CHECK(least >= 0.85);  // in the step of a jump too
    CHECK(newcomers[0] * 20 <= newcomers[1] * 17);
  }
}
