// The generic bodies of attention and selection on a GPU, beside the same bodies on the CPU.

#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/certify_skipped.hpp>
#include <pulseinfer/operation/choose_blocks.hpp>
#include <pulseinfer/operation/combine_shares.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/select_imported.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/select_top_p.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/log_mass.hpp>
#include <pulseinfer/selector/min_max.hpp>
#include <pulseinfer/selector/split.hpp>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <new>
#include <random>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using pulseinfer::dtype;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;
using pulseinfer_test::tensor;

namespace {

/// Memory that host and GPU read by the same address.
class managed_resource : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t) override
  {
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, std::max<std::size_t>(bytes, 1)) != cudaSuccess) { throw std::bad_alloc{}; }
    return memory;
  }
  void do_deallocate(void* memory, std::size_t, std::size_t) override { static_cast<void>(cudaFree(memory)); }
  [[nodiscard]] bool do_is_equal(std::pmr::memory_resource const& other) const noexcept override
  {
    return this == &other;
  }
};

/// Everything made while it lives is in managed memory.
struct managed_default {
  managed_default() : before{std::pmr::set_default_resource(&resource)} {}
  ~managed_default() { std::pmr::set_default_resource(before); }
  managed_resource resource;
  std::pmr::memory_resource* before;
};

struct gpu {
  gpu() : stream{backend.create_stream(pulseinfer::stream_priority::normal)} {}
  ~gpu() { backend.destroy_stream(stream); }
  template <class Op>
  void run(Op const& op)
  {
    CAPTURE(Op::name);
    REQUIRE(backend.launch(stream, op) == pulseinfer::status::ok);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
  pulseinfer::cuda_backend backend;
  pulseinfer::cuda_backend::stream_ref stream;
};

struct shape {
  std::uint32_t query_heads, kv_heads, head_groups, head_dim, value_dim, block_tokens;
  pulseinfer::token_order order;
  dtype type;
  bool latent = false;
};

using enum pulseinfer::token_order;

std::vector<shape> const shapes{
  {9, 3, 1, 64, 0, 16, hnd, dtype::float32},    {8, 8, 8, 46, 0, 1, nhd, dtype::float16},
  {32, 8, 1, 128, 0, 16, hnd, dtype::bfloat16}, {12, 4, 2, 51, 33, 17, nhd, dtype::float16},
  {4, 2, 2, 256, 0, 64, hnd, dtype::float16},   {16, 1, 1, 576, 512, 16, hnd, dtype::bfloat16, true},
};

pulseinfer::kv_geometry geometry_of(shape const& s)
{
  return {
    .layers = 1,
    .query_heads = s.query_heads,
    .kv_heads = s.kv_heads,
    .head_dim = s.head_dim,
    .value_dim = s.value_dim,
    .block_tokens = s.block_tokens,
    .head_groups = s.head_groups,
    .key_type = s.type,
    .value_type = s.type,
    .order = s.order,
    .value_is_key_prefix = s.latent};
}

double largest_difference(std::pmr::vector<float> const& a, std::pmr::vector<float> const& b)
{
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) { continue; }
    if (a[i] == b[i]) { continue; }  // infinities too
    double const apart = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isfinite(apart) ? std::max(worst, apart) : 1e9;
  }
  return worst;
}

/// Digests of all blocks and their scores, on the CPU and on the GPU.
template <class Policy>
void check_digests(gpu& on, shape const& s, dtype type)
{
  CAPTURE(name_of(type));
  CAPTURE(s.head_dim);
  std::uint32_t const bt = s.block_tokens;
  cache c{geometry_of(s), {{60 * bt + 1, 2}, {1, 1}, {9 * bt, 1}, {0, 0}}, s.head_dim};
  tensor queries{s.type, c.tensor_tokens, s.query_heads, s.head_dim, 2};
  queries.randomise(c.random);
  Policy const policy{.type = type, .bounds = true};
  pulseinfer::scoring_heads const heads{.first = 0, .count = s.kv_heads};
  std::vector<std::uint64_t> const bytes{policy.block_bytes(s.head_dim, s.kv_heads)};
  selection_arrays cpu_arrays{c, 8, bytes};
  selection_arrays gpu_arrays{c, 8, bytes};
  pulseinfer::score_table table{.queries = 2, .heads = s.query_heads, .pitch = pulseinfer::round_up(c.max_blocks, 16U)};
  std::pmr::vector<float> scores[2];
  for (std::size_t i = 0; i < 2; ++i) {
    scores[i].assign(c.info.size() * 2 * std::size_t{s.query_heads} * table.pitch, std::nanf(""));
    table.data = scores[i].data();
    selection_arrays const& arrays = i == 0 ? cpu_arrays : gpu_arrays;
    auto const run = [&](auto const& op) {
      if (i == 0) {
        pulseinfer_test::run_solo(op);
      } else {
        on.run(op);
      }
    };
    with_all_tokens_new(c, [&] {
      run(typename Policy::update_operation{
        .request = arrays.digest_request(0, c.max_blocks),
        .heads = heads,
        .head_groups = s.head_groups,
        .digest_type = type,
        .bounds_offset = policy.bounds_offset(s.head_dim, s.kv_heads)});
    });
    run(typename Policy::score_operation{
      .request = arrays.select_request(0, queries.view),
      .scores = table,
      .heads = heads,
      .query_group = c.geometry.query_group(),
      .block_tokens = bt,
      .budget_blocks = 8,
      .digest_type = type,
      .scale = 0.1F});
  }
  if constexpr (Policy::form::holds_keys) {
    std::pmr::vector<pulseinfer::certificate_sums> sums[2];
    for (std::size_t i = 0; i < 2; ++i) {
      sums[i].resize(c.info.size() * std::size_t{s.query_heads});
      selection_arrays const& arrays = i == 0 ? cpu_arrays : gpu_arrays;
      for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) { arrays.selection.counts[lane] = 0; }
      pulseinfer::certify_skipped<typename Policy::form, typename Policy::spread, Policy::pieces> const op{
        .request = arrays.select_request(0, queries.view),
        .table = {.data = sums[i].data(), .queries = 1, .heads = s.query_heads},
        .heads = heads,
        .query_group = c.geometry.query_group(),
        .group_heads = c.geometry.group_heads(),
        .head_groups = s.head_groups,
        .block_tokens = bt,
        .bounds_offset = policy.bounds_offset(s.head_dim, s.kv_heads),
        .digest_type = type,
        .scale = 0.1F};
      if (i == 0) {
        pulseinfer_test::run_solo(op);
      } else {
        on.run(op);
      }
    }
    std::uint32_t compared = 0;
    for (std::size_t i = 0; i < sums[0].size(); ++i) {
      CHECK((sums[0][i].value_norm > 0.0F) == (sums[1][i].value_norm > 0.0F));
      if (sums[0][i].value_norm == 0.0F) { continue; }  // a row without tokens
      ++compared;
      CHECK(sums[1][i].log_bound == doctest::Approx(sums[0][i].log_bound).epsilon(1e-3));
      CHECK(sums[1][i].log_skipped == doctest::Approx(sums[0][i].log_skipped).epsilon(1e-3));
      CHECK(sums[1][i].value_norm == doctest::Approx(sums[0][i].value_norm).epsilon(1e-3));
    }
    CHECK(compared == 3 * s.query_heads);
  }
  // A byte may be rounded the other way where a GPU contracts a product and a sum.
  CHECK(largest_difference(scores[0], scores[1]) <= (type == dtype::int8 ? 2e-2 : 1e-3));
  for (std::uint32_t block = 0; block < 60; block += 7) {
    for (std::uint32_t head = 0; head < s.kv_heads; ++head) {
      auto const bounds = [&](selection_arrays const& arrays) {
        return *reinterpret_cast<pulseinfer::block_bounds const*>(
          arrays.digests.address(pulseinfer::layer_id{0}, c.ids[0], block) +
          policy.bounds_offset(s.head_dim, s.kv_heads) + sizeof(pulseinfer::block_bounds) * head);
      };
      CHECK(bounds(gpu_arrays).key_radius == doctest::Approx(bounds(cpu_arrays).key_radius).epsilon(1e-3));
      CHECK(bounds(gpu_arrays).value_norm == doctest::Approx(bounds(cpu_arrays).value_norm).epsilon(1e-5));
    }
  }
}

}  // namespace

TEST_CASE("append_tokens, paged_attention and merge_partials give on a GPU what they give on a CPU")
{
  managed_default const memory;
  gpu on;
  for (shape const& s : shapes) {
    CAPTURE(s.head_dim);
    std::uint32_t const bt = s.block_tokens;
    cache c{geometry_of(s), {{20 * bt + 1, 1}, {1, 1}, {9 * bt, 5}, {33, 33}, {0, 0}}, s.head_dim};
    tensor queries{s.type, c.tensor_tokens, s.query_heads, s.head_dim, 2};
    tensor keys{dtype::float32, c.tensor_tokens, s.kv_heads, s.head_dim, 1};
    tensor values{dtype::float32, c.tensor_tokens, s.kv_heads, c.layout.value_dim, 1};
    queries.randomise(c.random);
    keys.randomise(c.random);
    values.randomise(c.random);
    pulseinfer::append_tokens const append{
      .layer = pulseinfer::layer_id{0},
      .rows = c.rows(),
      .info = c.info.data(),
      .keys = keys.view,
      .values = s.latent ? pulseinfer::tensor_view{} : values.view,
      .residency = c.residency,
      .pool = c.pool,
      .layout = c.layout,
      .head_groups = s.head_groups,
      .most_tokens = c.most_new};
    on.run(append);
    for (std::uint32_t row = 0; row < c.info.size(); ++row) {
      for (std::int32_t t = 0; t < c.info[row].new_tokens; ++t) {
        auto const position = static_cast<std::uint32_t>(c.info[row].tokens - c.info[row].new_tokens + t);
        auto const source = static_cast<std::uint64_t>(c.info[row].token_offset + t);
        std::uint32_t wrong = 0;
        for (std::uint32_t head = 0; head < s.kv_heads; ++head) {
          for (std::uint32_t j = 0; j < c.layout.value_dim; ++j) {
            float const value = s.latent ? keys.at(source, head, j) : values.at(source, head, j);
            wrong += c.value(0, row, head, position, j) != pulseinfer_test::rounded(s.type, value) ? 1U : 0U;
          }
          for (std::uint32_t j = 0; j < s.head_dim; ++j) {
            wrong +=
              c.key(0, row, head, position, j) != pulseinfer_test::rounded(s.type, keys.at(source, head, j)) ? 1U : 0U;
          }
        }
        CHECK(wrong == 0);
      }
    }

    auto const landed = [&](std::uint32_t lane, std::uint32_t block) {
      auto const& info = c.info[lane / s.head_groups];
      return block < static_cast<std::uint32_t>(info.tokens - info.new_tokens) / bt && block % 3 == 1;
    };
    auto const hit = [&](std::uint32_t lane, std::uint32_t block) { return !landed(lane, block); };
    std::size_t const elements = c.tensor_tokens * s.query_heads * c.layout.value_dim;
    std::pmr::vector<float> out[4];
    std::pmr::vector<float> lse[4];
    for (std::size_t i = 0; i < 4; ++i) {
      out[i].assign(elements, std::nanf(""));
      lse[i].assign(c.tensor_tokens * s.query_heads, 7.0F);
    }
    auto const attention = [&](pulseinfer::block_table const& table, std::size_t i) {
      return pulseinfer::paged_attention{
        .table = table,
        .rows = c.rows(),
        .queries = queries.view,
        .out = pulseinfer::contiguous_tensor(
          out[i].data(), dtype::float32, c.tensor_tokens, s.query_heads, c.layout.value_dim),
        .lse = lse[i].data(),
        .scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim)),
        .most_queries = c.most_new};
    };
    auto const all = c.table(0, [](auto, auto) { return true; });
    pulseinfer_test::run_solo(attention(all, 0));
    on.run(attention(all, 1));
    CHECK(largest_difference(out[0], out[1]) <= 3e-6);
    CHECK(largest_difference(lse[0], lse[1]) <= 6e-6);
    on.run(attention(c.table(0, hit, pulseinfer::part::hits), 2));
    on.run(attention(c.table(0, landed, pulseinfer::part::landed), 3));
    on.run(pulseinfer::merge_partials{
      .rows = c.rows(),
      .info = c.info.data(),
      .result = attention(all, 2).out,
      .result_lse = lse[2].data(),
      .other = attention(all, 3).out,
      .other_lse = lse[3].data(),
      .most_queries = c.most_new});
    CHECK(largest_difference(out[1], out[2]) <= 3e-6);
    CHECK(largest_difference(lse[1], lse[2]) <= 6e-6);
  }
}

TEST_CASE("digests, scores, shares, votes and choices are on a GPU what they are on a CPU")
{
  managed_default const memory;
  gpu on;
  for (shape const& s : shapes) {
    for (dtype const digest : {dtype::float32, dtype::float16}) {
      CAPTURE(s.head_dim);
      std::uint32_t const bt = s.block_tokens;
      cache c{geometry_of(s), {{300 * bt + 1, 2}, {1, 1}, {90 * bt, 1}, {0, 0}}, s.head_dim};
      tensor queries{s.type, c.tensor_tokens, s.query_heads, s.head_dim, 2};
      queries.randomise(c.random);
      pulseinfer::scoring_heads const heads{.first = 0, .count = s.kv_heads};
      std::vector<std::uint64_t> const bytes{
        std::uint64_t{s.kv_heads} * pulseinfer::device::cuboid_mean_elements(s.head_dim) * size_of(digest)};
      constexpr std::uint32_t budget = 24;
      selection_arrays cpu_arrays{c, budget, bytes};
      selection_arrays gpu_arrays{c, budget, bytes};
      auto const digests = [&](selection_arrays const& arrays) {
        return pulseinfer::update_digests{
          .request = arrays.digest_request(0, c.max_blocks),
          .heads = heads,
          .head_groups = s.head_groups,
          .digest_type = digest};
      };
      with_all_tokens_new(c, [&] {
        pulseinfer_test::run_solo(digests(cpu_arrays));
        on.run(digests(gpu_arrays));
      });

      pulseinfer::score_table table{
        .queries = 2, .heads = s.query_heads, .pitch = pulseinfer::round_up(c.max_blocks, 16U)};
      std::pmr::vector<float> scores[2];
      std::pmr::vector<float> votes[2];
      for (std::size_t i = 0; i < 2; ++i) {
        scores[i].assign(c.info.size() * 2 * std::size_t{s.query_heads} * table.pitch, std::nanf(""));
        votes[i].assign(std::size_t{c.residency.lanes} * table.pitch, std::nanf(""));
      }
      auto const each = [&](auto const& make, std::pmr::vector<float> const* results, double tolerance) {
        for (std::size_t i = 0; i < 2; ++i) {
          table.data = scores[i].data();
          auto const op = make(i == 0 ? cpu_arrays : gpu_arrays, votes[i].data());
          if (i == 0) {
            pulseinfer_test::run_solo(op);
          } else {
            on.run(op);
          }
        }
        CHECK(largest_difference(results[0], results[1]) <= tolerance);
      };
      each(
        [&](selection_arrays const& arrays, float*) {
          return pulseinfer::score_blocks{
            .request = arrays.select_request(0, queries.view),
            .scores = table,
            .heads = heads,
            .query_group = c.geometry.query_group(),
            .block_tokens = bt,
            .budget_blocks = budget,
            .digest_type = digest,
            .scale = 0.1F};
        },
        scores, 2e-5);
      each(
        [&](selection_arrays const&, float*) {
          return pulseinfer::share_blocks{
            .rows = c.rows(),
            .info = c.info.data(),
            .scores = table,
            .most_queries = 2,
            .most_blocks = c.max_blocks,
            .block_tokens = bt,
            .budget_blocks = budget};
        },
        scores, 1e-5);
      each(
        [&](selection_arrays const& arrays, float* sums) {
          return pulseinfer::vote_blocks{
            .layer = pulseinfer::layer_id{0},
            .rows = c.rows(),
            .info = c.info.data(),
            .scores = table,
            .votes = sums,
            .selection = arrays.selection,
            .head_groups = s.head_groups,
            .most_blocks = c.max_blocks,
            .block_tokens = bt,
            .budget_blocks = budget,
            .favour = 1.25F};
        },
        votes, 1e-4);
      std::pmr::vector<float> const weights(s.kv_heads, 0.75F);
      each(
        [&](selection_arrays const& arrays, float* sums) {
          return pulseinfer::combine_shares{
            .layer = pulseinfer::layer_id{0},
            .rows = c.rows(),
            .info = c.info.data(),
            .scores = table,
            .weights = weights.data(),
            .votes = sums,
            .selection = arrays.selection,
            .head_groups = s.head_groups,
            .query_group = c.geometry.query_group(),
            .most_blocks = c.max_blocks,
            .block_tokens = bt,
            .budget_blocks = budget,
            .favour = 1.25F,
            .largest = digest == dtype::float16};
        },
        votes, 1e-4);
      // The choice is of integers: from the same votes it is the same. First a part of the budget, then all of it.
      for (std::size_t i = 0; i < 4; ++i) {
        pulseinfer::select_top_k const choose{
          .layer = pulseinfer::layer_id{0},
          .rows = c.rows(),
          .info = c.info.data(),
          .votes = votes[1].data(),
          .selection = (i % 2 == 0 ? cpu_arrays : gpu_arrays).selection,
          .vote_pitch = table.pitch,
          .head_groups = s.head_groups,
          .block_tokens = bt,
          .budget_blocks = budget,
          .sink_blocks = 1,
          .recent_blocks = 2};
        pulseinfer::select_top_p const cut{
          .most = choose,
          .sizes = {.least = 6, .step = 3},
          .share = 0.2F,
          .favour = 1.25F,
          .most_blocks = c.max_blocks};
        if (i == 0) {
          pulseinfer_test::run_solo(cut);
        } else if (i == 1) {
          on.run(cut);
          for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
            CHECK(gpu_arrays.selected(lane) == cpu_arrays.selected(lane));
          }
        } else if (i == 2) {
          pulseinfer_test::run_solo(choose);
        } else {
          on.run(choose);
        }
      }
      for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
        CHECK(gpu_arrays.selected(lane) == cpu_arrays.selected(lane));
        CHECK(gpu_arrays.rest_is_none(lane));
        CHECK(gpu_arrays.remembered(0, lane) == gpu_arrays.selected(lane));
      }
    }
  }
}

TEST_CASE("law 8: shares, votes and choice in one launch are those of three, votes bit by bit and ties too")
{
  managed_default const memory;
  gpu on;
  std::mt19937 random{5};
  std::normal_distribution<float> normal{0.0F, 3.0F};
  for (std::uint32_t const most : {4096U, 8192U}) {
    for (std::uint32_t const head_groups : {1U, 2U}) {
      pulseinfer::kv_geometry const geometry{
        .layers = 1, .query_heads = 6, .kv_heads = 2, .head_dim = 1, .block_tokens = 1, .head_groups = head_groups};
      cache c{geometry, {{most, 1}, {most - 1027, 2}, {130, 1}, {63, 1}, {1, 1}, {0, 0}}, 1, false};
      selection_arrays apart{c, 512, {0}};
      selection_arrays together{c, 512, {0}};
      for (int round = 0; round < 6; ++round) {
        std::pmr::vector<float> scores(c.info.size() * 2 * 6 * c.max_blocks);
        // Half of the rounds have few values, so many ties.
        for (float& score : scores) {
          score = round % 2 == 0 ? normal(random) : static_cast<float>(random() % static_cast<unsigned>(4 + round));
        }
        std::pmr::vector<float> shares = scores;
        std::pmr::vector<float> votes[2];
        for (auto& of : votes) { of.assign(std::size_t{c.residency.lanes} * c.max_blocks, 0.25F); }
        pulseinfer::score_table table{
          .data = shares.data(), .queries = 2, .heads = 6, .pitch = pulseinfer::round_up(c.max_blocks, 16U)};
        REQUIRE(table.pitch == c.max_blocks);
        auto const budget = static_cast<std::uint32_t>(round == 0 ? 64 : 1 + random() % 512);
        on.run(pulseinfer::share_blocks{
          .rows = c.rows(),
          .info = c.info.data(),
          .scores = table,
          .most_queries = 2,
          .most_blocks = c.max_blocks,
          .block_tokens = 1,
          .budget_blocks = budget});
        on.run(pulseinfer::vote_blocks{
          .layer = pulseinfer::layer_id{0},
          .rows = c.rows(),
          .info = c.info.data(),
          .scores = table,
          .votes = votes[0].data(),
          .selection = apart.selection,
          .head_groups = head_groups,
          .most_blocks = c.max_blocks,
          .block_tokens = 1,
          .budget_blocks = budget,
          .favour = 1.25F});
        pulseinfer::select_top_k choose{
          .layer = pulseinfer::layer_id{0},
          .rows = c.rows(),
          .info = c.info.data(),
          .votes = votes[0].data(),
          .selection = apart.selection,
          .vote_pitch = c.max_blocks,
          .head_groups = head_groups,
          .block_tokens = 1,
          .budget_blocks = budget,
          .sink_blocks = static_cast<std::uint32_t>(round),
          .recent_blocks = static_cast<std::uint32_t>(40 * round)};
        on.run(choose);
        choose.votes = votes[1].data();
        choose.selection = together.selection;
        table.data = scores.data();
        pulseinfer::choose_blocks const all{
          .choose = choose, .scores = table, .votes = votes[1].data(), .most_blocks = c.max_blocks, .favour = 1.25F};
        REQUIRE(pulseinfer::detail::kernel_override<pulseinfer::choose_blocks>::takes(all));
        on.run(all);
        CHECK(votes[0] == votes[1]);
        for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
          CHECK(together.selected(lane) == apart.selected(lane));
          CHECK(together.rest_is_none(lane));
          CHECK(together.remembered(0, lane) == apart.remembered(0, lane));
        }
        // And what the generic body leaves, up to the rounding of votes.
        votes[0].assign(votes[0].size(), 0.25F);
        choose.votes = votes[0].data();
        choose.selection = apart.selection;
        choose.remember = false;
        for (std::size_t i = 0; i < apart.previous.size(); ++i) { apart.previous[i] = 0U; }
        pulseinfer::choose_blocks generic = all;
        generic.choose = choose;
        generic.votes = votes[0].data();
        pulseinfer::choose_blocks kernel = generic;
        kernel.choose.votes = kernel.votes = votes[1].data();
        kernel.choose.selection.ids = together.selection.ids;
        pulseinfer_test::run_solo(generic);
        votes[1].assign(votes[1].size(), 0.25F);
        on.run(kernel);
        CHECK(largest_difference(votes[0], votes[1]) <= 2e-6);
        for (std::size_t i = 0; i < apart.previous.size(); ++i) { apart.previous[i] = together.previous[i]; }
      }
    }
  }
}

TEST_CASE("law 8: a GPU chooses among ties as a CPU does, launch after launch, and takes over imported ids")
{
  managed_default const memory;
  gpu on;
  std::mt19937 random{3};
  pulseinfer::kv_geometry const geometry{
    .layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 1, .block_tokens = 1};
  cache c{geometry, {{8192, 1}, {5000, 1}, {130, 2}}, 1, false};
  selection_arrays cpu_arrays{c, 2048, {0}};
  selection_arrays gpu_arrays{c, 2048, {0}};
  for (int round = 0; round < 20; ++round) {
    std::pmr::vector<float> votes(3 * 8192);
    for (float& vote : votes) { vote = static_cast<float>(random() % (round + 1)); }
    pulseinfer::select_top_k choose{
      .layer = pulseinfer::layer_id{0},
      .rows = c.rows(),
      .info = c.info.data(),
      .votes = votes.data(),
      .selection = cpu_arrays.selection,
      .vote_pitch = 8192,
      .block_tokens = 1,
      .budget_blocks = static_cast<std::uint32_t>(1 + random() % 2048),
      .sink_blocks = 0,
      .recent_blocks = 0};
    pulseinfer_test::run_solo(choose);
    choose.selection = gpu_arrays.selection;
    on.run(choose);
    for (std::uint32_t lane = 0; lane < 3; ++lane) {
      CHECK(gpu_arrays.selected(lane) == cpu_arrays.selected(lane));
      CHECK(gpu_arrays.rest_is_none(lane));
    }
  }
  std::pmr::vector<pulseinfer::block_id> const ids{pulseinfer::block_id{4}, pulseinfer::block_id{90},
                                                   pulseinfer::block_id{4}, pulseinfer::block_id{91},
                                                   pulseinfer::block_id{1}, pulseinfer::block_id{2}};
  std::pmr::vector<std::uint32_t> const counts{2, 2, 1};
  on.run(pulseinfer::select_imported{
    .layer = pulseinfer::layer_id{0},
    .rows = c.rows(),
    .info = c.info.data(),
    .ids = ids.data(),
    .id_counts = counts.data(),
    .selection = gpu_arrays.selection,
    .id_pitch = 2,
    .block_tokens = 1,
    .budget_blocks = 3});
  CHECK(gpu_arrays.selected(0) == std::vector<std::uint32_t>{4, 128, 129});
  CHECK(gpu_arrays.selected(1) == std::vector<std::uint32_t>{4, 91, 4999});
  CHECK(gpu_arrays.selected(2) == std::vector<std::uint32_t>{1, 8191});
}

TEST_CASE("digests of every form and type are made and scored on a GPU as on a CPU, most of them by generic bodies")
{
  managed_default const memory;
  gpu on;
  for (std::size_t const i : {0U, 3U, 5U}) {
    check_digests<pulseinfer::cuboid_mean>(on, shapes[i], dtype::int8);
    check_digests<pulseinfer::min_max>(on, shapes[i], dtype::float16);
    check_digests<pulseinfer::log_mass>(on, shapes[i], dtype::float16);
    check_digests<pulseinfer::log_mass>(on, shapes[i], dtype::float32);
  }
  using pieces = pulseinfer::split<pulseinfer::min_max, 4>;
  static_assert(!pulseinfer::detail::has_kernel_override<pieces::score_operation>);  // its kernel knows whole blocks
  for (std::size_t const i : {0U, 5U}) { check_digests<pieces>(on, shapes[i], dtype::float16); }
}

TEST_SUITE_END();
