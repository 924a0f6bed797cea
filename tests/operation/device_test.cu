#include "../support/device_heap.hpp"
#include "support/cache.hpp"
#include "support/recall_scene.hpp"
#include "support/selection.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/defer_blocks.hpp>
#include <pulseinfer/operation/exchange_slots.hpp>
#include <pulseinfer/operation/export_append_slots.hpp>
#include <pulseinfer/operation/export_table.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/forget_blocks.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/install_lease.hpp>
#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/list_wanted_blocks.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/order_entries.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/operation/patch_words.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/reset_row.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/operation/score_blocks.hpp>
#include <pulseinfer/operation/select_imported.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/select_window.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/update_digests.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/operation/want_near_blocks.hpp>
#include <pulseinfer/replacement/lru.hpp>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

TEST_SUITE_BEGIN("gpu");

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace pulseinfer_test {

/// The operation with groups of another size: its generic body on the device.
template <operation Op>
struct with_threads {
  static constexpr char const* name = Op::name;
  static constexpr operation_kind kind = Op::kind;

  Op op = {};
  std::uint32_t threads = 0;

  [[nodiscard]] launch_shape shape() const { return {.items = op.shape().items, .group_threads = threads}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const { return op.scratch_bytes(group_threads); }
  [[nodiscard]] operation_cost cost() const { return op.cost(); }
  template <thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, scratch_ref scratch) const
  {
    op(group, item, scratch);
  }
};

/// What may differ between CPU and GPU. `words`: nothing. Others: elements of this type within rounding.
enum class sameness { words, floats, halves, bfloats };

/// The device, and memory beside the heap that its state is kept in.
class device_rig {
 public:
  device_rig()
  {
    REQUIRE(cudaHostRegister(device_heap::begin(), device_heap::size, cudaHostRegisterMapped) == cudaSuccess);
    before_ = static_cast<std::byte*>(std::malloc(device_heap::size));
    expected_ = static_cast<std::byte*>(std::malloc(device_heap::size));
    stream = backend.create_stream();
  }
  device_rig(device_rig&&) = delete;
  ~device_rig()
  {
    std::free(before_);
    std::free(expected_);
    static_cast<void>(cudaHostUnregister(device_heap::begin()));
  }

  /// Runs the operation on the CPU, then with groups of one thread, a warp, and blocks on the GPU, from the same memory. All
  /// of the heap must be the same afterwards. The CPU's result stays.
  template <operation Op>
  void check(Op const& op, sameness how = sameness::words)
  {
    device_heap_pause const pause;
    std::size_t const bytes = device_heap::used();
    std::byte* const heap = device_heap::begin();
    std::memcpy(before_, heap, bytes);
    std::vector<std::byte> scratch(op.scratch_bytes(1) + 16);
    run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
    std::memcpy(expected_, heap, bytes);
    CHECK_MESSAGE(std::memcmp(expected_, before_, bytes) != 0, Op::name << " has nothing to do");
    for (std::uint32_t const threads : {1U, 32U, 96U, 256U}) {
      std::memcpy(heap, before_, bytes);
      REQUIRE(backend.launch(stream, with_threads<Op>{op, threads}) == status::ok);
      compare(Op::name, threads, bytes, how);
    }
    std::memcpy(heap, before_, bytes);
    REQUIRE(backend.launch(stream, op) == status::ok);  // with its own shape and kernel
    compare(Op::name, 0, bytes, how);
    std::memcpy(heap, expected_, bytes);
  }

  /// Runs the operation on the CPU and as its own kernel on the GPU, from the same memory, which must be the same afterwards.
  /// The CPU's result stays.
  template <operation Op>
  void check_kernel(Op const& op, sameness how = sameness::words)
  {
    device_heap_pause const pause;
    REQUIRE(pulseinfer::detail::kernel_override<Op>::takes(op));
    std::size_t const bytes = device_heap::used();
    std::byte* const heap = device_heap::begin();
    std::memcpy(before_, heap, bytes);
    std::vector<std::byte> scratch(op.scratch_bytes(1) + 16);
    run_operation(op, {.data = scratch.data(), .bytes = scratch.size()});
    std::memcpy(expected_, heap, bytes);
    CHECK_MESSAGE(std::memcmp(expected_, before_, bytes) != 0, Op::name << " has nothing to do");
    std::memcpy(heap, before_, bytes);
    REQUIRE(backend.launch(stream, op) == status::ok);
    compare(Op::name, 0, bytes, how);
    std::memcpy(heap, expected_, bytes);
  }

  /// Runs the operation on the GPU. The heap changes.
  template <operation Op>
  void run(Op const& op)
  {
    device_heap_pause const pause;
    REQUIRE(backend.launch(stream, op) == status::ok);
    REQUIRE_MESSAGE(backend.synchronize(stream) == status::ok, Op::name << ": " << backend.last_error());
  }

  cuda_backend backend;
  cuda_backend::stream_ref stream;

 private:
  void compare(char const* name, std::uint32_t threads, std::size_t bytes, sameness how)
  {
    REQUIRE_MESSAGE(backend.synchronize(stream) == status::ok, name << ": " << backend.last_error());
    std::size_t at = 0;
    std::byte const* const heap = device_heap::begin();
    std::size_t const step = how == sameness::words || how == sameness::floats ? 4 : 2;
    for (; at + step <= bytes; at += step) {
      if (std::memcmp(heap + at, expected_ + at, step) != 0 && !near(heap + at, expected_ + at, how)) { break; }
    }
    bool const same = at + step > bytes;
    CHECK_MESSAGE(
      same,
      name << " by groups of " << threads << " differs at byte " << at << " of " << bytes << ": "
           << value(heap + at, how) << " instead of " << value(expected_ + at, how));
  }

  static float value(std::byte const* at, sameness how)
  {
    dtype const type = how == sameness::halves ? dtype::float16
      : how == sameness::bfloats               ? dtype::bfloat16
                                               : dtype::float32;
    return load_as_float(at, type, 0);
  }
  static bool near(std::byte const* a, std::byte const* b, sameness how)
  {
    if (how == sameness::words) { return false; }
    float const tolerance = how == sameness::floats ? 2e-5F : how == sameness::halves ? 2e-3F : 1.6e-2F;
    float const x = value(a, how);
    float const y = value(b, how);
    return std::fabs(x - y) <= tolerance * std::fmax(1.0F, std::fabs(y));
  }

  std::byte* before_ = nullptr;
  std::byte* expected_ = nullptr;
};

inline device_rig& rig()
{
  static device_rig made;
  return made;
}

inline kv_geometry geometry_of(
  dtype type, std::uint32_t kv_heads, std::uint32_t group, std::uint32_t dim, std::uint32_t head_groups = 1)
{
  return {
    .layers = 2,
    .query_heads = kv_heads * group,
    .kv_heads = kv_heads,
    .head_dim = dim,
    .block_tokens = 16,
    .head_groups = head_groups,
    .key_type = type,
    .value_type = type};
}

inline sameness sameness_of(dtype type)
{
  return type == dtype::float16 ? sameness::halves : type == dtype::bfloat16 ? sameness::bfloats : sameness::floats;
}

/// Leases, words and plans of some lanes, with random contents that agree with one another.
template <std::uint32_t LeastBlocks, std::uint32_t MaxBlocks, std::uint32_t MaxLease, std::uint32_t MaxSelected>
class sized_lease_scene {
 public:
  static constexpr std::uint32_t layers = 2, rows = 5, head_groups = 2, lanes = rows * head_groups;
  static constexpr std::uint32_t max_blocks = MaxBlocks, max_lease = MaxLease, max_selected = MaxSelected;
  static constexpr std::uint32_t slots = lanes * (MaxLease + 20);
  static constexpr std::uint32_t ring = 4;

  explicit sized_lease_scene(std::uint32_t seed)
    : random{seed},
      slot_of(layers * lanes * max_blocks, none<slot_id>),
      words(layers * slots),
      lease(layers * lanes * max_lease, none<slot_id>),
      lease_count(layers * lanes),
      spare(layers * lanes * ring, none<slot_id>),
      ids(lanes * max_selected, none<block_id>),
      counts(lanes),
      previous(layers * lanes * ((max_blocks + 31) / 32), 0xA5A5A5A5U),
      host_blocks(rows * max_blocks),
      listed(layers * lanes * max_blocks, none<slot_id>),
      listed_count(layers * lanes),
      landed(lanes * max_selected, none<slot_id>),
      landed_count(lanes),
      entries(lanes * max_selected),
      lane_counts(4 * lanes),
      foresight(lanes),
      plan_entries(lanes * max_selected),
      row_begin(rows + 1),
      failed(lanes * max_selected, 9),
      failures(lanes * max_selected),
      mailbox(rows),
      sequence(rows),
      info(rows),
      step(1, 7U)
  {
    base.assign(layers, nullptr);
    for (std::uint32_t r = 0; r < rows; ++r) { row_ids.push_back(static_cast<row_id>(rows - 1 - r)); }
    std::iota(sequence.begin(), sequence.end(), 100U);
    for (std::size_t i = 0; i < host_blocks.size(); ++i) { host_blocks[i] = static_cast<host_block_id>(i * 3 + 1); }
    std::vector<std::int32_t> order(slots);
    for (std::uint32_t l = 0; l < layers; ++l) {
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::size_t next = 0;
      for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        fill_lane(static_cast<layer_id>(l), static_cast<lane_id>(lane), order, next);
      }
    }
  }

  [[nodiscard]] row_list list() const { return {.ids = row_ids.data(), .count = rows}; }
  [[nodiscard]] residency_ref residency()
  {
    return {
      .slot_of = slot_of.data(),
      .slots = words.data(),
      .lease = lease.data(),
      .lease_count = lease_count.data(),
      .spare = spare.data(),
      .layers = layers,
      .lanes = lanes,
      .max_blocks = max_blocks,
      .max_lease = max_lease};
  }
  [[nodiscard]] slot_pool_ref pool()
  {
    return {.layer_base = base.data(), .slot_stride = 64, .slots = slots, .per_layer = true};
  }
  [[nodiscard]] selection_ref selection()
  {
    return {
      .ids = ids.data(),
      .counts = counts.data(),
      .previous = previous.data(),
      .max_selected = max_selected,
      .lanes = lanes,
      .previous_words = (max_blocks + 31) / 32};
  }
  [[nodiscard]] lane_table_ref table()
  {
    return {
      .listed = listed.data(),
      .listed_count = listed_count.data(),
      .landed = landed.data(),
      .landed_count = landed_count.data(),
      .stride = max_blocks,
      .max_selected = max_selected};
  }
  [[nodiscard]] lane_plan_ref lane_plan()
  {
    return {
      .entries = entries.data(),
      .misses = lane_counts.data(),
      .hits = lane_counts.data() + lanes,
      .flying = lane_counts.data() + 2 * lanes,
      .stalled = lane_counts.data() + 3 * lanes,
      .foresight = foresight.data()};
  }
  [[nodiscard]] resolve_blocks<lru> resolve(bool hits_only)
  {
    return {
      .rows = list(),
      .selection = selection(),
      .residency = residency(),
      .pool = pool(),
      .host_blocks = host_blocks.data(),
      .plan = lane_plan(),
      .table = table(),
      .step = step.data(),
      .layer = layer_id{1},
      .head_groups = head_groups,
      .list_hits_only = hits_only};
  }
  [[nodiscard]] plan_recall planning()
  {
    return {
      .rows = list(),
      .lanes = lane_plan(),
      .entries = plan_entries.data(),
      .row_begin = row_begin.data(),
      .failed = failed.data(),
      .mailbox = mailbox.data(),
      .sequence = sequence.data(),
      .block_bytes = 64,
      .head_groups = head_groups,
      .max_selected = max_selected};
  }
  [[nodiscard]] recall_plan_ref plan()
  {
    return {
      .entries = plan_entries.data(),
      .row_begin = row_begin.data(),
      .failed = failed.data(),
      .rows = list(),
      .pool = pool(),
      .layer = layer_id{1},
      .head_groups = head_groups,
      .block_bytes = 64,
      .capacity = lanes * max_selected};
  }

  std::mt19937 random;
  std::vector<std::byte*> base;
  std::vector<row_id> row_ids;
  std::vector<slot_id> slot_of;
  std::vector<slot_word> words;
  std::vector<slot_id> lease;
  std::vector<std::uint32_t> lease_count;
  std::vector<slot_id> spare;
  std::vector<block_id> ids;
  std::vector<std::uint32_t> counts;
  std::vector<std::uint32_t> previous;
  std::vector<host_block_id> host_blocks;
  std::vector<slot_id> listed;
  std::vector<std::uint32_t> listed_count;
  std::vector<slot_id> landed;
  std::vector<std::uint32_t> landed_count;
  std::vector<recall_entry> entries;
  std::vector<std::uint32_t> lane_counts;
  std::vector<lane_foresight> foresight;
  std::vector<recall_entry> plan_entries;
  std::vector<std::uint32_t> row_begin;
  std::vector<std::uint32_t> failed;
  std::vector<recall_entry> failures;
  std::vector<row_mailbox> mailbox;
  std::vector<std::uint32_t> sequence;
  std::vector<row_info> info;
  std::vector<std::uint32_t> step;

 private:
  [[nodiscard]] std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random() % below); }

  void fill_lane(layer_id l, lane_id lane, std::vector<std::int32_t> const& order, std::size_t& next)
  {
    slot_id* const of = residency().slots_of_lane(l, lane);
    slot_id* const leased = residency().lease_of_lane(l, lane);
    std::uint32_t const count = 10 + draw(max_lease - 10);
    std::uint32_t const blocks = LeastBlocks + draw(max_blocks - LeastBlocks);
    lease_count[residency().lane_index(l, lane)] = count;
    std::vector<std::uint32_t> numbers(blocks);
    std::iota(numbers.begin(), numbers.end(), 0U);
    std::shuffle(numbers.begin(), numbers.end(), random);
    for (std::uint32_t i = 0; i < count; ++i) {
      auto const slot = static_cast<slot_id>(order[next++]);
      leased[i] = slot;
      slot_word& word = words[pool().word(l, slot)];
      word = slot_word{.state = slot_state::empty, .last_used = 1 + draw(6), .ahead = draw(2)};
      if (draw(6) == 0) { continue; }
      word.block = static_cast<block_id>(numbers[i]);
      std::uint32_t const state = draw(5);
      word.state = state == 0 ? slot_state::dirty : state == 1 ? slot_state::in_flight : slot_state::clean;
      of[numbers[i]] = slot;
    }
    // Slots that the host knows.
    for (std::uint32_t i = count; i < count + 3; ++i) {
      auto const slot = static_cast<slot_id>(order[next++]);
      words[pool().word(l, slot)] =
        slot_word{.block = static_cast<block_id>(numbers[i]), .state = slot_state::open, .last_used = 3};
      of[numbers[i]] = slot;
    }
    if (to_number(l) != 1) { return; }
    std::uint32_t const chosen = draw(4) == 0 ? max_selected : draw(max_selected);
    std::vector<std::uint32_t> wanted(numbers.begin() + draw(blocks - chosen + 1), numbers.end());
    wanted.resize(std::min<std::size_t>(chosen, wanted.size()));
    std::sort(wanted.begin(), wanted.end());
    counts[to_index(lane)] = static_cast<std::uint32_t>(wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) { selection().ids_of(lane)[i] = static_cast<block_id>(wanted[i]); }
    // A longer list of an earlier step, and what none reads any more.
    slot_id* const of_table = listed.data() + residency().lane_index(l, lane) * max_blocks;
    for (std::uint32_t i = 0; i < max_blocks; ++i) {
      of_table[i] = i == max_blocks - 9 ? none<slot_id> : static_cast<slot_id>(i);
    }
  }
};

using lease_scene = sized_lease_scene<50, 90, 40, 24>;
/// Lists longer than a block of threads.
using long_lease_scene = sized_lease_scene<2400, 4000, 2000, 1800>;
/// As long as a block of threads.
using wide_lease_scene = sized_lease_scene<600, 1000, 512, 512>;

}  // namespace pulseinfer_test

TEST_CASE("appending, digests, scores, shares, votes and selections on the GPU equal those on the CPU")
{
  struct shape {
    dtype type;
    dtype digest;
    std::uint32_t kv_heads, group, dim, head_groups;
    bool latent;
  };
  for (shape const& s :
       {shape{dtype::bfloat16, dtype::float16, 2, 4, 64, 1, false},
        shape{dtype::float16, dtype::float32, 4, 2, 40, 4, false},
        shape{dtype::float32, dtype::float32, 2, 1, 32, 2, false},
        shape{dtype::bfloat16, dtype::float32, 1, 5, 72, 1, true}}) {
    rig();
    device_heap_scope const scope;
    kv_geometry geometry = geometry_of(s.type, s.kv_heads, s.group, s.dim, s.head_groups);
    if (s.latent) {
      geometry.value_is_key_prefix = true;
      geometry.value_dim = 64;
    }
    cache c{geometry, {{200, 1}, {33, 3}, {417, 2}, {16, 1}}, 5};
    tensor keys{s.type, c.tensor_tokens, geometry.kv_heads, geometry.head_dim, 3};
    tensor values{s.type, c.tensor_tokens, geometry.kv_heads, geometry.value_elements()};
    tensor queries{dtype::float32, c.tensor_tokens, geometry.query_heads, geometry.head_dim, 1};
    keys.randomise(c.random);
    values.randomise(c.random);
    queries.randomise(c.random);
    rig().check(append_tokens{
      .layer = layer_id{1},
      .rows = c.rows(),
      .info = c.info.data(),
      .keys = keys.view,
      .values = geometry.value_is_key_prefix ? tensor_view{} : values.view,
      .residency = c.residency,
      .pool = c.pool,
      .layout = c.layout,
      .head_groups = s.head_groups,
      .most_tokens = c.most_new});

    scoring_heads const heads{.first = 0, .count = s.kv_heads};
    std::uint64_t const digest_bytes =
      std::uint64_t{heads.count} * device::cuboid_mean_elements(s.dim) * size_of(s.digest);
    selection_arrays arrays{c, 8, std::vector<std::uint64_t>(geometry.layers, digest_bytes)};
    with_all_tokens_new(c, [&] {
      rig().check(
        update_digests{
          .request = arrays.digest_request(1, c.max_blocks),
          .heads = heads,
          .head_groups = s.head_groups,
          .digest_type = s.digest},
        sameness_of(s.digest));
    });
    score_table table{.queries = c.most_new, .heads = heads.count * s.group, .pitch = round_up(c.max_blocks, 16U)};
    std::vector<float> memory(c.info.size() * table.queries * table.heads * table.pitch, 0.0F);
    std::vector<float> votes(std::size_t{c.residency.lanes} * table.pitch, 0.0F);
    table.data = memory.data();
    query_pass const pass{};
    rig().check(
      score_blocks{
        .request = arrays.select_request(1, queries.view),
        .scores = table,
        .pass = pass,
        .heads = heads,
        .query_group = s.group,
        .block_tokens = geometry.block_tokens,
        .budget_blocks = 2,
        .digest_type = s.digest,
        .scale = 0.2F},
      sameness::floats);
    rig().check(
      share_blocks{
        .rows = c.rows(),
        .info = c.info.data(),
        .scores = table,
        .pass = pass,
        .most_queries = c.most_new,
        .most_blocks = c.max_blocks,
        .block_tokens = geometry.block_tokens,
        .budget_blocks = 2},
      sameness::floats);
    for (std::uint32_t& word : arrays.previous) { word = 0x12345678U; }
    rig().check(
      vote_blocks{
        .layer = layer_id{1},
        .rows = c.rows(),
        .info = c.info.data(),
        .scores = table,
        .votes = votes.data(),
        .selection = arrays.selection,
        .pass = pass,
        .head_groups = s.head_groups,
        .most_blocks = c.max_blocks,
        .block_tokens = geometry.block_tokens,
        .budget_blocks = 2,
        .favour = 1.3F},
      sameness::floats);
    rig().check(select_top_k{
      .layer = layer_id{1},
      .rows = c.rows(),
      .info = c.info.data(),
      .votes = votes.data(),
      .selection = arrays.selection,
      .vote_pitch = table.pitch,
      .head_groups = s.head_groups,
      .block_tokens = geometry.block_tokens,
      .budget_blocks = 8,
      .sink_blocks = 1,
      .recent_blocks = 2});
    std::vector<block_id> kept(geometry.layers * std::size_t{c.residency.lanes} * 8, none<block_id>);
    rig().check(keep_selection{
      .rows = c.rows(),
      .selection = arrays.selection,
      .kept = kept.data(),
      .layer = layer_id{1},
      .head_groups = s.head_groups});
    std::vector<block_id> imported;
    std::vector<std::uint32_t> imported_counts;
    for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
      for (std::uint32_t i = 0; i < 6; ++i) { imported.push_back(static_cast<block_id>(i * (1 + lane % 3))); }
      imported_counts.push_back(lane % 7);
    }
    rig().check(select_imported{
      .layer = layer_id{0},
      .rows = c.rows(),
      .info = c.info.data(),
      .ids = imported.data(),
      .id_counts = imported_counts.data(),
      .selection = arrays.selection,
      .id_pitch = 6,
      .head_groups = s.head_groups,
      .block_tokens = geometry.block_tokens,
      .budget_blocks = 7});
    rig().check(select_window{
      .rows = c.rows(),
      .info = c.info.data(),
      .selection = arrays.selection,
      .window_tokens = 60,
      .sink_tokens = 17,
      .block_tokens = geometry.block_tokens,
      .head_groups = s.head_groups});
    std::vector<row_info> asking(c.info.size());
    rig().check(last_queries{.rows = c.rows(), .info = c.info.data(), .asking = asking.data(), .queries = 2});
  }
}

TEST_CASE("top-K on the GPU takes the same of 20,000 votes as the CPU, ties to the lowest id")
{
  rig();
  device_heap_scope const scope;
  std::mt19937 random{3};
  constexpr std::uint32_t blocks = 20000;
  std::vector<row_info> info(2);
  info[0] = {.tokens = blocks * 16, .new_tokens = 1};
  info[1] = {.tokens = blocks * 16 - 5, .new_tokens = 1};
  std::vector<row_id> ids = {row_id{1}, row_id{0}};
  std::vector<float> votes(2 * blocks);
  for (float& vote : votes) { vote = static_cast<float>(random() % 700) / 700.0F; }  // many ties
  std::vector<block_id> chosen(2 * 1024);
  std::vector<std::uint32_t> counts(2);
  std::vector<std::uint32_t> previous(2 * (blocks / 32 + 1));
  for (std::uint32_t const budget : {4U, 65U, 1000U}) {
    rig().check(select_top_k{
      .layer = layer_id{0},
      .rows = {.ids = ids.data(), .count = 2},
      .info = info.data(),
      .votes = votes.data(),
      .selection =
        {.ids = chosen.data(),
         .counts = counts.data(),
         .previous = previous.data(),
         .max_selected = 1024,
         .lanes = 2,
         .previous_words = blocks / 32 + 1},
      .vote_pitch = blocks,
      .block_tokens = 16,
      .budget_blocks = budget,
      .sink_blocks = 1,
      .recent_blocks = 2});
  }
}

TEST_CASE("attention over a table, its parts and their merge on the GPU equal those on the CPU")
{
  for (dtype const type : {dtype::float32, dtype::bfloat16, dtype::float16}) {
    for (std::uint32_t const dim : {48U, 128U}) {
      rig();
      device_heap_scope const scope;
      kv_geometry const geometry = geometry_of(type, 2, 4, dim, type == dtype::float32 ? 2 : 1);
      cache c{geometry, {{150, 1}, {33, 3}, {80, 2}}, 9};
      tensor queries{dtype::float32, c.tensor_tokens, geometry.query_heads, dim};
      tensor whole{dtype::float32, c.tensor_tokens, geometry.query_heads, dim};
      tensor rest{dtype::float32, c.tensor_tokens, geometry.query_heads, dim};
      queries.randomise(c.random);
      whole.randomise(c.random);
      rest.randomise(c.random);
      std::vector<float> lse(c.tensor_tokens * geometry.query_heads);
      std::vector<float> other_lse(lse.size());
      auto const odd = [](std::uint32_t, std::uint32_t block) { return block % 2 == 1; };
      block_table const hits = c.table(
        0,
        [&](std::uint32_t lane, std::uint32_t block) {
          return !odd(lane, block) || block + 1 == c.info[lane / geometry.head_groups].blocks(16);
        },
        part::hits);
      block_table const landed = c.table(
        0,
        [&](std::uint32_t lane, std::uint32_t block) {
          return odd(lane, block) && block + 1 != c.info[lane / geometry.head_groups].blocks(16);
        },
        part::landed);
      paged_attention attend{
        .table = hits,
        .rows = c.rows(),
        .queries = queries.view,
        .out = whole.view,
        .lse = lse.data(),
        .scale = 0.3F,
        .most_queries = c.most_new};
      rig().check(attend, sameness::floats);
      attend.table = landed;
      attend.out = rest.view;
      attend.lse = other_lse.data();
      rig().check(attend, sameness::floats);
      rig().check(
        merge_partials{
          .rows = c.rows(),
          .info = c.info.data(),
          .result = whole.view,
          .result_lse = lse.data(),
          .other = rest.view,
          .other_lse = other_lse.data(),
          .most_queries = c.most_new},
        sameness::floats);
      if (type == dtype::float32) { continue; }
      block_table const listed =
        c.table(0, [](std::uint32_t lane, std::uint32_t block) { return (lane + block) % 3 != 0; });
      export_lists lists{.table = listed, .rows = c.rows(), .padded_rows = 5, .width = 7};
      std::vector<std::int32_t> refused(10), slots(10 * 7), lengths(10), indptr(11), indices(70), last(10);
      std::vector<std::int64_t> tokens(10 * 7 * 16), mapping(2 * c.tensor_tokens);
      lists.refused = refused.data();
      rig().check(export_dense_table{.lists = lists, .slots = slots.data(), .lengths = lengths.data()});
      rig().check(export_csr_table{
        .lists = lists, .indptr = indptr.data(), .indices = indices.data(), .last_page_len = last.data()});
      rig().check(export_token_slots{.lists = lists, .token_slots = tokens.data(), .lengths = lengths.data()});
      rig().check(export_append_slots{
        .layer = layer_id{0},
        .rows = c.rows(),
        .info = c.info.data(),
        .residency = c.residency,
        .block_tokens = 16,
        .head_groups = geometry.head_groups,
        .tokens = c.tensor_tokens,
        .slot_mapping = mapping.data()});
    }
  }
}

TEST_CASE("law 1: gathered blocks on the GPU are the written ones at any pitch, alignment and number of groups")
{
  for (std::uint32_t const pitch : {92U, 132U, 160U, 192U, 384U, 576U, 584U, 656U, 1152U, 37U, 2U}) {
    for (std::uint32_t const tokens : {1U, 3U, 17U, 64U}) {
      for (std::uint32_t const offset : {0U, 4U, 1U}) {
        rig();
        device_heap_scope const scope;
        recall_scene scene{
          {.layout = layout_of_pitch(pitch, tokens, 1),
           .layers = 2,
           .slots = 8,
           .offset = offset,
           .slot_padding = offset == 4 ? 12U : 0U}};
        plan_three_rows(scene, 1);
        recall_plan_ref const plan = scene.plan();
        scene.expect_all_arrived();
        for (std::uint32_t const groups : {1U, 3U, 12U, 40U}) {
          device_heap_pause const pause;
          REQUIRE(
            rig().backend.launch(
              rig().stream, gather_blocks{.plan = plan, .first_row = 0, .row_count = 3, .groups = groups}) ==
            status::ok);
          REQUIRE(rig().backend.synchronize(rig().stream) == status::ok);
          REQUIRE_MESSAGE(
            scene.difference() == "",
            "pitch " << pitch << " tokens " << tokens << " offset " << offset << " groups " << groups);
          scene.clear_device();
          scene.expect_all_arrived();
        }
      }
    }
  }
}

TEST_CASE("the gather's own kernel and its generic body leave the same memory, guards and paddings included")
{
  for (std::uint32_t const pitch : {64U, 260U}) {
    rig();
    device_heap_scope const scope;
    recall_scene scene{{.layout = layout_of_pitch(pitch, 17)}};
    plan_three_rows(scene, 2);
    for (std::uint32_t first = 0; first < 3; ++first) {
      if (first == 1) { continue; }  // a row without misses
      scene.clear_device();
      rig().check(gather_blocks{.plan = scene.plan(), .first_row = first, .row_count = 3 - first, .groups = 5});
    }
  }
}

TEST_CASE("entries in the order of host memory on the GPU are all there, stretch by stretch")
{
  rig();
  device_heap_scope const scope;
  std::mt19937 random{4};
  for (std::uint32_t const count : {0U, 1U, 777U, 30000U}) {
    for (std::uint32_t const head_groups : {1U, 3U}) {
      constexpr std::uint32_t host_blocks = 3000000;
      std::vector<recall_entry> entries(count + 5);
      for (std::uint32_t i = 0; i < entries.size(); ++i) {
        entries[i] = {
          .source = static_cast<host_block_id>(random() % host_blocks),
          .target = static_cast<slot_id>(i),
          .lane = static_cast<lane_id>(random() % 12),
          .block = static_cast<block_id>(i)};
      }
      std::vector<std::uint32_t> const row_begin = {0, 3, count / 2 + 3, count + 3};
      std::vector<recall_entry> ordered(count + 5);
      std::vector<std::uint32_t> begins = {7, 7};
      order_entries const op{
        .plan =
          {.entries = entries.data(),
           .row_begin = row_begin.data(),
           .host = {.block_stride = 1152, .head_groups = head_groups, .blocks = host_blocks},
           .head_groups = head_groups,
           .capacity = count + 5},
        .first_row = 1,
        .row_count = 2,
        .ordered = ordered.data(),
        .row_begin = begins.data()};
      REQUIRE(pulseinfer::detail::kernel_override<order_entries>::takes(op));
      rig().run(op);
      CHECK(begins[0] == 0);
      REQUIRE(begins[1] == count);
      std::vector<bool> seen(count + 5, false);
      std::uint32_t last = 0;
      std::uint32_t wrong = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        auto const from = static_cast<std::size_t>(to_index(ordered[i].target));
        REQUIRE(from < entries.size());
        std::uint32_t const stretch = op.stretch_of(ordered[i], op.stretch_blocks(), op.group_stretches());
        wrong += seen[from] || from < 3 || from >= count + 3 || stretch < last ||
            std::memcmp(&ordered[i], &entries[from], sizeof(recall_entry)) != 0
          ? 1U
          : 0U;
        seen[from] = true;
        last = stretch;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("long leases and selections are resolved on the GPU as on the CPU")
{
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    rig();
    device_heap_scope const scope;
    long_lease_scene s{seed};
    rig().check_kernel(s.resolve(seed % 2 == 1));
    CHECK(*std::max_element(s.lane_counts.begin(), s.lane_counts.begin() + long_lease_scene::lanes) > 512U);
    rig().check_kernel(s.planning());
  }
}

TEST_CASE("leases and selections of a thread each are resolved on the GPU as on the CPU, whatever misses")
{
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    rig();
    device_heap_scope const scope;
    wide_lease_scene s{seed};
    // From none to more missing blocks than few_victims: what is selected is resident, but for the first ones.
    for (std::uint32_t lane = 0; seed > 0 && lane < wide_lease_scene::lanes; ++lane) {
      slot_id const* const of = s.residency().slots_of_lane(layer_id{1}, static_cast<lane_id>(lane));
      std::uint32_t count = 0;
      std::uint32_t missing = 0;
      for (std::uint32_t b = 0; b < wide_lease_scene::max_blocks && count < 500; ++b) {
        if (is_none(of[b]) && ++missing > lane) { continue; }
        s.selection().ids_of(static_cast<lane_id>(lane))[count++] = static_cast<block_id>(b);
      }
      s.counts[lane] = count;
    }
    rig().check_kernel(s.resolve(seed % 2 == 1));
    rig().check_kernel(s.planning());
  }
}

TEST_CASE("leases, victims, plans and landings on the GPU equal those on the CPU")
{
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    rig();
    device_heap_scope const scope;
    lease_scene s{seed};
    rig().check(s.resolve(seed % 2 == 1));
    plan_recall quiet = s.planning();
    quiet.posts = false;
    rig().check(quiet);
    if (seed % 2 == 0) {
      rig().check(quiet.posting());
    } else {
      rig().check(s.planning());
    }
    for (std::size_t i = 0; i < s.failed.size(); ++i) { s.failed[i] = i % 5 == seed ? 1 : 0; }
    landed_ref const landed{
      .mailbox = s.mailbox.data(),
      .sequence = s.sequence.data(),
      .residency = s.residency(),
      .table = s.table(),
      .failures = s.failures.data()};
    landed_ref posting = landed;
    posting.counts = quiet.lanes.counts();
    rig().check(land_rows{.plan = s.plan(), .landed = posting, .first_row = 3, .row_count = 2, .behind_gather = true});
    rig().check(land_rows{.plan = s.plan(), .landed = posting, .first_row = 3, .row_count = 2, .how = landing::failed});
    rig().check(
      land_rows{.plan = s.plan(), .landed = landed, .first_row = 1, .row_count = 2, .behind_gather = seed % 2 == 0});
    rig().check(land_rows{.plan = s.plan(), .landed = landed, .first_row = 0, .row_count = 5, .how = landing::failed});

    std::vector<slot_exchange> exchanges;
    for (std::uint32_t lane = 0; lane < lease_scene::lanes; ++lane) {
      std::uint32_t const leased = s.lease_count[lane];
      slot_id written = none<slot_id>;
      for (std::uint32_t slot = 0; slot < lease_scene::slots && is_none(written); ++slot) {
        slot_word const& word = s.words[slot];
        bool const of_lane = word.state == slot_state::open &&
          s.slot_of[lane * lease_scene::max_blocks + to_index(word.block)] == static_cast<slot_id>(slot);
        if (of_lane) { written = static_cast<slot_id>(slot); }
      }
      if (leased == 0 || is_none(written)) { continue; }
      exchanges.push_back(
        {.layer = layer_id{0}, .lane = static_cast<lane_id>(lane), .written = written, .spare_place = lane * 4});
    }
    rig().check(exchange_slots<lru>{
      .exchanges = exchanges.data(),
      .count = static_cast<std::uint32_t>(exchanges.size()),
      .residency = s.residency(),
      .pool = s.pool(),
      .step = s.step.data()});
    rig().check(forget_blocks{
      .row = row_id{2},
      .residency = s.residency(),
      .pool = s.pool(),
      .selection = s.selection(),
      .host_blocks = s.host_blocks.data(),
      .first = 11,
      .last = 60,
      .head_groups = 2});
    std::vector<leased_slot> slots;
    for (std::int32_t i = 0; i < 20; ++i) {
      slots.push_back({.slot = static_cast<slot_id>(i * 3), .block = i % 4 == 0 ? none<block_id> : block_id{i}});
    }
    std::vector<lease_change> const changes = {
      {.layer = layer_id{0}, .lane = lane_id{1}, .first = 0, .lease_count = 7, .held_count = 2, .blocks = 90},
      {.layer = layer_id{1}, .lane = lane_id{1}, .first = 9, .lease_count = 11, .held_count = 0, .blocks = 70}};
    rig().check(install_lease{
      .changes = changes.data(),
      .slots = slots.data(),
      .count = 2,
      .residency = s.residency(),
      .pool = s.pool(),
      .step = s.step.data()});
    rig().check(reset_row{
      .row = row_id{3},
      .residency = s.residency(),
      .selection = s.selection(),
      .table = s.table(),
      .info = s.info.data(),
      .host_blocks = s.host_blocks.data(),
      .head_groups = 2});
    std::vector<word_patch> patches;
    for (std::size_t i = 0; i < s.landed.size(); ++i) {
      patches.push_back({.target = s.landed.data() + i, .value = static_cast<std::uint32_t>(i + 5)});
    }
    rig().check(patch_words{.patches = patches.data(), .count = static_cast<std::uint32_t>(patches.size())});
    rig().check(fill_words{.target = s.words.data(), .count = s.words.size() * 4, .value = 0xABCD1234U});
  }
}

TEST_CASE("attention's own kernel gives what the generic body gives, for groups of 1 to 32, sizes of rows, parts, "
          "drafts and types")
{
  struct shape {
    dtype type;
    std::uint32_t kv_heads, group, dim, value_dim, head_groups, block_tokens;
    token_order order;
  };
  using enum token_order;
  for (shape const& s :
       {shape{dtype::bfloat16, 2, 1, 128, 0, 1, 16, hnd}, shape{dtype::bfloat16, 1, 2, 64, 0, 1, 16, hnd},
        shape{dtype::float16, 2, 3, 96, 0, 2, 5, nhd}, shape{dtype::bfloat16, 2, 5, 128, 0, 1, 16, hnd},
        shape{dtype::float16, 1, 8, 256, 0, 1, 64, hnd}, shape{dtype::bfloat16, 1, 8, 64, 0, 1, 1, nhd},
        shape{dtype::float16, 2, 6, 80, 0, 1, 16, nhd}, shape{dtype::bfloat16, 1, 16, 192, 0, 1, 16, nhd},
        shape{dtype::float16, 1, 32, 128, 0, 1, 16, hnd}, shape{dtype::float32, 2, 4, 64, 0, 1, 16, hnd},
        shape{dtype::float32, 1, 5, 128, 0, 1, 17, nhd}, shape{dtype::float32, 1, 2, 256, 0, 1, 16, hnd},
        shape{dtype::bfloat16, 1, 16, 576, 512, 1, 16, hnd}, shape{dtype::float16, 1, 3, 320, 256, 1, 16, hnd}}) {
    CAPTURE(s.dim);
    CAPTURE(s.group);
    rig();
    device_heap_scope const scope;
    kv_geometry geometry = geometry_of(s.type, s.kv_heads, s.group, s.dim, s.head_groups);
    geometry.layers = 1;
    geometry.block_tokens = s.block_tokens;
    geometry.order = s.order;
    geometry.value_dim = s.value_dim;
    geometry.value_is_key_prefix = s.value_dim != 0;
    cache c{geometry, {{700, 1}, {1, 1}, {33, 3}, {0, 0}, {290, 5}}, s.dim + s.group};
    tensor queries{s.type, c.tensor_tokens, geometry.query_heads, s.dim, 2};
    tensor out{dtype::float32, c.tensor_tokens, geometry.query_heads, c.layout.value_dim};
    queries.randomise(c.random);
    std::vector<float> lse(c.tensor_tokens * geometry.query_heads);
    auto const lands = [&](std::uint32_t lane, std::uint32_t block) {
      row_info const& row = c.info[lane / geometry.head_groups];
      return block % 3 == 1 && block < static_cast<std::uint32_t>(row.tokens - row.new_tokens) / s.block_tokens;
    };
    paged_attention attend{
      .table = c.table(0, [](auto, auto) { return true; }),
      .rows = c.rows(),
      .queries = queries.view,
      .out = out.view,
      .lse = lse.data(),
      .scale = 2.0F / std::sqrt(static_cast<float>(s.dim)),
      .most_queries = c.most_new};
    rig().check_kernel(attend, sameness::floats);
    attend.table = c.table(0, [&](auto lane, auto block) { return !lands(lane, block); }, part::hits);
    rig().check_kernel(attend, sameness::floats);
    attend.table = c.table(0, lands, part::landed);
    rig().check_kernel(attend, sameness::floats);
  }
}

TEST_CASE("attention's own kernel writes bfloats, and no log-sums where none are asked for")
{
  rig();
  device_heap_scope const scope;
  kv_geometry const geometry = geometry_of(dtype::bfloat16, 2, 4, 128);
  cache c{geometry, {{500, 1}, {77, 2}}, 4};
  tensor queries{dtype::bfloat16, c.tensor_tokens, geometry.query_heads, 128};
  tensor out{dtype::bfloat16, c.tensor_tokens, geometry.query_heads, 128, 8};
  queries.randomise(c.random);
  rig().check_kernel(
    paged_attention{
      .table = c.table(1, [](auto, auto block) { return block != 2; }),
      .rows = c.rows(),
      .queries = queries.view,
      .out = out.view,
      .scale = 0.1F,
      .most_queries = 2},
    sameness::bfloats);
}

TEST_CASE("law 2: attention on the GPU is bit for bit the same in other slots, alone or among rows, whatever the "
          "table's stride")
{
  struct shape {
    dtype type;
    std::uint32_t group, dim, most_queries;
  };
  // With room for 64 queries a block of threads takes several stretches of a list in turn.
  for (shape const& s :
       {shape{dtype::bfloat16, 4, 128, 2}, shape{dtype::bfloat16, 8, 128, 2}, shape{dtype::bfloat16, 4, 128, 64},
        shape{dtype::bfloat16, 8, 128, 64}, shape{dtype::float16, 3, 64, 64}, shape{dtype::float32, 4, 128, 64}}) {
    CAPTURE(s.dim);
    CAPTURE(s.most_queries);
    rig();
    device_heap_scope const scope;
    kv_geometry geometry = geometry_of(s.type, 2, s.group, s.dim);
    geometry.layers = 1;
    cache c{geometry, {{1000, 1}, {219, 2}, {48, 1}}, 21};
    tensor queries{s.type, c.tensor_tokens, geometry.query_heads, s.dim};
    tensor out{dtype::float32, c.tensor_tokens, geometry.query_heads, s.dim};
    queries.randomise(c.random);
    std::vector<float> lse(c.tensor_tokens * geometry.query_heads);
    block_table const table = c.table(0, [](std::uint32_t, std::uint32_t block) { return block % 5 != 3; });
    paged_attention attend{
      .table = table,
      .rows = c.rows(),
      .queries = queries.view,
      .out = out.view,
      .lse = lse.data(),
      .scale = 0.1F,
      .most_queries = s.most_queries};
    rig().run(attend);
    std::vector<std::byte> const whole = out.bytes();
    std::vector<float> const log_sums = lse;

    std::vector<std::int32_t> order(c.pool.slots);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), c.random);
    std::vector<std::byte> moved(std::size_t{c.pool.slots} * c.layout.block_bytes);
    for (std::uint32_t slot = 0; slot < c.pool.slots; ++slot) {
      std::memcpy(
        moved.data() + static_cast<std::size_t>(order[slot]) * c.layout.block_bytes,
        c.pool.address(layer_id{0}, static_cast<slot_id>(slot)), c.layout.block_bytes);
    }
    std::vector<std::byte*> bases{moved.data()};
    std::uint32_t const stride = table.stride + 9;
    std::vector<slot_id> slots(std::size_t{c.residency.lanes} * stride, none<slot_id>);
    for (std::uint32_t lane = 0; lane < c.residency.lanes; ++lane) {
      for (std::uint32_t i = 0; i < table.counts[lane]; ++i) {
        slots[std::size_t{lane} * stride + i] =
          static_cast<slot_id>(order[to_index(table.slots[std::size_t{lane} * table.stride + i])]);
      }
    }
    attend.table.slots = slots.data();
    attend.table.stride = stride;
    attend.table.pool.layer_base = bases.data();
    out.randomise(c.random);
    std::fill(lse.begin(), lse.end(), 0.0F);
    // Each row by itself, the last one with room for more queries.
    for (std::uint32_t i = 0; i < c.ids.size(); ++i) {
      attend.rows = {.ids = c.ids.data() + i, .count = 1};
      attend.most_queries =
        i + 1 == c.ids.size() ? 7U : static_cast<std::uint32_t>(c.info[to_index(c.ids[i])].new_tokens);
      rig().run(attend);
    }
    std::size_t differing = 0;
    auto const* const now = out.view.data;
    for (row_info const& row : c.info) {
      auto const begin = static_cast<std::size_t>(row.token_offset) * out.view.token_stride;
      auto const bytes = static_cast<std::size_t>(row.new_tokens) * out.view.token_stride;
      differing += std::memcmp(now + begin, whole.data() + begin, bytes) != 0 ? 1U : 0U;
    }
    CHECK(differing == 0);
    CHECK(std::memcmp(lse.data(), log_sums.data(), lse.size() * sizeof(float)) == 0);
  }
}

TEST_CASE(
  "law 8: top-K's own kernel takes the same of up to 131,072 votes as the CPU, whatever their order, ties and kinds")
{
  std::mt19937 random{11};
  auto const draw = [&](std::uint32_t below) { return static_cast<std::uint32_t>(random() % below); };
  for (std::uint32_t round = 0; round < 60; ++round) {
    rig();
    device_heap_scope const scope;
    std::uint32_t const blocks = round < 2 ? 131072U : round < 4 ? 4097U + round : 1U + draw(round < 20 ? 9000U : 60U);
    std::uint32_t const head_groups = 1 + round % 3;
    std::uint32_t const pitch = round_up(blocks, 4U);
    std::vector<row_info> info(2);
    info[0] = {.tokens = static_cast<std::int32_t>(blocks * 4), .new_tokens = 1};
    info[1] = {.tokens = static_cast<std::int32_t>(1 + draw(blocks * 4)), .new_tokens = static_cast<std::int32_t>(1)};
    std::vector<row_id> ids = {row_id{1}, row_id{0}};
    std::vector<float> votes(std::size_t{2} * head_groups * pitch);
    for (float& vote : votes) {
      switch (round % 5) {
        case 0: vote = static_cast<float>(draw(3)); break;
        case 1:
          vote = std::ldexp(1.0F + static_cast<float>(draw(1U << 20U)) * 0x1p-20F, -static_cast<int>(draw(40)));
          break;
        case 2: vote = 0.25F; break;
        case 3: vote = static_cast<float>(static_cast<int>(draw(200)) - 100) * 1e-3F; break;
        default:
          vote = draw(9) == 0 ? std::nanf("") : draw(9) == 0 ? -0.0F : draw(9) == 0 ? INFINITY : 1e-30F * draw(1000);
      }
    }
    std::uint32_t const most = 1 + draw(std::min(blocks + 10U, 5000U));
    std::uint32_t const lanes = 2 * head_groups;
    std::uint32_t const words = blocks / 32 + 1;
    std::vector<block_id> chosen(std::size_t{lanes} * most);
    std::vector<std::uint32_t> counts(lanes, 77U);
    std::vector<std::uint32_t> previous(std::size_t{lanes} * words, 0xA5A5A5A5U);
    rig().check_kernel(select_top_k{
      .layer = layer_id{0},
      .rows = {.ids = ids.data(), .count = 2},
      .info = info.data(),
      .votes = votes.data(),
      .selection =
        {.ids = chosen.data(),
         .counts = counts.data(),
         .previous = previous.data(),
         .max_selected = most,
         .lanes = lanes,
         .previous_words = words},
      .vote_pitch = pitch,
      .head_groups = head_groups,
      .block_tokens = 4,
      .budget_blocks = 1 + draw(most + 2),
      .sink_blocks = draw(7),
      .recent_blocks = draw(9),
      .remember = round % 2 == 0});
  }
}

TEST_CASE(
  "the kernels of scores, shares, votes and top-K choose on the GPU what a CPU chooses, but for rounding at the cut")
{
  struct shape {
    std::uint32_t blocks, dim, kv_heads, group, queries, head_groups;
    dtype digest;
  };
  std::mt19937 random{5};
  for (shape const& s :
       {shape{300, 128, 1, 4, 1, 1, dtype::float16}, shape{1111, 64, 2, 8, 3, 1, dtype::float16},
        shape{65, 128, 4, 2, 2, 4, dtype::float32}, shape{9001, 64, 1, 1, 1, 1, dtype::float32},
        shape{2050, 256, 1, 6, 2, 1, dtype::float16}, shape{520, 40, 2, 5, 1, 2, dtype::float32},
        shape{777, 128, 2, 7, 2, 1, dtype::float16}}) {
    CAPTURE(s.blocks);
    rig();
    device_heap_scope const scope;
    constexpr std::uint32_t rows = 3, block_tokens = 16, extent_blocks = 24, budget = 32;
    std::uint32_t const elements = device::cuboid_mean_elements(s.dim);
    std::uint32_t const heads = s.kv_heads * s.group;
    std::uint32_t const pitch = round_up(s.blocks, 16U);
    std::vector<row_id> ids = {row_id{2}, row_id{0}, row_id{1}};
    std::vector<row_info> info(rows);
    std::uint32_t const new_tokens[rows] = {s.queries, 1U, s.queries};
    std::uint32_t const tokens[rows] = {
      s.blocks * block_tokens, s.blocks * 9U, 20U * block_tokens};  // the last is all kept
    std::int32_t offset = 1;
    for (std::uint32_t r = 0; r < rows; ++r) {
      info[r] = {
        .tokens = static_cast<std::int32_t>(tokens[r]),
        .new_tokens = static_cast<std::int32_t>(new_tokens[r]),
        .token_offset = offset};
      offset += info[r].new_tokens;
    }
    tensor queries{dtype::bfloat16, static_cast<std::uint64_t>(offset), heads, s.dim, 1};
    queries.randomise(random);

    std::uint32_t const extents = divide_up(s.blocks, extent_blocks);
    std::vector<std::uint64_t> layer_offset{0, 64};
    std::vector<std::uint64_t> block_bytes{0, std::uint64_t{s.kv_heads} * elements * size_of(s.digest)};
    std::uint64_t const extent_bytes = 64 + extent_blocks * block_bytes[1];
    std::vector<std::byte> digests(std::size_t{rows} * extents * extent_bytes);
    std::normal_distribution<float> normal;
    std::vector<std::int32_t> extent_of(std::size_t{rows} * extents);
    std::iota(extent_of.begin(), extent_of.end(), 0);
    std::shuffle(extent_of.begin(), extent_of.end(), random);
    for (std::size_t i = 0; i < digests.size() / size_of(s.digest); ++i) {
      store_from_float(digests.data(), s.digest, i, normal(random));
    }

    std::uint32_t const words = divide_up(s.blocks, 32U);
    std::uint32_t const lanes = rows * s.head_groups;
    std::vector<block_id> chosen(std::size_t{lanes} * budget);
    std::vector<std::uint32_t> counts(lanes);
    std::vector<std::uint32_t> previous(std::size_t{2} * lanes * words, 0x8421C0DEU);
    std::vector<float> scores(std::size_t{rows} * 2 * heads * pitch, 0.0F);
    std::vector<float> votes(std::size_t{lanes} * pitch, 0.0F);
    selection_ref const selection{
      .ids = chosen.data(),
      .counts = counts.data(),
      .previous = previous.data(),
      .max_selected = budget,
      .lanes = lanes,
      .previous_words = words};
    select_request const request{
      .layer = layer_id{1},
      .rows = {.ids = ids.data(), .count = rows},
      .info = info.data(),
      .queries = queries.view,
      .digests =
        {.base = digests.data(),
         .extent_of = extent_of.data(),
         .layer_offset = layer_offset.data(),
         .block_bytes = block_bytes.data(),
         .extent_bytes = extent_bytes,
         .extent_blocks = extent_blocks,
         .max_extents = extents},
      .selection = selection,
      .most_blocks = s.blocks,
      .most_queries = s.queries};
    score_table const table{.data = scores.data(), .queries = 2, .heads = heads, .pitch = pitch};
    select_top_k const choose{
      .layer = layer_id{1},
      .rows = request.rows,
      .info = info.data(),
      .votes = votes.data(),
      .selection = selection,
      .vote_pitch = pitch,
      .head_groups = s.head_groups,
      .block_tokens = block_tokens,
      .budget_blocks = budget,
      .sink_blocks = 1,
      .recent_blocks = 2,
      .remember = false};
    // `run` takes each operation of the passes in turn.
    auto const each = [&](auto const& run) {
      for (std::uint32_t first = 0; first < s.queries; first += table.queries) {
        query_pass const pass{.first = first, .last = first + table.queries >= s.queries};
        run(score_blocks{
          .request = request,
          .scores = table,
          .pass = pass,
          .heads = {.first = 0, .count = s.kv_heads},
          .query_group = s.group,
          .block_tokens = block_tokens,
          .budget_blocks = budget,
          .digest_type = s.digest,
          .scale = 1.5F / std::sqrt(static_cast<float>(s.dim))});
        run(share_blocks{
          .rows = request.rows,
          .info = info.data(),
          .scores = table,
          .pass = pass,
          .most_queries = std::min(table.queries, s.queries - first),
          .most_blocks = s.blocks,
          .block_tokens = block_tokens,
          .budget_blocks = budget});
        run(vote_blocks{
          .layer = layer_id{1},
          .rows = request.rows,
          .info = info.data(),
          .scores = table,
          .votes = votes.data(),
          .selection = selection,
          .pass = pass,
          .head_groups = s.head_groups,
          .most_blocks = s.blocks,
          .block_tokens = block_tokens,
          .budget_blocks = budget,
          .favour = 1.25F});
      }
      run(choose);
    };

    // One after the other, from the same memory.
    each([&](auto const& op) { rig().check_kernel(op, sameness::floats); });
    // All of them, on the GPU: what differs from the CPU's choice has votes at the cut.
    std::vector<block_id> const expected = chosen;
    std::vector<std::uint32_t> const expected_counts = counts;
    std::vector<float> const expected_votes = votes;
    std::fill(chosen.begin(), chosen.end(), block_id{1});
    each([&](auto const& op) { rig().run(op); });
    CHECK(counts == expected_counts);
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      if (tokens[lane / s.head_groups] <= budget * block_tokens) { continue; }
      float const* const vote = expected_votes.data() + std::size_t{lane} * pitch;
      auto const begin = static_cast<std::ptrdiff_t>(lane * budget);
      auto const end = begin + counts[lane];
      std::uint32_t differing = 0;
      // The smallest vote among those that were chosen by votes.
      float cut = INFINITY;
      for (auto i = begin + 1; i < end - 3; ++i) { cut = std::min(cut, vote[to_index(expected[i])]); }
      for (auto i = begin; i < end; ++i) {
        bool const same =
          std::find(expected.begin() + begin, expected.begin() + end, chosen[i]) != expected.begin() + end;
        if (same) { continue; }
        ++differing;
        CHECK(std::fabs(vote[to_index(chosen[i])] - cut) <= 2e-5F * cut);
      }
      CHECK(differing <= 1);
    }
  }
}

TEST_CASE("what is left for later and what stands below the cut are the same on the GPU as on the CPU")
{
  for (std::uint32_t seed = 1; seed <= 6; ++seed) {
    device_heap_scope const scope;
    lease_scene s{seed};
    constexpr std::uint32_t queries = 2, heads = 6, pitch = 96, words = 3;
    std::mt19937 random{seed};
    std::vector<float> votes(lease_scene::lanes * pitch);
    std::vector<float> shares(lease_scene::rows * queries * heads * pitch);
    std::vector<std::uint32_t> owed(lease_scene::layers * lease_scene::lanes * words);
    std::vector<std::uint32_t> wanted(owed.size());
    for (float& vote : votes) { vote = static_cast<float>(random() % 40); }
    for (float& share : shares) { share = static_cast<float>(random() % 512) * 0x1p-13F; }
    for (std::uint32_t& word : owed) { word = static_cast<std::uint32_t>(random() & random() & random()); }
    for (std::uint32_t& word : wanted) { word = static_cast<std::uint32_t>(random() & random()); }
    for (std::size_t word = 2; word < owed.size(); word += words) {
      owed[word] &= (1U << (lease_scene::max_blocks - 64)) - 1;
      wanted[word] &= (1U << (lease_scene::max_blocks - 64)) - 1;
    }
    for (std::size_t r = 0; r < s.info.size(); ++r) {
      s.info[r] = {.tokens = static_cast<std::int32_t>(80 + 70 * r), .new_tokens = r == 1 ? 3 : 2};
    }
    selection_scores const scores{
      .votes = votes.data(),
      .shares = shares.data(),
      .vote_pitch = pitch,
      .share_pitch = pitch,
      .queries = queries,
      .heads = heads,
      .every_head = true,
      .budget_blocks = lease_scene::max_selected,
      .sink_blocks = 1,
      .recent_blocks = 2};
    foresight_ref const foresight{
      .owed = owed.data(),
      .wanted = wanted.data(),
      .totals = s.foresight.data(),
      .lanes = lease_scene::lanes,
      .words = words};
    rig().check(want_near_blocks{
      .layer = layer_id{1},
      .rows = s.list(),
      .info = s.info.data(),
      .selection = s.selection(),
      .scores = scores,
      .foresight = foresight,
      .head_groups = lease_scene::head_groups,
      .block_tokens = 4,
      .near_blocks = 6});
    rig().check(defer_blocks{
      .layer = layer_id{1},
      .rows = s.list(),
      .info = s.info.data(),
      .selection = s.selection(),
      .scores = scores,
      .residency = s.residency(),
      .foresight = foresight,
      .head_groups = lease_scene::head_groups,
      .block_tokens = 4,
      .most_share = 0.15F,
      .wants_others = true});
    selection_ref listed = s.selection();
    std::vector<block_id> ids(lease_scene::lanes * lease_scene::max_selected, none<block_id>);
    std::vector<std::uint32_t> counts(lease_scene::lanes);
    listed.ids = ids.data();
    listed.counts = counts.data();
    rig().check(list_wanted_blocks{
      .layer = layer_id{1},
      .rows = s.list(),
      .listed = listed,
      .foresight = foresight,
      .residency = s.residency(),
      .host_blocks = s.host_blocks.data(),
      .head_groups = lease_scene::head_groups,
      .most_blocks = 5});
    std::uint64_t deferred = 0, brought = 0;
    for (lane_foresight const& lane : s.foresight) { deferred += lane.deferred; }
    for (std::uint32_t const count : counts) { brought += count; }
    CHECK(deferred > 5);
    CHECK(brought > 5);
  }
}

TEST_SUITE_END();
