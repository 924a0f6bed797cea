#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/store/host_store.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/immediate_backend.hpp>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

using namespace pulseinfer;
using pulseinfer_test::immediate_backend;

namespace {

constexpr host_block_id id(std::int32_t number) { return static_cast<host_block_id>(number); }
constexpr layer_id layer(std::int32_t number) { return static_cast<layer_id>(number); }

block_layout layout_of(std::uint64_t block_bytes, std::uint32_t alignment = 16)
{
  block_layout layout;
  layout.block_bytes = block_bytes;
  layout.alignment = alignment;
  return layout;
}

bool add_up(block_counts const& counts, std::uint32_t size)
{
  return counts.free + counts.held + counts.in_flight == size;
}

std::string text_of(auto&& call)
{
  try {
    call();
  } catch (error const& thrown) {
    return thrown.what();
  }
  return {};
}

[[maybe_unused]] std::uint64_t resident_bytes()
{
  std::ifstream file{"/proc/self/statm"};
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

}  // namespace

TEST_SUITE("store")
{
  // Report: vllm-project/vllm#53042
  TEST_CASE("a host store takes the bytes that were asked for and no power of two above them")
  {
    struct given {
      std::uint64_t bytes;
      std::uint64_t block_bytes;
      std::uint32_t layers;
      std::uint32_t head_groups;
      std::uint32_t blocks;
    };
    for (given const& it :
         {given{2'236'817'408, 1'089'536, 1, 1, 2053}, given{2'236'817'408, 34'048, 32, 1, 2053},
          given{33U << 20U, 65'536, 1, 1, 528}, given{33U << 20U, 65'536, 4, 8, 16},
          given{(33U << 20U) + 65'535, 65'536, 1, 1, 528}, given{100'000, 48, 3, 2, 347}}) {
      CHECK(host_store_blocks({.bytes = it.bytes}, it.layers, it.head_groups, layout_of(it.block_bytes)) == it.blocks);
      if (it.bytes > 1U << 30U) { continue; }
      immediate_backend backend;
      {
        host_store<immediate_backend> store{
          backend, it.layers, it.head_groups, layout_of(it.block_bytes), {.bytes = it.bytes}};
        CHECK(store.blocks() == it.blocks);
        CHECK(store.allocated_bytes() <= it.bytes + 4096);
        CHECK(backend.allocated == store.allocated_bytes());
      }
      CHECK(backend.allocated == 0);
    }
  }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Report: vllm-project/vllm#53042
  TEST_CASE("a host store's resident memory grows by what was asked for")
  {
    immediate_backend backend;
    std::uint64_t const asked = 33U << 20U;
    std::uint64_t const before = resident_bytes();
    host_store<immediate_backend> store{backend, 3, 2, layout_of(65'536), {.bytes = asked}};
    host_store_ref const ref = store.ref();
    for (std::int32_t l = 0; l < 3; ++l) {
      for (std::uint32_t g = 0; g < 2; ++g) {
        for (std::uint32_t b = 0; b < store.blocks(); ++b) {
          std::memset(ref.address(layer(l), g, id(static_cast<std::int32_t>(b))), 1, 65'536);
        }
      }
    }
    double const grown = static_cast<double>(resident_bytes() - before);
    CHECK(grown > 0.95 * static_cast<double>(asked));
    CHECK(grown < 1.05 * static_cast<double>(asked));
  }
#endif

  // Report: vllm-project/vllm#53042
  TEST_CASE("a host store that holds no block, overflows or exceeds the limit says the numbers before it takes memory")
  {
    immediate_backend backend;
    auto const make =
      [&](host_store_options const& options, std::uint32_t layers, std::uint32_t groups, block_layout const& layout) {
        return text_of([&] { host_store<immediate_backend> const store{backend, layers, groups, layout, options}; });
      };
    CHECK(
      make({.bytes = 1}, 1, 1, layout_of(65'536)) ==
      "invalid_argument: 1 B holds no block of 65536 B (1 layers x 1 head groups x 65536 B)");
    CHECK(
      make({.bytes = 65'535}, 2, 4, layout_of(8192)) ==
      "invalid_argument: 65535 B holds no block of 65536 B (2 layers x 4 head groups x 8192 B)");
    CHECK(
      make({}, 2, 4, layout_of(8192)) ==
      "invalid_argument: 0 B holds no block of 65536 B (2 layers x 4 head groups x 8192 B)");
    CHECK(
      make({.bytes = 2'236'817'408, .limit_bytes = 2'000'000'000}, 1, 1, layout_of(1'089'536)) ==
      "resource_exhausted: out_of_host_memory: 2236817408 B for 2053 host blocks exceed the limit of 2000000000 B");
    CHECK(make({.blocks = 1'000'000'000'000}, 1, 1, layout_of(16)).find("1000000000000 blocks") != std::string::npos);
    CHECK(make({.blocks = 1U << 30U}, 1U << 10U, 1, layout_of(1ULL << 30U)).find("overflow") != std::string::npos);
    CHECK(make({.blocks = 1}, 0, 1, layout_of(16)).find("0 layers") != std::string::npos);
    CHECK(make({.blocks = 1}, 1, 1, layout_of(0)).find("0 B") != std::string::npos);
    CHECK(
      make({.blocks = 4, .slab_padding_bytes = 8}, 2, 1, layout_of(32)) ==
      "invalid_argument: unsupported_layout: slab padding of 8 B, blocks need 16 B alignment");
    CHECK(
      make({.blocks = 4, .slab_padding_bytes = ~std::uint64_t{15}}, 3, 1, layout_of(32)).find("overflow") !=
      std::string::npos);
    CHECK(backend.allocated == 0);
    CHECK(make({.blocks = 4, .limit_bytes = 256}, 2, 1, layout_of(32)).empty());
    CHECK(make({.blocks = 4, .limit_bytes = 255}, 2, 1, layout_of(32)).find("256 B") != std::string::npos);
    CHECK(
      make({.blocks = 4, .limit_bytes = 271, .slab_padding_bytes = 16}, 2, 1, layout_of(32)).find("272 B") !=
      std::string::npos);
  }

  TEST_CASE("a host store gives back what it took when its second allocation fails")
  {
    immediate_backend backend;
    backend.allocation_limit = 100;
    CHECK_THROWS_AS((host_store<immediate_backend>{backend, 20, 1, layout_of(4), {.blocks = 1}}), resource_error);
    CHECK(backend.allocated == 0);
  }

  TEST_CASE("every block of a host store has bytes of its own in every layer and head group, whatever the padding")
  {
    for (std::uint64_t padding : {0U, 16U, 256U}) {
      immediate_backend backend;
      host_store<immediate_backend> const store{
        backend, 3, 2, layout_of(48), {.blocks = 5, .slab_padding_bytes = padding}};
      host_store_ref const ref = store.ref();
      auto const each = [&](auto&& visit) {
        std::uint8_t number = 1;
        for (std::int32_t l : {2, 0, 1}) {
          for (std::uint32_t g = 0; g < 2; ++g) {
            for (std::int32_t b = 0; b < 5; ++b) { visit(ref.address(layer(l), g, id(b)), number++); }
          }
        }
      };
      each([](std::byte* block, std::uint8_t number) { std::memset(block, number, 48); });
      each([](std::byte const* block, std::uint8_t number) {
        for (int i = 0; i < 48; ++i) { REQUIRE(block[i] == std::byte{number}); }
      });
      CHECK(ref.address(layer(1), 0, id(1)) - ref.address(layer(1), 0, id(0)) == 48);
      CHECK(
        ref.address(layer(1), 0, id(0)) - ref.address(layer(0), 1, id(0)) == static_cast<std::int64_t>(240 + padding));
    }
  }

  // Report: sgl-project/sglang#27444
  TEST_CASE("law 4: a host block that a copy names is nobody else's before the copy ends, whoever releases it")
  {
    immediate_backend backend;
    host_store<immediate_backend> store{backend, 2, 1, layout_of(64), {.blocks = 2}};
    host_block_id const first = store.acquire();
    host_block_id const second = store.acquire(id(1));
    REQUIRE(store.pin(first) == status::ok);
    REQUIRE(store.pin(first) == status::ok);
    CHECK(store.release(first) == status::ok);
    CHECK(store.release(second) == status::ok);
    CHECK(store.acquire(first) == second);
    CHECK(store.acquire(first) == none<host_block_id>);
    CHECK(store.counts().in_flight == 1);
    CHECK(store.counts().free == 0);
    CHECK(store.share(first) == status::invalid_state);
    CHECK(store.unpin(first) == status::ok);
    CHECK(store.acquire() == none<host_block_id>);
    CHECK(store.unpin(first) == status::ok);
    CHECK(store.counts().free == 1);
    CHECK(store.acquire() == first);
    CHECK(store.unpin(first) == status::invalid_state);
    CHECK(store.audit().empty());
  }

  // Report: vllm-project/vllm#42571
  TEST_CASE("a sequence that names a block twice releases it once, and the second release is told")
  {
    immediate_backend backend;
    host_store<immediate_backend> store{backend, 2, 1, layout_of(64), {.blocks = 4}};
    REQUIRE(store.acquire() == id(0));
    REQUIRE(store.acquire() == id(1));
    CHECK(store.refused_release().empty());
    CHECK(store.release(id(0)) == status::ok);
    CHECK(store.release(id(1)) == status::ok);
    CHECK(store.release(none<host_block_id>) == status::out_of_range);
    CHECK(store.release(id(0)) == status::invalid_state);
    CHECK(store.refused_release() == "double_release: block 0");
    CHECK(store.counts().free == 4);
    std::set<host_block_id> given;
    for (int i = 0; i < 4; ++i) { given.insert(store.acquire()); }
    CHECK(given.size() == 4);
    CHECK(store.acquire() == none<host_block_id>);
  }

  TEST_CASE("a shared host block is free after its last holder has left")
  {
    immediate_backend backend;
    host_store<immediate_backend> store{backend, 2, 1, layout_of(64), {.blocks = 2}};
    REQUIRE(store.acquire() == id(0));
    CHECK(store.share(id(0)) == status::ok);
    CHECK(store.references(id(0)) == 2);
    CHECK(store.counts().held == 1);
    CHECK(store.release(id(0)) == status::ok);
    CHECK(store.counts().held == 1);
    CHECK(store.release(id(0)) == status::ok);
    CHECK(store.counts().held == 0);
    CHECK(store.share(id(0)) == status::invalid_state);
    CHECK(store.pin(id(0)) == status::invalid_state);
    for (host_block_id const stranger : {id(2), none<host_block_id>}) {
      CHECK(store.share(stranger) == status::out_of_range);
      CHECK(store.pin(stranger) == status::out_of_range);
      CHECK(store.unpin(stranger) == status::out_of_range);
    }
  }

  TEST_CASE("a reservation keeps blocks back for who made it")
  {
    immediate_backend backend;
    host_store<immediate_backend> store{backend, 2, 1, layout_of(64), {.blocks = 5}};
    CHECK(store.reserve(6) == status::capacity_exceeded);
    CHECK(store.reserve(3) == status::ok);
    CHECK(store.available() == 2);
    CHECK(store.reserve(3) == status::busy);
    CHECK(store.acquire() != none<host_block_id>);
    CHECK(store.acquire() != none<host_block_id>);
    CHECK(store.acquire() == none<host_block_id>);
    CHECK(store.acquire_reserved() != none<host_block_id>);
    CHECK(store.reserved() == 2);
    CHECK(store.unreserve(3) == status::invalid_argument);
    CHECK(store.unreserve(1) == status::ok);
    CHECK(store.acquire_reserved() != none<host_block_id>);
    CHECK(store.acquire_reserved() == none<host_block_id>);
    CHECK(store.acquire() != none<host_block_id>);
    CHECK(store.counts().free == 0);
  }

  // Report: NVIDIA/TensorRT-LLM#12834, vllm-project/vllm#42571
  TEST_CASE("law 4: free, held and in flight add up to the size after any calls")
  {
    bool const held = rc::check([](std::vector<std::uint16_t> const& calls) {
      std::uint32_t const size = *rc::gen::inRange(1U, 9U);
      immediate_backend backend;
      host_store<immediate_backend> store{backend, 2, 1, layout_of(16), {.blocks = size}};
      std::vector<std::uint32_t> references(size, 0);
      std::vector<std::uint32_t> pins(size, 0);
      std::uint32_t reserved = 0;
      for (std::uint16_t const call : calls) {
        std::uint32_t const number = (call / 16U) % size;
        host_block_id const block = id(static_cast<std::int32_t>(number));
        std::uint32_t free = 0;
        for (std::uint32_t i = 0; i < size; ++i) { free += references[i] == 0 && pins[i] == 0 ? 1U : 0U; }
        auto const taken = [&](host_block_id given, bool wanted) {
          RC_ASSERT(is_none(given) == !wanted);
          if (wanted) {
            RC_ASSERT(references[to_index(given)] == 0U && pins[to_index(given)] == 0U);
            references[to_index(given)] = 1;
          }
        };
        switch (call % 8U) {
          case 0: taken(store.acquire(block), free > reserved); break;
          case 1:
            taken(store.acquire_reserved(block), reserved > 0);
            reserved -= reserved > 0 ? 1U : 0U;
            break;
          case 2: {
            bool const right = references[number] > 0;
            RC_ASSERT(store.share(block) == (right ? status::ok : status::invalid_state));
            references[number] += right ? 1U : 0U;
            break;
          }
          case 3: {
            bool const right = references[number] > 0;
            RC_ASSERT(store.release(block) == (right ? status::ok : status::invalid_state));
            references[number] -= right ? 1U : 0U;
            break;
          }
          case 4: {
            bool const right = references[number] > 0 || pins[number] > 0;
            RC_ASSERT(store.pin(block) == (right ? status::ok : status::invalid_state));
            pins[number] += right ? 1U : 0U;
            break;
          }
          case 5: {
            bool const right = pins[number] > 0;
            RC_ASSERT(store.unpin(block) == (right ? status::ok : status::invalid_state));
            pins[number] -= right ? 1U : 0U;
            break;
          }
          case 6: {
            bool const right = free - reserved >= number;
            RC_ASSERT(store.reserve(number) == (right ? status::ok : status::busy));
            reserved += right ? number : 0U;
            break;
          }
          default: {
            bool const right = reserved >= number;
            RC_ASSERT(store.unreserve(number) == (right ? status::ok : status::invalid_argument));
            reserved -= right ? number : 0U;
            break;
          }
        }
        RC_ASSERT(store.audit() == "");
        RC_ASSERT(add_up(store.counts(), size));
        block_counts expected;
        for (std::uint32_t i = 0; i < size; ++i) {
          if (pins[i] > 0) {
            ++expected.in_flight;
          } else if (references[i] > 0) {
            ++expected.held;
          } else {
            ++expected.free;
          }
          RC_ASSERT(store.references(id(static_cast<std::int32_t>(i))) == references[i]);
        }
        RC_ASSERT(store.counts().free == expected.free);
        RC_ASSERT(store.counts().held == expected.held);
        RC_ASSERT(store.counts().in_flight == expected.in_flight);
        RC_ASSERT(store.reserved() == reserved);
      }
    });
    CHECK(held);
  }

  // Report: vllm-project/vllm#42571
  TEST_CASE("ten thousand random calls leave no block lost and none invented")
  {
    immediate_backend backend;
    host_store<immediate_backend> store{backend, 2, 1, layout_of(16), {.blocks = 4}};
    std::uint64_t state = 1;
    auto const random = [&](std::uint64_t below) {
      state = state * 6'364'136'223'846'793'005U + 1'442'695'040'888'963'407U;
      return (state >> 33U) % below;
    };
    std::vector<host_block_id> references;
    for (int i = 0; i < 10'000; ++i) {
      std::uint64_t const choice = random(3);
      if (choice == 0) {
        if (host_block_id const got = store.acquire(); !is_none(got)) { references.push_back(got); }
      } else if (!references.empty()) {
        std::uint64_t const place = random(references.size());
        if (choice == 1) {
          REQUIRE(store.share(references[place]) == status::ok);
          references.push_back(references[place]);
        } else {
          REQUIRE(store.release(references[place]) == status::ok);
          references.erase(references.begin() + static_cast<std::ptrdiff_t>(place));
        }
      }
      std::set<host_block_id> const used(references.begin(), references.end());
      REQUIRE(store.counts().held == used.size());
      REQUIRE(add_up(store.counts(), 4));
      REQUIRE(store.audit() == "");
    }
    for (host_block_id const block : references) { REQUIRE(store.release(block) == status::ok); }
    CHECK(store.counts().free == 4);
  }

  TEST_CASE("law 12: a store that grows keeps its blocks where they are, and takes memory by what it has grown to")
  {
    constexpr std::uint64_t bytes = 65536, mib = std::uint64_t{1} << 20U;
    cpu_backend backend;
    {
      host_store<cpu_backend> store{
        backend, 2, 2, layout_of(bytes), {.blocks = 40, .most_blocks = 300, .growth_chunk_bytes = 4 * mib}};
      CHECK(store.blocks() == 40);
      CHECK(store.most_blocks() == 300);
      CHECK(backend.pinned_bytes() == 4 * 4 * mib + 4 * sizeof(std::byte*));  // 2.5 MiB of each slab, in whole pages
      CHECK(store.allocated_bytes() == backend.pinned_bytes());
      auto const fill = [&](std::uint32_t first, std::uint32_t last) {
        for (std::uint32_t b = first; b < last; ++b) {
          for (std::uint32_t slab = 0; slab < 4; ++slab) {
            std::memset(
              store.ref().address(
                layer(static_cast<std::int32_t>(slab / 2)), slab % 2, id(static_cast<std::int32_t>(b))),
              static_cast<int>(b * 4 + slab) % 251, bytes);
          }
        }
      };
      auto const holds = [&](std::uint32_t last) {
        bool right = true;
        for (std::uint32_t b = 0; b < last; ++b) {
          for (std::uint32_t slab = 0; slab < 4; ++slab) {
            std::byte const* const at = store.ref().address(
              layer(static_cast<std::int32_t>(slab / 2)), slab % 2, id(static_cast<std::int32_t>(b)));
            auto const want = static_cast<std::byte>((b * 4 + slab) % 251);
            right = right && at[0] == want && at[bytes - 1] == want;
          }
        }
        return right;
      };
      auto const finish = [&] {
        while (store.growth().under_way) { static_cast<void>(store.adopt_growth()); }
      };
      fill(0, 40);
      for (std::uint32_t b = 0; b < 40; ++b) { REQUIRE(store.acquire() == id(static_cast<std::int32_t>(b))); }
      CHECK(is_none(store.acquire()));
      CHECK(store.grow(261) == status::capacity_exceeded);
      REQUIRE(store.grow(8) == status::ok);  // there is memory for them
      CHECK(store.grow(1) == status::busy);
      finish();
      CHECK(store.blocks() == 48);
      CHECK(store.available() == 8);
      CHECK(backend.pinned_bytes() == 4 * 4 * mib + 4 * sizeof(std::byte*));
      REQUIRE(store.grow(252) == status::ok);
      finish();
      CHECK(store.growth_refusal() == "");
      CHECK(store.growth().longest_chunk > nanoseconds{0});
      CHECK(store.blocks() == 300);
      CHECK(backend.pinned_bytes() == 4 * 20 * mib + 4 * sizeof(std::byte*));
      for (std::uint32_t b = 40; b < 300; ++b) { REQUIRE(store.acquire() == id(static_cast<std::int32_t>(b))); }
      fill(40, 300);
      CHECK(holds(300));
      CHECK(store.grow(1) == status::capacity_exceeded);
      CHECK(store.audit() == "");
    }
    CHECK(backend.pinned_bytes() == 0);
  }

  TEST_CASE(
    "a growth that is refused says why, leaves the store as it was, and goes on where it stopped when asked again")
  {
    constexpr std::uint64_t bytes = 65536, mib = std::uint64_t{1} << 20U;
    // Room for 4 more pieces of 2 MiB beside the 4 MiB that are there, while nobody else has any of it.
    cpu_backend backend{{.memory = {.pinned_bytes = 12 * mib + 512}}};
    host_store<cpu_backend> store{
      backend, 2, 1, layout_of(bytes), {.blocks = 32, .most_blocks = 96, .growth_chunk_bytes = 2 * mib}};
    std::uint64_t const table = backend.pinned_bytes() - 4 * mib;
    auto const grow = [&](std::uint32_t blocks) {
      REQUIRE(store.grow(blocks) == status::ok);
      while (store.growth().under_way) { static_cast<void>(store.adopt_growth()); }
    };
    void* const other = backend.allocate(memory_space::pinned, 2 * mib);
    grow(64);
    CHECK(store.growth_refusal().find("2097152 B asked for") != std::string::npos);
    CHECK(store.blocks() == 64);  // one piece of each slab, and the first slab's second
    CHECK(backend.pinned_bytes() == 12 * mib + table);
    backend.deallocate(memory_space::pinned, other, 2 * mib);
    grow(32);
    CHECK(store.growth_refusal() == "");
    CHECK(store.blocks() == 96);
    CHECK(backend.pinned_bytes() == 12 * mib + table);  // no piece is made twice
    CHECK(store.audit() == "");
  }

  TEST_CASE("stores that can't grow say so, where they are made and where they are asked")
  {
    cpu_backend backend;
    host_store<cpu_backend> fixed{backend, 1, 1, layout_of(64), {.blocks = 4}};
    CHECK(fixed.grow(1) == status::invalid_state);
    CHECK_FALSE(fixed.adopt_growth());
    immediate_backend none_grows;
    CHECK(text_of([&] {
            host_store<immediate_backend>{none_grows, 1, 1, layout_of(64), {.blocks = 4, .most_blocks = 8}};
          }).find("whose pinned memory does not") != std::string::npos);
    CHECK(none_grows.allocated == 0);
    CHECK(text_of([&] {
            host_store<cpu_backend>{
              backend, 1, 1, layout_of(64), {.blocks = 4, .most_blocks = 8, .growth_chunk_bytes = 96U << 20U}};
          }).find("growth_chunk_bytes 100663296") != std::string::npos);
    CHECK(text_of([&] {
            host_store<cpu_backend>{backend, 1, 1, layout_of(64), {.blocks = 4, .limit_bytes = 500, .most_blocks = 8}};
          }).find("exceed the limit of 500 B") != std::string::npos);
  }
}
