/// CRC-32 as zlib, gzip and PNG compute it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace host_engine {

[[nodiscard]] inline std::uint32_t crc32(std::span<std::byte const> bytes)
{
  // Eight tables, so that the loop takes eight bytes at a time: a model of half a gigabyte passes in well under a second.
  static auto const tables = [] {
    std::array<std::array<std::uint32_t, 256>, 8> made{};
    for (std::uint32_t value = 0; value < 256; ++value) {
      std::uint32_t remainder = value;
      for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? 0xEDB88320U : 0U);
      made[0][value] = remainder;
    }
    for (std::size_t table = 1; table < 8; ++table) {
      for (std::size_t value = 0; value < 256; ++value) {
        std::uint32_t const before = made[table - 1][value];
        made[table][value] = (before >> 8) ^ made[0][before & 0xFFU];
      }
    }
    return made;
  }();

  std::uint32_t remainder = ~0U;
  std::size_t at = 0;
  auto const byte = [&](std::size_t index) { return std::to_integer<std::uint32_t>(bytes[index]); };
  for (; at + 8 <= bytes.size(); at += 8) {
    remainder ^= byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16 | byte(at + 3) << 24;
    remainder = tables[7][remainder & 0xFFU] ^ tables[6][remainder >> 8 & 0xFFU] ^ tables[5][remainder >> 16 & 0xFFU] ^
      tables[4][remainder >> 24] ^ tables[3][byte(at + 4)] ^ tables[2][byte(at + 5)] ^ tables[1][byte(at + 6)] ^
      tables[0][byte(at + 7)];
  }
  for (; at < bytes.size(); ++at) remainder = (remainder >> 8) ^ tables[0][(remainder ^ byte(at)) & 0xFFU];
  return ~remainder;
}

}  // namespace host_engine
