#include <pulseinfer/device/attention.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>

#include <doctest/doctest.h>

#include <cstdint>

using pulseinfer::device::attention_tile;
using pulseinfer::device::make_attention_tile;

namespace {

pulseinfer::block_layout layout_of(std::uint32_t head_dim, std::uint32_t value_dim, bool latent)
{
  return pulseinfer::make_block_layout(
    {.layers = 1,
     .query_heads = 1,
     .kv_heads = 1,
     .head_dim = head_dim,
     .value_dim = value_dim,
     .value_is_key_prefix = latent});
}

}  // namespace

TEST_SUITE("device")
{
  TEST_CASE("an attention tile holds whole lanes of tokens, no more queries than there are, and fits a GPU's scratch")
  {
    for (std::uint32_t dim = 1; dim <= 576; dim += 5) {
      for (bool const latent : {false, true}) {
        auto const layout = layout_of(dim, latent ? dim - dim / 9 : 0, latent);
        for (std::uint32_t const pairs : {0U, 1U, 3U, 40U, 4096U}) {
          attention_tile const tile = make_attention_tile(layout, pairs);
          CHECK(tile.tokens % 16 == 0);
          CHECK(tile.tokens >= 16);
          CHECK(tile.queries >= 1);
          CHECK(tile.queries <= (pairs == 0 ? 1 : pairs));
          CHECK(tile.value_pitch % 16 == 0);
          CHECK(tile.value_pitch >= layout.value_dim);
          CHECK(tile.scratch_floats() * sizeof(float) <= 160 * 1024);
        }
      }
    }
  }

  TEST_CASE("the tokens of an attention tile follow from the rows' sizes alone, so that a result depends on no batch")
  {
    auto const layout = layout_of(128, 0, false);
    for (std::uint32_t pairs = 1; pairs < 100; ++pairs) {
      CHECK(make_attention_tile(layout, pairs).tokens == make_attention_tile(layout, 1).tokens);
    }
  }
}
