#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t layers = 3, block_tokens = 4, length = 900, blocks_of_longest = length / block_tokens;

/// A rank: its manager, and what it has resident after each step.
struct rank {
  explicit rank(std::uint64_t order)
    : r{{.geometry = {.layers = layers, .query_heads = 4, .kv_heads = 2, .head_dim = 2, .block_tokens = block_tokens},
         .manager = {.max_rows = 2, .max_tokens = length, .max_prefill_tokens = 8, .quota_tokens = 14 * block_tokens},
         .cpu = {.mode = cpu_mode::manual, .seed = order},
         .per_row = 8},
        {.budget_tokens = 9 * block_tokens, .dense_tokens = 9 * block_tokens}}
  {
    r.engine.before_enter = [this](layer_id layer, row_list rows) {
      for (row_id const row : rows) {
        if (r.kv.mode_of(row) != row_mode::sparse_offloaded) { continue; }
        auto const& state = r.engine.row(row);
        auto const blocks = static_cast<std::uint32_t>(blocks_of(state.begin + state.count, block_tokens));
        REQUIRE(
          r.kv.selector().import_selection(layer, lane_of(row, 0, 1), ids[to_index(row)][to_index(layer)], blocks) ==
          status::ok);
      }
    };
  }

  /// Blocks of a row that have a slot, and the slots that attention was handed.
  [[nodiscard]] std::vector<std::int32_t> seen(row_id row)
  {
    std::vector<std::int32_t> all;
    for (std::uint32_t l = 0; l < layers; ++l) {
      lane_id const lane = lane_of(row, 0, 1);
      slot_id const* const slots = r.kv.books().residency().slots_of_lane(static_cast<layer_id>(l), lane);
      for (std::uint32_t b = 0; b < blocks_of_longest; ++b) { all.push_back(to_number(slots[b])); }
      lane_table_ref const table = r.kv.books().table();
      std::uint64_t const list = r.kv.books().residency().lane_index(static_cast<layer_id>(l), lane);
      for (std::uint32_t i = 0; i < table.listed_count[list]; ++i) {
        all.push_back(to_number(table.listed[list * table.stride + i]));
      }
    }
    return all;
  }

  std::vector<block_id> ids[2][layers];
  rig<chosen_manager> r;
};

}  // namespace

TEST_SUITE("manager")
{
  // Report: sgl-project/sglang#24654
  TEST_CASE("law 8: ranks that import one selection miss, evict and list the same blocks for 500 steps")
  {
    auto const one = std::make_unique<rank>(0), other = std::make_unique<rank>(5);  // streams run in different orders
    for (rank* const each : {one.get(), other.get()}) {
      for (std::uint64_t seed : {1U, 2U}) {
        row_id const row = each->r.open(seed, 40 + 7 * static_cast<std::uint32_t>(seed), length);
        each->r.engine.prefill(row, 40 + 7 * static_cast<std::uint32_t>(seed), 8);
      }
    }
    std::mt19937 random{3};
    std::uint64_t misses = 0;
    for (int step = 0; step < 500; ++step) {
      for (std::uint32_t row = 0; row < 2; ++row) {
        std::uint32_t const sealed = one->r.kv.tokens_of(static_cast<row_id>(row)) / block_tokens;
        for (std::uint32_t l = 0; l < layers; ++l) {
          std::vector<block_id> ids;
          for (std::uint32_t b = 0; b < sealed; ++b) { ids.push_back(static_cast<block_id>(b)); }
          std::shuffle(ids.begin(), ids.end(), random);
          ids.resize(std::min<std::size_t>(ids.size(), 8));
          one->ids[row][l] = other->ids[row][l] = ids;
        }
      }
      for (rank* const each : {one.get(), other.get()}) { each->r.step({{.row = row_id{0}}, {.row = row_id{1}}}); }
      std::uint64_t const recalled = one->r.kv.finish_sample().recalled_blocks;
      CAPTURE(step);
      REQUIRE(other->r.kv.finish_sample().recalled_blocks == recalled);
      misses += recalled;
      for (std::uint32_t row = 0; row < 2; ++row) {
        REQUIRE(one->seen(static_cast<row_id>(row)) == other->seen(static_cast<row_id>(row)));
      }
    }
    CHECK(misses > 5000);
    one->r.close_all();
    other->r.close_all();
  }
}
