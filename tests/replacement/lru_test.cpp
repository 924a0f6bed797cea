#include <pulseinfer/replacement/lru.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

using namespace pulseinfer;

namespace {

/// The slots of one lane under a policy: the lowest key leaves, ties by the lower slot.
template <replacement Policy>
class cache {
 public:
  cache(std::size_t slots, std::uint32_t first_step) : words_(slots), now_{first_step} {}

  /// Selects a block in a step of its own. @return false for a miss
  bool select(std::int32_t block)
  {
    ++now_;
    auto const wanted = static_cast<block_id>(block);
    for (slot_word& word : words_) {
      if (word.state == slot_state::clean && word.block == wanted) {
        word.last_used = now_;
        return true;
      }
    }
    slot_word* victim = nullptr;
    for (slot_word& word : words_) {
      if (word.state != slot_state::clean) {
        victim = &word;
        break;
      }
      if (victim == nullptr || Policy{}.key(word, now_) < Policy{}.key(*victim, now_)) { victim = &word; }
    }
    *victim = {.block = wanted, .state = slot_state::clean, .last_used = now_};
    return false;
  }

  [[nodiscard]] std::vector<std::int32_t> blocks() const
  {
    std::vector<std::int32_t> held;
    for (slot_word const& word : words_) {
      if (word.state == slot_state::clean) { held.push_back(to_number(word.block)); }
    }
    std::sort(held.begin(), held.end());
    return held;
  }

 private:
  std::vector<slot_word> words_;
  std::uint32_t now_;
};

/// The same, as a list in the order of use.
class reference {
 public:
  explicit reference(std::size_t slots) : slots_{slots} {}

  bool select(std::int32_t block)
  {
    auto const found = std::find(order_.begin(), order_.end(), block);
    bool const hit = found != order_.end();
    if (hit) {
      order_.erase(found);
    } else if (order_.size() == slots_) {
      order_.pop_front();
    }
    order_.push_back(block);
    return hit;
  }

  [[nodiscard]] std::vector<std::int32_t> blocks() const
  {
    std::vector<std::int32_t> held{order_.begin(), order_.end()};
    std::sort(held.begin(), held.end());
    return held;
  }

 private:
  std::size_t slots_;
  std::deque<std::int32_t> order_;
};

}  // namespace

TEST_SUITE("replacement")
{
  TEST_CASE("with one slot every other block drives the last one out")
  {
    cache<lru> one{1, 0};
    CHECK_FALSE(one.select(7));
    CHECK(one.select(7));
    CHECK_FALSE(one.select(8));
    CHECK_FALSE(one.select(7));
    CHECK(one.blocks() == std::vector<std::int32_t>{7});
  }

  TEST_CASE("with two slots the block that was selected longest ago leaves, not the one that came first")
  {
    cache<lru> two{2, 0};
    CHECK_FALSE(two.select(1));
    CHECK_FALSE(two.select(2));
    CHECK(two.select(1));
    CHECK_FALSE(two.select(3));
    CHECK(two.blocks() == std::vector<std::int32_t>{1, 3});
    CHECK(two.select(1));
    CHECK_FALSE(two.select(2));
    CHECK(two.blocks() == std::vector<std::int32_t>{1, 2});
  }

  TEST_CASE("lru orders by the last use, also across the largest step count")
  {
    constexpr std::uint32_t largest = std::numeric_limits<std::uint32_t>::max();
    auto const key = [](std::uint32_t last_used, std::uint32_t now) {
      return lru{}.key({.last_used = last_used}, now);
    };
    CHECK(key(3, 10) < key(4, 10));
    CHECK(key(0, 10) < key(10, 10));
    CHECK(key(5, 10) == key(5, 10));
    CHECK(key(largest - 1, 2) < key(largest, 2));
    CHECK(key(largest, 2) < key(0, 2));
    CHECK(key(0, 2) < key(1, 2));
  }

  TEST_CASE("lru keeps the blocks that a list in order of use keeps, whatever is selected")
  {
    bool const held = rc::check([](std::vector<std::uint8_t> const& selections) {
      std::size_t const slots = *rc::gen::inRange<std::size_t>(1, 6);
      std::uint32_t const first = *rc::gen::element(0U, 4'294'967'290U);
      cache<lru> ours{slots, first};
      reference theirs{slots};
      for (std::uint8_t const selection : selections) {
        RC_ASSERT(ours.select(selection % 9) == theirs.select(selection % 9));
        RC_ASSERT(ours.blocks() == theirs.blocks());
      }
    });
    CHECK(held);
  }
}
