#include <pulseinfer/operation/install_lease.hpp>
#include <pulseinfer/operation/patch_words.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <doctest/doctest.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr layer_id layer{1};
constexpr lane_id lane{1};

slot_id slot(std::int32_t number) { return static_cast<slot_id>(number); }
block_id block(std::int32_t number) { return static_cast<block_id>(number); }

/// Blocks 0 to 9 in slots 20 to 29; the last two are open. Of the sealed ones 0, 3 and 7 stay, with an empty slot.
struct shrinking {
  lane_books books{{.max_lease = 6}};
  std::vector<leased_slot> slots{{slot(20), block(0)},       {slot(23), block(3)}, {slot(27), block(7)},
                                 {slot(40), none<block_id>}, {slot(28), block(8)}, {slot(29), block(9)},
                                 {slot(41), none<block_id>}};
  lease_change change{.layer = layer, .lane = lane, .first = 0, .lease_count = 4, .held_count = 3, .blocks = 10};

  shrinking()
  {
    books.step = 50;
    for (std::int32_t b = 0; b < 10; ++b) {
      books.place(layer, lane, b, 20 + b, b < 8 ? slot_state::clean : slot_state::open, 2);
      books.place(layer, lane_id{0}, b, 50 + b, slot_state::open);
    }
  }

  [[nodiscard]] install_lease op()
  {
    return {
      .changes = &change,
      .slots = slots.data(),
      .count = 1,
      .residency = books.residency(),
      .pool = books.pool(),
      .step = &books.step};
  }

  void check()
  {
    residency_ref const residency = books.residency();
    CHECK(residency.lease_count[residency.lane_index(layer, lane)] == 4);
    for (std::uint32_t i = 0; i < 4; ++i) { CHECK(residency.lease_of_lane(layer, lane)[i] == slots[i].slot); }
    std::vector<std::int32_t> slot_of;
    for (std::int32_t b = 0; b < 12; ++b) { slot_of.push_back(to_number(residency.slots_of_lane(layer, lane)[b])); }
    CHECK(slot_of == std::vector<std::int32_t>{20, -1, -1, 23, -1, -1, -1, 27, 28, 29, -1, -1});
    CHECK(books.words[23].state == slot_state::clean);
    CHECK(books.words[28].state == slot_state::open);
    CHECK(books.words[40].state == slot_state::empty);
    CHECK(is_none(books.words[41].block));
    for (std::int32_t b = 0; b < 10; ++b) {
      CHECK(residency.slots_of_lane(layer, lane_id{0})[b] == slot(50 + b));
      CHECK(books.words[static_cast<std::size_t>(50 + b)].state == slot_state::open);
    }
  }
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("a lease takes the named blocks in and drops the others, held slots keep their state")
  {
    shrinking one;
    run_solo(one.op());
    one.check();
    shrinking many;
    run_parallel(many.op(), 5);
    many.check();
  }

  TEST_CASE("a block that stayed may leave in the very first step that does not select it")
  {
    shrinking s;
    run_solo(s.op());
    s.books.select(lane, {0, 1, 2, 8, 9});  // 3 and 7 are not wanted
    row_id const row{1};
    run_solo(resolve_blocks<lru>{
      .rows = {.ids = &row, .count = 1},
      .selection = s.books.selection(),
      .residency = s.books.residency(),
      .pool = s.books.pool(),
      .host_blocks = s.books.host_blocks.data(),
      .plan = s.books.plan(),
      .table = s.books.table(),
      .step = &s.books.step,
      .layer = layer});
    CHECK(s.books.plan().stalled[1] == 0);
    CHECK(s.books.plan().misses[1] == 2);
    CHECK(s.books.words[40].block == block(2));
    CHECK(s.books.words[23].block == block(1));
  }

  TEST_CASE("patches set the words they name, whatever those hold, in one launch or over several items")
  {
    for (std::uint32_t const count : {0U, 1U, 1023U, 1024U, 1025U, 5000U}) {
      std::vector<std::uint32_t> words(5001, 7);
      std::vector<word_patch> patches;
      for (std::uint32_t i = 0; i < count; ++i) {
        patches.push_back({.target = &words[count - 1 - i], .value = 100 + i});
      }
      patch_words const op{.patches = patches.data(), .count = count};
      CHECK(op.shape().items == (count + 1023) / 1024);
      if (count % 2 == 0) {
        run_parallel(op, 3);
      } else {
        run_solo(op);
      }
      bool right = true;
      for (std::uint32_t i = 0; i < count; ++i) { right = right && words[i] == 100 + count - 1 - i; }
      for (std::size_t i = count; i < words.size(); ++i) { right = right && words[i] == 7; }
      CHECK(right);
    }
  }
}
