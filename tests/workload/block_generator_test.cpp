#include <pulseinfer/workload/block_generator.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

using namespace pulseinfer;

namespace {

/// The blocks that a least-recently-used cache holds, slowly.
class slow_cache {
 public:
  explicit slow_cache(std::size_t slots) : slots_{slots} {}

  /// @return how many of the blocks were not there
  std::uint32_t use(std::span<block_id const> blocks)
  {
    std::uint32_t missed = 0;
    for (block_id const block : blocks) {
      auto const at = std::ranges::find(order_, block);
      if (at == order_.end()) {
        ++missed;
      } else {
        order_.erase(at);
      }
    }
    for (block_id const block : blocks) { order_.push_front(block); }
    while (order_.size() > slots_) { order_.pop_back(); }
    return missed;
  }

 private:
  std::size_t slots_;
  std::deque<block_id> order_;
};

}  // namespace

TEST_SUITE("workload")
{
  TEST_CASE("a least-recently-used cache of the hot size misses exactly the blocks that the miss generator counts")
  {
    miss_generator misses{{.layers = 3, .rows = 2, .budget_blocks = 32, .seed = 9}};
    constexpr std::uint32_t blocks = 1024, hot = 96;
    block_generator generator{misses, blocks, hot};
    std::vector<slow_cache> caches(6, slow_cache{hot});
    std::vector<std::vector<block_id>> last(6);
    std::uint64_t missed = 0, neighbours = 0;
    for (int step = 0; step < 300; ++step) {
      if (step > 0) { misses.next_step(); }
      for (std::int32_t r = 0; r < 2; ++r) {
        for (std::int32_t l = 0; l < 3; ++l) {
          auto const row = static_cast<row_id>(r);
          auto const layer = static_cast<layer_id>(l);
          auto const lane = static_cast<std::size_t>(r * 3 + l);
          auto const selected = generator.select(row, layer);
          REQUIRE(selected.size() == 32);
          REQUIRE(std::ranges::is_sorted(selected));
          REQUIRE(std::ranges::adjacent_find(selected) == selected.end());
          REQUIRE(to_index(selected.back()) < blocks);
          std::uint32_t const found = caches[lane].use(selected);
          REQUIRE(found == (step == 0 ? 32U : misses.misses(row, layer)));
          for (block_id const block : selected) {
            if (step == 0 || std::ranges::binary_search(last[lane], block)) { continue; }
            ++missed;
            bool beside = false;
            for (block_id const other : last[lane]) {
              auto const distance = std::abs(to_number(other) - to_number(block));
              beside = beside || (distance >= 1 && distance <= 2);
            }
            neighbours += beside ? 1U : 0U;
          }
          last[lane].assign(selected.begin(), selected.end());
        }
      }
    }
    // Half of them by the mixture, some of the others by chance.
    CHECK(missed > 1000);
    double const share = static_cast<double>(neighbours) / static_cast<double>(missed);
    CHECK(share > 0.45);
    CHECK(share < 0.75);
  }

  TEST_CASE("a new request of a row begins with a selection of its own")
  {
    miss_generator misses{{.layers = 1, .rows = 1, .budget_blocks = 16}};
    block_generator generator{misses, 4096, 48};
    auto const first = generator.select(row_id{0}, layer_id{0});
    std::set<block_id> const before{first.begin(), first.end()};
    generator.begin_request(row_id{0});
    std::size_t shared = 0;
    for (block_id const block : generator.select(row_id{0}, layer_id{0})) { shared += before.count(block); }
    CHECK(shared < 4);
  }

  TEST_CASE("selections that leave no new block to be drawn are refused with the numbers")
  {
    miss_generator misses{{.layers = 1, .rows = 1, .budget_blocks = 16}};
    CHECK_THROWS_WITH_AS(
      (block_generator{misses, 79, 48}),
      "invalid_argument: block_generator: selections of 16 blocks, 48 of them hot, out of 79", configuration_error);
    CHECK_THROWS_AS((block_generator{misses, 4096, 15}), configuration_error);
    CHECK_NOTHROW(block_generator{misses, 80, 48});
  }
}
