#include <pulseinfer/store/free_list.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

using pulseinfer::free_list;
using pulseinfer::host_block_id;
using pulseinfer::none;
using pulseinfer::status;

namespace {

constexpr host_block_id id(std::int32_t number) { return static_cast<host_block_id>(number); }

/// The lowest run of at least `run` free ids, else the lowest of the longest: written down as the sentence says it.
std::int32_t reference_choice(std::vector<bool> const& is_free, std::uint32_t run)
{
  std::int32_t best = -1;
  std::uint32_t best_length = 0;
  for (std::size_t begin = 0; begin < is_free.size(); ++begin) {
    if (!is_free[begin] || (begin > 0 && is_free[begin - 1])) { continue; }
    std::uint32_t length = 0;
    while (begin + length < is_free.size() && is_free[begin + length]) { ++length; }
    if (length >= run) { return static_cast<std::int32_t>(begin); }
    if (length > best_length) {
      best = static_cast<std::int32_t>(begin);
      best_length = length;
    }
  }
  return best;
}

}  // namespace

TEST_SUITE("store")
{
  TEST_CASE("a free list gives each id once and then none")
  {
    for (std::uint32_t size : {0U, 1U, 3U, 63U, 64U, 65U, 128U, 1000U}) {
      free_list<host_block_id> list{size};
      CHECK(list.size() == size);
      CHECK(list.free_count() == size);
      for (std::uint32_t i = 0; i < size; ++i) { REQUIRE(list.acquire() == id(static_cast<std::int32_t>(i))); }
      CHECK(list.free_count() == 0);
      CHECK(list.acquire() == none<host_block_id>);
      CHECK(list.acquire(id(0)) == none<host_block_id>);
      CHECK(list.audit().empty());
    }
  }

  TEST_CASE("a free list gives the hint where it is free, so that a sequence's blocks lie side by side")
  {
    free_list<host_block_id> list{200};
    CHECK(list.acquire(id(70)) == id(70));
    CHECK(list.acquire(id(71)) == id(71));
    CHECK(list.acquire(id(70)) == id(0));
    CHECK(list.acquire(none<host_block_id>) == id(1));
    CHECK(list.acquire(id(200)) == id(2));
    CHECK(list.acquire(id(-7)) == id(3));
    CHECK(list.acquire(id(199)) == id(199));
  }

  TEST_CASE("a free list begins a long sequence where it has room, else in the longest run")
  {
    free_list<host_block_id> list{16};
    for (std::int32_t taken : {2, 3, 9}) { REQUIRE(list.acquire(id(taken)) == id(taken)); }
    // free: 0..1, 4..8, 10..15
    CHECK(list.acquire(none<host_block_id>, 5) == id(4));
    REQUIRE(list.release(id(4)) == status::ok);
    CHECK(list.acquire(none<host_block_id>, 6) == id(10));
    REQUIRE(list.release(id(10)) == status::ok);
    CHECK(list.acquire(none<host_block_id>, 100) == id(10));
    CHECK(list.acquire(none<host_block_id>, 100) == id(4));
  }

  // Report: vllm-project/vllm#42571
  TEST_CASE("a free list refuses a double release and an id that is not its own, and nothing changes")
  {
    free_list<host_block_id> list{4};
    CHECK(list.release(id(0)) == status::invalid_state);
    CHECK(list.release(id(4)) == status::out_of_range);
    CHECK(list.release(none<host_block_id>) == status::out_of_range);
    REQUIRE(list.acquire() == id(0));
    CHECK(list.release(id(0)) == status::ok);
    CHECK(list.release(id(0)) == status::invalid_state);
    CHECK(list.free_count() == 4);
    std::set<host_block_id> given;
    for (int i = 0; i < 4; ++i) { given.insert(list.acquire()); }
    CHECK(given.size() == 4);
    CHECK(list.acquire() == none<host_block_id>);
    CHECK(list.audit().empty());
  }

  TEST_CASE("a free list is extended by free ids, from any size to any other")
  {
    for (std::uint32_t const begin : {0U, 1U, 63U, 64U, 65U, 200U}) {
      for (std::uint32_t const step : {0U, 1U, 63U, 64U, 130U}) {
        free_list<host_block_id> list{begin, 600};
        std::uint32_t taken = 0;
        for (std::uint32_t size = begin; size <= 600; size += std::max(step, 200U)) {
          list.extend(size);
          list.extend(size / 2);  // never shrinks
          CHECK(list.size() == size);
          while (list.free_count() > 0) {
            REQUIRE(list.acquire() == id(static_cast<std::int32_t>(taken)));
            ++taken;
          }
          CHECK(taken == size);
          CHECK_FALSE(list.contains(id(static_cast<std::int32_t>(size))));
          CHECK(is_none(list.acquire()));
          CHECK(list.audit() == "");
        }
      }
    }
  }

  TEST_CASE("a full free list finds what comes back, wherever it lies")
  {
    free_list<host_block_id> list{200};
    for (int i = 0; i < 200; ++i) { REQUIRE(list.acquire() == id(i)); }
    for (std::int32_t const back : {150, 199, 3, 64, 63, 0}) {
      REQUIRE(list.release(id(back)) == status::ok);
      CHECK(list.audit().empty());
      CHECK(list.acquire() == id(back));
    }
    for (std::int32_t const back : {150, 70, 5}) { REQUIRE(list.release(id(back)) == status::ok); }
    CHECK(list.acquire() == id(5));
    CHECK(list.acquire() == id(70));
    CHECK(list.acquire() == id(150));
  }

  TEST_CASE("a free list agrees with a plain list of flags after any acquires and releases")
  {
    bool const held = rc::check([](std::vector<std::uint16_t> const& moves) {
      std::uint32_t const size = *rc::gen::inRange(1U, 300U);
      free_list<host_block_id> list{size};
      std::vector<bool> is_free(size, true);
      for (std::uint16_t const move : moves) {
        std::uint32_t const number = (move / 8U) % size;
        if (move % 2 == 0) {
          status const expected = is_free[number] ? status::invalid_state : status::ok;
          RC_ASSERT(list.release(id(static_cast<std::int32_t>(number))) == expected);
          is_free[number] = true;
        } else {
          bool const hinted = (move & 2U) != 0;
          std::uint32_t const run = (move & 4U) != 0 ? number % 9 : 1;
          std::int32_t expected = reference_choice(is_free, run);
          if (hinted && is_free[number]) { expected = static_cast<std::int32_t>(number); }
          RC_ASSERT(
            list.acquire(hinted ? id(static_cast<std::int32_t>(number)) : none<host_block_id>, run) == id(expected));
          if (expected >= 0) { is_free[static_cast<std::size_t>(expected)] = false; }
        }
        RC_ASSERT(list.audit().empty());
        std::uint32_t count = 0;
        for (bool const flag : is_free) { count += flag ? 1U : 0U; }
        RC_ASSERT(list.free_count() == count);
      }
    });
    CHECK(held);
  }
}
