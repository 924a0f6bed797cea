#include <pulseinfer/operation/exchange_slots.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <doctest/doctest.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr layer_id layer{0};
constexpr lane_id lane{1};

slot_id slot(std::int32_t number) { return static_cast<slot_id>(number); }

void exchange_slots_of(lane_books& books, std::vector<slot_exchange> const& list)
{
  run_solo(exchange_slots<lru>{
    .exchanges = list.data(),
    .count = static_cast<std::uint32_t>(list.size()),
    .residency = books.residency(),
    .pool = books.pool(),
    .step = &books.step});
}

/// A lease of slots 10, 11, 12 and a written block 7 in slot 30 of the ring.
lane_books with_written_block()
{
  lane_books books{{.max_lease = 3}};
  books.step = 9;
  books.give_lease(layer, lane, 10, 3);
  books.place(layer, lane, 7, 30, slot_state::dirty);
  return books;
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("a written slot joins the lease for an empty one, the lowest of several")
  {
    lane_books books = with_written_block();
    books.place(layer, lane, 3, 10, slot_state::clean, 1);
    exchange_slots_of(books, {{.layer = layer, .lane = lane, .written = slot(30), .spare_place = 2}});
    CHECK(books.spare[2] == slot(11));
    CHECK(books.residency().lease_of_lane(layer, lane)[1] == slot(30));
    CHECK(books.words[30].state == slot_state::clean);
    CHECK(books.words[30].block == block_id{7});
    CHECK(books.residency().slots_of_lane(layer, lane)[7] == slot(30));
    CHECK(books.words[11].state == slot_state::empty);
    CHECK(books.residency().slots_of_lane(layer, lane)[3] == slot(10));
  }

  TEST_CASE("with nothing empty the longest unused clean slot leaves, and its block is not resident any more")
  {
    lane_books books = with_written_block();
    books.place(layer, lane, 3, 10, slot_state::clean, 8);
    books.place(layer, lane, 4, 11, slot_state::in_flight, 1);
    books.place(layer, lane, 5, 12, slot_state::clean, 6);
    exchange_slots_of(books, {{.layer = layer, .lane = lane, .written = slot(30), .spare_place = 0}});
    CHECK(books.spare[0] == slot(12));
    CHECK(is_none(books.residency().slots_of_lane(layer, lane)[5]));
    CHECK(is_none(books.words[12].block));
    CHECK(books.words[11].block == block_id{4});
    CHECK(books.residency().lease_of_lane(layer, lane)[2] == slot(30));
  }

  TEST_CASE("with no slot that may leave, or no lease at all, the written slot itself is given back")
  {
    for (std::uint32_t const leased : {3U, 0U}) {
      lane_books books = with_written_block();
      books.residency().lease_count[books.residency().lane_index(layer, lane)] = leased;
      for (std::int32_t i = 0; i < 3; ++i) { books.place(layer, lane, i, 10 + i, slot_state::in_flight, 1); }
      exchange_slots_of(books, {{.layer = layer, .lane = lane, .written = slot(30), .spare_place = 3}});
      CHECK(books.spare[3] == slot(30));
      CHECK(books.words[30].state == slot_state::empty);
      CHECK(is_none(books.words[30].block));
      CHECK(is_none(books.residency().slots_of_lane(layer, lane)[7]));
      for (std::uint32_t i = 0; i < 3; ++i) {
        CHECK(books.residency().lease_of_lane(layer, lane)[i] == slot(10 + static_cast<std::int32_t>(i)));
        CHECK(books.words[10 + i].block == block_id{static_cast<std::int32_t>(i)});
      }
    }
  }

  TEST_CASE("exchanges of several lanes and layers in one launch touch their own books only")
  {
    lane_books books{{.layers = 2, .rows = 2, .max_lease = 2}};
    std::vector<slot_exchange> list;
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t r = 0; r < 2; ++r) {
        auto const first = static_cast<std::uint32_t>(8 * (2 * l + r));
        books.give_lease(layer_id{l}, lane_id{r}, first, 2);
        books.place(layer_id{l}, lane_id{r}, 5, static_cast<std::int32_t>(first) + 4, slot_state::dirty);
        list.push_back(
          {.layer = layer_id{l},
           .lane = lane_id{r},
           .written = slot(static_cast<std::int32_t>(first) + 4),
           .spare_place = static_cast<std::uint32_t>(2 * l + r)});
      }
    }
    exchange_slots_of(books, list);
    for (std::int32_t i = 0; i < 4; ++i) {
      CHECK(books.spare[static_cast<std::size_t>(i)] == slot(8 * i));
      CHECK(books.words[static_cast<std::size_t>(8 * i + 4)].state == slot_state::clean);
      CHECK(books.residency().lease_of_lane(layer_id{i / 2}, lane_id{i % 2})[0] == slot(8 * i + 4));
      CHECK(books.residency().lease_of_lane(layer_id{i / 2}, lane_id{i % 2})[1] == slot(8 * i + 1));
    }
  }
}
