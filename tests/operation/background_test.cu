#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/replacement/lru.hpp>
#include <pulseinfer/store/slab.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;

namespace pulseinfer_test {

/// With groups of so many threads, by the generic body.
template <class Op>
struct in_groups : Op {
  std::uint32_t threads = 1;

  [[nodiscard]] launch_shape shape() const { return {.items = Op::shape().items, .group_threads = threads}; }
};

/// Lanes with leases in every state, and selections of which parts are resident, missing, under way or not stored, all in one
/// piece of memory that host and device read.
struct background_scene {
  static constexpr std::uint32_t rows = 3, groups = 2, lanes = rows * groups, layers = 2, max_blocks = 300,
                                 selected = 48;

  background_scene(cuda_backend& backend, std::uint32_t leased, std::uint32_t most, std::uint32_t seed)
    : lease{leased}, most_misses{most}, memory{backend, memory_space::pinned, std::size_t{1} << 20U}
  {
    std::memset(memory.data(), 0, memory.bytes());
    std::mt19937 random{seed};
    take(ids, lanes * selected);
    take(counts, lanes);
    take(slot_of, layers * lanes * max_blocks);
    take(words, lanes * lease);
    take(leases, layers * lanes * lease);
    take(lease_counts, layers * lanes);
    take(host, rows * max_blocks);
    take(entries, lanes * selected);
    take(told, 4 * lanes);
    take(foresight, lanes);
    take(step, 1);
    take(list, rows);
    *step = 50;
    std::fill_n(words, lanes * lease, slot_word{});
    std::fill_n(slot_of, layers * lanes * max_blocks, none<slot_id>);
    for (std::uint32_t i = 0; i < rows * max_blocks; ++i) {
      host[i] = random() % 9 == 0 ? none<host_block_id> : static_cast<host_block_id>(i);
    }
    for (std::uint32_t r = 0; r < rows; ++r) { list[r] = static_cast<row_id>((r + 1) % rows); }
    for (std::uint32_t lane = 0; lane < lanes; ++lane) { fill(lane, random); }
  }

  void fill(std::uint32_t lane, std::mt19937& random)
  {
    std::uint32_t const books = lanes + lane;  // of layer 1
    std::vector<std::int32_t> blocks(max_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<std::int32_t> slots(lease);
    std::iota(slots.begin(), slots.end(), static_cast<std::int32_t>(lane * lease));
    std::shuffle(slots.begin(), slots.end(), random);
    lease_counts[books] = lease - random() % 3;
    for (std::uint32_t i = 0; i < lease_counts[books]; ++i) {
      leases[books * lease + i] = static_cast<slot_id>(slots[i]);
      slot_word& word = words[slots[i]];
      word.last_used = 40 + random() % 11;
      word.ahead = random() % 3 == 0 ? 1U : 0U;
      std::uint32_t const kind = random() % 8;
      word.state = kind == 0 ? slot_state::empty
        : kind == 1          ? slot_state::dirty
        : kind == 2          ? slot_state::in_flight
                             : slot_state::clean;
      if (word.state == slot_state::empty) { continue; }
      word.block = static_cast<block_id>(blocks[i]);
      slot_of[books * max_blocks + static_cast<std::uint32_t>(blocks[i])] = static_cast<slot_id>(slots[i]);
    }
    std::shuffle(blocks.begin(), blocks.begin() + std::min(max_blocks, lease + 20), random);
    counts[lane] = selected - random() % 5;
    std::sort(blocks.begin(), blocks.begin() + counts[lane]);
    for (std::uint32_t i = 0; i < counts[lane]; ++i) { ids[lane * selected + i] = static_cast<block_id>(blocks[i]); }
  }

  [[nodiscard]] resolve_background<lru> op() const
  {
    return {
      .rows = {.ids = list, .count = rows},
      .selection = {.ids = ids, .counts = counts, .max_selected = selected, .lanes = lanes},
      .residency =
        {.slot_of = slot_of,
         .slots = words,
         .lease = leases,
         .lease_count = lease_counts,
         .layers = layers,
         .lanes = lanes,
         .max_blocks = max_blocks,
         .max_lease = lease},
      .pool = {.slot_stride = 64, .slots = lanes * lease},
      .host_blocks = host,
      .plan =
        {.entries = entries,
         .misses = told,
         .hits = told + lanes,
         .flying = told + 2 * lanes,
         .stalled = told + 3 * lanes,
         .foresight = foresight},
      .step = step,
      .layer = layer_id{1},
      .head_groups = groups,
      .most_misses = most_misses};
  }

  std::uint32_t lease, most_misses;
  slab<cuda_backend> memory;
  std::size_t used = 0;
  block_id* ids = nullptr;
  std::uint32_t* counts = nullptr;
  slot_id* slot_of = nullptr;
  slot_word* words = nullptr;
  slot_id* leases = nullptr;
  std::uint32_t* lease_counts = nullptr;
  host_block_id* host = nullptr;
  recall_entry* entries = nullptr;
  std::uint32_t* told = nullptr;
  lane_foresight* foresight = nullptr;
  std::uint32_t* step = nullptr;
  row_id* list = nullptr;

 private:
  template <class T>
  void take(T*& array, std::size_t count)
  {
    array = reinterpret_cast<T*>(memory.data() + used);
    used = round_up(used + count * sizeof(T), std::size_t{64});
    REQUIRE(used <= memory.bytes());
  }
};

}  // namespace pulseinfer_test

using namespace pulseinfer_test;

TEST_CASE("resolve_background leaves on a GPU what it leaves on a CPU, by its own kernel and by groups of any size")
{
  cuda_backend backend;
  auto const stream = backend.create_stream();
  std::uint32_t evicted_ahead = 0;  // residents that lose their slot to a block before them and are brought again
  std::uint32_t brought = 0;
  std::uint64_t wasted = 0;
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    for (std::uint32_t const lease : {5U, 60U, 280U}) {
      for (std::uint32_t const most : {1U, 4U, 200U}) {
        background_scene scene{backend, lease, most, seed * 7 + lease + most};
        auto const op = scene.op();
        std::size_t const bytes = scene.used;
        std::vector<std::byte> const before(scene.memory.data(), scene.memory.data() + bytes);
        std::vector<std::byte> scratch(op.scratch_bytes(1) + 16);
        run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
        std::vector<std::byte> const expected(scene.memory.data(), scene.memory.data() + bytes);
        auto const* const old_slots = reinterpret_cast<slot_id const*>(
          before.data() + (reinterpret_cast<std::byte*>(scene.slot_of) - scene.memory.data()));
        for (std::uint32_t lane = 0; lane < background_scene::lanes; ++lane) {
          wasted += scene.foresight[lane].wasted;
          for (std::uint32_t i = 0; i < scene.told[lane]; ++i) {
            block_id const block = scene.entries[lane * background_scene::selected + i].block;
            std::uint32_t const books = background_scene::lanes + lane;
            evicted_ahead += is_none(old_slots[books * background_scene::max_blocks + to_index(block)]) ? 0U : 1U;
            ++brought;
          }
        }
        for (std::uint32_t const threads : {0U, 1U, 32U, 96U}) {
          CAPTURE(threads);
          std::memcpy(scene.memory.data(), before.data(), bytes);
          if (threads == 0) {
            REQUIRE(pulseinfer::detail::kernel_override<resolve_background<lru>>::takes(op));
            REQUIRE(backend.launch(stream, op) == status::ok);
          } else {
            REQUIRE(backend.launch(stream, in_groups<resolve_background<lru>>{op, threads}) == status::ok);
          }
          REQUIRE(backend.synchronize(stream) == status::ok);
          REQUIRE(std::memcmp(scene.memory.data(), expected.data(), bytes) == 0);
        }
      }
    }
  }
  CHECK(brought > 1000);
  CHECK(evicted_ahead > 10);
  CHECK(wasted > 100);
}

TEST_SUITE_END();
