#include "support/parallel_group.hpp"
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/remember_selection.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

TEST_SUITE("device")
{
  TEST_CASE("remember_selection sets the selected blocks' bits and clears every other one, for any group")
  {
    std::mt19937 random{1};
    for (int round = 0; round < 40; ++round) {
      std::vector<pulseinfer::block_id> ids;
      std::vector<std::uint32_t> right(9, 0U);
      for (std::int32_t block = 0; block < 288; ++block) {
        if (random() % 8 >= static_cast<unsigned>(round % 9)) { continue; }
        ids.push_back(static_cast<pulseinfer::block_id>(block));
        right[static_cast<std::size_t>(block) / 32] |= 1U << (static_cast<std::uint32_t>(block) % 32U);
      }
      auto const count = static_cast<std::uint32_t>(ids.size());
      ids.push_back(pulseinfer::none<pulseinfer::block_id>);
      std::vector<std::uint32_t> words(9, 0xDEADBEEFU);
      pulseinfer::device::remember_selection(pulseinfer::device::solo_group{}, ids.data(), count, words.data(), 9);
      CHECK(words == right);
      std::vector<std::uint32_t> same(9, 0xDEADBEEFU);
      pulseinfer_test::run_group(4, [&](pulseinfer_test::parallel_group const& group) {
        pulseinfer::device::remember_selection(group, ids.data(), count, same.data(), 9);
      });
      CHECK(same == right);
    }
  }
}
