#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include "support/selection.hpp"
#include <pulseinfer/operation/select_imported.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using pulseinfer::block_id;
using pulseinfer_test::cache;
using pulseinfer_test::selection_arrays;

namespace {

using numbers = std::vector<std::uint32_t>;

numbers selected(
  std::uint32_t tokens, std::uint32_t new_tokens, numbers const& imported, std::uint32_t budget, std::uint32_t threads)
{
  pulseinfer::kv_geometry const geometry{
    .layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 1, .block_tokens = 4};
  cache c{geometry, {{tokens, new_tokens}}, 1, false};
  selection_arrays arrays{c, budget + 2, {0}};
  std::vector<block_id> ids;
  for (std::uint32_t const id : imported) { ids.push_back(static_cast<block_id>(id)); }
  ids.push_back(static_cast<block_id>(1));
  auto const count = static_cast<std::uint32_t>(imported.size());
  pulseinfer_test::run_parallel(
    pulseinfer::select_imported{
      .layer = pulseinfer::layer_id{0},
      .rows = c.rows(),
      .info = c.info.data(),
      .ids = ids.data(),
      .id_counts = &count,
      .selection = arrays.selection,
      .id_pitch = budget,
      .block_tokens = 4,
      .budget_blocks = budget},
    threads);
  CHECK(arrays.rest_is_none(0));
  CHECK(arrays.remembered(0, 0) == arrays.selected(0));
  return arrays.selected(0);
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("select_imported takes the imported blocks and adds the open ones, named or not")
  {
    for (std::uint32_t const threads : {1U, 3U}) {
      CHECK(selected(77, 1, {2, 5, 9}, 5, threads) == numbers{2, 5, 9, 19});
      CHECK(selected(77, 1, {2, 5, 9, 19}, 5, threads) == numbers{2, 5, 9, 19});
      CHECK(selected(77, 1, {}, 5, threads) == numbers{19});
      CHECK(selected(77, 3, {0, 17}, 5, threads) == numbers{0, 17, 18, 19});
      CHECK(selected(77, 3, {0, 17, 18, 19}, 5, threads) == numbers{0, 17, 18, 19});
      CHECK(selected(80, 0, {0, 17, 19}, 5, threads) == numbers{0, 17, 19});
    }
  }

  TEST_CASE("select_imported never exceeds the budget, and reads all of a short row")
  {
    CHECK(selected(77, 1, {2, 5, 9, 11, 12}, 5, 2) == numbers{2, 5, 9, 11, 19});
    CHECK(selected(17, 1, {3}, 5, 2) == numbers{0, 1, 2, 3, 4});
    CHECK(selected(17, 1, {}, 5, 2) == numbers{0, 1, 2, 3, 4});
    CHECK(selected(0, 0, {}, 5, 2).empty());
  }
}
