#include <pulseinfer/backend/pinned_pages.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
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

  TEST_CASE(
    "a pool that may not be registered is taken from the runtime and says why; where that has none it is refused")
  {
    detail::system_page_placer placer;
    detail::page_placement placed;
    std::size_t const bytes = 3 * detail::huge_page_bytes + 5;
    std::byte elsewhere[1] = {};
    auto const take = [&](std::size_t fails, std::byte* other) {
      scripted_registrar registrar{.most = detail::huge_page_bytes, .fails = fails};
      placed = {};
      detail::pinned_memory const taken = detail::take_pinned(
        registrar, placer, bytes, detail::huge_page_bytes, detail::unknown_node, true, placed, [&] { return other; });
      CHECK(registrar.removed.size() == (taken.mapped ? 0 : fails - 1));
      return taken;
    };
    detail::pinned_memory const own = take(5, elsewhere);
    CHECK(own.mapped);
    CHECK(placed.warning == "");
    own.begin[bytes - 1] = std::byte{1};
    detail::unmap_pages(own.begin, bytes);

    detail::pinned_memory const lent = take(3, elsewhere);
    CHECK_FALSE(lent.mapped);
    CHECK(lent.begin == elsewhere);
    CHECK(placed.warning.find("pinning_refused: 4194304 of 8388608 B pinned, chunk 3 of 4") != std::string::npos);
    CHECK(placed.warning.find("runtime's own allocation") != std::string::npos);
    CHECK_THROWS_WITH_AS(
      static_cast<void>(take(1, nullptr)), doctest::Contains("chunk 1 of 4 failed: operation not permitted"),
      resource_error);
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

  // Report: ai-dynamo/dynamo#3700: the rate of transfers depended on the socket that the process happened to start on.
  TEST_CASE("pages are asked for on the node of the device, whatever thread asks; a refusal costs the nearness alone")
  {
    struct recording_placer {
      std::string refusal = {};
      std::vector<int> asked = {};
      std::vector<bool> spilled = {};
      std::string place(std::byte* memory, std::size_t bytes, int node, bool may_spill)
      {
        CHECK(memory != nullptr);
        CHECK(bytes % detail::huge_page_bytes == 0);
        asked.push_back(node);
        spilled.push_back(may_spill);
        return refusal;
      }
    };
    constexpr std::size_t bytes = 3 * detail::huge_page_bytes;
    for (bool const may_spill : {true, false}) {
      for (int const node : {0, 1, 7}) {
        recording_placer placer;
        detail::page_placement placed;
        std::byte* const memory = detail::map_pages(bytes, placer, node, may_spill, placed);
        CHECK(placer.asked == std::vector<int>{node});
        CHECK(placer.spilled == std::vector<bool>{may_spill});
        CHECK(placed.node == node);
        CHECK(placed.warning == "");
        detail::unmap_pages(memory, bytes);
      }
    }
    recording_placer refusing{.refusal = "Operation not permitted"};
    detail::page_placement placed;
    std::byte* memory = detail::map_pages(bytes, refusing, 1, true, placed);
    memory[bytes - 1] = std::byte{3};
    CHECK(placed.node == detail::unknown_node);
    CHECK(placed.warning == "6291456 B of host memory are not bound to node 1: Operation not permitted");
    detail::unmap_pages(memory, bytes);
    // On a machine of one node nothing is asked.
    recording_placer idle;
    memory = detail::map_pages(bytes, idle, detail::unknown_node, true, placed);
    CHECK(idle.asked.empty());
    CHECK(placed.node == detail::unknown_node);
    CHECK(placed.warning == "");
    detail::unmap_pages(memory, bytes);
  }

  TEST_CASE(
    "the system is asked in its own terms: node 0 is there or refused in words, a node that cannot be is refused")
  {
    detail::system_page_placer placer;
    detail::page_placement placed;
    std::byte* const memory = detail::map_pages(1, placer, 0, true, placed);
    CHECK((placed.node == 0) == placed.warning.empty());
    memory[0] = std::byte{1};
    CHECK(placer.place(memory, detail::huge_page_bytes, 5000, true) == "no such node");
    CHECK(placer.place(memory, detail::huge_page_bytes, 1000, false) != "");
    detail::unmap_pages(memory, 1);
  }

  TEST_CASE("the node of a device is read as the system writes it, in either case of its address")
  {
    std::filesystem::path const devices =
      std::filesystem::temp_directory_path() / ("pulseinfer_nodes_" + std::to_string(::getpid()));
    auto const write = [&](char const* address, char const* text) {
      std::filesystem::create_directories(devices / address);
      std::ofstream{devices / address / "numa_node"} << text;
    };
    write("0000:1b:00.0", "1\n");
    write("0000:2c:00.0", "-1\n");
    write("0000:3d:00.0", "none\n");
    CHECK(detail::node_of_device("0000:1B:00.0", devices) == 1);
    CHECK(detail::node_of_device("0000:1b:00.0", devices) == 1);
    CHECK(detail::node_of_device("0000:2c:00.0", devices) == detail::unknown_node);
    CHECK(detail::node_of_device("0000:3d:00.0", devices) == detail::unknown_node);
    CHECK(detail::node_of_device("0000:99:00.0", devices) == detail::unknown_node);
    std::filesystem::remove_all(devices);
  }
}
