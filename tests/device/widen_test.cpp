#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/device/widen.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

using pulseinfer::bfloat16;
using pulseinfer::dtype;
using pulseinfer::fp8_e4m3;
using pulseinfer::half;

namespace {

template <class T, class Bits>
std::uint32_t bits_that_differ(std::uint32_t patterns)
{
  std::uint32_t wrong = 0;
  for (std::uint32_t pattern = 0; pattern < patterns; ++pattern) {
    auto const value = std::bit_cast<T>(static_cast<Bits>(pattern));
    auto const right = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    T sixteen[16];
    for (T& x : sixteen) { x = value; }
    pulseinfer::device::float_lanes lanes;
    lanes.load(sixteen);
    float stored[16];
    lanes.store(stored);
    wrong += std::bit_cast<std::uint32_t>(pulseinfer::device::widen(value)) != right ? 1U : 0U;
    for (float const x : stored) { wrong += std::bit_cast<std::uint32_t>(x) != right ? 1U : 0U; }
  }
  return wrong;
}

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("widen gives the bits of the plain conversion for every half, bfloat16 and fp8, alone and in lanes")
  {
    CHECK(bits_that_differ<half, std::uint16_t>(65536) == 0);
    CHECK(bits_that_differ<bfloat16, std::uint16_t>(65536) == 0);
    CHECK(bits_that_differ<fp8_e4m3, std::uint8_t>(256) == 0);
  }

  TEST_CASE("convert_row converts between any two types as load and store do, and copies bits between equal types")
  {
    constexpr std::uint32_t count = 37;
    for (dtype const from : {dtype::float32, dtype::float16, dtype::bfloat16, dtype::float8_e4m3}) {
      for (dtype const to : {dtype::float32, dtype::float16, dtype::bfloat16, dtype::float8_e4m3}) {
        CAPTURE(name_of(from));
        CAPTURE(name_of(to));
        std::vector<std::byte> source(count * 4 + 4, std::byte{0x55});
        std::vector<std::byte> target(count * 4 + 4, std::byte{0x55});
        std::vector<std::byte> right = target;
        for (std::uint32_t i = 0; i < count; ++i) {
          pulseinfer::store_from_float(source.data(), from, i, 0.37F * static_cast<float>(i) - 5.1F);
        }
        for (std::uint32_t i = 0; i < count; ++i) {
          pulseinfer::store_from_float(right.data(), to, i, pulseinfer::load_as_float(source.data(), from, i));
        }
        pulseinfer::device::convert_row(
          pulseinfer::device::solo_group{}, source.data(), from, target.data(), to, count);
        CHECK(target == right);
      }
    }
    half const payload = std::bit_cast<half>(std::uint16_t{0x7D01});  // a signalling NaN: a conversion would quieten it
    half copy;
    pulseinfer::device::convert_row(
      pulseinfer::device::solo_group{}, &payload, dtype::float16, &copy, dtype::float16, 1);
    CHECK(copy.bits == payload.bits);
  }
}
