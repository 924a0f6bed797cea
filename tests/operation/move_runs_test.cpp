#include <pulseinfer/operation/move_runs.hpp>

#include <doctest/doctest.h>
#include <support/rank_group.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

TEST_SUITE("operation")
{
  TEST_CASE(
    "law 1: move_runs moves every byte of its runs and touches no other, of any length, alignment and group size")
  {
    std::vector<std::byte> source(400000);
    for (std::size_t i = 0; i < source.size(); ++i) { source[i] = static_cast<std::byte>(i * 13 + (i >> 8U)); }
    for (std::uint32_t const count : {0U, 1U, 3U, move_runs::most_runs}) {
      for (std::uint32_t const groups : {1U, 3U, 60U}) {
        for (std::uint32_t const ranks : {1U, 7U, 32U, 100U}) {
          std::vector<std::byte> target(source.size(), std::byte{0xEE});
          std::vector<std::byte> wanted = target;
          move_runs op{.count = count, .groups = groups};
          std::size_t from = 5;
          std::size_t to = 0;
          std::uint64_t bytes = 0;
          for (std::uint32_t i = 0; i < count; ++i) {
            std::size_t const length = i % 4 == 0 ? 4096 * (i % 3) : 997 * (i % 5) + i;
            op.runs[i] = {.target = target.data() + to, .source = source.data() + from, .bytes = length};
            std::copy_n(source.data() + from, length, wanted.data() + to);
            from += length + i % 3;
            to += length + i % 7;
            bytes += length;
          }
          REQUIRE(op.shape().items == (count == 0 ? 0U : groups));
          if (ranks == 1) {
            run_operation(op, {});
          } else {
            run_with_ranks(op, ranks);
          }
          REQUIRE(target == wanted);
          CHECK(op.cost().link_bytes == bytes);
          CHECK_FALSE(op.cost().to_host);
          op.direction = copy_direction::device_to_host;
          CHECK(op.cost().to_host);
          op.direction = copy_direction::device_to_device;
          CHECK(op.cost().link_bytes == 0);
          CHECK(op.cost().device_bytes == 2 * bytes);
        }
      }
    }
  }
}
