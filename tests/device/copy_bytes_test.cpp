#include <pulseinfer/device/copy_bytes.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

TEST_SUITE("device")
{
  TEST_CASE("copy_bytes copies each byte of the range and no other, at any alignment, length and number of ranks")
  {
    alignas(64) std::byte source[1024];
    for (std::size_t i = 0; i < sizeof(source); ++i) { source[i] = static_cast<std::byte>(i * 7 + (i >> 8U)); }
    for (std::uint32_t ranks : {1U, 2U, 3U, 32U}) {
      for (std::size_t from : {0U, 1U, 2U, 4U, 8U, 12U, 16U}) {
        for (std::size_t to : {0U, 1U, 2U, 4U, 8U, 16U}) {
          for (std::size_t bytes : {0U, 1U, 3U, 15U, 16U, 17U, 92U, 128U, 500U, 999U}) {
            alignas(64) std::byte target[1056];
            for (std::byte& value : target) { value = std::byte{0xEE}; }
            for (std::uint32_t rank = ranks; rank-- > 0;) {
              pulseinfer::device::copy_bytes(target + 16 + to, source + from, bytes, rank, ranks);
            }
            bool right = true;
            for (std::size_t i = 0; i < sizeof(target); ++i) {
              bool const inside = i >= 16 + to && i < 16 + to + bytes;
              right = right && target[i] == (inside ? source[from + i - 16 - to] : std::byte{0xEE});
            }
            REQUIRE_MESSAGE(right, "ranks " << ranks << " from " << from << " to " << to << " bytes " << bytes);
          }
        }
      }
    }
  }
}
