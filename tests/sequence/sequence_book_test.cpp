#include <pulseinfer/sequence/sequence_book.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cstdint>
#include <string>

using namespace pulseinfer;

namespace {

constexpr row_id row(std::int32_t number) { return static_cast<row_id>(number); }

std::string text_of(std::uint32_t rows, std::uint32_t blocks, std::uint32_t block_tokens)
{
  try {
    sequence_book const book{rows, blocks, block_tokens};
  } catch (error const& thrown) {
    return thrown.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("sequence")
{
  TEST_CASE("a sequence book of no rows, blocks or tokens is refused with the numbers")
  {
    CHECK(text_of(0, 2, 3) == "invalid_argument: sequence book of 0 rows, 2 blocks a row and 3 tokens a block");
    CHECK(text_of(1, 0, 3) == "invalid_argument: sequence book of 1 rows, 0 blocks a row and 3 tokens a block");
    CHECK(text_of(1, 2, 0) == "invalid_argument: sequence book of 1 rows, 2 blocks a row and 0 tokens a block");
    CHECK(text_of(1, 1, 1).empty());
  }

  // Report: vllm-project/vllm#54193
  TEST_CASE("a block is sealed by the tokens that were committed, not by those that were only appended")
  {
    sequence_book book{1, 4, 4};
    block_range sealed;
    REQUIRE(book.open(row(0), 16) == status::ok);
    REQUIRE(book.append(row(0), 3) == status::ok);
    REQUIRE(book.commit(row(0), 3, sealed) == status::ok);
    CHECK(sealed.empty());
    // Five more of which four are drafts that are rejected: exactly at the block's end.
    REQUIRE(book.append(row(0), 5) == status::ok);
    CHECK(book[row(0)].tokens == 3);
    CHECK(book[row(0)].pending == 5);
    REQUIRE(book.commit(row(0), 1, sealed) == status::ok);
    CHECK(sealed.first == 0);
    CHECK(sealed.last == 1);
    CHECK(book[row(0)].tokens == 4);
    CHECK(book[row(0)].sealed == 1);
    REQUIRE(book.append(row(0), 3) == status::ok);
    REQUIRE(book.commit(row(0), 3, sealed) == status::ok);
    CHECK(sealed.empty());
    CHECK(book[row(0)].sealed == 1);
    // Several blocks at once.
    REQUIRE(book.append(row(0), 9) == status::ok);
    REQUIRE(book.commit(row(0), 9, sealed) == status::ok);
    CHECK(sealed.first == 1);
    CHECK(sealed.last == 4);
  }

  TEST_CASE("each wrong call of a sequence book says what is wrong and changes nothing")
  {
    sequence_book book{2, 3, 4};
    block_range sealed{.first = 7, .last = 7};
    CHECK(book.open(row(2), 4) == status::out_of_range);
    CHECK(book.open(none<row_id>, 4) == status::out_of_range);
    CHECK(book.open(row(0), 0) == status::invalid_argument);
    CHECK(book.open(row(0), 13) == status::capacity_exceeded);
    CHECK(book.append(row(0), 1) == status::invalid_state);
    CHECK(book.commit(row(0), 0, sealed) == status::invalid_state);
    CHECK_FALSE(book[row(0)].open());

    REQUIRE(book.open(row(0), 12) == status::ok);
    CHECK(book.open(row(0), 12) == status::invalid_state);
    CHECK(book.append(row(2), 1) == status::out_of_range);
    CHECK(book.append(row(0), 0) == status::invalid_argument);
    CHECK(book.append(row(0), 13) == status::capacity_exceeded);
    CHECK(book.append(row(0), ~0U) == status::capacity_exceeded);
    CHECK(book.commit(row(0), 1, sealed) == status::invalid_state);
    REQUIRE(book.append(row(0), 12) == status::ok);
    CHECK(book.append(row(0), 1) == status::invalid_state);
    CHECK(book.commit(row(0), 13, sealed) == status::invalid_argument);
    CHECK(book.commit(row(9), 1, sealed) == status::out_of_range);
    CHECK(sealed.first == 7);
    CHECK(book[row(0)].pending == 12);
    CHECK(book[row(0)].tokens == 0);
    CHECK_FALSE(book.in_range(row(2)));
    CHECK_FALSE(book.in_range(none<row_id>));
  }

  TEST_CASE("a dropped trial leaves the sequence as it was, and an id is never used again")
  {
    sequence_book book{1, 3, 4};
    block_range sealed;
    REQUIRE(book.open(row(0), 12) == status::ok);
    sequence_id const first = book[row(0)].id;
    REQUIRE(book.append(row(0), 5) == status::ok);
    book.drop(row(0));
    CHECK(book[row(0)].tokens == 0);
    CHECK(book.commit(row(0), 1, sealed) == status::invalid_state);
    REQUIRE(book.append(row(0), 4) == status::ok);
    REQUIRE(book.commit(row(0), 4, sealed) == status::ok);
    book[row(0)].host_blocks[0] = host_block_id{3};
    book.close(row(0));
    CHECK_FALSE(book[row(0)].open());
    REQUIRE(book.open(row(0), 12) == status::ok);
    CHECK(book[row(0)].id != first);
    CHECK(book[row(0)].tokens == 0);
    CHECK(book[row(0)].sealed == 0);
    CHECK(is_none(book[row(0)].host_blocks[0]));
  }

  TEST_CASE("sealed blocks are the committed tokens divided by the block's, after any appends and commits")
  {
    CHECK(rc::check([] {
      std::uint32_t const block_tokens = *rc::gen::inRange(1U, 9U), most = *rc::gen::inRange(1U, 100U);
      sequence_book book{1, 100, block_tokens};
      RC_ASSERT(book.open(row_id{0}, most) == status::ok);
      std::uint32_t tokens = 0, next = 0;
      for (int step = 0; step < 40 && tokens < most; ++step) {
        std::uint32_t const appended = *rc::gen::inRange(1U, 12U);
        status const said = book.append(row_id{0}, appended);
        RC_ASSERT(said == (tokens + appended > most ? status::capacity_exceeded : status::ok));
        if (said != status::ok) { break; }
        std::uint32_t const accepted = *rc::gen::inRange(0U, appended + 1);
        block_range sealed;
        RC_ASSERT(book.commit(row_id{0}, accepted, sealed) == status::ok);
        tokens += accepted;
        RC_ASSERT(sealed.first == next);
        RC_ASSERT(sealed.last == tokens / block_tokens);
        next = sealed.last;
        RC_ASSERT(book[row_id{0}].sealed == next);
      }
    }));
  }
}
