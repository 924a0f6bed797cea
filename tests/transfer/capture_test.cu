#include "../support/cache.hpp"
#include "../support/device_heap.hpp"
#include "transfer_engine_contract.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/store/host_store.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/transfer/batch_copy_engine.hpp>
#include <pulseinfer/transfer/fragment_copy_engine.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;

namespace pulseinfer_test {

/// A step of one layer with everything that runs between projection and attention, at addresses that never change: what a
/// lockstep engine captures. Keys and queries of each step are drawn by (seed, step), so that two of these see the same.
class fixed_step {
 public:
  static constexpr std::uint32_t rows = 3, kv_heads = 2, query_heads = 4, dim = 16, block_tokens = 4;
  static constexpr std::uint32_t max_blocks = 64, selected = 8, lease = 20, first_tokens = 100;
  static constexpr std::uint32_t slots = rows * (lease + max_blocks);

  explicit fixed_step(cuda_backend& made)
    : backend{made},
      stream{made.create_stream()},
      copies{made.create_stream(stream_priority::high)},
      planned{made.create_event()},
      arrived{made.create_event()},
      layout{make_block_layout(shape())},
      selector{
        solo_head_selector<>{
          .budget_tokens = selected * block_tokens, .sink_tokens = block_tokens, .recent_tokens = block_tokens}
          .bind(
            made, selector_limits{.geometry = shape(), .layout = layout, .max_rows = rows, .max_blocks = max_blocks})},
      engine{gather_scatter_engine{.groups = 3, .rows_per_landing = 1}.bind(made, transfer_limits{.max_rows = rows})},
      digest_bytes{selector.digest_bytes(layer_id{0})}
  {
    info = words<row_info>(rows);
    ids = words<row_id>(rows);
    sequence = words<std::uint32_t>(rows);
    step = words<std::uint32_t>(1);
    slot_of = words<slot_id>(rows * max_blocks);
    slot_words = words<slot_word>(slots);
    leases = words<slot_id>(rows * lease);
    lease_count = words<std::uint32_t>(rows);
    host_blocks = words<host_block_id>(rows * max_blocks);
    chosen = words<block_id>(rows * selected);
    counts = words<std::uint32_t>(8 * rows);
    previous = words<std::uint32_t>(rows * ((max_blocks + 31) / 32));
    listed = words<slot_id>(rows * max_blocks);
    landed = words<slot_id>(rows * selected);
    lane_entries = words<recall_entry>(rows * selected);
    entries = words<recall_entry>(rows * selected);
    row_begin = words<std::uint32_t>(rows + 1);
    failed = words<std::uint32_t>(rows * selected);
    mailbox = words<row_mailbox>(rows);
    pool = words<std::byte>(slots * layout.block_bytes);
    store = words<std::byte>(rows * max_blocks * layout.block_bytes);
    bases = words<std::byte*>(2);
    digests = words<std::byte>(rows * max_blocks * digest_bytes);
    extents = words<std::int32_t>(rows);
    offsets = words<std::uint64_t>(2);
    keys = words<float>(rows * kv_heads * dim);
    values = words<float>(rows * kv_heads * dim);
    queries = words<float>(rows * query_heads * dim);
    out = words<float>(rows * query_heads * dim);
    lse = words<float>(rows * query_heads);
    set_up();
  }
  fixed_step(fixed_step&&) = delete;
  ~fixed_step() { static_cast<void>(backend.synchronize()); }

  /// What the host does before a step: lengths, the open block's slot, the step's keys and queries.
  void prepare(std::uint32_t number)
  {
    REQUIRE(backend.synchronize(stream) == status::ok);
    std::mt19937 random{1000 + number};
    std::normal_distribution<float> normal{0.0F, 1.0F};
    for (slab<cuda_backend>* const tensor : {&keys, &values, &queries}) {
      for (std::uint64_t i = 0; i < tensor->bytes() / sizeof(float); ++i) { tensor->as<float>()[i] = normal(random); }
    }
    *step.as<std::uint32_t>() = 10 + number;
    for (std::uint32_t r = 0; r < rows; ++r) {
      info.as<row_info>()[r].tokens = static_cast<std::int32_t>(first_tokens + 10 * r + number + 1);
      std::uint32_t const block = static_cast<std::uint32_t>(info.as<row_info>()[r].tokens - 1) / block_tokens;
      // Every block that is written lies in a slot of the host's own and is never evicted.
      auto const slot = static_cast<slot_id>(rows * lease + r * max_blocks + block);
      slot_of.as<slot_id>()[r * max_blocks + block] = slot;
      slot_words.as<slot_word>()[to_index(slot)] = {.block = static_cast<block_id>(block), .state = slot_state::open};
    }
  }

  void enqueue()
  {
    row_list const list{.ids = ids.as<row_id>(), .count = rows};
    residency_ref const residency{
      .slot_of = slot_of.as<slot_id>(),
      .slots = slot_words.as<slot_word>(),
      .lease = leases.as<slot_id>(),
      .lease_count = lease_count.as<std::uint32_t>(),
      .layers = 1,
      .lanes = rows,
      .max_blocks = max_blocks,
      .max_lease = lease};
    slot_pool_ref const slot_pool{
      .layer_base = bases.as<std::byte*>(), .slot_stride = layout.block_bytes, .slots = slots};
    std::uint32_t* const count = counts.as<std::uint32_t>();
    selection_ref const selection{
      .ids = chosen.as<block_id>(),
      .counts = count,
      .previous = previous.as<std::uint32_t>(),
      .max_selected = selected,
      .lanes = rows,
      .previous_words = (max_blocks + 31) / 32};
    digest_store_ref const digest_store{
      .base = digests.data(),
      .extent_of = extents.as<std::int32_t>(),
      .layer_offset = offsets.as<std::uint64_t>(),
      .block_bytes = offsets.as<std::uint64_t>() + 1,
      .extent_bytes = max_blocks * digest_bytes,
      .extent_blocks = max_blocks,
      .max_extents = 1};
    tensor_view const asked = contiguous_tensor(queries.as<float>(), dtype::float32, rows, query_heads, dim);
    need(append_tokens{
      .layer = layer_id{0},
      .rows = list,
      .info = info.as<row_info>(),
      .keys = contiguous_tensor(keys.as<float>(), dtype::float32, rows, kv_heads, dim),
      .values = contiguous_tensor(values.as<float>(), dtype::float32, rows, kv_heads, dim),
      .residency = residency,
      .pool = slot_pool,
      .layout = layout});
    REQUIRE(
      selector.digest_async(
        stream,
        {.layer = layer_id{0},
         .rows = list,
         .info = info.as<row_info>(),
         .residency = residency,
         .pool = slot_pool,
         .layout = layout,
         .digests = digest_store,
         .most_touched = 1}) == status::ok);
    REQUIRE(
      selector.select_async(
        stream,
        {.layer = layer_id{0},
         .rows = list,
         .info = info.as<row_info>(),
         .queries = asked,
         .digests = digest_store,
         .selection = selection,
         .most_blocks = max_blocks}) == status::ok);
    lane_table_ref const table{
      .listed = listed.as<slot_id>(),
      .listed_count = count + rows,
      .landed = landed.as<slot_id>(),
      .landed_count = count + 2 * rows,
      .stride = max_blocks,
      .max_selected = selected};
    lane_plan_ref const lanes{
      .entries = lane_entries.as<recall_entry>(),
      .misses = count + 3 * rows,
      .hits = count + 4 * rows,
      .flying = count + 5 * rows,
      .stalled = count + 6 * rows};
    need(resolve_blocks<lru>{
      .rows = list,
      .selection = selection,
      .residency = residency,
      .pool = slot_pool,
      .host_blocks = host_blocks.as<host_block_id>(),
      .plan = lanes,
      .table = table,
      .step = step.as<std::uint32_t>(),
      .layer = layer_id{0}});
    need(plan_recall{
      .rows = list,
      .lanes = lanes,
      .entries = entries.as<recall_entry>(),
      .row_begin = row_begin.as<std::uint32_t>(),
      .failed = failed.as<std::uint32_t>(),
      .mailbox = mailbox.as<row_mailbox>(),
      .sequence = sequence.as<std::uint32_t>(),
      .block_bytes = layout.block_bytes,
      .max_selected = selected});
    REQUIRE(backend.record(stream, planned) == status::ok);
    REQUIRE(backend.wait(copies, planned) == status::ok);
    REQUIRE(
      engine.recall_async(
        copies,
        {.entries = entries.as<recall_entry>(),
         .row_begin = row_begin.as<std::uint32_t>(),
         .failed = failed.as<std::uint32_t>(),
         .rows = list,
         .host =
           {.slab_base = bases.as<std::byte*>() + 1, .block_stride = layout.block_bytes, .blocks = rows * max_blocks},
         .pool = slot_pool,
         .layer = layer_id{0},
         .block_bytes = layout.block_bytes,
         .capacity = rows * selected},
        {.mailbox = mailbox.as<row_mailbox>(), .sequence = sequence.as<std::uint32_t>(), .residency = residency}) ==
      status::ok);
    REQUIRE(backend.record(copies, arrived) == status::ok);
    REQUIRE(backend.wait(stream, arrived) == status::ok);
    need(paged_attention{
      .table =
        {.slots = listed.as<slot_id>(),
         .counts = count + rows,
         .info = info.as<row_info>(),
         .pool = slot_pool,
         .layout = layout,
         .layer = layer_id{0},
         .stride = max_blocks},
      .rows = list,
      .queries = asked,
      .out = contiguous_tensor(out.as<float>(), dtype::float32, rows, query_heads, dim),
      .lse = lse.as<float>(),
      .scale = 0.25F});
  }

  /// The tables, books and outputs of a step, byte by byte.
  [[nodiscard]] std::vector<std::byte> state()
  {
    REQUIRE(backend.synchronize(stream) == status::ok);
    std::vector<std::byte> all;
    for (slab<cuda_backend>* const part :
         {&slot_of, &slot_words, &chosen, &counts, &previous, &listed, &landed, &entries, &row_begin, &mailbox, &pool,
          &digests, &out, &lse}) {
      all.insert(all.end(), part->data(), part->data() + part->bytes());
    }
    return all;
  }
  [[nodiscard]] std::uint32_t misses() const { return row_begin.as<std::uint32_t>()[rows]; }

  cuda_backend& backend;
  cuda_backend::stream_ref stream, copies;
  cuda_backend::event_ref planned, arrived;

 private:
  static kv_geometry shape()
  {
    return {
      .layers = 1,
      .query_heads = query_heads,
      .kv_heads = kv_heads,
      .head_dim = dim,
      .block_tokens = block_tokens,
      .key_type = dtype::float32,
      .value_type = dtype::float32};
  }

  template <class T>
  [[nodiscard]] slab<cuda_backend> words(std::uint64_t count)
  {
    slab<cuda_backend> memory{backend, memory_space::pinned, count * sizeof(T)};
    std::memset(memory.data(), 0, memory.bytes());
    return memory;
  }

  template <class Op>
  void need(Op const& op)
  {
    REQUIRE(backend.launch(stream, op) == status::ok);
  }

  void set_up()
  {
    std::mt19937 random{77};
    std::normal_distribution<float> normal{0.0F, 1.0F};
    bases.as<std::byte*>()[0] = pool.data();
    bases.as<std::byte*>()[1] = store.data();
    offsets.as<std::uint64_t>()[1] = digest_bytes;
    for (std::uint64_t i = 0; i < store.bytes() / sizeof(float); ++i) {
      reinterpret_cast<float*>(store.data())[i] = normal(random);
    }
    for (slab<cuda_backend>* const absent : {&slot_of, &chosen, &listed, &landed}) {
      std::memset(absent->data(), 0xFF, absent->bytes());
    }
    for (std::uint32_t r = 0; r < rows; ++r) {
      ids.as<row_id>()[r] = static_cast<row_id>(r);
      sequence.as<std::uint32_t>()[r] = 1;
      extents.as<std::int32_t>()[r] = static_cast<std::int32_t>(r);
      lease_count.as<std::uint32_t>()[r] = lease;
      info.as<row_info>()[r] = {
        .new_tokens = 1, .token_offset = static_cast<std::int32_t>(r), .mode = row_mode::sparse_offloaded};
      for (std::uint32_t i = 0; i < lease; ++i) {
        auto const slot = static_cast<slot_id>(r * lease + i);
        leases.as<slot_id>()[r * lease + i] = slot;
        slot_words.as<slot_word>()[to_index(slot)].state = slot_state::empty;
      }
      for (std::uint32_t b = 0; b < max_blocks; ++b) {
        host_blocks.as<host_block_id>()[r * max_blocks + b] = static_cast<host_block_id>(r * max_blocks + b);
      }
    }
    // Digests of the prompt: random, so that selections change with the queries.
    for (std::uint64_t i = 0; i < digests.bytes() / 2; ++i) {
      store_from_float(digests.data(), dtype::float16, i, 0.3F * normal(random));
    }
  }

  block_layout layout;
  bound_selector_t<solo_head_selector<>, cuda_backend> selector;
  bound_transfer_t<gather_scatter_engine, cuda_backend> engine;
  std::uint64_t digest_bytes;
  slab<cuda_backend> info, ids, sequence, step, slot_of, slot_words, leases, lease_count, host_blocks, chosen, counts,
    previous, listed, landed, lane_entries, entries, row_begin, failed, mailbox, pool, store, bases, digests, extents,
    offsets, keys, values, queries, out, lse;
};

}  // namespace pulseinfer_test

using namespace pulseinfer_test;

TEST_CASE("a captured step replays 64 times as it runs launch by launch: selection, tables, slots and outputs alike")
{
  cuda_backend backend;
  fixed_step eager{backend};
  fixed_step captured{backend};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  captured.prepare(0);
  REQUIRE(cudaStreamBeginCapture(captured.stream.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  captured.enqueue();
  REQUIRE(cudaStreamEndCapture(captured.stream.stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&runnable, graph, 0) == cudaSuccess);
  std::uint32_t recalled = 0;
  for (std::uint32_t step = 0; step < 64; ++step) {
    eager.prepare(step);
    eager.enqueue();
    captured.prepare(step);
    REQUIRE(cudaGraphLaunch(runnable, captured.stream.stream) == cudaSuccess);
    REQUIRE(eager.state() == captured.state());
    recalled += eager.misses();
  }
  CHECK(recalled > 20);  // hysteresis keeps most of a selection, not all
  CHECK(backend.last_error().empty());
  CHECK(cudaGraphExecDestroy(runnable) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

namespace pulseinfer_test {

/// Recalls on the GPU into and out of a scene that lies in mapped memory, byte by byte with guards: what the contract asks of an
/// engine on any backend.
template <class Engine>
void recalls_on_the_gpu(Engine const& engine)
{
  for (std::uint32_t const pitch : {92U, 132U, 192U, 584U, 1152U, 37U}) {
    for (std::uint32_t const tokens : {1U, 3U, 16U, 17U}) {
      for (std::uint32_t const offset : {0U, 4U}) {
        CAPTURE(pitch);
        CAPTURE(tokens);
        CAPTURE(offset);
        device_heap_scope const scope;
        cuda_backend backend;  // ends before the scope does: its own lists lie in the scope's memory, too
        auto const finish = [&](cuda_stream_ref stream) { REQUIRE(backend.synchronize(stream) == status::ok); };
        recalls_arrive(
          engine, backend,
          {.layout = layout_of_pitch(pitch, tokens, 2, tokens == 3, 20), .offset = offset, .slot_padding = offset * 3},
          finish);
        CHECK(backend.last_error() == "");
      }
    }
  }
}

}  // namespace pulseinfer_test

namespace pulseinfer_test {

/// Eight rows that share most of what they select, into and out of a scene that lies in mapped memory.
inline void shared_recalls_on_the_gpu(std::uint32_t pitch, std::uint32_t tokens, std::uint32_t offset)
{
  constexpr std::uint32_t rows = 8, blocks = 12;
  cuda_backend backend;
  cuda_stream_ref const stream = backend.create_stream();
  scene_sizes const sizes{
    .layout = layout_of_pitch(pitch, tokens),
    .layers = 2,
    .host_blocks = blocks,
    .slots = rows * blocks,
    .offset = offset};
  auto bound = gather_scatter_engine{.groups = 5, .measure = false}.bind(
    backend,
    transfer_limits{.max_rows = rows, .max_entries = 2 * rows * blocks, .head_groups = 2, .layout = sizes.layout});
  std::mt19937 random{pitch + tokens};
  for (std::uint32_t const apart : {0U, 2U, blocks}) {  // of each row's blocks, those that are its own
    for (bool const told : {true, false}) {
      device_heap_scope const scope;
      recall_scene scene{sizes};
      scene.begin_plan(1);
      std::vector<std::uint32_t> slots(rows * blocks);
      for (std::uint32_t i = 0; i < slots.size(); ++i) { slots[i] = i; }
      std::shuffle(slots.begin(), slots.end(), random);
      for (std::uint32_t row = 0; row < rows; ++row) {
        scene.add_row(static_cast<std::int32_t>(row));
        for (std::uint32_t block = 0; block < blocks; ++block) {
          std::uint32_t const source = block >= blocks - apart ? (block + 5 * row) % blocks : block;
          scene.add_entry(block % 2, block, source, slots[row * blocks + block]);
        }
      }
      recall_plan_ref plan = scene.plan();
      plan.may_share = told;
      REQUIRE(bound.recall_async(stream, plan, scene.landed()) == status::ok);
      REQUIRE(backend.synchronize(stream) == status::ok);
      scene.expect_all_arrived();
      REQUIRE(scene.difference() == "");
      for (std::uint32_t place = 0; place < rows; ++place) { REQUIRE(scene.has_landed(place)); }
    }
  }
  CHECK(backend.last_error() == "");
}

}  // namespace pulseinfer_test

TEST_CASE("law 1: a host block that rows share is read once on a GPU and reaches a slot of each, whatever its size")
{
  REQUIRE(cudaHostRegister(device_heap::begin(), device_heap::size, cudaHostRegisterMapped) == cudaSuccess);
  struct shape {
    std::uint32_t pitch, tokens, offset;
  };
  for (shape const& s :
       {shape{37, 1, 0}, shape{37, 17, 0}, shape{92, 1, 4}, shape{92, 17, 4}, shape{256, 17, 0}, shape{584, 1, 0}}) {
    CAPTURE(s.pitch);
    CAPTURE(s.tokens);
    shared_recalls_on_the_gpu(s.pitch, s.tokens, s.offset);
  }
  REQUIRE(cudaHostUnregister(device_heap::begin()) == cudaSuccess);
}

TEST_CASE("entries of many rows are joined on a GPU as on a CPU, place for place but for their order")
{
  cuda_backend backend;
  cuda_stream_ref const stream = backend.create_stream();
  std::mt19937 random{8};
  for (std::uint32_t const count : {0U, 1U, 500U, 9000U, 40000U}) {
    for (std::uint32_t const blocks : {3U, 700U, 1000000U}) {
      auto const pinned = [&](std::uint64_t bytes) {
        return slab<cuda_backend>{backend, memory_space::pinned, bytes + 64};
      };
      slab<cuda_backend> const given = pinned(count * sizeof(recall_entry)),
                               joined = pinned(count * sizeof(recall_entry));
      slab<cuda_backend> const of = pinned(count * sizeof(target_span)), targets = pinned(count * sizeof(slot_id));
      slab<cuda_backend> const begins = pinned(5 * sizeof(std::uint32_t)),
                               stands = pinned(count * sizeof(join_entries::standing));
      slab<cuda_backend> const table{
        backend, memory_space::device, join_entries::table_places(count) * sizeof(join_entries::found)};
      auto* const entries = given.as<recall_entry>();
      std::vector<std::pair<std::uint64_t, slot_id>> wanted;
      for (std::uint32_t i = 0; i < count; ++i) {
        entries[i] = {
          .source = static_cast<host_block_id>(random() % blocks),
          .target = static_cast<slot_id>(i),
          .lane = static_cast<lane_id>(random() % 12),
          .block = static_cast<block_id>(i)};
        wanted.emplace_back(to_index(entries[i].source) * 3 + to_index(entries[i].lane) % 3, entries[i].target);
      }
      auto* const words = begins.as<std::uint32_t>();
      words[3] = 0;
      words[4] = count;
      join_entries const op{
        .plan = {.entries = entries, .row_begin = words + 3, .head_groups = 3, .capacity = count},
        .row_count = 1,
        .joined = joined.as<recall_entry>(),
        .of = of.as<target_span>(),
        .targets = targets.as<slot_id>(),
        .row_begin = words,
        .table = table.as<join_entries::found>(),
        .stands = stands.as<join_entries::standing>()};
      REQUIRE(backend.launch(stream, op) == status::ok);
      REQUIRE(backend.synchronize(stream) == status::ok);
      std::vector<std::pair<std::uint64_t, slot_id>> found;
      std::vector<std::uint64_t> sources;
      for (std::uint32_t i = 0; i < words[1]; ++i) {
        recall_entry const& entry = op.joined[i];
        std::uint64_t const source = to_index(entry.source) * 3 + to_index(entry.lane) % 3;
        sources.push_back(source);
        if (op.of[i].count == 0) { found.emplace_back(source, entry.target); }
        for (std::uint32_t t = 0; t < op.of[i].count; ++t) {
          found.emplace_back(source, op.targets[op.of[i].begin + t]);
        }
      }
      std::sort(wanted.begin(), wanted.end());
      std::sort(found.begin(), found.end());
      std::sort(sources.begin(), sources.end());
      CHECK(words[0] == 0);
      CHECK(found == wanted);
      CHECK(std::adjacent_find(sources.begin(), sources.end()) == sources.end());
    }
  }
  CHECK(backend.last_error() == "");
}

TEST_CASE("law 1: runs go both ways byte by byte on a GPU by either mover, also captured, where no copy becomes a node")
{
  cuda_backend backend;
  cuda_stream_ref const stream = backend.create_stream();
  constexpr std::uint64_t bytes = std::uint64_t{3} << 20U;
  slab<cuda_backend> const slots{backend, memory_space::device, bytes};
  slab<cuda_backend> const host{backend, memory_space::pinned, bytes};
  slab<cuda_backend> const back{backend, memory_space::pinned, bytes};
  std::mt19937 random{12};
  for (std::uint64_t i = 0; i < bytes; ++i) { host.data()[i] = static_cast<std::byte>(random()); }
  for (std::uint64_t const from : {std::uint64_t{0}, std::uint64_t{6000}, never_by_copy_engine}) {
    auto bound =
      gather_scatter_engine{.groups = 6, .copy_engine_from_bytes = from}.bind(backend, transfer_limits{.max_rows = 1});
    for (bool const captured : {false, true}) {
      REQUIRE(cudaMemset(slots.data(), 0xEE, bytes) == cudaSuccess);
      std::memset(back.data(), 0xEE, bytes);
      std::vector<copy_run> up, down;
      std::vector<std::byte> wanted(bytes, std::byte{0xEE});
      for (std::uint64_t at = 0, i = 0;; ++i) {
        std::uint64_t const length = i % 5 == 0 ? 40000 : i % 5 == 1 ? 4096 : random() % 9000;
        if (at + length + 16 > bytes) { break; }
        up.push_back({slots.data() + at, host.data() + at, length});
        down.push_back({back.data() + at, slots.data() + at, length});
        std::copy_n(host.data() + at, length, wanted.data() + at);
        at += length + (i % 2 == 0 ? 16 : random() % 16);
      }
      auto const move = [&] {
        auto const count = static_cast<std::uint32_t>(up.size());
        REQUIRE(bound.move_async(stream, {up.data(), count, copy_direction::host_to_device}) == status::ok);
        REQUIRE(bound.move_async(stream, {down.data(), count, copy_direction::device_to_host}) == status::ok);
      };
      if (captured) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t runnable = nullptr;
        REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        CHECK(backend.is_capturing(stream));
        move();
        REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
        std::size_t count = 0;
        REQUIRE(cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess);
        std::vector<cudaGraphNode_t> nodes(count);
        REQUIRE(cudaGraphGetNodes(graph, nodes.data(), &count) == cudaSuccess);
        for (cudaGraphNode_t const node : nodes) {
          cudaGraphNodeType type{};
          REQUIRE(cudaGraphNodeGetType(node, &type) == cudaSuccess);
          REQUIRE(type == cudaGraphNodeTypeKernel);
        }
        // The lists went into the graph: what becomes of them afterwards does not matter.
        std::fill(up.begin(), up.end(), copy_run{});
        std::fill(down.begin(), down.end(), copy_run{});
        REQUIRE(cudaGraphInstantiate(&runnable, graph, 0) == cudaSuccess);
        REQUIRE(cudaGraphLaunch(runnable, stream.stream) == cudaSuccess);
        REQUIRE(backend.synchronize(stream) == status::ok);
        REQUIRE(cudaGraphExecDestroy(runnable) == cudaSuccess);
        REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
      } else {
        CHECK_FALSE(backend.is_capturing(stream));
        move();
        REQUIRE(backend.synchronize(stream) == status::ok);
      }
      CHECK(std::memcmp(back.data(), wanted.data(), bytes) == 0);
    }
  }
  // What is measured where nothing is given is told, and found in both directions.
  auto const measured =
    gather_scatter_engine{}.bind(backend, transfer_limits{.max_rows = 1, .layout = layout_of_pitch(1024, 16)});
  CHECK(measured.report().gather_rates.size() == tried_gather_groups.size());
  REQUIRE(measured.report().move_rates.size() == 2 * tried_run_bytes.size());
  for (move_rate const& rate : measured.report().move_rates) {
    CHECK(rate.copy_engine > 0);
    CHECK(rate.gather > 0);
  }
  CHECK(backend.last_error() == "");
}

TEST_CASE(
  "law 1: blocks of a store that grows go both ways on a GPU, over the bounds of its registrations, while it grows")
{
  cuda_backend backend;
  cuda_stream_ref const stream = backend.create_stream();
  constexpr std::uint64_t bytes = 96 * 1024;  // blocks lie across registrations
  constexpr std::uint32_t first = 20, all = 400;
  block_layout layout;
  layout.block_bytes = bytes;
  layout.alignment = 16;
  {
    host_store<cuda_backend> store{
      backend,
      2,
      1,
      layout,
      {.blocks = first, .most_blocks = all, .growth_chunk_bytes = host_store<cuda_backend>::smallest_chunk_bytes}};
    CHECK(backend.host_pool_warning() == "");
    slab<cuda_backend> const slots{backend, memory_space::device, std::uint64_t{all} * bytes};
    auto bound =
      gather_scatter_engine{.groups = 4, .copy_engine_from_bytes = 0}.bind(backend, transfer_limits{.max_rows = 1});
    auto const at = [&](std::uint32_t b) { return store.ref().address(layer_id{1}, 0, static_cast<host_block_id>(b)); };
    auto const move = [&](std::uint32_t from, std::uint32_t to, copy_direction direction) {
      std::vector<copy_run> runs;
      for (std::uint32_t b = from; b < to; ++b) {
        std::byte* const slot = slots.data() + std::uint64_t{b} * bytes;
        bool const up = direction == copy_direction::host_to_device;
        runs.push_back({.target = up ? slot : at(b), .source = up ? at(b) : slot, .bytes = bytes});
      }
      REQUIRE(
        bound.move_async(stream, {runs.data(), static_cast<std::uint32_t>(runs.size()), direction}) == status::ok);
      REQUIRE(backend.synchronize(stream) == status::ok);
    };
    auto const write = [&](std::uint32_t from, std::uint32_t to) {
      for (std::uint32_t b = from; b < to; ++b) {
        REQUIRE(
          cudaMemset(slots.data() + std::uint64_t{b} * bytes, static_cast<int>(b % 251 + 1), bytes) == cudaSuccess);
      }
      REQUIRE(backend.synchronize() == status::ok);
      move(from, to, copy_direction::device_to_host);
    };
    auto const arrived = [&](std::uint32_t to) {
      bool right = true;
      for (std::uint32_t b = 0; b < to; ++b) {
        auto const wanted = static_cast<std::byte>(b % 251 + 1);
        right = right && std::all_of(at(b), at(b) + bytes, [&](std::byte one) { return one == wanted; });
      }
      return right;
    };
    write(0, first);
    REQUIRE(store.grow(all - first) == status::ok);
    std::uint32_t known = first;
    while (store.growth().under_way) {
      REQUIRE(cudaMemset(slots.data(), 0xEE, slots.bytes()) == cudaSuccess);
      move(0, known, copy_direction::host_to_device);
      static_cast<void>(store.adopt_growth());
      if (store.blocks() > known) { write(known, store.blocks()); }
      known = store.blocks();
    }
    CHECK(store.growth_refusal() == "");
    REQUIRE(known == all);
    CHECK(arrived(all));
    // All of it comes back, by either mover.
    for (std::uint64_t const from : {std::uint64_t{0}, never_by_copy_engine}) {
      auto mover = gather_scatter_engine{.groups = 4, .copy_engine_from_bytes = from}.bind(
        backend, transfer_limits{.max_rows = 1});
      slab<cuda_backend> const seen{backend, memory_space::pinned, slots.bytes()};
      REQUIRE(cudaMemset(slots.data(), 0xEE, slots.bytes()) == cudaSuccess);
      copy_run const whole{.target = slots.data(), .source = at(0), .bytes = slots.bytes()};
      REQUIRE(mover.move_async(stream, {&whole, 1, copy_direction::host_to_device}) == status::ok);
      copy_run const down{.target = seen.data(), .source = slots.data(), .bytes = slots.bytes()};
      REQUIRE(mover.move_async(stream, {&down, 1, copy_direction::device_to_host}) == status::ok);
      REQUIRE(backend.synchronize(stream) == status::ok);
      CHECK(std::memcmp(seen.data(), at(0), slots.bytes()) == 0);
    }
  }
  CHECK(backend.pinned_bytes() == 0);
  CHECK(backend.host_pool_teardown() > nanoseconds{0});
  CHECK(backend.last_error() == "");
}

// Reports: vllm-project/vllm#45466, vllm-project/vllm#57019
TEST_CASE("law 1: each transfer engine brings every block to its slot on a GPU, whatever the layout")
{
  REQUIRE(cudaHostRegister(device_heap::begin(), device_heap::size, cudaHostRegisterMapped) == cudaSuccess);
  // Measuring would leave words of the backend's in the heap that the next scene takes for its own.
  SUBCASE("gather") { recalls_on_the_gpu(gather_scatter_engine{.measure = false}); }
  SUBCASE("gather, rows by themselves")
  {
    recalls_on_the_gpu(gather_scatter_engine{.groups = 1, .rows_per_landing = 1, .measure = false});
  }
  SUBCASE("fragments") { recalls_on_the_gpu(fragment_copy_engine{}); }
  SUBCASE("batches") { recalls_on_the_gpu(batch_copy_engine{}); }
  REQUIRE(cudaHostUnregister(device_heap::begin()) == cudaSuccess);
}

TEST_SUITE_END();
