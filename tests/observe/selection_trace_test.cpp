#include "support/mutated_text.hpp"
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/observe/selection_trace.hpp>
#include <pulseinfer/selector/external_selector.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

/// Ids of the blocks.
std::vector<block_id> blocks(std::initializer_list<int> numbers)
{
  std::vector<block_id> ids;
  for (int const number : numbers) { ids.push_back(static_cast<block_id>(number)); }
  return ids;
}

}  // namespace

TEST_SUITE("observe")
{
  TEST_CASE("recorded_selector keeps what each lane selected, with its layer and its tokens, and no prefetch")
  {
    constexpr std::uint32_t rows = 2, layers = 2, block_tokens = 4, budget = 5;
    sim_backend backend;
    auto const stream = backend.create_stream();
    recorded_selector<external_selector> const policy{.selector = {.budget_tokens = budget * block_tokens}};
    auto selector = policy.bind(
      backend,
      selector_limits{
        .geometry = {.layers = layers, .query_heads = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = block_tokens},
        .max_rows = rows,
        .max_blocks = 20});
    std::vector<row_info> info(rows);
    std::vector<block_id> ids(rows * budget, none<block_id>);
    std::vector<std::uint32_t> counts(rows), previous(layers * rows);
    std::vector<row_id> const list{row_id{1}, row_id{0}};
    info[0] = {.tokens = 41, .new_tokens = 1, .mode = row_mode::sparse_offloaded};
    info[1] = {.tokens = 78, .new_tokens = 1, .mode = row_mode::sparse_offloaded};
    select_request request{
      .layer = layer_id{1},
      .rows = {.ids = list.data(), .count = rows},
      .info = info.data(),
      .selection =
        {.ids = ids.data(),
         .counts = counts.data(),
         .previous = previous.data(),
         .max_selected = budget,
         .lanes = rows,
         .previous_words = 1},
      .most_blocks = 20};
    for (bool const remember : {false, true}) {
      REQUIRE(selector.import_selection(layer_id{1}, lane_id{0}, blocks({7, 2, 3}), 11) == status::ok);
      REQUIRE(selector.import_selection(layer_id{1}, lane_id{1}, blocks({0, 1, 2, 18}), 20) == status::ok);
      request.remember = remember;
      REQUIRE(selector.select_async(stream, request) == status::ok);
      REQUIRE(backend.synchronize() == status::ok);
    }
    auto const records = selector.records();
    REQUIRE(records.size() == 2);
    // Open blocks are always selected.
    CHECK(records[0] == selection_record{lane_id{1}, layer_id{1}, 78, blocks({0, 1, 2, 18, 19})});
    CHECK(records[1] == selection_record{lane_id{0}, layer_id{1}, 41, blocks({2, 3, 7, 10})});
    CHECK(selector.dropped() == 0);

    std::ostringstream text;
    write_selections(text, records);
    CHECK(text.str() == "pulseinfer selections 1\n1 1 78 0-2 18-19\n0 1 41 2-3 7 10\n");
    std::istringstream again{text.str()};
    CHECK(read_selections(again) == records);
    selector.clear();
    CHECK(selector.records().empty());
  }

  TEST_CASE("a file that is no record of selections is refused with its line")
  {
    auto const refused = [](std::string const& lines, char const* message) {
      std::istringstream in{lines};
      CHECK_THROWS_WITH_AS(read_selections(in), message, argument_error);
    };
    refused("", "invalid_argument: selections, line 1: '' where 'pulseinfer selections 1' begins the file");
    std::string const head = "pulseinfer selections 1\n";
    refused(head + "1 x 3 4\n", "invalid_argument: selections, line 2: no number for the layer");
    refused(head + "1 2 9 4 4\n", "invalid_argument: selections, line 2: blocks that do not ascend");
    refused(head + "1 2 99 9-7\n", "invalid_argument: selections, line 2: blocks that do not ascend");
    refused(
      head + "1 2 2147483647 16777215-16777216\n",
      "invalid_argument: selections, line 2: block 16777216, where 16777215 is the last");
    refused(
      head + "1 2 2147483647 2147483646-2147483647\n",
      "invalid_argument: selections, line 2: block 2147483647, where 16777215 is the last");
    refused(head + "1 2 3 1-3\n", "invalid_argument: selections, line 2: block 3 of a row of 3 tokens");
    refused(head + "1 2 3 2147483648\n", "invalid_argument: selections, line 2: no number for a block");
    refused(head + "1 2 3 4-\n", "invalid_argument: selections, line 2: no number for a run's last block");
    refused(head + "1 2 3 \n", "invalid_argument: selections, line 2: no number for a block");
    refused(head + "1 2 3\n1 2 3 -4\n", "invalid_argument: selections, line 3: no number for a block");
    refused(head + "1,2,3\n", "invalid_argument: selections, line 2: numbers with a space between them are wanted");
    refused(
      std::string{"a\0b\x80", 4},
      "invalid_argument: selections, line 1: 'a?b?' where 'pulseinfer selections 1' begins the file");
    std::ifstream missing{"/no-such-folder/selections.txt"};
    CHECK_THROWS_WITH_AS(
      static_cast<void>(read_selections(missing)), "invalid_argument: selections, line 1: the file cannot be read",
      argument_error);
  }

  TEST_CASE(
    "a record of selections with anything wrong in it is read as what it says, or refused by a line that it has")
  {
    CHECK(rc::check([] {
      std::vector<selection_record> records;
      for (auto count = *rc::gen::inRange(0, 4); count > 0; --count) {
        selection_record& record = records.emplace_back(selection_record{
          .lane = static_cast<lane_id>(*rc::gen::inRange(0, 40)),
          .layer = static_cast<layer_id>(*rc::gen::inRange(0, 40)),
          .tokens = *rc::gen::inRange(40U, 9000U)});
        for (int block = *rc::gen::inRange(0, 5); block < 40; block += *rc::gen::inRange(1, 4)) {
          record.selected.push_back(static_cast<block_id>(block));
        }
      }
      std::ostringstream out;
      write_selections(out, records);
      std::istringstream whole{out.str()};
      RC_ASSERT(read_selections(whole) == records);

      std::mt19937_64 random{*rc::gen::arbitrary<std::uint64_t>()};
      for (int change = 0; change < 20; ++change) {
        std::string const text = pulseinfer_test::mutated(out.str(), random);
        std::istringstream in{text};
        try {
          std::vector<selection_record> const found = read_selections(in);
          std::ostringstream again;
          write_selections(again, found);
          std::istringstream back{again.str()};
          RC_ASSERT(read_selections(back) == found);
          for (selection_record const& record : found) {
            RC_ASSERT((record.selected.empty() || to_index(record.selected.back()) < record.tokens));
            RC_ASSERT(
              std::adjacent_find(record.selected.begin(), record.selected.end(), std::greater_equal<>{}) ==
              record.selected.end());
          }
        } catch (argument_error const& refusal) {
          RC_ASSERT(pulseinfer_test::names_a_line(refusal.what(), "selections", text));
        }
      }
    }));
  }
}
