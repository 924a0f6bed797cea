#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/plan_recall.hpp>

#include <doctest/doctest.h>
#include <support/lane_books.hpp>
#include <support/parallel_group.hpp>

#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

/// Rows of two head groups with some misses each, their entries named by (lane, place).
struct planned {
  lane_books books{{.rows = 5, .head_groups = 2, .max_selected = 4}};
  std::vector<row_id> rows{row_id{3}, row_id{0}, row_id{4}};
  std::vector<recall_entry> entries = std::vector<recall_entry>(3 * 2 * 4);
  std::vector<std::uint32_t> row_begin = std::vector<std::uint32_t>(4, 99), failed = std::vector<std::uint32_t>(24, 7);
  std::vector<row_mailbox> mailbox = std::vector<row_mailbox>(5);
  std::vector<std::uint32_t> sequence{11, 12, 13};

  planned(std::vector<std::uint32_t> const& misses)
  {
    for (std::uint32_t l = 0; l < 10; ++l) {
      books.plan().misses[l] = misses[l];
      books.plan().hits[l] = 10 + l;
      books.plan().flying[l] = l;
      books.plan().stalled[l] = 2 * l;
      for (std::uint32_t i = 0; i < 4; ++i) {
        books.entries[l * 4 + i] = {.lane = static_cast<lane_id>(l), .block = static_cast<block_id>(i)};
      }
    }
  }

  [[nodiscard]] plan_recall op()
  {
    return {
      .rows = {.ids = rows.data(), .count = 3},
      .lanes = books.plan(),
      .entries = entries.data(),
      .row_begin = row_begin.data(),
      .failed = failed.data(),
      .mailbox = mailbox.data(),
      .sequence = sequence.data(),
      .block_bytes = 100,
      .head_groups = 2,
      .max_selected = 4};
  }
};

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("a plan lists the misses of its rows in their order, within a row by lane, and posts what travels")
  {
    // Lanes 6 and 7 are row 3, 0 and 1 row 0, 8 and 9 row 4; the others are in no plan.
    planned p{{2, 1, 4, 4, 4, 4, 3, 0, 0, 0}};
    CHECK(p.op().cost().device_bytes == 6 * 32);
    run_solo(p.op());
    CHECK(p.row_begin == std::vector<std::uint32_t>{0, 3, 6, 6});
    std::vector<std::pair<int, int>> seen;
    for (std::size_t i = 0; i < 6; ++i) {
      seen.emplace_back(to_number(p.entries[i].lane), to_number(p.entries[i].block));
      CHECK(p.failed[i] == 0);
    }
    CHECK(seen == std::vector<std::pair<int, int>>{{6, 0}, {6, 1}, {6, 2}, {0, 0}, {0, 1}, {1, 0}});
    row_mailbox const& first = p.mailbox[3];
    CHECK(first.posted == 11);
    CHECK(first.misses == 3);
    CHECK(first.bytes == 300);
    CHECK(first.hits == 16 + 17);
    CHECK(first.flying == 6 + 7);
    CHECK(first.stalled == 12 + 14);
    CHECK(p.mailbox[0].posted == 12);
    CHECK(p.mailbox[0].misses == 3);
    CHECK(p.mailbox[4].posted == 13);
    CHECK(p.mailbox[4].misses == 0);
    CHECK(p.mailbox[4].bytes == 0);
    CHECK(p.mailbox[1].posted == 0);
    CHECK(p.mailbox[2].posted == 0);
    run_solo(p.op());
    CHECK(p.mailbox[3].total_misses == 6);
    CHECK(p.mailbox[3].total_hits == 66);
  }

  TEST_CASE("a plan is the same whatever the number of threads")
  {
    planned one{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}}, many{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}};
    run_solo(one.op());
    for (std::uint32_t const threads : {2U, 7U}) {
      run_parallel(many.op(), threads);
      CHECK(many.row_begin == one.row_begin);
      for (std::size_t i = 0; i < one.row_begin.back(); ++i) {
        CHECK(many.entries[i].lane == one.entries[i].lane);
        CHECK(many.entries[i].block == one.entries[i].block);
      }
    }
  }

  TEST_CASE("a plan that does not post lists the same, and what it leaves is posted by an operation of its own")
  {
    planned at_once{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}}, apart{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}};
    std::vector<recall_failure> of_one(3), of_other(3);
    plan_recall one = at_once.op(), other = apart.op();
    one.outcome = of_one.data();
    other.outcome = of_other.data();
    other.posts = false;
    run_solo(one);
    run_solo(other);
    CHECK(apart.row_begin == at_once.row_begin);
    for (row_mailbox const& box : apart.mailbox) {
      CHECK(box.posted == 0);
      CHECK(box.total_misses == 0);
    }
    CHECK(of_other[0].planned == 0);
    CHECK(other.posting().shape().items == 3);
    run_solo(other.posting());
    for (std::size_t row = 0; row < 5; ++row) {
      row_mailbox const& a = at_once.mailbox[row];
      row_mailbox const& b = apart.mailbox[row];
      CHECK(a.posted == b.posted);
      CHECK(a.bytes == b.bytes);
      CHECK(a.misses == b.misses);
      CHECK(a.hits == b.hits);
      CHECK(a.flying == b.flying);
      CHECK(a.stalled == b.stalled);
      CHECK(a.total_misses == b.total_misses);
      CHECK(a.total_hits == b.total_hits);
    }
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(of_one[i].planned == of_other[i].planned);
      CHECK(of_one[i].hits == of_other[i].hits);
      CHECK(of_one[i].stalled == of_other[i].stalled);
      CHECK(of_one[i].flying == of_other[i].flying);
    }
  }

  TEST_CASE("what a plan leaves is posted with its landing, before the rows are posted as landed or as failed")
  {
    planned at_once{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}}, later{{2, 1, 4, 4, 4, 4, 3, 0, 4, 2}};
    std::vector<recall_failure> of_one(3), of_other(3);
    plan_recall one = at_once.op(), other = later.op();
    one.outcome = of_one.data();
    other.posts = false;
    run_solo(one);
    run_solo(other);
    std::vector<slot_word> words(8);
    recall_plan_ref const plan{
      .entries = later.entries.data(),
      .row_begin = later.row_begin.data(),
      .rows = other.rows,
      .pool = {.slots = 8},
      .layer = layer_id{0},
      .head_groups = 2,
      .block_bytes = 100};
    landed_ref landed{
      .mailbox = later.mailbox.data(),
      .sequence = later.sequence.data(),
      .residency = {.slots = words.data()},
      .failed = of_other.data(),
      .counts = later.books.plan().counts()};
    for (recall_entry& entry : later.entries) { entry.target = slot_id{1}; }
    run_solo(land_rows{.plan = plan, .landed = landed, .first_row = 0, .row_count = 2});
    run_solo(land_rows{.plan = plan, .landed = landed, .first_row = 2, .row_count = 1, .how = landing::failed});
    for (std::size_t place = 0; place < 3; ++place) {
      row_mailbox const& a = at_once.mailbox[to_index(at_once.rows[place])];
      row_mailbox const& b = later.mailbox[to_index(at_once.rows[place])];
      CHECK(b.posted == a.posted);
      CHECK(b.bytes == a.bytes);
      CHECK(b.misses == a.misses);
      CHECK(b.hits == a.hits);
      CHECK(b.flying == a.flying);
      CHECK(b.stalled == a.stalled);
      CHECK(b.total_misses == a.total_misses);
      CHECK(b.total_hits == a.total_hits);
      CHECK(of_other[place].planned == of_one[place].planned);
      CHECK(of_other[place].hits == of_one[place].hits);
      CHECK(of_other[place].stalled == of_one[place].stalled);
      CHECK(of_other[place].flying == of_one[place].flying);
      CHECK(b.landed == (place < 2 ? a.posted : 0U));
      CHECK(b.failed == (place < 2 ? 0U : a.posted));
    }
  }

  TEST_CASE("a plan for no rows is no launch")
  {
    planned p{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
    plan_recall op = p.op();
    op.rows.count = 0;
    CHECK(op.shape().items == 0);
  }
}
