#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/transfer/block_fragments.hpp>

#include <doctest/doctest.h>
#include <support/recall_scene.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;

TEST_SUITE("transfer")
{
  TEST_CASE("fragments of a block are a head's keys and a head's values where its rows lie together")
  {
    kv_geometry geometry{.layers = 2, .query_heads = 32, .kv_heads = 8, .head_dim = 128};
    std::vector<block_fragment> const fragments = block_fragments(make_block_layout(geometry));
    REQUIRE(fragments.size() == 16);
    for (std::size_t i = 0; i < fragments.size(); ++i) {
      CHECK(fragments[i].offset == i * 4096);
      CHECK(fragments[i].bytes == 4096);
    }
    geometry.head_groups = 8;
    CHECK(block_fragments(make_block_layout(geometry)).size() == 2);
  }

  TEST_CASE("fragments of a block whose heads lie inside each token are single rows")
  {
    kv_geometry geometry{.layers = 2, .query_heads = 32, .kv_heads = 8, .head_dim = 128, .order = token_order::nhd};
    CHECK(block_fragments(make_block_layout(geometry)).size() == 2 * 8 * 16);
    geometry.block_tokens = 1;
    CHECK(block_fragments(make_block_layout(geometry)).size() == 16);
    geometry.block_tokens = 16;
    geometry.head_groups = 8;
    CHECK(block_fragments(make_block_layout(geometry)).size() == 2);
  }

  TEST_CASE("fragments cover each row of each plane once")
  {
    for (token_order const order : {token_order::hnd, token_order::nhd}) {
      for (std::uint32_t const row_alignment : {1U, 64U}) {
        for (std::uint32_t const heads : {1U, 3U}) {
          kv_geometry const geometry{
            .layers = 2,
            .query_heads = heads,
            .kv_heads = heads,
            .head_dim = 46,
            .value_dim = 20,
            .block_tokens = 5,
            .order = order,
            .row_alignment = row_alignment,
            .extra_planes = {{.name = "scales", .bytes_per_token = 7, .bytes_per_block = 3}}};
          block_layout const layout = make_block_layout(geometry);
          std::vector<int> covered(layout.block_bytes, 0);
          for (block_fragment const& fragment : block_fragments(layout)) {
            for (std::uint64_t i = 0; i < fragment.bytes; ++i) { ++covered.at(fragment.offset + i); }
          }
          for (int const count : covered) { REQUIRE(count <= 1); }
          for (std::uint32_t p = 0; p < 2; ++p) {
            for (std::uint32_t head = 0; head < heads; ++head) {
              for (std::uint32_t token = 0; token < 5; ++token) {
                for (std::uint32_t i = 0; i < layout.planes[p].row_bytes; ++i) {
                  REQUIRE(covered[row_offset(layout.planes[p], head, token) + i] == 1);
                }
              }
            }
          }
          for (std::uint64_t i = 0; i < 38; ++i) { REQUIRE(covered[layout.planes[2].offset + i] == 1); }
        }
      }
    }
  }

  TEST_CASE("a latent row that holds key and value is one fragment")
  {
    kv_geometry const geometry{
      .layers = 2, .query_heads = 16, .kv_heads = 1, .head_dim = 576, .value_dim = 512, .value_is_key_prefix = true};
    std::vector<block_fragment> const fragments = block_fragments(make_block_layout(geometry));
    REQUIRE(fragments.size() == 1);
    CHECK(fragments[0].bytes == 16 * 1152);
  }
}
