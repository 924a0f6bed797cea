#include <pulseinfer/store/slot_pool.hpp>

#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <support/immediate_backend.hpp>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace pulseinfer;
using pulseinfer_test::immediate_backend;

namespace {

constexpr slot_id id(std::int32_t number) { return static_cast<slot_id>(number); }
constexpr layer_id layer(std::int32_t number) { return static_cast<layer_id>(number); }

block_layout layout_of(std::uint64_t block_bytes, std::uint32_t alignment = 16)
{
  block_layout layout;
  layout.block_bytes = block_bytes;
  layout.alignment = alignment;
  return layout;
}

struct alignas(256) memory {
  std::byte bytes[8192];
};

std::string text_of(std::uint32_t layers, block_layout const& layout, slot_pool_options const& options)
{
  try {
    validate(options, layers, layout);
  } catch (error const& thrown) {
    return thrown.what();
  }
  return {};
}

/// As a GPU's host: device memory has another copy of what both sides read.
struct far_backend : immediate_backend {
  static constexpr bool host_reads_device_memory = false;
};

}  // namespace

TEST_SUITE("store")
{
  TEST_CASE("an own slot pool is one pool for all layers: a slot given to one layer is no other's")
  {
    immediate_backend backend;
    {
      slot_pool<immediate_backend> pool{backend, 3, layout_of(64), {.slots = 4}};
      CHECK(pool.allocated_bytes() == 4 * 64);
      CHECK(pool.total_slots() == 4);
      CHECK_FALSE(pool.per_layer());
      CHECK(pool.acquire(layer(0)) == id(0));
      CHECK(pool.acquire(layer(2)) == id(1));
      CHECK(pool.acquire(layer(1), id(3)) == id(3));
      CHECK(pool.free_slots(layer(0)) == 1);
      CHECK(pool.acquire(layer(0)) == id(2));
      CHECK(pool.acquire(layer(1)) == none<slot_id>);
      CHECK(pool.release(layer(1), id(3)) == status::ok);
      CHECK(pool.acquire(layer(0)) == id(3));
      slot_pool_ref const ref = pool.ref();
      CHECK(ref.address(layer(0), id(3)) == ref.address(layer(2), id(3)));
      CHECK(ref.address(layer(0), id(3)) - ref.address(layer(0), id(0)) == 192);
      CHECK(ref.word(layer(2), id(3)) == 3);
    }
    CHECK(backend.allocated == 0);
  }

  TEST_CASE("pools lent per layer number their slots apart and keep to the lender's memory")
  {
    memory lent;
    immediate_backend backend;
    slot_pool<immediate_backend> pool{
      backend, 3, layout_of(64), {.slots = 4, .lent = {lent.bytes + 1024, lent.bytes, lent.bytes + 4096}}};
    CHECK(pool.per_layer());
    CHECK(pool.allocated_bytes() == 0);
    CHECK(pool.total_slots() == 12);
    CHECK(pool.free_slots() == 12);
    CHECK(pool.acquire(layer(0)) == id(0));
    CHECK(pool.acquire(layer(1)) == id(0));
    CHECK(pool.acquire(layer(2), id(2)) == id(2));
    CHECK(pool.free_slots(layer(2)) == 3);
    CHECK(pool.free_slots() == 9);
    CHECK(pool.ref().address(layer(0), id(0)) == lent.bytes + 1024);
    CHECK(pool.ref().address(layer(1), id(0)) == lent.bytes);
    CHECK(pool.ref().address(layer(2), id(2)) == lent.bytes + 4096 + 128);
    CHECK(pool.ref().word(layer(2), id(2)) == 10);
    CHECK(pool.release(layer(0), id(2)) == status::invalid_state);
    CHECK(pool.refused_release(layer(0)) == "double_release: block 2");
    CHECK(pool.release(layer(2), id(2)) == status::ok);
  }

  TEST_CASE("a pool lent once is one pool for all layers, with the lender's stride")
  {
    memory lent;
    immediate_backend backend;
    slot_pool<immediate_backend> pool{backend, 2, layout_of(64), {.slots = 3, .slot_stride = 96, .lent = {lent.bytes}}};
    CHECK_FALSE(pool.per_layer());
    CHECK(pool.acquire(layer(0)) == id(0));
    CHECK(pool.acquire(layer(1)) == id(1));
    CHECK(pool.ref().address(layer(1), id(1)) == lent.bytes + 96);
    CHECK(pool.ref().address(layer(0), id(1)) == lent.bytes + 96);
  }

  // Report: vllm-project/vllm#57019
  TEST_CASE("layers whose lent slots share bytes are refused by name; slots that interleave are not")
  {
    memory lent;
    auto const at = [&](std::size_t offset) { return lent.bytes + offset; };
    block_layout const layout = layout_of(64);
    // layer stride = slots x block bytes + 256 B of padding
    CHECK(text_of(3, layout, {.slots = 4, .lent = {at(0), at(512), at(1024)}}).empty());
    CHECK(text_of(3, layout, {.slots = 4, .lent = {at(0), at(256), at(512)}}).empty());
    CHECK(text_of(2, layout, {.slots = 4, .lent = {at(0), at(0)}}) == "invalid_argument: layer 1 overlaps layer 0");
    CHECK(text_of(2, layout, {.slots = 4, .lent = {at(0), at(240)}}) == "invalid_argument: layer 1 overlaps layer 0");
    CHECK(text_of(2, layout, {.slots = 4, .lent = {at(240), at(0)}}) == "invalid_argument: layer 1 overlaps layer 0");
    CHECK(
      text_of(3, layout, {.slots = 4, .lent = {at(0), at(1024), at(272 + 1008 - 64)}}) ==
      "invalid_argument: layer 2 overlaps layer 1");
    CHECK(text_of(3, layout, {.slots = 4, .slot_stride = 192, .lent = {at(0), at(64), at(128)}}).empty());
    CHECK(
      text_of(3, layout, {.slots = 4, .slot_stride = 192, .lent = {at(0), at(64), at(144)}}) ==
      "invalid_argument: layer 2 overlaps layer 0");
    CHECK(
      text_of(2, layout, {.slots = 4, .slot_stride = 192, .lent = {at(0), at(48)}}) ==
      "invalid_argument: layer 1 overlaps layer 0");
    CHECK(text_of(2, layout, {.slots = 1, .slot_stride = 192, .lent = {at(0), at(144)}}).empty());
    CHECK(text_of(2, layout, {.slots = 1, .slot_stride = 192, .lent = {at(0), at(192)}}).empty());
  }

  TEST_CASE("the overlap check agrees with marking every byte of every slot")
  {
    bool const held = rc::check([] {
      std::uint32_t const slots = *rc::gen::inRange(1U, 6U);
      std::uint64_t const block = *rc::gen::inRange(1U, 12U);
      std::uint64_t const stride = block + *rc::gen::inRange(0U, 30U);
      auto const offsets = *rc::gen::container<std::vector<std::uint32_t>>(3, rc::gen::inRange(0U, 200U));
      memory lent;
      std::vector<int> owners(8192, 0);
      slot_pool_options options{.slots = slots, .slot_stride = stride};
      for (std::uint32_t const offset : offsets) {
        options.lent.push_back(lent.bytes + offset);
        for (std::uint64_t slot = 0; slot < slots; ++slot) {
          for (std::uint64_t i = 0; i < block; ++i) { ++owners[offset + slot * stride + i]; }
        }
      }
      bool shared = false;
      for (int const count : owners) { shared = shared || count > 1; }
      RC_ASSERT(text_of(3, layout_of(block, 1), options).empty() == !shared);
    });
    CHECK(held);
  }

  TEST_CASE("slots that no block fits, or that blocks could not be aligned in, are refused with the numbers")
  {
    memory lent;
    CHECK(text_of(2, layout_of(64), {.slots = 0}) == "invalid_argument: a slot pool of 0 slots");
    CHECK(
      text_of(2, layout_of(64), {.slots = 1, .slot_stride = 48}) ==
      "invalid_argument: slot stride of 48 B is less than a block of 64 B");
    CHECK(
      text_of(2, layout_of(64), {.slots = 1, .slot_stride = 72}) ==
      "invalid_argument: unsupported_layout: slot stride of 72 B, blocks need 16 B alignment");
    CHECK(
      text_of(3, layout_of(64), {.slots = 1, .lent = {lent.bytes, lent.bytes + 64}}) ==
      "invalid_argument: 2 lent pools for 3 layers: give one for all or one for each");
    CHECK(
      text_of(2, layout_of(64), {.slots = 1, .lent = {lent.bytes, nullptr}}) ==
      "invalid_argument: layer 1 has no pool");
    CHECK(
      text_of(2, layout_of(64), {.slots = 1, .lent = {lent.bytes, lent.bytes + 68}}) ==
      "invalid_argument: unsupported_layout: the pool of layer 1 begins 4 B past a multiple of the 16 B that blocks "
      "need");
    CHECK(text_of(2, layout_of(64, 4), {.slots = 1, .lent = {lent.bytes, lent.bytes + 68}}).empty());
  }

  TEST_CASE("law 4: a slot that a copy names is nobody else's before the copy ends")
  {
    immediate_backend backend;
    slot_pool<immediate_backend> pool{backend, 2, layout_of(64), {.slots = 2}};
    REQUIRE(pool.acquire(layer(0)) == id(0));
    REQUIRE(pool.pin(layer(0), id(0)) == status::ok);
    CHECK(pool.release(layer(0), id(0)) == status::ok);
    CHECK(pool.acquire(layer(1)) == id(1));
    CHECK(pool.acquire(layer(1)) == none<slot_id>);
    CHECK(pool.counts(layer(0)).in_flight == 1);
    CHECK(pool.unpin(layer(0), id(0)) == status::ok);
    CHECK(pool.acquire(layer(1)) == id(0));
    CHECK(pool.audit().empty());
  }

  TEST_CASE("a layer or slot that the pool does not have is refused")
  {
    immediate_backend backend;
    slot_pool<immediate_backend> pool{backend, 2, layout_of(64), {.slots = 2}};
    CHECK(pool.acquire(layer(2)) == none<slot_id>);
    CHECK(pool.acquire(none<layer_id>) == none<slot_id>);
    CHECK(pool.free_slots(layer(2)) == 0);
    CHECK(pool.release(layer(2), id(0)) == status::out_of_range);
    CHECK(pool.release(layer(0), id(2)) == status::out_of_range);
    CHECK(pool.pin(layer(-1), id(0)) == status::out_of_range);
    CHECK(pool.unpin(layer(0), none<slot_id>) == status::out_of_range);
  }

  TEST_CASE("law 4: slots add up to the pool's size after any calls, in every layer")
  {
    bool const held = rc::check([](std::vector<std::uint16_t> const& calls, bool lend) {
      memory lent;
      std::uint32_t const slots = *rc::gen::inRange(1U, 6U);
      immediate_backend backend;
      slot_pool_options options{.slots = slots};
      if (lend) { options.lent = {lent.bytes, lent.bytes + 2048, lent.bytes + 4096}; }
      slot_pool<immediate_backend> pool{backend, 3, layout_of(64), options};
      std::vector<std::uint32_t> references(3U * slots, 0);
      std::vector<std::uint32_t> pins(3U * slots, 0);
      for (std::uint16_t const call : calls) {
        std::uint32_t const l = (call / 4U) % 3U;
        std::uint32_t const s = (call / 16U) % slots;
        layer_id const at = layer(static_cast<std::int32_t>(l));
        slot_id const slot = id(static_cast<std::int32_t>(s));
        std::size_t const place = pool.ref().word(at, slot);
        switch (call % 4U) {
          case 0:
            if (slot_id const given = pool.acquire(at, slot); is_none(given)) {
              RC_ASSERT(pool.free_slots(at) == 0U);
            } else {
              std::size_t const found = pool.ref().word(at, given);
              RC_ASSERT(references[found] == 0U && pins[found] == 0U);
              references[found] = 1;
            }
            break;
          case 1:
            RC_ASSERT(pool.release(at, slot) == (references[place] > 0 ? status::ok : status::invalid_state));
            references[place] = 0;
            break;
          case 2: {
            bool const right = references[place] + pins[place] > 0;
            RC_ASSERT(pool.pin(at, slot) == (right ? status::ok : status::invalid_state));
            pins[place] += right ? 1U : 0U;
            break;
          }
          default:
            RC_ASSERT(pool.unpin(at, slot) == (pins[place] > 0 ? status::ok : status::invalid_state));
            pins[place] -= pins[place] > 0 ? 1U : 0U;
            break;
        }
        RC_ASSERT(pool.audit() == "");
        block_counts const counts = pool.counts(at);
        RC_ASSERT(counts.free + counts.held + counts.in_flight == slots);
        RC_ASSERT(pool.free_slots(at) == counts.free);
      }
    });
    CHECK(held);
  }

  TEST_CASE("kernels read the begins of the layers in device memory, the host in its own")
  {
    far_backend backend;
    {
      slot_pool<far_backend> const pool{backend, 3, layout_of(64), {.slots = 2}};
      slot_pool_ref const ref = pool.ref();
      CHECK(ref.device_layer_base != ref.layer_base);
      for (std::uint32_t l = 0; l < 3; ++l) {
        CHECK(ref.device_layer_base[l] == ref.layer_base[l]);
        CHECK(ref.base(layer(static_cast<std::int32_t>(l))) == ref.layer_base[l]);
      }
      REQUIRE(backend.runs.size() == 1);  // at set-up
      CHECK(backend.runs[0].bytes == 3 * sizeof(std::byte*));
    }
    CHECK(backend.allocated == 0);
    immediate_backend near;
    slot_pool<immediate_backend> const shared{near, 3, layout_of(64), {.slots = 2}};
    CHECK(shared.ref().device_layer_base == shared.ref().layer_base);
    CHECK(near.copies == 0);
  }
}
