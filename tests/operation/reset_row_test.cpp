#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/reset_row.hpp>

#include <doctest/doctest.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Every word of the books is something else than after a reset.
lane_books used_books()
{
  lane_books books{{.layers = 3, .rows = 3, .head_groups = 2, .max_blocks = 40, .max_selected = 5}};
  for (auto* const list : {&books.slot_of, &books.listed, &books.landed}) { std::ranges::fill(*list, slot_id{9}); }
  for (auto* const list : {&books.lease_count, &books.previous, &books.listed_count, &books.landed_count}) {
    std::ranges::fill(*list, 4U);
  }
  std::ranges::fill(
    books.info, row_info{.tokens = 8, .new_tokens = 1, .token_offset = 2, .mode = row_mode::dense_resident});
  std::ranges::fill(books.host_blocks, host_block_id{6});
  return books;
}

template <class T>
bool row_is(std::vector<T> const& list, std::size_t rows, std::size_t row, std::size_t lists, T value)
{
  std::size_t const of_row = list.size() / lists / rows;
  for (std::size_t l = 0; l < lists; ++l) {
    for (std::size_t i = 0; i < of_row; ++i) {
      if (list[l * rows * of_row + row * of_row + i] != value) { return false; }
    }
  }
  return true;
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("a reset clears all that the device knows of a row, and nothing of the others")
  {
    for (std::uint32_t const threads : {1U, 6U}) {
      lane_books books = used_books();
      reset_row const op{
        .row = row_id{1},
        .residency = books.residency(),
        .selection = books.selection(),
        .table = books.table(),
        .info = books.info.data(),
        .host_blocks = books.host_blocks.data(),
        .head_groups = 2};
      CHECK(op.shape().items == 3);
      if (threads == 1) {
        run_solo(op);
      } else {
        run_parallel(op, threads);
      }
      for (std::size_t row = 0; row < 3; ++row) {
        bool const mine = row == 1;
        CHECK(row_is(books.slot_of, 3, row, 3, mine ? none<slot_id> : slot_id{9}));
        CHECK(row_is(books.listed, 3, row, 3, mine ? none<slot_id> : slot_id{9}));
        CHECK(row_is(books.landed, 3, row, 1, mine ? none<slot_id> : slot_id{9}));
        CHECK(row_is(books.lease_count, 3, row, 3, mine ? 0U : 4U));
        CHECK(row_is(books.listed_count, 3, row, 3, mine ? 0U : 4U));
        CHECK(row_is(books.landed_count, 3, row, 1, mine ? 0U : 4U));
        CHECK(row_is(books.previous, 3, row, 3, mine ? 0U : 4U));
        CHECK(row_is(books.host_blocks, 3, row, 1, mine ? none<host_block_id> : host_block_id{6}));
        CHECK(books.info[row].tokens == (mine ? 0 : 8));
        CHECK(books.info[row].mode == (mine ? row_mode::idle : row_mode::dense_resident));
      }
    }
  }

  TEST_CASE("a kept selection is the lane's ids with none behind them, in the place of its layer")
  {
    lane_books books{{.layers = 2, .rows = 3, .head_groups = 2, .max_selected = 4}};
    for (std::int32_t l = 0; l < 6; ++l) { books.select(lane_id{l}, {l, l + 3}); }
    books.select(lane_id{4}, {0, 1, 2, 9});
    books.select(lane_id{5}, {});
    books.ids[5 * 4] = block_id{3};  // behind the count
    std::vector<block_id> kept(2 * 6 * 4, block_id{77});
    std::vector<row_id> const rows{row_id{2}, row_id{0}};
    run_parallel(
      keep_selection{
        .rows = {.ids = rows.data(), .count = 2},
        .selection = books.selection(),
        .kept = kept.data(),
        .layer = layer_id{1},
        .head_groups = 2},
      3);
    auto const place = [&](std::size_t layer, std::size_t lane, std::size_t i) {
      return to_number(kept[(layer * 6 + lane) * 4 + i]);
    };
    CHECK(place(1, 0, 0) == 0);
    CHECK(place(1, 0, 1) == 3);
    CHECK(place(1, 0, 2) == -1);
    CHECK(place(1, 1, 1) == 4);
    CHECK(place(1, 4, 3) == 9);
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(place(1, 5, i) == -1);
      CHECK(place(1, 2, i) == 77);
      CHECK(place(0, 0, i) == 77);
    }
  }

  TEST_CASE("the last queries of a row ask, and all of them where it has fewer")
  {
    std::vector<row_info> const info{
      {.tokens = 50, .new_tokens = 20, .token_offset = 100, .mode = row_mode::dense_resident},
      {.tokens = 3, .new_tokens = 3, .token_offset = 7, .mode = row_mode::dense_resident}};
    std::vector<row_info> asking(2);
    std::vector<row_id> const rows{row_id{1}, row_id{0}};
    run_solo(last_queries{
      .rows = {.ids = rows.data(), .count = 2}, .info = info.data(), .asking = asking.data(), .queries = 8});
    CHECK(asking[0].new_tokens == 8);
    CHECK(asking[0].token_offset == 112);
    CHECK(asking[0].tokens == 50);
    CHECK(asking[1].new_tokens == 3);
    CHECK(asking[1].token_offset == 7);
  }
}
