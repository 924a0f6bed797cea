#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/operation/export_append_slots.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

using pulseinfer_test::cache;

namespace {

pulseinfer::kv_geometry geometry_of(std::uint32_t block_tokens, std::uint32_t head_groups)
{
  return {
    .layers = 3,
    .query_heads = head_groups,
    .kv_heads = head_groups,
    .head_dim = 2,
    .block_tokens = block_tokens,
    .head_groups = head_groups,
    .key_type = pulseinfer::dtype::float32,
    .value_type = pulseinfer::dtype::float32};
}

pulseinfer::export_append_slots operation_of(cache const& c, std::uint32_t layer, std::vector<std::int64_t>& mapping)
{
  mapping.assign(std::size_t{c.geometry.head_groups} * c.tensor_tokens, 123456);
  return {
    .layer = static_cast<pulseinfer::layer_id>(layer),
    .rows = c.rows(),
    .info = c.info.data(),
    .residency = c.residency,
    .block_tokens = c.layout.block_tokens,
    .head_groups = c.geometry.head_groups,
    .tokens = c.tensor_tokens,
    .slot_mapping = mapping.data()};
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("export_append_slots names the slot and place of each new token, and -1 where the tensors hold others")
  {
    for (std::uint32_t const block_tokens : {1U, 4U, 7U}) {
      for (std::uint32_t const head_groups : {1U, 3U}) {
        // crossing blocks, a whole prompt longer than an item, a row that appends nothing
        cache c{geometry_of(block_tokens, head_groups), {{30, 9}, {300, 300}, {5, 1}, {12, 0}}, block_tokens, false};
        for (std::uint32_t layer = 0; layer < c.geometry.layers; ++layer) {
          std::vector<std::int64_t> mapping;
          pulseinfer_test::run_parallel(operation_of(c, layer, mapping), 5);
          std::vector<std::int64_t> expected(mapping.size(), -1);
          for (std::uint32_t row = 0; row < c.info.size(); ++row) {
            auto const& info = c.info[row];
            for (std::uint32_t t = 0; t < static_cast<std::uint32_t>(info.new_tokens); ++t) {
              auto const position = static_cast<std::uint32_t>(info.tokens - info.new_tokens) + t;
              for (std::uint32_t g = 0; g < head_groups; ++g) {
                // where the token's key lies, counted back from its address
                std::byte const* const begin =
                  c.pool.address(static_cast<pulseinfer::layer_id>(layer), pulseinfer::slot_id{0});
                auto const bytes =
                  static_cast<std::uint64_t>(c.address(c.layout.key(), layer, row, g, position) - begin);
                std::uint64_t const in_block = bytes % c.layout.block_bytes / c.layout.key().token_stride;
                expected[g * c.tensor_tokens + static_cast<std::uint32_t>(info.token_offset) + t] =
                  static_cast<std::int64_t>(bytes / c.layout.block_bytes * block_tokens + in_block);
              }
            }
          }
          CHECK(mapping == expected);
        }
      }
    }
  }

  TEST_CASE("export_append_slots leaves rows out that it is not asked for, and blocks without a slot")
  {
    cache c{geometry_of(4, 1), {{9, 2}, {8, 3}}, 11, false};
    std::vector<std::int64_t> mapping;
    pulseinfer::export_append_slots operation = operation_of(c, 1, mapping);
    operation.rows.count = 1;
    pulseinfer::row_info const asked = c.info[static_cast<std::size_t>(pulseinfer::to_index(c.ids[0]))];
    c.residency.slots_of_lane(pulseinfer::layer_id{1}, pulseinfer::lane_of(c.ids[0], 0, 1))[2] =
      pulseinfer::none<pulseinfer::slot_id>;
    pulseinfer_test::run_solo(operation);
    for (std::size_t i = 0; i < mapping.size(); ++i) {
      bool const first_token = i == static_cast<std::size_t>(asked.token_offset);  // position 7; position 8 has no slot
      CHECK((mapping[i] >= 0) == first_token);
      CHECK(mapping[i] != 123456);
    }
  }

  // vllm-project/vllm#50427: 32-bit products of ids
  TEST_CASE("export_append_slots counts tokens past 32 bits")
  {
    std::vector<pulseinfer::slot_id> slots{static_cast<pulseinfer::slot_id>(0x7FFFFFF0)};
    pulseinfer::row_info const info{.tokens = 40, .new_tokens = 1};
    pulseinfer::row_id const row{0};
    std::int64_t mapping = 123456;
    pulseinfer_test::run_solo(pulseinfer::export_append_slots{
      .layer = pulseinfer::layer_id{0},
      .rows = {.ids = &row, .count = 1},
      .info = &info,
      .residency = {.slot_of = slots.data(), .layers = 1, .lanes = 1, .max_blocks = 1},
      .block_tokens = 64,
      .tokens = 1,
      .slot_mapping = &mapping});
    CHECK(mapping == 0x7FFFFFF0LL * 64 + 39);
  }
}
