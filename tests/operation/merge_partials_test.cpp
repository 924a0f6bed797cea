#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/operation/merge_partials.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using pulseinfer::dtype;
using pulseinfer_test::tensor;

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

struct merge_call {
  explicit merge_call(dtype result_type)
    : result{result_type, 12, 3, 10, 2}, other{dtype::float32, 12, 3, 10, 1}, result_lse(36), other_lse(36)
  {
    std::mt19937 random{6};
    result.randomise(random);
    other.randomise(random);
    std::normal_distribution<float> normal{3.0F, 4.0F};
    for (std::size_t i = 0; i < 36; ++i) {
      result_lse[i] = i % 5 == 0 ? minus_infinity : normal(random);
      other_lse[i] = i % 3 == 0 ? minus_infinity : normal(random);
    }
    info[0] = {.tokens = 90, .new_tokens = 4, .token_offset = 6};
    info[1] = {.tokens = 8, .new_tokens = 1, .token_offset = 1};
    info[2] = {.tokens = 8, .new_tokens = 2, .token_offset = 3};  // not in the list
  }
  [[nodiscard]] pulseinfer::merge_partials operation()
  {
    return {
      .rows = {.ids = ids, .count = 2},
      .info = info,
      .result = result.view,
      .result_lse = result_lse.data(),
      .other = other.view,
      .other_lse = other_lse.data(),
      .most_queries = 4};
  }
  tensor result;
  tensor other;
  std::vector<float> result_lse;
  std::vector<float> other_lse;
  pulseinfer::row_info info[3];
  pulseinfer::row_id ids[2] = {pulseinfer::row_id{1}, pulseinfer::row_id{0}};
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("merge_partials merges the rows' tokens in place, for any type and group, and leaves others alone")
  {
    for (dtype const type : {dtype::float32, dtype::float16, dtype::bfloat16}) {
      for (std::uint32_t const threads : {1U, 4U}) {
        merge_call call{type};
        merge_call const before{type};
        if (threads == 1) {
          pulseinfer_test::run_solo(call.operation());
        } else {
          pulseinfer_test::run_parallel(call.operation(), threads);
        }
        double const unit = type == dtype::float32 ? 1e-6 : (type == dtype::float16 ? 2e-3 : 1e-2);
        for (std::uint64_t token = 0; token < 12; ++token) {
          bool const named = token == 1 || (token >= 6 && token < 10);
          for (std::uint32_t head = 0; head < 3; ++head) {
            CAPTURE(token);
            CAPTURE(head);
            std::size_t const place = token * 3 + head;
            float const lse_a = before.result_lse[place];
            float const lse_b = before.other_lse[place];
            double const a = std::exp(static_cast<double>(lse_a));
            double const b = std::exp(static_cast<double>(lse_b));
            if (!named) {
              CHECK(call.result_lse[place] == lse_a);
            } else if (a + b == 0.0) {
              CHECK(call.result_lse[place] == minus_infinity);
            } else {
              CHECK(static_cast<double>(call.result_lse[place]) == doctest::Approx(std::log(a + b)).epsilon(1e-5));
            }
            for (std::uint32_t j = 0; j < 10; ++j) {
              float const x = before.result.at(token, head, j);
              float const y = before.other.at(token, head, j);
              float const merged = call.result.at(token, head, j);
              if (!named || (b == 0.0 && a != 0.0)) {
                CHECK(merged == x);
              } else if (a + b == 0.0) {
                CHECK(merged == 0.0F);
              } else {
                double const right = (a * static_cast<double>(x) + b * static_cast<double>(y)) / (a + b);
                CHECK(
                  std::abs(static_cast<double>(merged) - right) <=
                  unit * static_cast<double>(std::abs(x) + std::abs(y)));
              }
            }
          }
        }
      }
    }
  }

  TEST_CASE("merge_partials merges every token of a row where nobody says how many there are")
  {
    merge_call said{dtype::float32}, unsaid{dtype::float32};
    pulseinfer_test::run_solo(said.operation());
    pulseinfer::merge_partials op = unsaid.operation();
    op.most_queries = pulseinfer::merge_partials{}.most_queries;
    pulseinfer_test::run_solo(op);
    CHECK(unsaid.result_lse == said.result_lse);
    CHECK(unsaid.result.bytes() == said.result.bytes());
  }
}
