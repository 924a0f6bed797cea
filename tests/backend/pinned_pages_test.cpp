#include <pulseinfer/backend/pinned_pages.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using namespace pulseinfer;

namespace {

/// Takes at most `most` bytes a call, and refuses the call numbered `fails`.
struct scripted_registrar {
  std::size_t most = 0;
  std::size_t fails = ~std::size_t{0};
  std::vector<std::pair<std::byte*, std::size_t>> added = {};
  std::vector<std::byte*> removed = {};

  std::string add(std::byte* memory, std::size_t bytes)
  {
    if (bytes > most) { return "too large"; }
    if (added.size() + 1 == fails) { return "operation not permitted"; }
    added.emplace_back(memory, bytes);
    return {};
  }
  void remove(std::byte* memory) noexcept { removed.push_back(memory); }
};

constexpr std::size_t kib = 1024;

}  // namespace

TEST_SUITE("backend")
{
  // Report: LMCache/LMCache#5177
  TEST_CASE("a large pool is registered in chunks that the driver takes, and given back chunk by chunk")
  {
    std::vector<std::byte> memory(160 * kib);
    scripted_registrar registrar{.most = 64 * kib};
    detail::add_chunks(registrar, memory.data(), memory.size(), 64 * kib);
    REQUIRE(registrar.added.size() == 3);
    CHECK(registrar.added[0] == std::pair{memory.data(), 64 * kib});
    CHECK(registrar.added[1] == std::pair{memory.data() + 64 * kib, 64 * kib});
    CHECK(registrar.added[2] == std::pair{memory.data() + 128 * kib, 32 * kib});
    detail::remove_chunks(registrar, memory.data(), memory.size(), 64 * kib);
    CHECK(
      registrar.removed == std::vector<std::byte*>{memory.data() + 128 * kib, memory.data() + 64 * kib, memory.data()});
  }

  // Report: LMCache/LMCache#5177
  TEST_CASE("where a chunk is refused, those before it are given back in reverse and the error has the numbers")
  {
    std::vector<std::byte> memory(160 * kib);
    for (std::size_t fails = 1; fails <= 3; ++fails) {
      scripted_registrar registrar{.most = 64 * kib, .fails = fails};
      std::string text;
      try {
        detail::add_chunks(registrar, memory.data(), memory.size(), 64 * kib);
      } catch (resource_error const& refused) {
        text = refused.what();
      }
      CHECK(
        text.find(
          "pinning_refused: " + std::to_string((fails - 1) * 64 * kib) + " of 163840 B pinned, chunk " +
          std::to_string(fails) + " of 3 failed: operation not permitted") != std::string::npos);
      REQUIRE(registrar.removed.size() == fails - 1);
      for (std::size_t i = 0; i < registrar.removed.size(); ++i) {
        CHECK(registrar.removed[i] == registrar.added[fails - 2 - i].first);
      }
    }
  }

  TEST_CASE("any size falls into chunks without a gap")
  {
    std::byte* const nowhere = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 30U);
    for (std::size_t const bytes : {1UL, 63 * kib, 64 * kib, 64 * kib + 1, 640 * kib, 1000 * kib + 7}) {
      scripted_registrar registrar{.most = 64 * kib};
      detail::add_chunks(registrar, nowhere, bytes, 64 * kib);
      std::byte* end = nowhere;
      for (auto const& [memory, size] : registrar.added) {
        CHECK(memory == end);
        CHECK(size > 0);
        end = memory + size;
      }
      CHECK(end == nowhere + bytes);
      detail::remove_chunks(registrar, nowhere, bytes, 64 * kib);
      CHECK(registrar.removed.size() == registrar.added.size());
    }
  }

  TEST_CASE(
    "mapped pages begin at a huge page, hold what is written, and take less than a huge page more than asked for")
  {
    for (std::size_t const bytes : {std::size_t{1}, detail::huge_page_bytes, 5 * detail::huge_page_bytes + 3}) {
      std::byte* const memory = detail::map_pages(bytes);
      CHECK(reinterpret_cast<std::uintptr_t>(memory) % detail::huge_page_bytes == 0);
      CHECK(detail::mapped_bytes(bytes) >= bytes);
      CHECK(detail::mapped_bytes(bytes) - bytes < detail::huge_page_bytes);
      memory[0] = std::byte{7};
      memory[bytes - 1] = std::byte{9};
      CHECK(memory[bytes - 1] == std::byte{9});
      detail::unmap_pages(memory, bytes);
    }
    CHECK_THROWS_AS(static_cast<void>(detail::map_pages(std::size_t{1} << 60U)), resource_error);
  }
}
