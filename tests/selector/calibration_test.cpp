#include "support/cache.hpp"
#include "support/immediate_backend.hpp"
#include "support/mutated_text.hpp"
#include "support/selector_harness.hpp"
#include <pulseinfer/selector/calibrated_heads.hpp>
#include <pulseinfer/selector/calibration.hpp>
#include <pulseinfer/selector/few_heads.hpp>
#include <pulseinfer/selector/head_calibrator.hpp>
#include <pulseinfer/selector/mean_key.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using pulseinfer::calibrated_layer;
using pulseinfer::calibration;
using pulseinfer::head_calibrator;
using pulseinfer::head_choice;
using pulseinfer::layer_id;

namespace {

using heads = std::vector<std::uint32_t>;

calibration three_layers()
{
  return {
    .query_heads = 12,
    .kv_heads = 6,
    .head_dim = 24,
    .block_tokens = 4,
    .budget_tokens = 64,
    .digest = "cuboid_mean",
    .layers = {
      {.heads = {.kv_heads = {0, 1, 2, 3, 4, 5}}, .coverage = 0.96, .vote_coverage = 0.96},
      {.kind = pulseinfer::layer_kind::dense,
       .divergence = 0.25,
       .heads = {.kv_heads = {4}},
       .coverage = 0.1 + 0.2,
       .vote_coverage = 0.9},
      {.heads = {.kv_heads = {1, 5}, .weights = {1.0F, 0.3F}}, .coverage = 0.5, .vote_coverage = 0.75}}};
}

std::string text_of(calibration const& measured)
{
  std::ostringstream out;
  write_calibration(out, measured);
  return out.str();
}

std::string refusal_of(std::string const& text)
{
  std::istringstream in{text};
  try {
    static_cast<void>(pulseinfer::read_calibration(in));
  } catch (pulseinfer::argument_error const& error) {
    return error.what();
  }
  return "read";
}

/// Blocks whose shares are drawn anew for each sample, as large as `loud` says; `target` makes the target of the heads' shares.
template <class Target>
head_calibrator sampled(std::uint32_t kv_heads, Target const& target, std::vector<float> const& loud = {})
{
  head_calibrator result{kv_heads, 8};
  std::mt19937 random{7};
  std::lognormal_distribution<float> draw{0.0F, 1.5F};
  constexpr std::size_t blocks = 64;
  for (int i = 0; i < 40; ++i) {
    std::vector<float> shares(kv_heads * blocks);
    for (std::size_t head = 0; head < kv_heads; ++head) {
      for (std::size_t b = 0; b < blocks; ++b) {
        shares[head * blocks + b] = draw(random) * (head < loud.size() ? loud[head] : 1.0F);
      }
    }
    std::vector<float> targets(blocks);
    for (std::size_t b = 0; b < blocks; ++b) {
      targets[b] = target([&](std::size_t head) { return shares[head * blocks + b]; });
    }
    result.add(targets, shares);
  }
  return result;
}

}  // namespace

TEST_SUITE("selector")
{
  TEST_CASE("a calibration is written and read back, to the last bit of its numbers")
  {
    std::string const text = text_of(three_layers());
    CHECK(
      text ==
      "pulseinfer calibration 2\n"
      "model layers 3 query_heads 12 kv_heads 6 head_dim 24\n"
      "selection digest cuboid_mean block_tokens 4 budget_tokens 64\n"
      "layer 0 selected divergence 0 coverage 0.96 of_vote 0.96 sum heads 0 1 2 3 4 5\n"
      "layer 1 dense divergence 0.25 coverage 0.30000000000000004 of_vote 0.9 sum heads 4\n"
      "layer 2 selected divergence 0 coverage 0.5 of_vote 0.75 sum heads 1 5 weights 1 0.3\n"
      "end 3\n");
    std::istringstream in{text};
    CHECK(pulseinfer::read_calibration(in) == three_layers());
    calibration largest = three_layers();
    largest.layers[0].heads.combination = pulseinfer::share_combination::largest;
    std::istringstream again{text_of(largest)};
    CHECK(pulseinfer::read_calibration(again) == largest);
  }

  TEST_CASE(
    "a calibration of another version, cut short anywhere, or with numbers that are none is refused by its line")
  {
    std::string const text = text_of(three_layers());
    for (std::size_t length = 0; length + 1 < text.size(); ++length) {
      CAPTURE(length);
      CHECK(refusal_of(text.substr(0, length)).find("calibration, line ") != std::string::npos);
    }
    auto const with = [&](std::string const& from, std::string const& to) {
      std::string changed = text;
      REQUIRE(changed.find(from) != std::string::npos);
      return refusal_of(changed.replace(changed.find(from), from.size(), to));
    };
    auto const has = [](std::string const& said, char const* part) {
      CAPTURE(said);
      CHECK(said.find(part) != std::string::npos);
    };
    has(
      with("calibration 2", "calibration 1"),
      "line 1: 'pulseinfer calibration 1' where 'pulseinfer calibration 2' begins the file");
    has(with("layers 3", "layers three"), "line 2: 'three' is no layers from 0 to 65536");
    has(with("layers 3", "layers -3"), "line 2: '-3' is no layers");
    has(with("layers 3", "layers 4"), "line 7: 'end' where 'layer' is to stand");
    has(with("layers 3", "layers 2"), "line 6: 'layer' where 'end' is to stand");
    has(with("end 3", "end 2"), "line 7: the file names 3 layers");
    has(with("kv_heads", "kv_head"), "line 2: 'kv_head' where 'kv_heads' is to stand");
    has(with("1 dense", "1 sparse"), "line 5: 'sparse' where selected or dense is to stand");
    has(with("0.25", "inf"), "line 5: 'inf' is no divergence");
    has(with("0.25", "-1"), "line 5: '-1' is no divergence");
    has(with("dense divergence", "dense kl"), "line 5: 'kl' where 'divergence' is to stand");
    has(with("0.96", "nan"), "line 4: 'nan' is no coverage");
    has(with("0.96", "1.5"), "line 4: '1.5' is no coverage");
    has(with("0.9 ", "0.9x "), "line 5: '0.9x' is no coverage");
    has(with("layer 1", "layer 2"), "line 5: layer 1 comes next");
    has(with("heads 4", "heads 6"), "line 5: '6' is no head of 6");
    has(with("heads 4", "heads"), "line 5: no head chooses");
    has(with("heads 1 5", "heads 5 1"), "line 6: '1' is no head of 6 behind those before it");
    has(with("0.3\n", "inf\n"), "line 6: 'inf' is no weight");
    has(with("0.3\n", "-0.3\n"), "line 6: '-0.3' is no weight");
    has(with("1 0.3\n", "1\n"), "line 6: the line ends where weight is to stand");
    has(with("1 0.3\n", "1 0.3 0.2\n"), "line 6: '0.2' is too much");
    has(with("sum heads 4", "mean heads 4"), "line 5: 'mean' where sum or largest is to stand");
    has(with("layer 1", "layer  1"), "line 5: words with one space between them are wanted");
    has(with("end 3\n", "end 3\n\n"), "line 8: nothing is to follow the end");
    has(with("layer 1", "layer 0"), "line 5: layer 1 comes next");
    has(with("layers 3", "layers 99999999999999999999"), "line 2: '99999999999999999999' is no layers from 0 to 65536");
    has(with("0.96", "1e999"), "line 4: '1e999' is no coverage from 0 to 1");
    has(with("0.3\n", "1e39\n"), "line 6: '1e39' is no weight from 0 to 3.4028235e+38");
    has(with("heads 4", "heads 4294967300"), "line 5: '4294967300' is no head of 6");
    has(
      with("cuboid_mean", std::string(1000, 'a')), "line 3: a digest's name of 1000 characters, where 64 are the most");
  }

  TEST_CASE("a calibration with characters that are no text, or that cannot be read, is refused whole and by its place")
  {
    std::string const text = text_of(three_layers());
    std::string carriage_returns;
    for (char const c : text) { carriage_returns += c == '\n' ? std::string{"\r\n"} : std::string{c}; }
    std::string const wanted = ", where printable ASCII and lines that end with a line feed alone are wanted";
    CHECK(
      refusal_of(carriage_returns) == "invalid_argument: calibration, line 1: character 25 has the code 13" + wanted);
    CHECK(
      refusal_of("\xEF\xBB\xBF" + text) ==
      "invalid_argument: calibration, line 1: character 1 has the code 239" + wanted);
    auto const in_digest = [&](std::string const& name) {
      std::string changed = text;
      return refusal_of(changed.replace(changed.find("cuboid_mean"), 11, name));
    };
    // Neither may end the text of the refusal or become part of a name.
    CHECK(
      in_digest(std::string{"cuboid\0mean", 11}) ==
      "invalid_argument: calibration, line 3: character 24 has the code 0" + wanted);
    CHECK(in_digest("cuboid_mean\r") == "invalid_argument: calibration, line 3: character 29 has the code 13" + wanted);
    std::ifstream missing{PULSEINFER_CALIBRATIONS "/no-such-file.txt"};
    CHECK_THROWS_WITH_AS(
      static_cast<void>(pulseinfer::read_calibration(missing)),
      "invalid_argument: calibration, line 1: the file cannot be read", pulseinfer::argument_error);
  }

  TEST_CASE("a calibration with anything wrong in it is read as what it says, or refused by a line that it has")
  {
    CHECK(rc::check([] {
      std::mt19937_64 random{*rc::gen::arbitrary<std::uint64_t>()};
      for (int change = 0; change < 20; ++change) {
        std::string const text = pulseinfer_test::mutated(text_of(three_layers()), random);
        std::istringstream in{text};
        try {
          calibration const found = pulseinfer::read_calibration(in);
          std::istringstream again{text_of(found)};
          RC_ASSERT(pulseinfer::read_calibration(again) == found);
          // Nothing that was there is passed over.
          auto const lines = [](std::string const& of) {
            return std::count(of.begin(), of.end(), '\n') + (of.empty() || of.back() != '\n' ? 1 : 0);
          };
          RC_ASSERT(lines(text_of(found)) == lines(text));
        } catch (pulseinfer::argument_error const& refusal) {
          RC_ASSERT(pulseinfer_test::names_a_line(refusal.what(), "calibration", text));
        }
      }
    }));
  }

  TEST_CASE("the calibration that is shipped fits its model's cache")
  {
    std::ifstream file{PULSEINFER_CALIBRATIONS "/smollm2-135m.txt"};
    REQUIRE(file.is_open());
    calibration const shipped = pulseinfer::read_calibration(file);
    pulseinfer_test::immediate_backend on;
    pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::calibrated_heads> const selector{
      .budget_tokens = shipped.budget_tokens, .heads = {.measured = shipped}};
    auto const bound = selector.bind(
      on,
      {.geometry = {.layers = 30, .query_heads = 9, .kv_heads = 3, .head_dim = 64}, .max_rows = 1, .max_blocks = 100});
    CHECK(bound.budget_blocks(layer_id{29}) == 64);
    CHECK(bound.digest_bytes(layer_id{0}) == shipped.layers[0].heads.kv_heads.size() * 256);
    // Those that accuracy.md's tables leave dense.
    CHECK(pulseinfer::dense_layers(shipped) == std::vector<std::uint32_t>{7, 17, 18, 20});
  }

  TEST_CASE("layers that cost far more than most are to stay dense, and become a cache's layer groups")
  {
    using pulseinfer::lookup_layers;
    using layers = std::vector<std::uint32_t>;
    CHECK(lookup_layers({}).empty());
    CHECK(lookup_layers(std::vector<double>(30, 0.25)).empty());
    std::vector<double> costs(30, 1.0);
    for (std::size_t i = 0; i < costs.size(); ++i) { costs[i] += static_cast<double>(i) / 30.0; }
    CHECK(lookup_layers(costs).empty());
    // One that costs more than all others together hides none of them.
    costs[7] = 900.0;
    costs[18] = 80.0;
    costs[20] = 30.0;
    costs[4] = 14.0;
    CHECK(lookup_layers(costs) == layers{7, 18, 20});
    CHECK(lookup_layers(costs, 5.0) == layers{4, 7, 18, 20});
    // A sixth of all at most, those that cost the most.
    for (std::size_t i = 0; i < 8; ++i) { costs[2 * i] = 50.0 + static_cast<double>(i); }
    CHECK(lookup_layers(costs) == layers{7, 10, 12, 14, 18});
    CHECK(lookup_layers({0.0, 1.0, 0.0}) == layers{1});

    calibration const measured = three_layers();
    CHECK(pulseinfer::dense_layers(measured) == layers{1});
    std::vector<pulseinfer::layer_group> const groups = pulseinfer::layer_groups(measured);
    REQUIRE(groups.size() == 3);
    pulseinfer::kv_geometry geometry{
      .layers = 3, .query_heads = 12, .kv_heads = 6, .head_dim = 24, .block_tokens = 4, .layer_groups = groups};
    CHECK_NOTHROW(pulseinfer::validate(geometry));
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      CHECK(geometry.group_of(static_cast<layer_id>(layer)).kind == measured.layers[layer].kind);
    }
    calibration alike = measured;
    alike.layers[1].kind = pulseinfer::layer_kind::selected;
    CHECK(pulseinfer::layer_groups(alike).size() == 1);
  }

  TEST_CASE(
    "a selector follows a calibration layer by layer, and refuses one of another cache or digest with the numbers")
  {
    pulseinfer::kv_geometry geometry{
      .layers = 3,
      .query_heads = 12,
      .kv_heads = 6,
      .head_dim = 24,
      .block_tokens = 4,
      .key_type = pulseinfer::dtype::float32};
    using rule = pulseinfer::calibrated_heads;
    using selector = pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, rule>;
    pulseinfer_test::cache c{geometry, {{161, 1}, {90, 3}}, 5};
    selector const options{
      .budget_tokens = 64, .sink_tokens = 4, .recent_tokens = 4, .heads = {.measured = three_layers()}};
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      pulseinfer_test::harness ours{options, c, layer, 3};
      head_choice const& choice = options.heads.measured.layers[layer].heads;
      CHECK(ours.bound.digest_bytes(static_cast<layer_id>(layer)) == choice.kv_heads.size() * 48 * 2);
      ours.select();
      // The same choice in every layer by hand.
      pulseinfer::few_heads const named{.layers = std::vector<head_choice>(3, choice)};
      pulseinfer::solo_head_selector<pulseinfer::cuboid_mean, pulseinfer::few_heads> const by_hand{
        .budget_tokens = 64, .sink_tokens = 4, .recent_tokens = 4, .heads = named};
      pulseinfer_test::harness theirs{by_hand, c, layer, 3};
      REQUIRE(
        theirs.bound.select_async({}, theirs.arrays.select_request(layer, ours.queries.view)) ==
        pulseinfer::status::ok);
      CHECK(ours.arrays.selected(0) == theirs.arrays.selected(0));
    }

    pulseinfer_test::immediate_backend on;
    auto const refusal = [&](auto const& with, auto const& change) -> std::string {
      pulseinfer::selector_limits limits{.geometry = geometry, .max_rows = 1, .max_blocks = 100};
      change(limits.geometry);
      try {
        static_cast<void>(with.bind(on, limits));
      } catch (pulseinfer::configuration_error const& error) {
        return error.what();
      }
      return "accepted";
    };
    using pulseinfer::kv_geometry;
    CHECK(refusal(options, [](kv_geometry&) {}) == "accepted");
    CHECK(refusal(options, [](kv_geometry& g) {
            g.layers = 30;
          }) == "invalid_argument: calibrated for 3 layers, the cache has 30");
    CHECK(refusal(options, [](kv_geometry& g) {
            g.kv_heads = 3;
          }) == "invalid_argument: calibrated for 6 KV heads, the cache has 3");
    CHECK(refusal(options, [](kv_geometry& g) {
            g.query_heads = 6;
          }) == "invalid_argument: calibrated for 12 query heads, the cache has 6");
    CHECK(refusal(options, [](kv_geometry& g) {
            g.head_dim = 32;
          }) == "invalid_argument: calibrated for 24 elements of a head, the cache has 32");
    CHECK(refusal(options, [](kv_geometry& g) {
            g.block_tokens = 8;
          }) == "invalid_argument: calibrated for 4 tokens of a block, the cache has 8");
    CHECK(refusal(options, [](kv_geometry& g) { g.head_groups = 2; }).find("2 head groups") != std::string::npos);
    pulseinfer::solo_head_selector<pulseinfer::mean_key, rule> const other{
      .budget_tokens = 64, .sink_tokens = 4, .recent_tokens = 4, .heads = options.heads};
    CHECK(refusal(other, [](kv_geometry&) {
          }) == "invalid_argument: calibrated with digests 'cuboid_mean', the selector has 'mean_key'");
  }

  TEST_CASE("calibration finds the one head that chooses as all do, the two that do together, or that all are needed")
  {
    auto const one = sampled(5, [](auto const& head) { return head(3) + 0.02F * head(1); }).result();
    CHECK(one.heads == head_choice{.kv_heads = {3}});
    CHECK(one.coverage >= 0.985 * one.vote_coverage);

    // Where digests see part of the mass alone, one head is held against what the vote of all covers and not against the best.
    std::mt19937 random{3};
    std::lognormal_distribution<float> unseen{0.0F, 1.5F};
    auto const blurred = sampled(5, [&](auto const& head) { return head(3) + 2.0F * unseen(random); }).result();
    CHECK(blurred.heads == head_choice{.kv_heads = {3}});
    CHECK(blurred.coverage < 0.985);
    CHECK(blurred.coverage >= 0.985 * blurred.vote_coverage);

    auto const two =
      sampled(5, [](auto const& head) { return head(1) + 0.5F * head(4); }, {0, 1, 0.01F, 0, 1}).result();
    CHECK(two.heads.kv_heads == heads{1, 4});
    REQUIRE(two.heads.weights.size() == 2);
    CHECK(two.heads.weights[0] == doctest::Approx(1.0));
    CHECK(two.heads.weights[1] == doctest::Approx(0.5).epsilon(1e-3));
    CHECK(two.coverage == doctest::Approx(1.0));

    auto const needed = sampled(5, [](auto const& head) { return head(0) + head(1) + head(2) + head(3) + head(4); });
    auto const all = needed.result();
    CHECK(all.heads == head_choice{.kv_heads = {0, 1, 2, 3, 4}});
    CHECK(all.coverage == doctest::Approx(1.0));
    CHECK(needed.result({.coverage = 0.3}).heads.kv_heads.size() == 1);
    auto const four = needed.result({.coverage = 0.9, .most_heads = 4}).heads.kv_heads.size();
    CHECK(four >= 2);
    CHECK(four <= 4);
    // What a head must not count with less than nothing.
    for (float const weight :
         sampled(3, [](auto const& head) { return head(0) - 0.2F * head(2); }).weights_of({0, 2})) {
      CHECK(weight >= 0.0F);
    }
  }

  TEST_CASE("coverage is the mass of what the heads choose over that of the best choice, against sorting everything")
  {
    std::mt19937 random{3};
    std::uniform_real_distribution<float> draw{0.0F, 1.0F};
    head_calibrator calibrator{2, 5};
    double covered = 0;
    double best = 0;
    for (std::size_t const blocks : {5U, 6U, 40U, 17U}) {
      std::vector<float> target(blocks);
      std::vector<float> shares(2 * blocks);
      std::generate(target.begin(), target.end(), [&] { return draw(random); });
      std::generate(shares.begin(), shares.end(), [&] { return std::floor(4.0F * draw(random)); });  // with ties
      calibrator.add(target, shares);
      if (blocks <= 5) { continue; }
      std::vector<std::size_t> order(blocks);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
        return std::max(shares[a], 2.0F * shares[blocks + a]) > std::max(shares[b], 2.0F * shares[blocks + b]);
      });
      for (std::size_t i = 0; i < 5; ++i) { covered += static_cast<double>(target[order[i]]); }
      std::sort(target.begin(), target.end(), [](float a, float b) { return a > b; });
      for (std::size_t i = 0; i < 5; ++i) { best += static_cast<double>(target[i]); }
    }
    CHECK(calibrator.samples() == 3);
    head_choice const choice{
      .kv_heads = {0, 1}, .weights = {1.0F, 2.0F}, .combination = pulseinfer::share_combination::largest};
    CHECK(calibrator.cover(choice) == doctest::Approx(covered / best).epsilon(1e-9));
  }

  TEST_CASE("a calibrator without samples, or with ones of other sizes, says so")
  {
    CHECK_THROWS_WITH_AS(
      (head_calibrator{0, 3}), "invalid_argument: calibration of 0 KV heads that choose 3 blocks",
      pulseinfer::configuration_error);
    head_calibrator calibrator{2, 3};
    std::vector<float> const three(3, 1.0F);
    std::vector<float> const six(6, 1.0F);
    calibrator.add(three, six);
    CHECK_THROWS_WITH_AS(
      static_cast<void>(calibrator.result()),
      "invalid_argument: no sample has more blocks than the 3 that are chosen: nothing is measured",
      pulseinfer::argument_error);
    CHECK_THROWS_WITH_AS(
      calibrator.add(six, six), "invalid_argument: 6 shares for 2 heads and 6 blocks", pulseinfer::argument_error);
  }
}
