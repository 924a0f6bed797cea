#include <doctest/doctest.h>
#include <support/manager/rig.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

solo_head_selector<> const six_blocks{.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 4, .dense_tokens = 24};

kv_geometry plain() { return {.layers = 3, .query_heads = 8, .kv_heads = 4, .head_dim = 8, .block_tokens = 4}; }

manager_options options_of(std::uint32_t rows = 2)
{
  return {.max_rows = rows, .max_tokens = 120, .max_prefill_tokens = 8, .quota_tokens = 32};
}

/// Decodes two sequences of different lengths, the second with a block that is not full, and looks at every byte.
template <class Manager>
void check_bytes(kv_geometry const& geometry, manager_options const& options = options_of())
{
  rig<Manager> r{{.geometry = geometry, .manager = options, .per_row = 8}, six_blocks};
  row_id const a = r.open(1, 40, 120), b = r.open(2, 30, 110);
  r.engine.prefill(a, 40, 8);
  r.engine.prefill(b, 30, 7);
  std::uint64_t recalled = 0;
  for (int step = 0; step < 70; ++step) {
    r.step({{.row = b}, {.row = a}});
    recalled += r.kv.finish_sample().recalled_blocks;
    REQUIRE(r.kv.audit() == "");
  }
  CHECK(recalled > 0);
  r.close_all();
}

}  // namespace

TEST_SUITE("manager")
{
  TEST_CASE_TEMPLATE(
    "law 1: recalled bytes equal the written bytes, for every layout of a block", Manager, lockstep_manager,
    hits_manager, fragment_manager)
  {
    for (dtype const type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float8_e4m3}) {
      for (token_order const order : {token_order::hnd, token_order::nhd}) {
        for (std::uint32_t const head_groups : {1U, 2U, 4U}) {
          kv_geometry g = plain();
          g.key_type = type;
          g.value_type = type == dtype::float16 ? dtype::float32 : type;
          g.order = order;
          g.head_groups = head_groups;
          check_bytes<Manager>(g);
        }
      }
    }
    kv_geometry latent = plain();
    latent.kv_heads = 1;
    latent.value_is_key_prefix = true;
    latent.value_dim = 5;
    latent.extra_planes = {{.name = "rope", .bytes_per_token = 6}};
    check_bytes<Manager>(latent);
    kv_geometry padded = plain();
    padded.head_dim = 46;
    padded.value_dim = 10;
    padded.row_alignment = 32;
    check_bytes<Manager>(padded);
  }

  // Report: sgl-project/sglang#17085
  TEST_CASE_TEMPLATE(
    "law 6: planes that the library never reads travel with their block", Manager, lockstep_manager, fragment_manager)
  {
    kv_geometry g = plain();
    g.key_type = g.value_type = dtype::float8_e4m3;
    for (std::uint32_t const head_groups : {1U, 4U}) {
      g.head_groups = head_groups;
      g.extra_planes = {
        {.name = "scales", .bytes_per_block = 64},
        {.name = "index keys", .bytes_per_token = 132},
        {.name = "odd", .bytes_per_token = 1, .bytes_per_block = 3}};
      check_bytes<Manager>(g);
    }
  }

  // Report: sgl-project/sglang#17085
  TEST_CASE(
    "law 6: after everything has left the device and its memory is poisoned, the selection and all planes are the same")
  {
    kv_geometry g = plain();
    g.key_type = g.value_type = dtype::float8_e4m3;
    g.block_tokens = 16;
    g.extra_planes = {{.name = "scales", .bytes_per_block = 64}, {.name = "index keys", .bytes_per_token = 132}};
    std::uint64_t selections[2] = {};
    for (bool const evicted : {false, true}) {
      rig<checked_manager> r{
        {.geometry = g,
         .manager =
           {.max_rows = 1, .max_tokens = 700, .max_prefill_tokens = 16, .quota_tokens = 160, .host_blocks = 100},
         .per_row = 16},
        {.budget_tokens = 112, .sink_tokens = 16, .recent_tokens = 32, .dense_tokens = 112}};
      row_id row = r.open(1, 640, 700);
      r.engine.prefill(row, 640, 16);
      for (int step = 0; step < 10; ++step) { r.step({{.row = row}}); }
      if (evicted) {
        saved_id saved;
        REQUIRE(r.kv.preempt(row, saved) == status::ok);
        REQUIRE(r.kv.drain(no_deadline) == status::ok);
        CHECK(r.kv.memory().slot_bytes == 0);
        slot_pool_ref const pool = r.kv.pool().ref();
        for (std::uint32_t s = 0; s < pool.slots; ++s) {
          std::byte* const slot = pool.address(layer_id{0}, static_cast<slot_id>(s));
          REQUIRE(r.backend.poison(memory_space::device, slot, pool.slot_stride) == status::ok);
        }
        row_id back{};
        REQUIRE(r.kv.resume(saved, back) == admission::admitted);
        REQUIRE(back == row);
      }
      r.engine.selections = 0;
      for (int step = 0; step < 40; ++step) { r.step({{.row = row}}); }
      selections[evicted ? 1 : 0] = r.engine.selections;
      r.close_all();
      CHECK(r.backend.check() == 0);
    }
    CHECK(selections[1] == selections[0]);
  }

  TEST_CASE("law 1: over memory that is watched and poisoned, sequences that come and go read what was written")
  {
    for (std::uint64_t const seed : {0U, 1U, 2U}) {
      kv_geometry g = plain();
      g.head_groups = 2;
      g.extra_planes = {{.name = "scales", .bytes_per_token = 3, .bytes_per_block = 5}};
      rig<checked_manager> r{
        {.geometry = g, .manager = options_of(3), .cpu = {.mode = cpu_mode::manual, .seed = seed}, .per_row = 8},
        six_blocks};
      r.engine.warm_up = true;
      for (std::uint64_t sequence = 1; sequence < 8; sequence += 2) {
        row_id const a = r.open(sequence, 33, 80), b = r.open(sequence + 1, 12, 50);
        r.engine.prefill(a, 33, 8);
        r.engine.prefill(b, 12, 5);
        for (int step = 0; step < 38; ++step) { r.step({{.row = a}, {.row = b}}); }
        REQUIRE(r.kv.close(a) == status::ok);
        REQUIRE(r.kv.close(b) == status::ok);
        REQUIRE(r.kv.drain(no_deadline) == status::ok);
      }
      r.close_all();
      CHECK(r.backend.check() == 0);
      CHECK(r.backend.violations() == std::vector<std::string>{});
    }
  }

  // Report: vllm-project/vllm#57019
  TEST_CASE_TEMPLATE(
    "law 12: layers lent out of one slab, with padding between slots and layers, never read one another's blocks",
    Manager, lockstep_manager, fragment_manager)
  {
    kv_geometry const g = plain();
    block_layout const layout = make_block_layout(g);
    constexpr std::uint32_t slots = 80;
    std::uint64_t const stride = layout.block_bytes + 48, layer_stride = slots * stride + 256;
    struct alignas(256) line {
      std::byte bytes[256];
    };
    std::vector<line> memory((3 * layer_stride + 255) / 256);
    manager_options options = options_of();
    options.slots = slots;
    options.slot_stride = stride;
    for (std::uint64_t const layer : {1U, 2U, 0U}) {
      options.lent_slots.push_back(memory[0].bytes + layer * layer_stride);
    }
    check_bytes<Manager>(g, options);
    options.lent_slots[1] = options.lent_slots[0] + stride;
    CHECK_THROWS_WITH_AS(
      (rig<Manager>{{.geometry = g, .manager = options}, six_blocks}), "invalid_argument: layer 1 overlaps layer 0",
      configuration_error);
  }
}
