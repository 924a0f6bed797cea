#include <pulseinfer/store/digest_store.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/immediate_backend.hpp>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

using namespace pulseinfer;
using pulseinfer_test::immediate_backend;

namespace {

constexpr layer_id layer(std::uint32_t number) { return static_cast<layer_id>(number); }
constexpr row_id row(std::int32_t number) { return static_cast<row_id>(number); }

using store_type = digest_store<immediate_backend>;

/// What the manager does with patches, without a stream.
void apply(store_type const& store, std::vector<extent_patch> const& patches, std::uint32_t count)
{
  auto* const table = const_cast<std::int32_t*>(store.ref().extent_of);
  for (std::uint32_t i = 0; i < count; ++i) { table[patches[i].index] = patches[i].value; }
}

status cover(store_type& store, row_id of, std::uint64_t blocks)
{
  std::vector<extent_patch> patches(store.missing_extents(of, blocks));
  std::uint32_t written = 0;
  status const result = store.cover(of, blocks, patches, written);
  apply(store, patches, written);
  return result;
}

status release(store_type& store, row_id of)
{
  std::vector<extent_patch> patches(store.extents(of).size());
  std::uint32_t written = 0;
  status const result = store.release(of, patches, written);
  apply(store, patches, written);
  return result;
}

}  // namespace

TEST_SUITE("store")
{
  TEST_CASE("every block of every row and layer has digest bytes of its own")
  {
    immediate_backend backend;
    std::vector<std::uint64_t> const bytes{12, 0, 40, 7};
    {
      store_type store{backend, bytes, {.max_rows = 3, .max_blocks = 21, .extent_blocks = 8}};
      CHECK(store.total_extents() == 9);
      for (std::int32_t r : {1, 0, 2, 1, 0}) {
        std::uint64_t const blocks = store.extents(row(r)).empty() ? 5 : 21;
        REQUIRE(cover(store, row(r), blocks) == status::ok);
      }
      REQUIRE(cover(store, row(2), 21) == status::ok);
      digest_store_ref const ref = store.ref();
      auto const each = [&](auto&& visit) {
        std::uint8_t number = 1;
        for (std::uint32_t l = 0; l < 4; ++l) {
          for (std::int32_t r = 0; r < 3; ++r) {
            for (std::uint32_t b = 0; b < 21; ++b) { visit(ref.address(layer(l), row(r), b), bytes[l], number++); }
          }
        }
      };
      each([](std::byte* digest, std::uint64_t size, std::uint8_t number) { std::memset(digest, number, size); });
      each([](std::byte const* digest, std::uint64_t size, std::uint8_t number) {
        for (std::uint64_t i = 0; i < size; ++i) { REQUIRE(digest[i] == std::byte{number}); }
      });
      CHECK(store.audit().empty());
      CHECK(reinterpret_cast<std::uintptr_t>(ref.address(layer(2), row(1), 0)) % 16 == 0);
    }
    CHECK(backend.allocated == 0);
    CHECK(backend.streams == 0);
    CHECK(backend.events == 0);
  }

  TEST_CASE("the device's extent table says none until patches say otherwise, and again after a release")
  {
    immediate_backend backend;
    std::vector<std::uint64_t> const bytes{16, 16};
    store_type store{backend, bytes, {.max_rows = 2, .max_blocks = 100, .extents = 3}};
    std::int32_t const* const table = store.ref().extent_of;
    CHECK(store.ref().max_extents == 2);
    for (int i = 0; i < 4; ++i) { CHECK(table[i] == -1); }
    CHECK(cover(store, row(1), 64) == status::ok);
    CHECK(table[2] == 0);
    CHECK(cover(store, row(1), 65) == status::ok);
    CHECK(table[3] == 1);
    CHECK(cover(store, row(1), 3) == status::ok);
    CHECK(store.extents(row(1)).size() == 2);
    CHECK(cover(store, row(0), 100) == status::busy);
    CHECK(store.extents(row(0)).empty());
    CHECK(store.free_extents() == 1);
    CHECK(release(store, row(1)) == status::ok);
    for (int i = 0; i < 4; ++i) { CHECK(table[i] == -1); }
    CHECK(cover(store, row(0), 100) == status::ok);
    CHECK(release(store, row(1)) == status::ok);
    CHECK(store.audit().empty());
  }

  TEST_CASE("a row or length that the digest store was not made for is refused, and too few patches change nothing")
  {
    immediate_backend backend;
    std::vector<std::uint64_t> const bytes{16, 16};
    store_type store{backend, bytes, {.max_rows = 2, .max_blocks = 100}};
    CHECK(cover(store, row(2), 1) == status::out_of_range);
    CHECK(cover(store, none<row_id>, 1) == status::out_of_range);
    CHECK(cover(store, row(0), 129) == status::out_of_range);
    CHECK(cover(store, row(0), 1ULL << 40U) == status::out_of_range);
    CHECK(release(store, row(2)) == status::out_of_range);
    std::vector<extent_patch> patches(1);
    std::uint32_t written = 7;
    CHECK(store.cover(row(0), 65, patches, written) == status::invalid_argument);
    CHECK(written == 0);
    CHECK(store.free_extents() == 4);
    CHECK(cover(store, row(0), 0) == status::ok);
    CHECK(store.extents(row(0)).empty());
    REQUIRE(cover(store, row(0), 65) == status::ok);
    CHECK(store.release(row(0), patches, written) == status::invalid_argument);
    CHECK(store.extents(row(0)).size() == 2);
  }

  TEST_CASE("a selector without digests takes neither memory nor extents")
  {
    immediate_backend backend;
    std::vector<std::uint64_t> const bytes{0, 0, 0};
    store_type store{backend, bytes, {.max_rows = 2, .max_blocks = 100}};
    CHECK(store.allocated_bytes() == 0);
    CHECK(store.total_extents() == 0);
    CHECK(store.extents_for(100) == 0);
    CHECK(cover(store, row(1), 100) == status::ok);
    CHECK(release(store, row(1)) == status::ok);
    CHECK(backend.copies == 0);
  }

  TEST_CASE("a digest store that could hold nothing is refused at construction")
  {
    immediate_backend backend;
    std::vector<std::uint64_t> const bytes{16};
    CHECK_THROWS_AS(
      (store_type{backend, bytes, {.max_rows = 2, .max_blocks = 100, .extent_blocks = 0}}), configuration_error);
    CHECK_THROWS_AS((store_type{backend, bytes, {.max_rows = 0, .max_blocks = 100}}), configuration_error);
    std::vector<std::uint64_t> const huge{1ULL << 62U};
    CHECK_THROWS_AS((store_type{backend, huge, {.max_rows = 2, .max_blocks = 100}}), configuration_error);
    backend.refuse_copy = 0;
    CHECK_THROWS_AS((store_type{backend, bytes, {.max_rows = 2, .max_blocks = 100}}), resource_error);
    CHECK(backend.allocated == 0);
    CHECK(backend.streams == 0);
    CHECK(backend.events == 0);
  }

  TEST_CASE("extents have one owner, and table and books agree, after any calls")
  {
    bool const held = rc::check([](std::vector<std::uint16_t> const& calls) {
      immediate_backend backend;
      std::vector<std::uint64_t> const bytes{4, 8};
      store_type store{backend, bytes, {.max_rows = 3, .max_blocks = 40, .extents = 7, .extent_blocks = 8}};
      for (std::uint16_t const call : calls) {
        row_id const of = row(call % 3);
        std::uint32_t const free = store.free_extents();
        if (call % 4 == 0) {
          RC_ASSERT(release(store, of) == status::ok);
          RC_ASSERT(store.extents(of).empty());
        } else {
          std::uint32_t const blocks = (call / 4U) % 41U;
          std::uint32_t const missing = store.missing_extents(of, blocks);
          RC_ASSERT(cover(store, of, blocks) == (missing <= free ? status::ok : status::busy));
          RC_ASSERT(store.free_extents() == (missing <= free ? free - missing : free));
        }
        RC_ASSERT(store.audit() == "");
        std::set<std::int32_t> seen;
        for (std::int32_t r = 0; r < 3; ++r) {
          for (std::uint32_t i = 0; i < 5; ++i) {
            std::int32_t const word = store.ref().extent_of[r * 5 + static_cast<std::int32_t>(i)];
            bool const owned = i < store.extents(row(r)).size();
            RC_ASSERT(word == (owned ? to_number(store.extents(row(r))[i]) : -1));
            if (owned) { RC_ASSERT(seen.insert(word).second); }
          }
        }
      }
    });
    CHECK(held);
  }
}
