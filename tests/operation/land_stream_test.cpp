#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/operation/land_stream.hpp>

#include <doctest/doctest.h>
#include <support/parallel_group.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_test;

namespace {

constexpr std::uint32_t groups = 2, stride = 6, host_blocks = 20;

stream_chunk chunk_of(std::uint32_t number, std::uint32_t first, std::uint32_t count)
{
  return {.layer = layer_id{1}, .first_block = first, .block_count = count, .number = number};
}

/// Slots whose bytes are those of the host blocks 19, 18, … in every head group, with their checksums.
struct arrived_blocks {
  explicit arrived_blocks(std::uint32_t count)
    : layout{make_block_layout(
        {.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 4, .block_tokens = 2, .head_groups = groups})},
      memory(std::size_t{2} * groups * stride * layout.block_bytes),
      sums(std::size_t{2} * groups * host_blocks * layout.plane_count, 0)
  {
    for (std::size_t i = 0; i < memory.size(); ++i) { memory[i] = static_cast<std::byte>(i * 37 % 251); }
    bases = {memory.data(), memory.data()};
    for (std::uint32_t b = 0; b < count; ++b) {
      home.push_back(static_cast<host_block_id>(host_blocks - 1 - b));
      for (std::uint32_t g = 0; g < groups; ++g) {
        for (std::uint32_t p = 0; p < layout.plane_count; ++p) {
          checksums().of(layer_id{1}, g, home[b])[p] = device::checksum_plane(slot(g, b), layout, p);
        }
      }
    }
  }

  /// The second half is used.
  [[nodiscard]] std::byte* slot(std::uint32_t group, std::uint32_t block)
  {
    return memory.data() + (std::size_t{groups} * stride + group * stride + block) * layout.block_bytes;
  }
  [[nodiscard]] checksum_ref checksums()
  {
    return {.sums = sums.data(), .head_groups = groups, .blocks = host_blocks, .layout = layout};
  }
  [[nodiscard]] land_stream landing(stream_box& box, stream_chunk const& chunk, stream_chunk const& before)
  {
    return {
      .box = &box,
      .chunk = chunk,
      .before = before,
      .checksums = checksums(),
      .pool = {.layer_base = bases.data(), .slot_stride = layout.block_bytes, .slots = 2 * groups * stride},
      .host_blocks = home.data(),
      .first = static_cast<slot_id>(groups * stride),
      .stride = stride,
      .head_groups = groups};
  }

  block_layout layout;
  std::vector<std::byte> memory;
  std::array<std::byte*, 2> bases = {};
  std::vector<std::uint32_t> sums;
  std::vector<host_block_id> home;
};

void run(land_stream const& op, std::uint32_t threads)
{
  CHECK(op.shape().items == 1);
  if (threads == 1) {
    run_solo(op);
  } else {
    run_parallel(op, threads);
  }
}

}  // namespace

TEST_SUITE("operation")
{
  TEST_CASE("chunks that are reached one after the other have arrived")
  {
    for (std::uint32_t const threads : {1U, 3U}) {
      arrived_blocks blocks{6};
      stream_box box;
      run(blocks.landing(box, chunk_of(1, 0, 6), {}), threads);
      run(blocks.landing(box, chunk_of(2, 6, 4), chunk_of(1, 0, 6)), threads);
      CHECK(box.failed == 0);
      CHECK(box.seen == 2);
    }
  }

  TEST_CASE("a chunk that was never reached is found by the one behind it, and the first loss is kept")
  {
    for (std::uint32_t const threads : {1U, 3U}) {
      arrived_blocks blocks{6};
      stream_box box;
      run(blocks.landing(box, chunk_of(1, 0, 6), {}), threads);
      run(blocks.landing(box, chunk_of(3, 12, 6), chunk_of(2, 6, 5)), threads);
      CHECK(box.failed == 1);
      CHECK(box.lost.first_block == 6);
      CHECK(box.lost.block_count == 5);
      CHECK(box.lost.layer == layer_id{1});
      run(blocks.landing(box, chunk_of(5, 24, 6), chunk_of(4, 18, 6)), threads);
      CHECK(box.seen == 5);
      CHECK(box.lost.first_block == 6);
    }
  }

  TEST_CASE("the first block whose bytes are not those that were written back is named")
  {
    for (std::uint32_t const threads : {1U, 2U, 8U}) {
      for (std::uint32_t const damaged : {0U, 3U, 5U}) {
        for (std::uint32_t const group : {0U, 1U}) {
          arrived_blocks blocks{6};
          blocks.slot(group, damaged)[9] ^= std::byte{4};
          blocks.slot(0, 5)[0] ^= static_cast<std::byte>(damaged == 5 ? 0 : 1);
          stream_box box;
          run(blocks.landing(box, chunk_of(1, 30, 6), {}), threads);
          CHECK(box.failed == 1);
          CHECK(box.lost.first_block == 30 + damaged);
          CHECK(box.lost.block_count == 1);
          CHECK(box.seen == 1);
          // Blocks behind the chunk's are not looked at.
          stream_box few;
          run(blocks.landing(few, chunk_of(1, 30, damaged), {}), threads);
          CHECK(few.failed == 0);
        }
      }
    }
  }
}
