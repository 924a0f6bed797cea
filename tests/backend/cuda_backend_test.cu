#include "backend/backend_contract.hpp"
#include <pulseinfer/backend/checked.hpp>
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/residency/staging_ring.hpp>

#include <cuda/stream_ref>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;
using namespace pulseinfer_test;

static_assert(backend<checked<cuda_backend>> && backend<traced<cuda_backend>>);
static_assert(std::is_convertible_v<cudaStream_t, cuda_stream_ref>);
static_assert(std::is_convertible_v<::cuda::stream_ref, cuda_stream_ref>);
static_assert(!std::is_convertible_v<std::nullptr_t, cuda_stream_ref>);
static_assert(std::is_convertible_v<std::unique_ptr<CUstream_st>, cuda_stream_ref>);  // owners, by get()
struct owner_that_converts {
  operator cudaStream_t() const noexcept { return cudaStreamPerThread; }
};
static_assert(std::is_convertible_v<owner_that_converts, cuda_stream_ref>);
static_assert(!std::is_convertible_v<int, cuda_stream_ref> && !std::is_convertible_v<void*, cuda_stream_ref>);

namespace pulseinfer_test {

/// Keeps a stream busy until *open reaches `number`.
struct spin_operation {
  static constexpr char const* name = "spin";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint32_t const* open = nullptr;
  std::uint32_t number = 0;

  [[nodiscard]] launch_shape shape() const { return {.items = 1, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const&, std::uint64_t, scratch_ref) const
  {
    while (*static_cast<std::uint32_t const volatile*>(open) < number) {}
  }
};

/// Writes group size and rank of every thread: sizes[item], and 1 into ranks[item * 1024 + rank].
struct census_operation {
  static constexpr char const* name = "census";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint32_t* sizes = nullptr;
  std::uint32_t* ranks = nullptr;
  std::uint64_t items = 0;
  std::uint32_t threads = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = items, .group_threads = threads}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const { return group_threads * 4; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    auto* const words = reinterpret_cast<std::uint32_t*>(scratch.data);
    words[group.thread_rank()] = static_cast<std::uint32_t>(item);
    group.sync();
    // Reads another thread's word, which a missing sync or a shared slice would leave wrong.
    std::uint32_t const other = words[(group.thread_rank() + 1) % group.size()];
    ranks[item * 1024 + group.thread_rank()] += other == item ? 1 : 1000;
    if (group.thread_rank() == 0) { sizes[item] = group.size(); }
  }
};

/// Keeps a stream busy for so many nanoseconds.
struct linger_operation {
  static constexpr char const* name = "linger";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint64_t nanoseconds = 0;

  [[nodiscard]] launch_shape shape() const { return {.items = 1, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const&, std::uint64_t, scratch_ref) const
  {
#if defined(__CUDA_ARCH__)
    auto const now = [] {
      std::uint64_t time = 0;
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
      return time;
    };
    for (std::uint64_t const begin = now(); now() - begin < nanoseconds;) {}
#endif
  }
};

/// target[i] = source[i].
struct read_operation {
  static constexpr char const* name = "read";
  static constexpr operation_kind kind = operation_kind::metadata;

  std::uint32_t const* source = nullptr;
  std::uint32_t* target = nullptr;
  std::uint64_t count = 0;

  [[nodiscard]] launch_shape shape() const { return {.items = count, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const&, std::uint64_t item, scratch_ref) const
  {
    target[item] = source[item];
  }
};

/// Has the kernels of the tests below loaded: the first launch of a kernel may wait for what the device runs, and that waits for
/// the host.
inline void load_kernels(cuda_backend& backend, cuda_stream_ref stream, std::uint32_t* words)
{
  REQUIRE(backend.launch(stream, spin_operation{words, 0}) == status::ok);
  REQUIRE(backend.launch(stream, fill_words{.target = words, .count = 1, .value = 0}) == status::ok);
  REQUIRE(backend.launch(stream, read_operation{.source = words, .target = words, .count = 1}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
}

template <template <class> class Wrapped>
struct cuda_with {
  static constexpr bool has_held_work_pending = true;
  static constexpr bool moves_bytes = true;

  std::uint32_t* open = nullptr;  // not of the backend, whose bytes are counted
  std::uint32_t holds = 0;
  Wrapped<cuda_backend> made{cuda_options{
    .max_streams = contract_sizes::streams,
    .max_events = contract_sizes::events,
    .max_copy_runs = contract_sizes::copy_runs,
    .memory = {contract_sizes::memory_bytes, contract_sizes::memory_bytes}}};

  cuda_with()
  {
    REQUIRE(cudaHostAlloc(reinterpret_cast<void**>(&open), sizeof(std::uint32_t), cudaHostAllocMapped) == cudaSuccess);
    *open = 0;
  }
  ~cuda_with()
  {
    release();
    static_cast<void>(made.synchronize());
    static_cast<void>(cudaFreeHost(open));
  }

  auto& backend() { return made; }
  template <class Stream>
  void hold(Stream stream)
  {
    REQUIRE(made.launch(stream, spin_operation{open, ++holds}) == status::ok);
  }
  void release() { *static_cast<std::uint32_t volatile*>(open) = holds; }
};

template <class B>
using plain = B;

}  // namespace pulseinfer_test

TEST_CASE("cuda_backend keeps the backend contract") { backend_contract<cuda_with<plain>>(); }
TEST_CASE("checked keeps the backend contract over cuda_backend") { backend_contract<cuda_with<checked>>(); }
TEST_CASE("traced keeps the backend contract over cuda_backend") { backend_contract<cuda_with<traced>>(); }

TEST_CASE("cuda_backend gives each item one thread, one warp or one block, with its own scratch")
{
  cuda_backend backend{cuda_options{.max_blocks = 7}};  // so that items go round
  auto const stream = backend.create_stream();
  constexpr std::uint64_t items = 100;
  buffer<cuda_backend, std::uint32_t> sizes{backend, memory_space::pinned, items};
  buffer<cuda_backend, std::uint32_t> ranks{backend, memory_space::pinned, items * 1024};
  for (auto const& [asked, given] :
       {std::pair{1U, 1U}, {2U, 32U}, {32U, 32U}, {33U, 64U}, {512U, 512U}, {1024U, 1024U}}) {
    std::memset(sizes.data(), 0, items * 4);
    std::memset(ranks.data(), 0, items * 1024 * 4);
    REQUIRE(backend.launch(stream, census_operation{sizes.data(), ranks.data(), items, asked}) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
    for (std::uint64_t item = 0; item < items; ++item) {
      REQUIRE(sizes[item] == given);
      for (std::uint32_t rank = 0; rank < 1024; ++rank) {
        REQUIRE(ranks[item * 1024 + rank] == (rank < given ? 1U : 0U));
      }
    }
  }
}

TEST_CASE("cuda_backend gives an item more scratch than a block has without asking")
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  buffer<cuda_backend, std::uint32_t> data{backend, memory_space::pinned, 3};
  std::size_t const words = backend.options().max_scratch_bytes / 4;
  REQUIRE(words * 4 > detail::default_block_scratch_bytes);
  REQUIRE(backend.launch(stream, fill_operation{data.data(), 3, 5, words}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
  for (std::uint32_t i = 0; i < 3; ++i) { CHECK(data[i] == 5 + i); }
  CHECK(backend.launch(stream, fill_operation{data.data(), 3, 5, words + 1}) == status::invalid_argument);
}

/// Public report: vllm-project/vllm#46379 (batched copies fail on the legacy default stream).
TEST_CASE("cuda_backend copies on lent streams of every kind, captured ones included")
{
  cuda_backend backend;
  constexpr std::size_t bytes = 200 * 64;
  buffer<cuda_backend, std::byte> source{backend, memory_space::pinned, bytes};
  buffer<cuda_backend, std::byte> device{backend, memory_space::device, bytes};
  buffer<cuda_backend, std::byte> target{backend, memory_space::pinned, bytes};
  std::vector<copy_run> there, back;
  for (std::size_t i = 0; i < 200; ++i) {
    there.push_back({device.data() + i * 64, source.data() + i * 64, 64});
    back.push_back({target.data() + i * 64, device.data() + i * 64, 64});
  }
  auto const round_trip = [&](cuda_stream_ref stream) {
    REQUIRE(backend.copy(stream, {there.data(), 200, copy_direction::host_to_device}) == status::ok);
    REQUIRE(backend.copy(stream, {back.data(), 200, copy_direction::device_to_host}) == status::ok);
  };
  auto const fill = [&](int value) {
    std::memset(source.data(), value, bytes);
    std::memset(target.data(), 0, bytes);
  };
  int value = 1;
  for (cudaStream_t const stream : {cudaStreamLegacy, cudaStreamPerThread, backend.create_stream().stream}) {
    fill(++value);
    round_trip(stream);
    REQUIRE(backend.synchronize(stream) == status::ok);
    CHECK(std::memcmp(source.data(), target.data(), bytes) == 0);
  }
  // A captured copy runs at each replay, and not before.
  auto const stream = backend.create_stream();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  fill(77);
  REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  round_trip(stream);
  REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&runnable, graph, 0) == cudaSuccess);
  CHECK(target[0] == std::byte{0});
  for (int replay = 0; replay < 3; ++replay) {
    fill(100 + replay);
    REQUIRE(cudaGraphLaunch(runnable, stream.stream) == cudaSuccess);
    REQUIRE(backend.synchronize(stream) == status::ok);
    CHECK(std::memcmp(source.data(), target.data(), bytes) == 0);
  }
  CHECK(cudaGraphExecDestroy(runnable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(backend.last_error().empty());
}

// Report: LMCache/LMCache#5177
TEST_CASE("copies go through where large pinned memory passes from one registration to the next")
{
  constexpr std::size_t chunk = std::size_t{4} << 20U;
  constexpr std::size_t bytes = std::size_t{21} << 20U;
  cuda_backend backend{cuda_options{.pinned_chunk_bytes = chunk}};
  auto const stream = backend.create_stream();
  buffer<cuda_backend, std::byte> host{backend, memory_space::pinned, bytes};
  buffer<cuda_backend, std::byte> device{backend, memory_space::device, bytes};
  auto const pattern = [](std::size_t i) { return static_cast<std::byte>(i * 7 + (i >> 12U)); };
  for (std::size_t i = 0; i < bytes; ++i) { host[i] = pattern(i); }
  std::vector<copy_run> there, back;
  for (std::size_t begin = 0; begin < bytes; begin += 3000003) {
    std::size_t const size = std::min<std::size_t>(3000003, bytes - begin);
    there.push_back({device.data() + begin, host.data() + begin, size});
    back.push_back({host.data() + begin, device.data() + begin, size});
  }
  copy_run const whole_there{device.data(), host.data(), bytes};
  copy_run const whole_back{host.data(), device.data(), bytes};
  for (bool const whole : {true, false}) {
    auto const list = [&](std::vector<copy_run> const& parts, copy_run const& one, copy_direction direction) {
      return copy_list{whole ? &one : parts.data(), whole ? 1 : static_cast<std::uint32_t>(parts.size()), direction};
    };
    REQUIRE(backend.copy(stream, list(there, whole_there, copy_direction::host_to_device)) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
    std::memset(host.data(), 0, bytes);
    REQUIRE(backend.copy(stream, list(back, whole_back, copy_direction::device_to_host)) == status::ok);
    REQUIRE(backend.synchronize(stream) == status::ok);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < bytes; ++i) { wrong += host[i] == pattern(i) ? 0 : 1; }
    CHECK(wrong == 0);
  }
  CHECK(backend.last_error().empty());
  CHECK_THROWS_AS(cuda_backend{cuda_options{.pinned_chunk_bytes = 4096}}, configuration_error);
}

/// Public report: vllm-project/vllm#50427 (addresses past 4 GiB).
TEST_CASE("the last block of a pool of more than 4 GiB goes to the host and back, and block 0 stays as it was")
{
  constexpr std::uint64_t block = 65536;
  constexpr std::uint64_t blocks = 65537;
  cuda_backend backend;
  auto const stream = backend.create_stream();
  buffer<cuda_backend, std::byte> pool{backend, memory_space::device, blocks * block};
  buffer<cuda_backend, std::byte> store{backend, memory_space::pinned, 2 * block};
  buffer<cuda_backend, std::byte*> bases{backend, memory_space::pinned, 2};
  bases[0] = pool.data();
  bases[1] = store.data();
  slot_pool_ref const slots{.layer_base = bases.data(), .slot_stride = block, .slots = blocks};
  host_store_ref const host{.slab_base = bases.data() + 1, .block_stride = block, .head_groups = 1, .blocks = 2};
  REQUIRE(cudaMemset(pool.data(), 0x11, block) == cudaSuccess);
  std::byte* const last = slots.address(layer_id{0}, static_cast<slot_id>(blocks - 1));
  for (std::size_t i = 0; i < block; ++i) { store[i] = static_cast<std::byte>(i * 5 + (i >> 8U)); }
  copy_run const there{last, store.data(), block};
  copy_run const back{store.data() + block, last, block};
  REQUIRE(backend.copy(stream, {&there, 1, copy_direction::host_to_device}) == status::ok);
  REQUIRE(backend.copy(stream, {&back, 1, copy_direction::device_to_host}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
  CHECK(std::memcmp(store.data(), store.data() + block, block) == 0);
  // And by the gather.
  REQUIRE(cudaMemset(last, 0, block) == cudaSuccess);
  buffer<cuda_backend, recall_entry> entries{backend, memory_space::pinned, 1};
  buffer<cuda_backend, std::uint32_t> begins{backend, memory_space::pinned, 2};
  entries[0] = {host_block_id{1}, static_cast<slot_id>(blocks - 1), lane_id{0}, block_id{0}};
  begins[0] = 0;
  begins[1] = 1;
  recall_plan_ref const plan{
    .entries = entries.data(),
    .row_begin = begins.data(),
    .host = host,
    .pool = slots,
    .layer = layer_id{0},
    .block_bytes = block,
    .capacity = 1};
  REQUIRE(backend.launch(stream, gather_blocks{.plan = plan, .first_row = 0, .row_count = 1}) == status::ok);
  std::memset(store.data(), 0, block);
  copy_run const again{store.data(), last, block};
  copy_run const first{store.data() + block, pool.data(), block};
  REQUIRE(backend.copy(stream, {&again, 1, copy_direction::device_to_host}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
  CHECK(std::memcmp(store.data(), store.data() + block, block) == 0);
  REQUIRE(backend.copy(stream, {&first, 1, copy_direction::device_to_host}) == status::ok);
  REQUIRE(backend.synchronize(stream) == status::ok);
  CHECK(store[block] == std::byte{0x11});
  CHECK(store[2 * block - 1] == std::byte{0x11});
}

TEST_CASE("cuda_backend records, waits for and asks events of the host engine's own")
{
  cuda_backend backend;
  auto const first = backend.create_stream();
  auto const second = backend.create_stream();
  buffer<cuda_backend, std::uint32_t> open{backend, memory_space::pinned, 1};
  buffer<cuda_backend, std::uint32_t> words{backend, memory_space::pinned, 2};
  open[0] = words[0] = words[1] = 0;
  load_kernels(backend, first, words.data());
  cudaEvent_t lent = nullptr;
  REQUIRE(cudaEventCreateWithFlags(&lent, cudaEventDisableTiming) == cudaSuccess);
  CHECK(backend.done(lent) == event_state::done);
  REQUIRE(backend.launch(first, spin_operation{open.data(), 1}) == status::ok);
  REQUIRE(backend.launch(first, fill_words{.target = words.data(), .count = 1, .value = 7}) == status::ok);
  REQUIRE(backend.record(first, lent) == status::ok);
  REQUIRE(backend.wait(second, lent) == status::ok);
  REQUIRE(
    backend.launch(second, read_operation{.source = words.data(), .target = words.data() + 1, .count = 1}) ==
    status::ok);
  CHECK(backend.done(lent) == event_state::pending);
  *static_cast<std::uint32_t volatile*>(open.data()) = 1;
  REQUIRE(backend.synchronize(second) == status::ok);
  CHECK(words[1] == 7);
  CHECK(backend.done(lent) == event_state::done);
  CHECK(cudaEventDestroy(lent) == cudaSuccess);
  CHECK(backend.last_error().empty());
}

// Report: vllm-project/vllm#45704
TEST_CASE("a write-back behind an event takes what the kernel before it wrote, 150 times; without the wait it does not")
{
  cuda_backend backend;
  auto const compute = backend.create_stream();
  auto const copies = backend.create_stream(stream_priority::low);
  auto const appended = backend.create_event();
  constexpr std::uint32_t words = 16 << 10U;
  buffer<cuda_backend, std::uint32_t> slot{backend, memory_space::device, words};
  buffer<cuda_backend, std::uint32_t> host{backend, memory_space::pinned, words};
  copy_run const back{reinterpret_cast<std::byte*>(host.data()), reinterpret_cast<std::byte*>(slot.data()), words * 4};
  auto const stale_after = [&](bool waits, std::uint32_t rounds) {
    std::uint32_t stale = 0;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      std::memset(host.data(), 0, words * 4);
      REQUIRE(backend.launch(compute, fill_words{.target = slot.data(), .count = words, .value = 0}) == status::ok);
      REQUIRE(backend.synchronize(compute) == status::ok);
      REQUIRE(backend.launch(compute, linger_operation{1000000}) == status::ok);
      REQUIRE(
        backend.launch(compute, fill_words{.target = slot.data(), .count = words, .value = 0xA5A5A5A5U}) == status::ok);
      REQUIRE(backend.record(compute, appended) == status::ok);
      if (waits) { REQUIRE(backend.wait(copies, appended) == status::ok); }
      REQUIRE(backend.copy(copies, {&back, 1, copy_direction::device_to_host}) == status::ok);
      REQUIRE(backend.synchronize(copies) == status::ok);
      stale +=
        static_cast<std::uint32_t>(words - std::count(host.data(), host.data() + words, std::uint32_t{0xA5A5A5A5U}));
      REQUIRE(backend.synchronize(compute) == status::ok);
    }
    return stale;
  };
  CHECK(stale_after(true, 150) == 0);
  CHECK(stale_after(false, 3) > 0);
}

// Report: NVIDIA/TensorRT-LLM#15546
TEST_CASE("tables published ahead of a busy device reach each step as they were published, past the depth of the ring")
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  constexpr std::uint32_t depth = 3, steps = 2 * depth + 3, width = 4;
  staging_ring<cuda_backend> ring{backend, depth, width * sizeof(std::uint32_t)};
  buffer<cuda_backend, std::uint32_t> seen{backend, memory_space::pinned, steps * width};
  buffer<cuda_backend, std::uint32_t> open{backend, memory_space::pinned, 1};
  open[0] = 0;
  load_kernels(backend, stream, seen.data());
  std::memset(seen.data(), 0xFF, steps * width * 4);
  auto const let_run = [&](std::uint32_t count) { *static_cast<std::uint32_t volatile*>(open.data()) = count; };
  for (std::uint32_t step = 0; step < steps; ++step) {
    if (step >= depth) {
      // A full ring says so, and overwrites nothing.
      REQUIRE(ring.begin(backend.now()) == status::drain_timeout);
      let_run(step - depth + 1);
    }
    REQUIRE(ring.begin(no_deadline) == status::ok);
    auto* const table = ring.take<std::uint32_t>(width);
    REQUIRE(table != nullptr);
    for (std::uint32_t i = 0; i < width; ++i) { table[i] = step * 4 + i; }
    REQUIRE(backend.launch(stream, spin_operation{open.data(), step + 1}) == status::ok);
    REQUIRE(
      backend.launch(stream, read_operation{.source = table, .target = seen.data() + step * width, .count = width}) ==
      status::ok);
    REQUIRE(ring.end(stream) == status::ok);
  }
  let_run(steps);
  CHECK(ring.waits() > 0);
  REQUIRE(backend.synchronize(stream) == status::ok);
  for (std::uint32_t i = 0; i < steps * width; ++i) { REQUIRE(seen[i] == i); }
}

// Report: vllm-project/vllm#45466
TEST_CASE("copies of any row pitch go both ways byte for byte, one by one and in batches, guards intact")
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  constexpr std::size_t guard = 16, most = 2 * (64 * 1152 + 64) + 512;
  buffer<cuda_backend, std::byte> from{backend, memory_space::pinned, most};
  buffer<cuda_backend, std::byte> device{backend, memory_space::device, most};
  buffer<cuda_backend, std::byte> to{backend, memory_space::pinned, most};
  for (std::size_t i = 0; i < most; ++i) { from[i] = static_cast<std::byte>(i * 11 + (i >> 8U)); }
  for (std::size_t const pitch : {92, 132, 160, 192, 384, 576, 584, 656, 1152}) {
    for (std::size_t const tokens : {1, 3, 16, 17, 64}) {
      for (std::size_t const offset : {0, 4}) {
        for (bool const by_rows : {false, true}) {
          std::size_t const block = pitch * tokens;
          std::vector<copy_run> there, back;
          for (std::size_t b = 0; b < 2; ++b) {
            for (std::size_t at = 0; at < block; at += by_rows ? pitch : block) {
              std::size_t const place = guard + offset + b * block + at;
              std::size_t const bytes = by_rows ? pitch : block;
              there.push_back({device.data() + place, from.data() + place, bytes});
              back.push_back({to.data() + place, device.data() + place, bytes});
            }
          }
          std::memset(to.data(), 0xEE, most);
          auto const count = static_cast<std::uint32_t>(there.size());
          REQUIRE(backend.copy(stream, {there.data(), count, copy_direction::host_to_device}) == status::ok);
          REQUIRE(backend.copy(stream, {back.data(), count, copy_direction::device_to_host}) == status::ok);
          REQUIRE(backend.synchronize(stream) == status::ok);
          std::size_t const begin = guard + offset, end = begin + 2 * block;
          REQUIRE(std::memcmp(to.data() + begin, from.data() + begin, end - begin) == 0);
          auto const untouched = [](std::byte value) { return value == std::byte{0xEE}; };
          REQUIRE(std::all_of(to.data(), to.data() + begin, untouched));
          REQUIRE(std::all_of(to.data() + end, to.data() + most, untouched));
        }
      }
    }
  }
}

TEST_CASE("errors are told with call, operation and stream; those that outlive their call end in device_lost")
{
  cuda_error_log log;
  cudaStream_t const stream = cudaStreamPerThread;
  auto const noted = [&](cudaError_t code) {
    return log.note("cudaLaunchKernel", code, status::invalid_state, "gather", &stream);
  };
  CHECK(noted(cudaErrorInvalidValue) == status::invalid_argument);
  CHECK_FALSE(log.device_lost());
  CHECK(noted(cudaErrorIllegalAddress) == status::device_lost);
  CHECK(log.device_lost());
  CHECK(log.last_error().find("cudaLaunchKernel(gather) on stream 0x2") != std::string::npos);
  CHECK(log.last_error().find("cudaErrorIllegalAddress (700)") != std::string::npos);
}

// After a fault nothing of the process can use the device: a process of its own runs this.
TEST_CASE("faulting kernel, in a process of its own" * doctest::skip())
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  auto const event = backend.create_event();
  buffer<cuda_backend, std::byte> memory{backend, memory_space::device, 64};
  copy_run const run{memory.data(), memory.data() + 32, 32};
  auto* const nowhere = reinterpret_cast<std::uint32_t*>(std::uintptr_t{64});
  REQUIRE(backend.record(stream, event) == status::ok);
  REQUIRE(backend.launch(stream, fill_words{.target = nowhere, .count = 1, .value = 1}) == status::ok);
  CHECK(backend.synchronize(stream) == status::device_lost);
  CHECK(backend.device_lost());
  CHECK(backend.last_error().find("cudaStreamSynchronize() on stream 0x") == 0);
  CHECK(backend.last_error().find("cudaErrorIllegalAddress") != std::string::npos);
  CHECK(backend.launch(stream, fill_words{.target = memory.data(), .count = 1}) == status::device_lost);
  CHECK(backend.copy(stream, {&run, 1, copy_direction::device_to_device}) == status::device_lost);
  CHECK(backend.record(stream, event) == status::device_lost);
  CHECK(backend.wait(stream, event) == status::device_lost);
  CHECK(backend.done(event) == event_state::failed);
  CHECK(backend.wait_any({&event, 1}, no_deadline) == status::device_lost);
  CHECK(backend.synchronize() == status::device_lost);
}

TEST_CASE("a kernel that faults ends in device_lost for every later call")
{
  char path[4096] = {};
  REQUIRE(readlink("/proc/self/exe", path, sizeof(path) - 1) > 0);
  std::string call{"'"};
  call.append(path).append("' --no-skip --test-case='faulting kernel*' >/dev/null 2>&1");
  CHECK(std::system(call.c_str()) == 0);
}

TEST_CASE("cuda_backend keeps the text of a refused call and leaves no error pending")
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  std::byte* const nowhere = reinterpret_cast<std::byte*>(std::uintptr_t{64});
  copy_run const run{nowhere, nowhere + 64, 32};
  status const refused = backend.copy(stream, {&run, 1, copy_direction::device_to_device});
  CHECK(refused != status::ok);
  CHECK(refused != status::device_lost);
  CHECK(backend.last_error().find("cudaMemcpyAsync") != std::string::npos);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_FALSE(backend.device_lost());
  CHECK_THROWS_AS(cuda_backend{cuda_options{.device = 1000}}, configuration_error);
  CHECK_THROWS_AS(cuda_backend{cuda_options{.max_scratch_bytes = std::size_t{1} << 30U}}, configuration_error);
  std::string const text =
    text_of_resource_error([&] { static_cast<void>(backend.allocate(memory_space::device, std::size_t{1} << 50U)); });
  CHECK(text.find("cudaMalloc") != std::string::npos);
  CHECK(text.find("1125899906842624 B") != std::string::npos);
  CHECK(backend.device_bytes() == 0);
}

TEST_SUITE_END();
