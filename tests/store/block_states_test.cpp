#include <pulseinfer/store/block_book.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;

namespace {

constexpr auto book_size = 7U;

/// A holder of blocks, as a sequence is one: the blocks it names, and those of its copies that fly.
struct holder {
  std::vector<host_block_id> named;
  std::uint32_t reserved = 0;
};

/// Holders that acquire, share, fly, land and go away, each at any moment, over one small book.
struct holders {
  block_book<host_block_id> book{book_size};
  std::vector<holder> all = std::vector<holder>(3);
  std::vector<host_block_id> flying;  // in the order in which copies were begun

  /// State of each block by who names it: the slow, obvious way.
  [[nodiscard]] block_counts expected() const
  {
    block_counts counts;
    for (std::uint32_t i = 0; i < book.size(); ++i) {
      auto const id = static_cast<host_block_id>(i);
      bool const flies = std::ranges::find(flying, id) != flying.end();
      bool const held =
        std::ranges::any_of(all, [&](holder const& h) { return std::ranges::find(h.named, id) != h.named.end(); });
      ++(flies ? counts.in_flight : held ? counts.held : counts.free);
    }
    return counts;
  }
  [[nodiscard]] bool named_by_any(host_block_id id) const
  {
    return std::ranges::find(flying, id) != flying.end() ||
      std::ranges::any_of(all, [&](holder const& h) { return std::ranges::find(h.named, id) != h.named.end(); });
  }

  void run(std::uint32_t what, std::uint32_t who, std::uint32_t which)
  {
    holder& h = all[who % all.size()];
    holder& other = all[which % all.size()];
    std::uint32_t const available = book.available();
    switch (what % 8) {
      case 0: {  // acquire, from what nobody has reserved
        host_block_id const got = book.acquire();
        RC_ASSERT(is_none(got) == (available == 0));
        if (!is_none(got)) {
          RC_ASSERT(!named_by_any(got));
          h.named.push_back(got);
        }
        break;
      }
      case 1: {  // acquire from the holder's reservation
        if (h.reserved == 0) { break; }
        host_block_id const got = book.acquire_reserved();
        RC_ASSERT(!is_none(got));
        RC_ASSERT(!named_by_any(got));
        --h.reserved;
        h.named.push_back(got);
        break;
      }
      case 2:  // share: another names one of this holder's blocks
        if (h.named.empty()) { break; }
        RC_ASSERT(book.share(h.named[which % h.named.size()]) == status::ok);
        other.named.push_back(h.named[which % h.named.size()]);
        break;
      case 3:  // fly: a copy names one of the holder's blocks
        if (h.named.empty()) { break; }
        RC_ASSERT(book.pin(h.named[which % h.named.size()]) == status::ok);
        flying.push_back(h.named[which % h.named.size()]);
        break;
      case 4:  // land: a copy ends, whoever is left
        if (flying.empty()) { break; }
        RC_ASSERT(book.unpin(flying.front()) == status::ok);
        flying.erase(flying.begin());
        break;
      case 5:  // release one
        if (h.named.empty()) { break; }
        RC_ASSERT(book.release(h.named.back()) == status::ok);
        h.named.pop_back();
        break;
      case 6: {  // reserve, or give back
        std::uint32_t const count = which % 4;
        if (h.reserved >= count && who % 2 == 0) {
          RC_ASSERT(book.unreserve(count) == status::ok);
          h.reserved -= count;
        } else {
          RC_ASSERT(book.reserve(count) == (count <= available ? status::ok : status::busy));
          h.reserved += count <= available ? count : 0;
        }
        break;
      }
      default:  // the holder goes away, also while its copies fly
        for (host_block_id const id : h.named) { RC_ASSERT(book.release(id) == status::ok); }
        RC_ASSERT(book.unreserve(h.reserved) == status::ok);
        h = holder{};
        break;
    }
  }
};

}  // namespace

TEST_SUITE("store")
{
  // Report: NVIDIA/TensorRT-LLM#12834, vllm-project/vllm#42571, sgl-project/sglang#27444
  TEST_CASE("law 4: whoever shares, flies and goes away, each block is in one state and none is given out twice")
  {
    CHECK(rc::check([](std::vector<std::uint64_t> const& numbers) {
      holders h;
      std::uint32_t reserved = 0;
      for (std::uint64_t const number : numbers) {
        std::uint64_t const drawn = number * 0x9E3779B97F4A7C15U;
        h.run(
          static_cast<std::uint32_t>(drawn >> 60U), static_cast<std::uint32_t>(drawn >> 40U) & 0xFFFFU,
          static_cast<std::uint32_t>(drawn >> 20U) & 0xFFFFU);
        RC_ASSERT(h.book.audit() == std::string{});
        block_counts const is = h.book.counts(), right = h.expected();
        RC_ASSERT(is.free == right.free);
        RC_ASSERT(is.held == right.held);
        RC_ASSERT(is.in_flight == right.in_flight);
        RC_ASSERT(is.free + is.held + is.in_flight == book_size);
        reserved = 0;
        for (holder const& each : h.all) { reserved += each.reserved; }
        RC_ASSERT(h.book.reserved() == reserved);
        RC_ASSERT(h.book.available() == is.free - reserved);
      }
      while (!h.flying.empty()) { h.run(4, 0, 0); }
      for (std::uint32_t i = 0; i < 3; ++i) { h.run(7, i, 0); }
      RC_ASSERT(h.book.counts().free == book_size);
      RC_ASSERT(h.book.reserved() == 0U);
    }));
  }
}
