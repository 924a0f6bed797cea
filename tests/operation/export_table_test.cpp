#include "support/cache.hpp"
#include "support/parallel_group.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/operation/export_table.hpp>
#include <pulseinfer/scheduler/lockstep_scheduler.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

using pulseinfer::part;
using pulseinfer_test::cache;
using pulseinfer_test::run_parallel;
using pulseinfer_test::run_solo;

namespace {

constexpr std::int32_t stale = 123456;
constexpr std::int32_t absent = -1;

/// An engine's array of `count` numbers that holds an earlier step's, with a guard at each end.
template <class Integer>
class engine_array {
 public:
  explicit engine_array(std::uint64_t count) : numbers_(count + 2, Integer{stale}) {}
  [[nodiscard]] Integer* data() { return numbers_.data() + 1; }
  [[nodiscard]] Integer operator[](std::uint64_t i) const { return numbers_[i + 1]; }
  [[nodiscard]] bool guards_intact() const
  {
    return numbers_.front() == Integer{stale} && numbers_.back() == Integer{stale};
  }
  [[nodiscard]] std::uint32_t left_over() const
  {
    std::uint32_t count = 0;
    for (std::size_t i = 1; i + 1 < numbers_.size(); ++i) { count += numbers_[i] == Integer{stale} ? 1U : 0U; }
    return count;
  }

 private:
  std::vector<Integer> numbers_;
};

pulseinfer::kv_geometry geometry_of(std::uint32_t block_tokens, std::uint32_t head_groups)
{
  return {
    .layers = 2,
    .query_heads = 4,
    .kv_heads = 4,
    .head_dim = 3,
    .block_tokens = block_tokens,
    .head_groups = head_groups,
    .key_type = pulseinfer::dtype::float32,
    .value_type = pulseinfer::dtype::float32};
}

/// One shape of a batch and of the arrays that it is exported to.
struct export_case {
  std::uint32_t block_tokens = 4;
  std::uint32_t head_groups = 1;
  std::vector<pulseinfer_test::row_shape> rows = {};
  std::uint32_t padded_rows = 0;
  std::uint32_t width = 0;  // 0: the table's stride
};

std::vector<export_case> export_cases()
{
  return {
    {.rows = {{1}}},
    {.rows = {{9}, {64}, {4}}},
    {.block_tokens = 16, .rows = {{17}, {160}}, .padded_rows = 5},
    {.block_tokens = 1, .head_groups = 2, .rows = {{5}, {33}, {12}}, .padded_rows = 8},
    {.block_tokens = 3, .head_groups = 4, .rows = {{100}, {2}}, .padded_rows = 2},
    {.block_tokens = 8, .head_groups = 2, .rows = {{100}, {24}, {8}}, .padded_rows = 4, .width = 6},
    {.rows = {}, .padded_rows = 3, .width = 4},
  };
}

/// A table of random blocks; a whole or hits table lists the open block, as a selection does.
pulseinfer::block_table random_table(cache& c, part which, std::uint32_t seed)
{
  std::mt19937 random{seed};
  return c.table(
    1,
    [&](std::uint32_t lane, std::uint32_t block) {
      std::uint32_t const blocks = c.info[lane / c.geometry.head_groups].blocks(c.layout.block_tokens);
      bool const open = block + 1 == blocks;
      return which == part::landed ? !open && random() % 3 == 0 : open || random() % 2 == 0;
    },
    which);
}

/// What a list must hold, written down slowly: slots, and the tokens in them.
struct expected_list {
  std::vector<std::int32_t> slots;
  std::uint32_t tokens = 0;
  std::int32_t refused = 0;
};

expected_list expect(cache const& c, pulseinfer::export_lists const& lists, std::uint32_t list)
{
  expected_list expected;
  std::uint32_t const place = list / c.geometry.head_groups;
  if (place >= c.ids.size()) { return expected; }
  auto const row = static_cast<std::uint32_t>(pulseinfer::to_index(c.ids[place]));
  std::uint32_t const lane = row * c.geometry.head_groups + list % c.geometry.head_groups;
  std::uint32_t const count = lists.table.counts[lane];
  if (count > lists.width) {
    expected.refused = static_cast<std::int32_t>(count);
    return expected;
  }
  auto const tokens = static_cast<std::uint32_t>(c.info[row].tokens);
  std::uint32_t const blocks = (tokens + c.layout.block_tokens - 1) / c.layout.block_tokens;
  for (std::uint32_t i = 0; i < count; ++i) {
    pulseinfer::slot_id const slot = lists.table.slots[std::size_t{lane} * lists.table.stride + i];
    expected.slots.push_back(pulseinfer::to_number(slot));
    for (std::uint32_t block = 0; block < blocks; ++block) {
      bool const this_one =
        c.residency.slots_of_lane(pulseinfer::layer_id{1}, static_cast<pulseinfer::lane_id>(lane))[block] == slot;
      std::uint32_t const rest = tokens - block * c.layout.block_tokens;
      if (this_one) { expected.tokens += rest < c.layout.block_tokens ? rest : c.layout.block_tokens; }
    }
  }
  return expected;
}

template <class Op>
void run_with(Op const& op, std::uint32_t threads)
{
  if (threads == 1) {
    run_solo(op);
  } else {
    run_parallel(op, threads);
  }
}

/// Calls check(cache, lists, threads) for tables of each case, part and group size.
template <class Check>
void for_each_export(Check check)
{
  std::uint32_t seed = 1;
  for (export_case const& shape : export_cases()) {
    for (part const which : {part::whole, part::hits, part::landed}) {
      for (std::uint32_t const threads : {1U, 3U, 8U}) {
        cache c{geometry_of(shape.block_tokens, shape.head_groups), shape.rows, ++seed, false};
        pulseinfer::block_table const table = random_table(c, which, seed);
        pulseinfer::export_lists lists{
          .table = table,
          .rows = c.rows(),
          .padded_rows = shape.padded_rows,
          .width = shape.width == 0 ? table.stride : shape.width};
        engine_array<std::int32_t> refused{lists.count()};
        lists.refused = refused.data();
        check(c, lists, threads);
        for (std::uint32_t list = 0; list < lists.count(); ++list) {
          CHECK(refused[list] == expect(c, lists, list).refused);
        }
        CHECK(refused.guards_intact());
      }
    }
  }
}

}  // namespace

TEST_SUITE("operation")
{
  // sgl-project/sglang#32483: rows of padded requests and the tail of short ones kept the values of the step before
  TEST_CASE("export_dense_table writes every place: slots by ascending block, -1 past them and in padded rows")
  {
    for_each_export([](cache const& c, pulseinfer::export_lists const& lists, std::uint32_t threads) {
      engine_array<std::int32_t> slots{lists.count() * lists.width};
      engine_array<std::int32_t> lengths{lists.count()};
      run_with(
        pulseinfer::export_dense_table{.lists = lists, .slots = slots.data(), .lengths = lengths.data()}, threads);
      std::uint32_t wrong = 0;
      for (std::uint32_t list = 0; list < lists.count(); ++list) {
        expected_list const right = expect(c, lists, list);
        CHECK(lengths[list] == static_cast<std::int32_t>(right.tokens));
        for (std::uint32_t i = 0; i < lists.width; ++i) {
          wrong += slots[std::uint64_t{list} * lists.width + i] != (i < right.slots.size() ? right.slots[i] : absent);
        }
      }
      CHECK(wrong == 0);
      CHECK(slots.guards_intact());
      CHECK(lengths.guards_intact());
    });
  }

  TEST_CASE("export_csr_table lists the same slots without gaps, and lengths follow from its last pages")
  {
    for_each_export([](cache const& c, pulseinfer::export_lists const& lists, std::uint32_t threads) {
      engine_array<std::int32_t> indptr{lists.count() + 1};
      engine_array<std::int32_t> indices{lists.count() * lists.width};
      engine_array<std::int32_t> last_page_len{lists.count()};
      run_with(
        pulseinfer::export_csr_table{
          .lists = lists, .indptr = indptr.data(), .indices = indices.data(), .last_page_len = last_page_len.data()},
        threads);
      std::int32_t begin = 0;
      std::uint32_t wrong = 0;
      for (std::uint32_t list = 0; list < lists.count(); ++list) {
        expected_list const right = expect(c, lists, list);
        CHECK(indptr[list] == begin);
        for (std::size_t i = 0; i < right.slots.size(); ++i) {
          wrong += indices[static_cast<std::uint64_t>(begin) + i] != right.slots[i];
        }
        begin += static_cast<std::int32_t>(right.slots.size());
        // the length that a kernel derives: an empty range has none, whatever its last page says
        auto const pages = static_cast<std::int32_t>(right.slots.size());
        std::int32_t const page = static_cast<std::int32_t>(c.layout.block_tokens);
        std::int32_t const length = pages == 0 ? 0 : (pages - 1) * page + last_page_len[list];
        CHECK(length == static_cast<std::int32_t>(right.tokens));
        CHECK(last_page_len[list] <= page);
        CHECK(last_page_len[list] >= (pages == 0 ? 0 : 1));
      }
      CHECK(indptr[lists.count()] == begin);
      for (auto i = static_cast<std::uint64_t>(begin); i < lists.count() * lists.width; ++i) {
        wrong += indices[i] != absent;
      }
      CHECK(wrong == 0);
      CHECK(indptr.guards_intact());
      CHECK(indices.guards_intact());
      CHECK(last_page_len.guards_intact());
    });
  }

  TEST_CASE("export_token_slots numbers each valid token, -1 for the rest of the last block and of the list")
  {
    for_each_export([](cache const& c, pulseinfer::export_lists const& lists, std::uint32_t threads) {
      std::uint64_t const places = std::uint64_t{lists.width} * c.layout.block_tokens;
      engine_array<std::int64_t> token_slots{lists.count() * places};
      engine_array<std::int32_t> lengths{lists.count()};
      run_with(
        pulseinfer::export_token_slots{.lists = lists, .token_slots = token_slots.data(), .lengths = lengths.data()},
        threads);
      std::uint32_t wrong = 0;
      for (std::uint32_t list = 0; list < lists.count(); ++list) {
        expected_list const right = expect(c, lists, list);
        CHECK(lengths[list] == static_cast<std::int32_t>(right.tokens));
        for (std::uint64_t i = 0; i < places; ++i) {
          std::int64_t const expected = i < right.tokens
            ? std::int64_t{right.slots[i / c.layout.block_tokens]} * c.layout.block_tokens +
              static_cast<std::int64_t>(i % c.layout.block_tokens)
            : absent;
          wrong += token_slots[list * places + i] != expected;
        }
      }
      CHECK(wrong == 0);
      CHECK(token_slots.guards_intact());
    });
  }

  // vllm-project/vllm#50427: 32-bit products of ids
  TEST_CASE("export_token_slots counts tokens past 32 bits")
  {
    std::vector<pulseinfer::slot_id> const slots{
      static_cast<pulseinfer::slot_id>(0x7FFFFFF0), static_cast<pulseinfer::slot_id>(2)};
    std::uint32_t const count = 2;
    pulseinfer::row_info const info{.tokens = 70, .new_tokens = 1, .mode = pulseinfer::row_mode::dense_resident};
    pulseinfer::row_id const row{0};
    pulseinfer::block_table const table{
      .slots = slots.data(),
      .counts = &count,
      .info = &info,
      .layout = {.block_tokens = 64},
      .layer = pulseinfer::layer_id{0},
      .stride = 2};
    engine_array<std::int64_t> token_slots{128};
    run_solo(pulseinfer::export_token_slots{
      .lists = {.table = table, .rows = {.ids = &row, .count = 1}, .width = 2}, .token_slots = token_slots.data()});
    CHECK(token_slots[0] == 0x7FFFFFF0LL * 64);
    CHECK(token_slots[63] == 0x7FFFFFF0LL * 64 + 63);
    CHECK(token_slots[69] == 2 * 64 + 5);
    CHECK(token_slots[70] == -1);
  }

  TEST_CASE("exports without refusals or lengths asked write nothing there")
  {
    cache c{geometry_of(4, 1), {{9}}, 3, false};
    pulseinfer::export_lists const lists{.table = random_table(c, part::whole, 3), .rows = c.rows(), .width = 1};
    std::int32_t slot = stale;
    run_solo(pulseinfer::export_dense_table{.lists = lists, .slots = &slot});
    CHECK(slot == absent);  // more than one block is listed
  }

  TEST_CASE("exports state their shape and cost, padded rows included")
  {
    CHECK(pulseinfer::explain_operation<pulseinfer::export_dense_table>());
    CHECK(pulseinfer::explain_operation<pulseinfer::export_csr_table>());
    CHECK(pulseinfer::explain_operation<pulseinfer::export_token_slots>());
    cache c{geometry_of(4, 2), {{9}, {30}}, 3, false};
    pulseinfer::export_lists const lists{
      .table = random_table(c, part::whole, 3), .rows = c.rows(), .padded_rows = 4, .width = 8};
    CHECK(pulseinfer::export_dense_table{.lists = lists}.shape().items == 8);
    CHECK(pulseinfer::export_dense_table{.lists = lists}.cost().device_bytes > 8 * 8 * 4);
  }

  // sgl-project/sglang#32483, through a manager: 8 blocks of budget, a graph of 4 rows, 2 of them real, 3 and 20 blocks long
  TEST_CASE("a resolved step fills the rows of a fixed batch, and padded rows change nothing")
  {
    for (std::uint32_t const block_tokens : {4U, 16U}) {
      using manager = pulseinfer::offload_manager<
        pulseinfer::cpu_backend, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine,
        pulseinfer::lockstep_scheduler<>, pulseinfer::fixed_admission>;
      pulseinfer::kv_geometry geometry = geometry_of(block_tokens, 1);
      pulseinfer::cpu_backend backend{{.mode = pulseinfer::cpu_mode::manual}};
      auto const stream = backend.create_stream(pulseinfer::stream_priority::normal);
      manager kv{
        backend,
        stream,
        geometry,
        {.max_rows = 4, .max_tokens = 32 * block_tokens, .max_prefill_tokens = 32 * block_tokens},
        {.budget_tokens = 8 * block_tokens, .sink_tokens = 1, .recent_tokens = 1}};
      std::uint32_t const lengths[] = {3 * block_tokens - 1, 20 * block_tokens};  // two decoded tokens included
      std::vector<float> tensor(40 * block_tokens * geometry.query_heads * geometry.head_dim);
      std::mt19937 random{5};
      std::normal_distribution<float> normal{0.0F, 1.0F};
      for (float& x : tensor) { x = normal(random); }
      auto const view = pulseinfer::contiguous_tensor(
        tensor.data(), pulseinfer::dtype::float32, 40 * block_tokens, geometry.query_heads, geometry.head_dim);

      constexpr std::uint32_t width = 8;
      std::vector<std::vector<std::int32_t>> tables;
      std::vector<std::vector<std::int32_t>> counted;
      auto const step = [&](std::vector<pulseinfer::step_row> const& rows, bool exported) {
        REQUIRE(kv.begin_step(rows) == pulseinfer::status::ok);
        REQUIRE(kv.enter(kv.first_layer(), kv.rows(), view, view, view) == pulseinfer::status::ok);
        for (pulseinfer::visit const& v : kv.step()) {
          if (exported) {
            engine_array<std::int32_t> slots{4 * width};
            engine_array<std::int32_t> tokens{4};
            REQUIRE(
              backend.launch(
                stream,
                pulseinfer::export_dense_table{
                  .lists = {.table = v.table, .rows = v.rows, .padded_rows = 4, .width = width},
                  .slots = slots.data(),
                  .lengths = tokens.data()}) == pulseinfer::status::ok);
            REQUIRE(backend.synchronize(stream) == pulseinfer::status::ok);
            CHECK(slots.left_over() == 0);
            CHECK(tokens.left_over() == 0);
            tables.emplace_back(slots.data(), slots.data() + 4 * width);
            counted.emplace_back(tokens.data(), tokens.data() + 4);
          }
          if (!v.last) { REQUIRE(kv.enter(v.next, v.rows, view, view, view) == pulseinfer::status::ok); }
        }
        std::vector<pulseinfer::commit_row> accepted;
        for (pulseinfer::step_row const& r : rows) { accepted.push_back({.row = r.row, .accepted = r.tokens}); }
        REQUIRE(kv.commit(accepted) == pulseinfer::status::ok);
      };
      std::vector<pulseinfer::step_row> decode;
      for (std::uint32_t const tokens : lengths) {
        pulseinfer::row_id row{};
        REQUIRE(
          kv.open({.prompt_tokens = tokens - 2, .max_tokens = tokens + 8}, row) == pulseinfer::admission::admitted);
        step({{.row = row, .tokens = tokens - 2}}, false);
        decode.push_back({.row = row, .token_offset = static_cast<std::uint32_t>(decode.size())});
      }
      REQUIRE(kv.drain(pulseinfer::no_deadline) == pulseinfer::status::ok);

      // What the books say of rows 2 and 3, in every layer.
      auto const padded_books = [&] {
        REQUIRE(backend.synchronize() == pulseinfer::status::ok);
        pulseinfer::residency_ref const books = kv.books().residency();
        std::vector<std::int64_t> words;
        for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
          for (std::uint32_t lane = 2; lane < 4; ++lane) {
            auto const id = static_cast<pulseinfer::layer_id>(layer);
            auto const of = static_cast<pulseinfer::lane_id>(lane);
            words.push_back(books.lease_count[books.lane_index(id, of)]);
            for (std::uint32_t block = 0; block < books.max_blocks; ++block) {
              words.push_back(pulseinfer::to_number(books.slots_of_lane(id, of)[block]));
            }
          }
        }
        words.push_back(static_cast<std::int64_t>(kv.pool().free_slots()));
        return words;
      };
      step(decode, false);  // the long row turns sparse in this step
      auto const before = padded_books();
      step(decode, true);
      CHECK(padded_books() == before);
      CHECK(kv.audit() == "");

      REQUIRE(tables.size() == geometry.layers);
      for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
        std::vector<std::int32_t> const& slots = tables[layer];
        for (std::uint32_t i = 0; i < width; ++i) {
          CHECK((slots[i] >= 0) == (i < 3));
          CHECK(slots[width + i] >= 0);
          CHECK(slots[2 * width + i] == absent);
          CHECK(slots[3 * width + i] == absent);
        }
        for (std::uint32_t i = 0; i < width; ++i) {
          for (std::uint32_t j = 0; j < i; ++j) { CHECK(slots[width + i] != slots[width + j]); }
        }
        CHECK(counted[layer][0] == static_cast<std::int32_t>(kv.tokens_of(decode[0].row)));
        CHECK(counted[layer][1] <= static_cast<std::int32_t>(8 * block_tokens));
        CHECK(counted[layer][2] == 0);
        CHECK(counted[layer][3] == 0);
      }
    }
  }
}
