#pragma once

/// A large host store with known contents, slots, and recall plans over random blocks of it.

#include "../on_gpu.cuh"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/pool.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace pulseinfer_bench {

using pulseinfer::memory_space;
using pulseinfer::status;

/// The word at a place of the store.
[[nodiscard]] PULSEINFER_HOST_DEVICE inline std::uint64_t word_at(std::uint64_t place)
{
  std::uint64_t x = place + 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

static __global__ void fill_store(std::uint64_t* words, std::uint64_t count)
{
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    words[i] = word_at(i);
  }
}

/// Counts words of the entries' slots that are not those of their host blocks.
static __global__ void count_wrong(
  pulseinfer::recall_entry const* entries, std::uint32_t count, std::byte const* slots, std::uint64_t block_bytes,
  unsigned long long* wrong)
{
  std::uint64_t const words = block_bytes / 8;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count * words;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    pulseinfer::recall_entry const entry = entries[i / words];
    std::uint64_t const place = i % words;
    auto const* const slot = reinterpret_cast<std::uint64_t const*>(slots + to_index(entry.target) * block_bytes);
    if (slot[place] != word_at(to_index(entry.source) * words + place)) { atomicAdd(wrong, 1ULL); }
  }
}

/// 8 GiB of pinned store, 1 GiB of slots, a high-priority stream and events. One for all benchmarks of a program.
class recall_store {
 public:
  static constexpr std::uint64_t store_bytes = std::uint64_t{8} << 30U;
  static constexpr std::uint64_t slot_bytes = std::uint64_t{1} << 30U;

  recall_store()
    : store{backend, memory_space::pinned, store_bytes},
      slots{backend, memory_space::device, slot_bytes},
      bases{backend, memory_space::pinned, 2 * sizeof(std::byte*)},
      device_bases{backend, memory_space::device, 2 * sizeof(std::byte*)},
      wrong_{backend, memory_space::pinned, sizeof(unsigned long long)},
      stream{backend.create_stream(pulseinfer::stream_priority::high)}
  {
    bases.as<std::byte*>()[0] = store.data();
    bases.as<std::byte*>()[1] = slots.data();
    require(cudaMemcpy(device_bases.data(), bases.data(), bases.bytes(), cudaMemcpyDefault), "bases");
    fill_store<<<1024, 256, 0, stream.stream>>>(store.as<std::uint64_t>(), store_bytes / 8);
    require(cudaGetLastError(), "fill");
    for (cudaEvent_t& event : events) { require(cudaEventCreate(&event), "cudaEventCreate"); }
    require(backend.synchronize(stream), "synchronize");
  }
  recall_store(recall_store&&) = delete;

  [[nodiscard]] pulseinfer::host_store_ref host(std::uint64_t block_bytes) const
  {
    return {
      .slab_base = bases.as<std::byte*>(),
      .device_slab_base = device_bases.as<std::byte*>(),
      .block_stride = block_bytes,
      .head_groups = 1,
      .blocks = static_cast<std::uint32_t>(store_bytes / block_bytes)};
  }
  [[nodiscard]] pulseinfer::slot_pool_ref pool(std::uint64_t block_bytes) const
  {
    return {
      .layer_base = bases.as<std::byte*>() + 1,
      .device_layer_base = device_bases.as<std::byte*>() + 1,
      .slot_stride = block_bytes,
      .slots = static_cast<std::uint32_t>(slot_bytes / block_bytes)};
  }

  /// Microseconds between begin and end of what `work` enqueues, the stream idle before. `behind_work`: busy until all is
  /// enqueued, as in the midst of a step, so that the way from the host to the device does not count.
  template <class Work>
  [[nodiscard]] double time(Work work, bool behind_work = false)
  {
    require(backend.synchronize(stream), "synchronize");
    if (behind_work) {
      keep_busy<<<1, 1, 0, stream.stream>>>(100000);
      require(cudaGetLastError(), "keep_busy");
    }
    require(cudaEventRecord(events[0], stream.stream), "cudaEventRecord");
    work();
    require(cudaEventRecord(events[1], stream.stream), "cudaEventRecord");
    require(cudaEventSynchronize(events[1]), "cudaEventSynchronize");
    float milliseconds = 0.0F;
    require(cudaEventElapsedTime(&milliseconds, events[0], events[1]), "cudaEventElapsedTime");
    return double{1000.0} * static_cast<double>(milliseconds);
  }

  /// One contiguous copy of the copy engine, of as many bytes: the limit that others are compared with.
  [[nodiscard]] double time_contiguous(std::uint64_t bytes, std::uint64_t round, bool behind_work = false)
  {
    std::uint64_t const offset = round * 977 * 4096 * 512 % (store_bytes - bytes + 1) / 4096 * 4096;
    return time(
      [&] {
        require(
          cudaMemcpyAsync(slots.data(), store.data() + offset, bytes, cudaMemcpyHostToDevice, stream.stream),
          "cudaMemcpyAsync");
      },
      behind_work);
  }

  /// Words that the entries' slots hold wrongly.
  [[nodiscard]] unsigned long long wrong(
    pulseinfer::recall_entry const* entries, std::uint32_t count, std::uint64_t block_bytes)
  {
    *wrong_.as<unsigned long long>() = 0;
    count_wrong<<<1024, 256, 0, stream.stream>>>(
      entries, count, slots.data(), block_bytes, wrong_.as<unsigned long long>());
    require(backend.synchronize(stream), "count_wrong");
    return *wrong_.as<unsigned long long>();
  }
  void poison()
  {
    require(cudaMemsetAsync(slots.data(), 0xEE, slot_bytes, stream.stream), "cudaMemsetAsync");
    require(backend.synchronize(stream), "synchronize");
  }

  // One registration, so that one contiguous copy may take any part of the store.
  pulseinfer::cuda_backend backend{
    pulseinfer::cuda_options{.max_copy_runs = 1U << 20U, .pinned_chunk_bytes = store_bytes}};
  pulseinfer::slab<pulseinfer::cuda_backend> store, slots, bases, device_bases, wrong_;
  pulseinfer::cuda_backend::stream_ref stream;
  cudaEvent_t events[2] = {};
};

inline recall_store& shared_store()
{
  static recall_store* const made = new recall_store;  // lives until the process ends, as the runtime does
  return *made;
}

/// A bijection on [0, 2^bits) that looks random.
[[nodiscard]] inline std::uint64_t scatter(std::uint64_t x, std::uint32_t bits, std::uint64_t seed)
{
  std::uint64_t const mask = (std::uint64_t{1} << bits) - 1;
  x = (x + seed * 0x9E3779B97F4A7C15ULL) & mask;
  for (std::uint32_t i = 0; i < 3; ++i) {
    x = x * 0xBF58476D1CE4E5B9ULL & mask;
    x ^= x >> (bits / 2 + 1);
  }
  return x;
}

[[nodiscard]] inline std::uint32_t bits_of(std::uint64_t power_of_two)
{
  std::uint32_t bits = 0;
  while ((std::uint64_t{1} << bits) < power_of_two) { ++bits; }
  return bits;
}

/// Random distinct blocks into random distinct slots, one row. `ordered`: by host address in buckets of 2 MiB. `shared`: every
/// block is wanted so many times, as by so many rows that hold a prefix together.
class random_plan {
 public:
  random_plan(
    recall_store& store, std::uint64_t block_bytes, std::uint64_t volume, std::uint64_t seed, bool ordered,
    memory_space where, std::uint32_t shared = 1)
    : count{static_cast<std::uint32_t>(volume / block_bytes)},
      block_bytes_{block_bytes},
      store_{&store},
      entries_{store.backend, where, count * sizeof(pulseinfer::recall_entry)},
      row_begin_{store.backend, where, 2 * sizeof(std::uint32_t)},
      failed_{store.backend, where, count * sizeof(std::uint32_t)},
      rows_{store.backend, memory_space::pinned, sizeof(pulseinfer::row_id)}
  {
    std::vector<pulseinfer::recall_entry> entries(count);
    std::uint32_t const block_bits = bits_of(recall_store::store_bytes / block_bytes);
    std::uint32_t const slot_bits = bits_of(recall_store::slot_bytes / block_bytes);
    for (std::uint32_t i = 0; i < count; ++i) {
      entries[i] = {
        .source = static_cast<pulseinfer::host_block_id>(scatter(i % (count / shared), block_bits, seed)),
        .target = static_cast<pulseinfer::slot_id>(scatter(i, slot_bits, seed + 100)),
        .lane = pulseinfer::lane_id{0},
        .block = static_cast<pulseinfer::block_id>(i)};
    }
    if (ordered) {
      std::stable_sort(entries.begin(), entries.end(), [&](auto const& a, auto const& b) {
        return to_index(a.source) * block_bytes >> 21U < to_index(b.source) * block_bytes >> 21U;
      });
    }
    std::uint32_t const begins[2] = {0, count};
    copy(entries_.data(), entries.data(), entries_.bytes());
    copy(row_begin_.data(), begins, sizeof(begins));
    require(cudaMemset(failed_.data(), 0, failed_.bytes()), "cudaMemset");
    *rows_.as<pulseinfer::row_id>() = pulseinfer::row_id{0};
  }

  [[nodiscard]] pulseinfer::recall_plan_ref ref() const
  {
    return {
      .entries = entries_.as<pulseinfer::recall_entry>(),
      .row_begin = row_begin_.as<std::uint32_t>(),
      .failed = failed_.as<std::uint32_t>(),
      .rows = {.ids = rows_.as<pulseinfer::row_id>(), .count = 1},
      .host = store_->host(block_bytes_),
      .pool = store_->pool(block_bytes_),
      .layer = pulseinfer::layer_id{0},
      .head_groups = 1,
      .block_bytes = block_bytes_,
      .capacity = count};
  }

  std::uint32_t count;

 private:
  static void copy(void* to, void const* from, std::size_t bytes)
  {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }

  std::uint64_t block_bytes_;
  recall_store* store_;
  pulseinfer::slab<pulseinfer::cuda_backend> entries_, row_begin_, failed_, rows_;
};

/// The middle one.
[[nodiscard]] inline double median(std::vector<double> values)
{
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace pulseinfer_bench
