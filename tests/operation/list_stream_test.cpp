#include <pulseinfer/operation/list_stream.hpp>

#include <doctest/doctest.h>
#include <support/parallel_group.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("operation")
{
  TEST_CASE("a part's lists are its half's slots, none behind them, and no other row's")
  {
    constexpr std::uint32_t rows = 3, groups = 2, stride = 5;
    for (std::uint32_t const threads : {1U, 4U}) {
      for (std::uint32_t const count : {0U, 1U, 3U, 5U}) {
        std::vector<slot_id> slots(std::size_t{rows} * groups * stride, slot_id{77});
        std::vector<std::uint32_t> counts(std::size_t{rows} * groups, 99);
        list_stream const op{
          .slots = slots.data(),
          .counts = counts.data(),
          .row = row_id{1},
          .first = slot_id{10},
          .count = count,
          .stride = stride,
          .head_groups = groups};
        CHECK(op.shape().items == groups);
        if (threads == 1) {
          run_solo(op);
        } else {
          run_parallel(op, threads);
        }
        for (std::uint32_t lane = 0; lane < rows * groups; ++lane) {
          bool const own = lane / groups == 1;
          CHECK(counts[lane] == (own ? count : 99));
          for (std::uint32_t i = 0; i < stride; ++i) {
            int const listed = i < count ? static_cast<int>(10 + lane % groups * stride + i) : -1;
            CHECK(to_number(slots[lane * stride + i]) == (own ? listed : 77));
          }
        }
      }
    }
  }
}
