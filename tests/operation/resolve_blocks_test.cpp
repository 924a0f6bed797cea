#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr layer_id layer{1};

slot_id slot(std::int32_t number) { return static_cast<slot_id>(number); }
lane_id lane(std::int32_t number) { return static_cast<lane_id>(number); }

void resolve(lane_books& books, std::vector<row_id> const& rows, bool hits_only = false)
{
  run_solo(resolve_blocks<lru>{
    .rows = {.ids = rows.data(), .count = static_cast<std::uint32_t>(rows.size())},
    .selection = books.selection(),
    .residency = books.residency(),
    .pool = books.pool(),
    .host_blocks = books.host_blocks.data(),
    .plan = books.plan(),
    .table = books.table(),
    .step = &books.step,
    .layer = layer,
    .head_groups = books.sizes.head_groups,
    .list_hits_only = hits_only});
}

std::vector<std::int32_t> listed(lane_books& books, lane_id of)
{
  std::vector<std::int32_t> result;
  std::uint64_t const index = books.residency().lane_index(layer, of);
  for (std::uint32_t i = 0; i < books.listed_count[index]; ++i) {
    result.push_back(to_number(books.listed[index * books.sizes.max_blocks + i]));
  }
  return result;
}

/// What a lane's lease holds, slow and obvious: a map from slot to content, and the rule in words.
struct reference {
  struct content {
    std::int32_t block = -1;
    std::uint32_t last_used = 0;
    bool open = false;  ///< the host's: never a victim
  };

  std::map<std::int32_t, content> slots;

  /// @return for each selected block its slot, -1 for one that finds none; misses are those in `missed`
  std::vector<std::int32_t> select(
    std::vector<std::int32_t> const& blocks, std::uint32_t now, std::vector<std::int32_t>& missed)
  {
    missed.clear();
    for (std::int32_t const block : blocks) {
      auto const found = std::ranges::find_if(slots, [&](auto const& s) { return s.second.block == block; });
      if (found == slots.end()) {
        missed.push_back(block);
      } else {
        found->second.last_used = now;
      }
    }
    // Slots that may be taken: empty ones by number, then the longest unused by number.
    std::vector<std::int32_t> order;
    for (auto const& [number, it] : slots) {
      if (it.block < 0 || (!it.open && it.last_used != now)) { order.push_back(number); }
    }
    std::ranges::stable_sort(order, [&](std::int32_t a, std::int32_t b) {
      content const& x = slots[a];
      content const& y = slots[b];
      if ((x.block < 0) != (y.block < 0)) { return x.block < 0; }
      return x.block >= 0 && x.last_used < y.last_used;
    });
    order.resize(std::min(order.size(), missed.size()));
    std::ranges::sort(order);
    for (std::size_t i = 0; i < order.size(); ++i) { slots[order[i]] = {.block = missed[i], .last_used = now}; }
    std::vector<std::int32_t> result;
    for (std::int32_t const block : blocks) {
      auto const found = std::ranges::find_if(slots, [&](auto const& s) { return s.second.block == block; });
      result.push_back(found == slots.end() ? -1 : found->first);
    }
    return result;
  }
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("with one slot each new block takes it, and one that is there needs nothing")
  {
    lane_books books{{.max_selected = 1, .max_lease = 1}};
    books.give_lease(layer, lane(0), 5, 1);
    for (std::int32_t b = 0; b < 16; ++b) { books.host_blocks[static_cast<std::size_t>(b)] = host_block_id{100 + b}; }
    std::int32_t before = -1;
    for (std::int32_t const block : {3, 3, 7, 3, 3, 0}) {
      ++books.step;
      books.select(lane(0), {block});
      resolve(books, {row_id{0}});
      bool const hit = block == before;
      CHECK(books.plan().misses[0] == (hit ? 0U : 1U));
      CHECK(books.plan().hits[0] == (hit ? 1U : 0U));
      CHECK(books.plan().stalled[0] == 0);
      CHECK(listed(books, lane(0)) == std::vector<std::int32_t>{5});
      CHECK(books.words[5].block == block_id{block});
      if (!hit) {
        CHECK(books.words[5].state == slot_state::in_flight);
        CHECK(books.entries[0].source == host_block_id{100 + block});
        CHECK(books.entries[0].target == slot(5));
        CHECK(books.entries[0].block == block_id{block});
        CHECK(books.entries[0].lane == lane(0));
        if (before >= 0) { CHECK(is_none(books.residency().slots_of_lane(layer, lane(0))[before])); }
      }
      books.words[5].state = slot_state::clean;  // it lands
      before = block;
    }
  }

  TEST_CASE("with two slots the block that this step reads too stays, whichever came first")
  {
    lane_books books{{.max_selected = 2, .max_lease = 2}};
    books.give_lease(layer, lane(0), 8, 2);
    books.place(layer, lane(0), 1, 8, slot_state::clean, 1);
    books.place(layer, lane(0), 2, 9, slot_state::clean, 9);
    books.step = 10;
    books.select(lane(0), {1, 4});
    resolve(books, {row_id{0}});
    CHECK(listed(books, lane(0)) == std::vector<std::int32_t>{8, 9});
    CHECK(books.plan().misses[0] == 1);
    CHECK(books.entries[0].target == slot(9));
    // While block 4 travels it is no victim and no hit; the row waits for it.
    books.step = 11;
    books.select(lane(0), {4});
    resolve(books, {row_id{0}});
    CHECK(books.plan().flying[0] == 1);
    CHECK(books.plan().hits[0] == 0);
    CHECK(books.plan().misses[0] == 0);
    CHECK(books.landed[0] == slot(9));
    books.step = 12;
    books.select(lane(0), {5, 6});
    resolve(books, {row_id{0}});
    CHECK(books.plan().misses[0] == 1);
    CHECK(books.plan().stalled[0] == 1);
    CHECK(books.entries[0].target == slot(8));
    CHECK(books.words[9].block == block_id{4});
  }

  TEST_CASE("slots without a host copy are never taken: open, dirty and travelling blocks stall the row instead")
  {
    for (slot_state const state : {slot_state::open, slot_state::dirty, slot_state::in_flight}) {
      lane_books books{{.max_selected = 4, .max_lease = 3}};
      books.give_lease(layer, lane(0), 0, 3);
      for (std::int32_t i = 0; i < 3; ++i) { books.place(layer, lane(0), i, i, state); }
      books.step = 5;
      books.select(lane(0), {9});
      resolve(books, {row_id{0}});
      CHECK(books.plan().misses[0] == 0);
      CHECK(books.plan().stalled[0] == 1);
      CHECK(listed(books, lane(0)).empty());
      for (std::size_t i = 0; i < 3; ++i) { CHECK(books.words[i].state == state); }
    }
  }

  // Report: sgl-project/sglang#32483
  TEST_CASE("places behind a row's entries hold none, and rows that are not asked for change nothing")
  {
    lane_books books{{.rows = 4, .max_blocks = 24, .max_selected = 8, .max_lease = 8, .slots = 64}};
    for (std::int32_t r = 0; r < 4; ++r) { books.give_lease(layer, lane(r), static_cast<std::uint32_t>(r) * 8, 8); }
    books.step = 1;
    // An earlier step of all rows, with eight blocks each.
    for (std::int32_t r = 0; r < 4; ++r) { books.select(lane(r), {0, 1, 2, 3, 4, 5, 6, 7}); }
    resolve(books, {row_id{0}, row_id{1}, row_id{2}, row_id{3}});
    for (slot_word& word : books.words) {
      if (word.state == slot_state::in_flight) { word.state = slot_state::clean; }
    }
    for (std::size_t i = 0; i < books.landed.size(); ++i) { books.landed[i] = slot(123456); }
    auto const words = books.words;
    auto const table = books.listed;
    auto const landed = books.landed;
    // A step of two rows, of 3 and 20 blocks, in a batch that is padded to four.
    books.step = 2;
    books.select(lane(0), {0, 1, 2});
    books.select(lane(1), {0, 1, 4, 9, 11, 17, 18, 19});
    resolve(books, {row_id{0}, row_id{1}});
    std::size_t const first = books.residency().lane_index(layer, lane(0)) * 24;
    CHECK(listed(books, lane(0)) == std::vector<std::int32_t>{0, 1, 2});
    for (std::size_t i = 3; i < 24; ++i) { CHECK(is_none(books.listed[first + i])); }
    CHECK(listed(books, lane(1)).size() == 8);
    for (std::size_t i = 8; i < 24; ++i) { CHECK(is_none(books.listed[first + 24 + i])); }
    for (std::size_t i = 0; i < 8; ++i) { CHECK(is_none(books.landed[i])); }
    for (std::size_t i = 5; i < 8; ++i) { CHECK(is_none(books.landed[8 + i])); }
    for (std::size_t i = 16; i < 32; ++i) { CHECK(books.landed[i] == landed[i]); }
    for (std::size_t i = 16; i < 32; ++i) {
      CHECK(books.words[i].block == words[i].block);
      CHECK(books.words[i].last_used == words[i].last_used);
    }
    for (std::size_t i = first + 48; i < first + 96; ++i) { CHECK(books.listed[i] == table[i]); }
  }

  TEST_CASE("with hits first the table lists the hits, and what travels is listed apart, both by ascending block")
  {
    lane_books books{{.max_selected = 5, .max_lease = 6}};
    books.give_lease(layer, lane(1), 10, 6);
    books.place(layer, lane(1), 2, 14, slot_state::clean, 1);
    books.place(layer, lane(1), 5, 11, slot_state::in_flight, 2);
    books.place(layer, lane(1), 8, 40, slot_state::open);
    books.step = 3;
    books.select(lane(1), {1, 2, 5, 6, 8});
    resolve(books, {row_id{1}}, true);
    CHECK(listed(books, lane(1)) == std::vector<std::int32_t>{14, 40});
    CHECK(books.landed_count[1] == 3);
    CHECK(books.landed[5] == slot(10));
    CHECK(books.landed[6] == slot(11));
    CHECK(books.landed[7] == slot(12));
    CHECK(books.plan().hits[1] == 2);
    CHECK(books.plan().misses[1] == 2);
    CHECK(books.plan().flying[1] == 1);
  }

  TEST_CASE("law 2: whatever is selected, slots are those of a slow reference with the same rule")
  {
    CHECK(rc::check([] {
      auto const leased = *rc::gen::inRange(1U, 9U);
      auto const most = *rc::gen::inRange(1U, leased + 1);
      auto const seed = *rc::gen::inRange(0U, 1000000U);
      auto const hits_first = *rc::gen::arbitrary<bool>();
      lane_books books{
        {.rows = 2, .head_groups = 2, .max_blocks = 12, .max_selected = most + 1, .max_lease = leased, .slots = 64}};
      std::mt19937 random{seed};
      std::vector<std::uint32_t> firsts{3, 20, 33, 50};
      std::vector<reference> model(4);
      for (std::int32_t l = 0; l < 4; ++l) {
        books.give_lease(layer, lane(l), firsts[static_cast<std::size_t>(l)], leased);
        for (std::uint32_t i = 0; i < leased; ++i) {
          model[static_cast<std::size_t>(l)].slots[static_cast<std::int32_t>(firsts[static_cast<std::size_t>(l)] + i)];
        }
        // The open block, 11, sits in a slot of the host's.
        books.place(layer, lane(l), 11, 60 + l, slot_state::open);
        model[static_cast<std::size_t>(l)].slots[60 + l] = {.block = 11, .open = true};
      }
      for (std::uint32_t step = 1; step < 30; ++step) {
        books.step = step;
        for (std::int32_t l = 0; l < 4; ++l) {
          std::vector<std::int32_t> blocks{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
          std::shuffle(blocks.begin(), blocks.end(), random);
          blocks.resize(random() % (most + 1));
          blocks.push_back(11);
          std::ranges::sort(blocks);
          books.select(lane(l), blocks);
        }
        resolve(books, {row_id{1}, row_id{0}}, hits_first);
        for (std::int32_t l = 0; l < 4; ++l) {
          block_id const* const ids = books.selection().ids_of(lane(l));
          std::vector<std::int32_t> blocks, missed, hit_slots;
          for (std::uint32_t i = 0; i < books.counts[static_cast<std::size_t>(l)]; ++i) {
            blocks.push_back(to_number(ids[i]));
          }
          std::vector<std::int32_t> const right = model[static_cast<std::size_t>(l)].select(blocks, step, missed);
          for (std::size_t i = 0; i < blocks.size(); ++i) {
            RC_ASSERT(to_number(books.residency().slots_of_lane(layer, lane(l))[blocks[i]]) == right[i]);
            if (!std::ranges::count(missed, blocks[i])) { hit_slots.push_back(right[i]); }
          }
          RC_ASSERT(listed(books, lane(l)) == (hits_first ? hit_slots : right));
          RC_ASSERT(books.plan().misses[l] == missed.size());
          RC_ASSERT(books.plan().stalled[l] == 0U);
          for (std::size_t i = 0; i < missed.size(); ++i) {
            RC_ASSERT(to_number(books.entries[static_cast<std::size_t>(l) * (most + 1) + i].block) == missed[i]);
          }
        }
        for (slot_word& word : books.words) {
          if (word.state == slot_state::in_flight) { word.state = slot_state::clean; }
        }
      }
    }));
  }

  // Report: NVIDIA/TensorRT-LLM#13124
  TEST_CASE("a table holds slots, all below the pool's size and all different, after blocks have changed places")
  {
    lane_books books{{.max_blocks = 12, .max_selected = 4, .max_lease = 4, .slots = 4}};
    books.give_lease(layer, lane(0), 0, 4);
    for (std::int32_t b = 0; b < 4; ++b) { books.place(layer, lane(0), b, b, slot_state::clean, 1); }
    auto const step = [&](std::vector<std::int32_t> const& blocks) {
      ++books.step;
      books.select(lane(0), blocks);
      resolve(books, {row_id{0}});
      for (slot_word& word : books.words) { word.state = slot_state::clean; }
      return listed(books, lane(0));
    };
    books.step = 1;
    CHECK(step({0, 1, 3, 9}) == std::vector<std::int32_t>{0, 1, 3, 2});   // 9 for 2
    CHECK(step({1, 3, 9, 11}) == std::vector<std::int32_t>{1, 3, 2, 0});  // 11 for 0
    CHECK(step({1, 2, 3, 9}) == std::vector<std::int32_t>{1, 0, 3, 2});   // 2 for 11
  }
}
