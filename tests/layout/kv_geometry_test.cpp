#include <pulseinfer/layout/kv_geometry.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

std::string refusal(kv_geometry const& geometry)
{
  try {
    static_cast<void>(make_block_layout(geometry));
  } catch (configuration_error const& reason) {
    return reason.what();
  }
  return "nothing";
}

constexpr std::uint32_t most = ~0U;

}  // namespace

TEST_SUITE("layout")
{
  TEST_CASE("a block whose bytes cannot be counted is refused, with the numbers")
  {
    struct wrong_geometry {
      kv_geometry geometry;
      char const* text;
    };
    std::vector<wrong_geometry> const table{
      {{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 0x40000001, .key_type = dtype::float32},
       "a row of 1073741825 elements, 4294967300 B"},
      {{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 8, .value_dim = 0x80000001},
       "a row of 2147483649 elements, 4294967298 B"},
      {{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 9, .row_alignment = most}, "lie 4294967295 B apart"},
      {{.layers = 1, .query_heads = most, .kv_heads = most, .head_dim = 1U << 30U, .block_tokens = most},
       "overflow: a plane of 4294967295 x"},
      {{.layers = 1,
        .query_heads = 1,
        .kv_heads = 1,
        .head_dim = 8,
        .block_tokens = most,
        .extra_planes = {{.name = "scales", .bytes_per_token = most, .bytes_per_block = most}}},
       "overflow: a plane of 1 x 18446744069414584320 B"}};
    for (wrong_geometry const& wrong : table) {
      CAPTURE(wrong.text);
      std::string const said = refusal(wrong.geometry);
      CAPTURE(said);
      CHECK(said.find(wrong.text) != std::string::npos);
    }
  }

  TEST_CASE("rows whose padding puts elements across their own alignment are refused; others may have any pitch")
  {
    kv_geometry geometry{
      .layers = 1,
      .query_heads = 2,
      .kv_heads = 2,
      .head_dim = 5,
      .key_type = dtype::float32,
      .value_type = dtype::float32};
    geometry.row_alignment = 3;
    CHECK(
      refusal(geometry) ==
      "invalid_argument: unsupported_layout: rows of 20 B rounded up to multiples of 3 B lie 21 B apart, elements need "
      "4 B alignment");
    geometry.row_alignment = 12;
    CHECK(make_block_layout(geometry).key().token_stride == 24);
    geometry.row_alignment = 3;
    geometry.head_dim = 6;
    CHECK(make_block_layout(geometry).key().token_stride == 24);
  }

  TEST_CASE("the largest rows that 32 bits count keep their bytes")
  {
    block_layout const layout = make_block_layout(
      {.layers = 1,
       .query_heads = 1,
       .kv_heads = 1,
       .head_dim = 0x3FFFFFFF,
       .key_type = dtype::float32,
       .value_type = dtype::float32});
    CHECK(layout.key().row_bytes == 0xFFFFFFFC);
    CHECK(layout.value().offset == round_up(std::uint64_t{0xFFFFFFFC} * 16, std::uint64_t{16}));
    CHECK(layout.block_bytes == 2 * std::uint64_t{0xFFFFFFFC} * 16);
  }
}
