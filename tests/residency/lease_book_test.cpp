#include <pulseinfer/residency/lease_book.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <set>

using namespace pulseinfer;

TEST_SUITE("residency")
{
  TEST_CASE("each list of each layer and lane has a place of its own, and all are empty at first")
  {
    constexpr std::uint32_t layers = 3, rows = 2, groups = 2, blocks = 5, lease = 4, ring = 3;
    lease_book book{layers, rows, groups, blocks, lease, ring};
    std::set<slot_id*> places;
    std::set<std::uint32_t*> counts;
    for (std::uint32_t l = 0; l < layers; ++l) {
      for (std::uint32_t r = 0; r < rows * groups; ++r) {
        auto const layer = static_cast<layer_id>(l);
        auto const lane = static_cast<lane_id>(r);
        CHECK(book.lease_count(layer, lane) == 0);
        counts.insert(&book.lease_count(layer, lane));
        for (std::uint32_t i = 0; i < blocks; ++i) { places.insert(&book.placed(layer, lane, i)); }
        for (std::uint32_t i = 0; i < lease; ++i) { places.insert(book.lease(layer, lane) + i); }
        for (std::uint32_t i = 0; i < ring; ++i) { places.insert(&book.ring_slot(layer, lane, i)); }
      }
    }
    CHECK(places.size() == layers * rows * groups * (blocks + lease + ring));
    CHECK(counts.size() == layers * rows * groups);
    for (slot_id* const place : places) { CHECK(is_none(*place)); }
    CHECK(book.ring_size() == ring);
    CHECK(book.max_lease() == lease);
  }

  TEST_CASE("a ring place is found by its state, the first of several, and in its own row only")
  {
    lease_book book{1, 2, 1, 4, 2, 3};
    row_id const row{1};
    CHECK(book.find_ring(row, ring_state::spare) == 0);
    CHECK(book.find_ring(row, ring_state::written) == 3);
    book.ring(row, 0).state = ring_state::open;
    book.ring(row, 1).state = ring_state::written;
    book.ring(row, 2).state = ring_state::written;
    CHECK(book.find_ring(row, ring_state::written) == 1);
    CHECK(book.find_ring(row, ring_state::spare) == 3);
    CHECK(book.find_ring(row_id{0}, ring_state::spare) == 0);
    CHECK(book.find_ring(row_id{0}, ring_state::written) == 3);
  }
}
