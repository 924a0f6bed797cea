#include "backend/fixtures.hpp"
#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/cpu/cpu_backend.hpp>
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/numeric.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

TEST_SUITE_BEGIN("backend");

using namespace pulseinfer;
using namespace pulseinfer_test;

static_assert(backend<checked<cpu_backend>> && observed_backend<checked<cpu_backend>>);
static_assert(backend<traced<checked<cpu_backend>>> && backend<checked<traced<cpu_backend>>>);

namespace {

struct checked_cpu {
  checked<cpu_backend> backend{
    check_options{.quarantine_bytes = 4096, .max_violations = 4}, cpu_options{.mode = cpu_mode::manual}};
  cpu_backend::stream_ref stream = backend.create_stream();
  std::byte* device = static_cast<std::byte*>(backend.allocate(memory_space::device, 1000));
  std::byte* pinned = static_cast<std::byte*>(backend.allocate(memory_space::pinned, 1000));

  ~checked_cpu()
  {
    backend.deallocate(memory_space::device, device, 1000);
    backend.deallocate(memory_space::pinned, pinned, 1000);
  }

  status copy(void* target, void const* source, std::uint64_t bytes, copy_direction direction)
  {
    copy_run const run{static_cast<std::byte*>(target), static_cast<std::byte const*>(source), bytes};
    return backend.copy(stream, {&run, 1, direction});
  }

  /// Whether the last violation says all of `words`.
  bool says(std::vector<std::string> const& words)
  {
    std::vector<std::string> const texts = backend.violations();
    if (texts.empty()) { return false; }
    CAPTURE(texts.back());
    return std::all_of(words.begin(), words.end(), [&](std::string const& word) {
      return texts.back().find(word) != std::string::npos;
    });
  }
};

[[nodiscard]] bool all_poison(void const* pointer, std::size_t bytes)
{
  auto const* const begin = static_cast<std::byte const*>(pointer);
  return std::all_of(begin, begin + bytes, [](std::byte value) { return value == poison_byte; });
}

}  // namespace

TEST_CASE("checked gives memory that reads as NaN in every type of a cache until it is written")
{
  checked_cpu c;
  for (std::byte* const memory : {c.device, c.pinned}) {
    CHECK(all_poison(memory, 1000));
    for (dtype const type : {dtype::float32, dtype::float16, dtype::bfloat16, dtype::float8_e4m3}) {
      CHECK(std::isnan(load_as_float(memory, type, 3)));
    }
  }
}

TEST_CASE("checked lets copies pass that stay inside one allocation of the right space")
{
  checked_cpu c;
  using enum copy_direction;
  std::memset(c.pinned, 1, 1000);
  CHECK(c.copy(c.device, c.pinned, 1000, host_to_device) == status::ok);
  CHECK(c.copy(c.pinned, c.device + 999, 1, device_to_host) == status::ok);
  CHECK(c.copy(c.device, c.device + 500, 500, device_to_device) == status::ok);
  CHECK(c.copy(c.device + 1000, c.pinned + 5000, 0, host_to_device) == status::ok);  // no byte, no place
  CHECK(c.backend.synchronize() == status::ok);
  CHECK(c.backend.check() == 0);
}

TEST_CASE("checked refuses copies that leave their memory, says which and where, and moves nothing")
{
  checked_cpu c;
  using enum copy_direction;
  std::vector<std::byte> foreign(100);
  SUBCASE("past the end of the target")
  {
    CHECK(c.copy(c.device + 900, c.pinned, 101, host_to_device) == status::out_of_range);
    CHECK(c.says({"copy target", "101 B from byte 900", "device memory of 1000 B"}));
  }
  SUBCASE("past the end of the source")
  {
    CHECK(c.copy(c.device, c.pinned + 1, 1000, host_to_device) == status::out_of_range);
    CHECK(c.says({"copy source", "1000 B from byte 1 ", "pinned memory of 1000 B"}));
  }
  SUBCASE("before the begin")
  {
    CHECK(c.copy(c.device - 1, c.pinned, 10, host_to_device) == status::out_of_range);
    CHECK(c.says({"copy target", "no memory of this backend"}));
  }
  SUBCASE("the wrong space, each way")
  {
    CHECK(c.copy(c.pinned, c.device, 10, host_to_device) == status::out_of_range);
    CHECK(c.backend.violation_count() == 2);  // source and target
    CHECK(c.says({"copy target", "pinned memory where device memory is due"}));
    CHECK(c.copy(c.device, c.pinned, 10, device_to_device) == status::out_of_range);
    CHECK(c.says({"copy source", "pinned memory where device memory is due"}));
    CHECK(c.copy(c.device, c.device + 500, 10, device_to_host) == status::out_of_range);
    CHECK(c.says({"copy target", "device memory where pinned memory is due"}));
  }
  SUBCASE("memory of somebody else")
  {
    CHECK(c.copy(c.device, foreign.data(), 10, host_to_device) == status::out_of_range);
    CHECK(c.says({"copy source", "no memory of this backend"}));
  }
  SUBCASE("one bad run among good ones")
  {
    copy_run const runs[3] = {
      {c.device, c.pinned, 10}, {c.device + 10, c.pinned + 995, 10}, {c.device + 20, c.pinned, 10}};
    CHECK(c.backend.copy(c.stream, {runs, 3, host_to_device}) == status::out_of_range);
    CHECK(c.says({"copy source", "run 1 of 3"}));
  }
  CHECK(c.backend.base().queued_tasks() == 0);
  CHECK(all_poison(c.device, 1000));
}

TEST_CASE("checked knows memory that the host engine lends until it is taken back")
{
  checked_cpu c;
  using enum copy_direction;
  std::vector<std::byte> engine(100, std::byte{5});
  c.backend.lend(memory_space::device, engine.data(), 100);
  CHECK(engine[7] == std::byte{5});  // not poisoned
  CHECK(c.copy(c.pinned, engine.data() + 50, 50, device_to_host) == status::ok);
  CHECK(c.copy(c.pinned, engine.data() + 50, 51, device_to_host) == status::out_of_range);
  for (std::ptrdiff_t const at : {0, 99}) {
    CHECK_THROWS_AS(c.backend.lend(memory_space::device, engine.data() + at, 1), argument_error);
  }
  CHECK_THROWS_AS(c.backend.lend(memory_space::device, c.device + 10, 1), argument_error);
  CHECK_THROWS_AS(c.backend.lend(memory_space::device, c.device - 10, 11), argument_error);
  CHECK(c.backend.synchronize() == status::ok);
  c.backend.take_back(engine.data());
  CHECK(c.copy(c.pinned, engine.data(), 10, device_to_host) == status::out_of_range);
  c.backend.take_back(engine.data());
  CHECK(c.says({"was not lent"}));
  c.backend.deallocate(memory_space::device, engine.data(), 100);
  CHECK(c.says({"not allocated here"}));
}

TEST_CASE("checked poisons freed memory, keeps it from being used again, and tells of reads and writes")
{
  checked_cpu c;
  using enum copy_direction;
  auto* const freed = static_cast<std::byte*>(c.backend.allocate(memory_space::device, 2000));
  std::memset(freed, 3, 2000);
  c.backend.deallocate(memory_space::device, freed, 2000);
  CHECK(all_poison(freed, 2000));  // kept, so this may be read
  CHECK(c.copy(c.pinned, freed + 7, 20, device_to_host) == status::out_of_range);
  CHECK(c.says({"copy source", "was freed", "2000 B"}));
  CHECK(c.copy(freed, c.pinned, 20, host_to_device) == status::out_of_range);
  CHECK(c.backend.check() == 2);
  freed[1234] = std::byte{0};
  CHECK(c.backend.check() == 3);
  CHECK(c.says({"freed device memory", "2000 B", "written at byte 1234"}));
  CHECK(c.backend.check() == 3);  // told once
}

TEST_CASE("checked tells of a copy that was in flight when its memory was freed")
{
  checked_cpu c;
  std::memset(c.pinned, 9, 1000);
  auto* const freed = static_cast<std::byte*>(c.backend.allocate(memory_space::device, 512));
  CHECK(c.copy(freed + 100, c.pinned, 10, copy_direction::host_to_device) == status::ok);
  c.backend.deallocate(memory_space::device, freed, 512);
  CHECK(c.backend.check() == 0);
  CHECK(c.backend.synchronize() == status::ok);
  CHECK(c.backend.check() == 1);
  CHECK(c.says({"written at byte 100"}));
}

TEST_CASE("checked lets freed memory go when the quarantine is full, oldest first")
{
  checked_cpu c;  // keeps 4096 B
  std::vector<std::byte*> freed;
  for (int i = 0; i < 5; ++i) {
    auto* const memory = static_cast<std::byte*>(c.backend.allocate(memory_space::device, 1024));
    freed.push_back(memory);
    CHECK(std::count(freed.begin(), freed.end(), memory) == 1);
    c.backend.deallocate(memory_space::device, memory, 1024);
    CHECK(c.backend.base().device_bytes() == 1000 + 1024 * std::min(i + 1, 4));
  }
  // More than all of it.
  void* const large = c.backend.allocate(memory_space::device, 10000);
  c.backend.deallocate(memory_space::device, large, 10000);
  CHECK(c.backend.base().device_bytes() == 1000);
  CHECK(c.backend.check() == 0);
}

TEST_CASE("checked gives the quarantine back before it lets an allocation fail")
{
  checked<cpu_backend> backend{cpu_options{.memory = {.device_bytes = 1000}}};
  void* const first = backend.allocate(memory_space::device, 900);
  backend.deallocate(memory_space::device, first, 900);
  CHECK(backend.base().device_bytes() == 900);
  void* const second = backend.allocate(memory_space::device, 800);
  CHECK_THROWS_AS(static_cast<void>(backend.allocate(memory_space::device, 201)), resource_error);
  backend.deallocate(memory_space::device, second, 800);
  CHECK(backend.check() == 0);
}

TEST_CASE("checked tells of memory freed twice, or as another size or space")
{
  checked_cpu c;
  void* const a = c.backend.allocate(memory_space::device, 100);
  c.backend.deallocate(memory_space::device, a, 100);
  c.backend.deallocate(memory_space::device, a, 100);
  CHECK(c.says({"freed before"}));
  void* const b = c.backend.allocate(memory_space::device, 100);
  c.backend.deallocate(memory_space::pinned, b, 99);
  CHECK(c.says({"device memory of 100 B", "pinned memory of 99 B"}));
  c.backend.deallocate(memory_space::device, static_cast<std::byte*>(c.device) + 8, 10);
  CHECK(c.says({"not allocated here"}));
  CHECK(c.backend.violation_count() == 3);
}

TEST_CASE("checked keeps the first sentences and counts all")
{
  checked_cpu c;  // keeps 4
  for (int i = 0; i < 10; ++i) {
    CHECK(
      c.copy(c.device, c.pinned, 2000 + static_cast<std::uint64_t>(i), copy_direction::host_to_device) ==
      status::out_of_range);
  }
  CHECK(c.backend.violation_count() == 20);  // source and target of each
  REQUIRE(c.backend.violations().size() == 4);
  CHECK(c.backend.violations()[0].find("2000 B") != std::string::npos);
}

TEST_CASE("checked poisons what an owner says it has freed, inside live memory only")
{
  checked_cpu c;
  std::memset(c.device, 0, 1000);
  CHECK(c.backend.poison(memory_space::device, c.device + 100, 50) == status::ok);
  CHECK(all_poison(c.device + 100, 50));
  CHECK(c.device[99] == std::byte{0});
  CHECK(c.device[150] == std::byte{0});
  CHECK(c.backend.poison(memory_space::device, c.device + 990, 11) == status::out_of_range);
  CHECK(c.says({"poison"}));
  CHECK(c.device[995] == std::byte{0});
}

namespace {

struct dirty : archetype::operation {
  std::uint32_t* clean;
  explicit dirty(std::uint32_t* count) : clean{count} {}
  [[nodiscard]] launch_shape shape() const { return {.items = 5}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 64; }
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref scratch) const
  {
    *clean += all_poison(scratch.data, scratch.bytes) ? 1 : 0;
    std::memset(scratch.data, 0, scratch.bytes);
  }
};

}  // namespace

TEST_CASE("checked gives every item scratch that is poisoned anew")
{
  checked_cpu c;
  std::uint32_t clean = 0;
  CHECK(c.backend.launch(c.stream, dirty{&clean}) == status::ok);
  CHECK(c.backend.launch(c.stream, dirty{&clean}) == status::ok);
  CHECK(c.backend.synchronize() == status::ok);
  CHECK(clean == 10);
}

TEST_SUITE_END();
