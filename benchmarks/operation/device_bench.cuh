#pragma once

/// Times of what runs on a GPU, as graphs of repeated calls, beside copies in its memory.

#include "../on_gpu.cuh"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/numeric.hpp>
#include <pulseinfer/store/slab.hpp>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace pulseinfer_bench {

/// Numbers between -1 and 1 that look random.
template <class T>
__global__ void fill_random(T* values, std::uint64_t count, std::uint64_t seed)
{
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = i + seed * 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
    values[i] = static_cast<T>(static_cast<float>(x >> 40U) * 0x1p-23F - 1.0F);
  }
}

/// A backend, a stream and device memory that ends with the process.
class device_bench {
 public:
  using slab_type = pulseinfer::slab<pulseinfer::cuda_backend>;

  device_bench()
  {
    for (cudaEvent_t& event : events_) { require(cudaEventCreate(&event), "cudaEventCreate"); }
  }
  device_bench(device_bench&&) = delete;

  [[nodiscard]] slab_type memory(std::uint64_t bytes)
  {
    return slab_type{backend, pulseinfer::memory_space::device, std::max<std::uint64_t>(bytes, 16)};
  }
  template <class T>
  [[nodiscard]] slab_type upload(std::vector<T> const& from)
  {
    slab_type result = memory(from.size() * sizeof(T));
    require(cudaMemcpy(result.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return result;
  }
  [[nodiscard]] slab_type random(std::uint64_t elements, pulseinfer::dtype type, std::uint64_t seed)
  {
    slab_type result = memory(elements * size_of(type));
    switch (type) {
      case pulseinfer::dtype::float32: fill(result.as<float>(), elements, seed); break;
      case pulseinfer::dtype::float16: fill(result.as<pulseinfer::half>(), elements, seed); break;
      default: fill(result.as<pulseinfer::bfloat16>(), elements, seed); break;
    }
    require(backend.synchronize(stream), "fill");
    return result;
  }

  /// Calls of `work(i)`, i < repeats, as one graph.
  class graph {
   public:
    template <class Work>
    graph(device_bench& on, std::uint32_t repeats, Work work) : on_{&on}, repeats_{repeats}
    {
      work(0U);  // what CUDA does at a kernel's first launch
      require(on.backend.synchronize(on.stream), "synchronize");
      require(cudaStreamBeginCapture(on.stream.stream, cudaStreamCaptureModeThreadLocal), "capture");
      for (std::uint32_t i = 0; i < repeats; ++i) { work(i); }
      require(cudaStreamEndCapture(on.stream.stream, &graph_), "capture");
      require(cudaGraphInstantiate(&runnable_, graph_, 0), "cudaGraphInstantiate");
      require(cudaGraphUpload(runnable_, on.stream.stream), "cudaGraphUpload");
      static_cast<void>(run());
    }
    graph(graph&&) = delete;
    ~graph()
    {
      static_cast<void>(cudaGraphExecDestroy(runnable_));
      static_cast<void>(cudaGraphDestroy(graph_));
    }

    /// Microseconds of a call. `behind_work`: the stream is busy until all is enqueued, as in the midst of a step, so that the
    /// way from the host to the device does not count.
    [[nodiscard]] double run(bool behind_work = false)
    {
      require(on_->backend.synchronize(on_->stream), "synchronize");
      if (behind_work) {
        keep_busy<<<1, 1, 0, on_->stream.stream>>>(100000);
        require(cudaGetLastError(), "keep_busy");
      }
      require(cudaEventRecord(on_->events_[0], on_->stream.stream), "cudaEventRecord");
      require(cudaGraphLaunch(runnable_, on_->stream.stream), "cudaGraphLaunch");
      require(cudaEventRecord(on_->events_[1], on_->stream.stream), "cudaEventRecord");
      require(cudaEventSynchronize(on_->events_[1]), "cudaEventSynchronize");
      float milliseconds = 0.0F;
      require(cudaEventElapsedTime(&milliseconds, on_->events_[0], on_->events_[1]), "cudaEventElapsedTime");
      return 1000.0 * static_cast<double>(milliseconds) / static_cast<double>(repeats_);
    }

   private:
    device_bench* on_;
    std::uint32_t repeats_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t runnable_ = nullptr;
  };

  /// Copies inside the device that read and write `bytes` together, each at another place of `around`.
  class copies {
   public:
    copies(device_bench& on, std::uint32_t repeats, std::uint64_t bytes, slab_type const& around)
      : half_{bytes / 2},
        target_{on.memory(std::max(half_, std::min(half_ * repeats, std::uint64_t{256} << 20U)))},
        graph_{on, repeats, [&](std::uint32_t i) {
                 std::uint64_t const source = around.bytes() >= half_ ? i * half_ % (around.bytes() - half_ + 1) : 0;
                 std::uint64_t const target = i * half_ % (target_.bytes() - half_ + 1);
                 require(
                   cudaMemcpyAsync(
                     target_.data() + target / 256 * 256, around.data() + source / 256 * 256,
                     std::min<std::uint64_t>(half_, around.bytes()), cudaMemcpyDeviceToDevice, on.stream.stream),
                   "cudaMemcpyAsync");
               }}
    {}
    [[nodiscard]] double run() { return graph_.run(); }

   private:
    std::uint64_t half_;
    slab_type target_;
    graph graph_;
  };

  /// Medians of `rounds` runs of both in turn. `bytes` is what the work has to read and write, each once.
  template <class Copies>
  void report(benchmark::State& state, std::uint64_t bytes, graph& work, Copies& copy, std::uint32_t rounds = 9)
  {
    for (auto _ : state) {
      std::vector<double> of_work;
      std::vector<double> of_copy;
      for (std::uint32_t round = 0; round < rounds; ++round) {
        of_copy.push_back(copy.run());
        of_work.push_back(work.run());
      }
      for (std::vector<double>* const times : {&of_work, &of_copy}) { std::sort(times->begin(), times->end()); }
      double const microseconds = of_work[rounds / 2];
      double const beside = of_copy[rounds / 2];
      state.SetIterationTime(microseconds * 1e-6);
      state.counters["microseconds"] = microseconds;
      state.counters["bytes_per_second"] = static_cast<double>(bytes) / (microseconds * 1e-6);
      state.counters["copy_bytes_per_second"] = static_cast<double>(bytes) / (beside * 1e-6);
      state.counters["copy_share"] = beside / microseconds;
    }
  }

  pulseinfer::cuda_backend backend;
  pulseinfer::cuda_backend::stream_ref stream = backend.create_stream();

 private:
  template <class T>
  void fill(T* values, std::uint64_t elements, std::uint64_t seed)
  {
    fill_random<<<4096, 256, 0, stream.stream>>>(values, elements, seed);
    require(cudaGetLastError(), "fill");
  }

  cudaEvent_t events_[2] = {};
};

[[nodiscard]] inline device_bench& shared_device()
{
  static device_bench* const made = new device_bench;  // lives until the process ends, as the runtime does
  return *made;
}

/// The operation's generic body, whatever kernel it has: the baseline.
template <class Op>
struct generic {
  static constexpr char const* name = Op::name;
  static constexpr pulseinfer::operation_kind kind = Op::kind;

  Op op = {};

  [[nodiscard]] pulseinfer::launch_shape shape() const { return op.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t group_threads) const { return op.scratch_bytes(group_threads); }
  [[nodiscard]] pulseinfer::operation_cost cost() const { return op.cost(); }
  template <pulseinfer::thread_group Group>
  PULSEINFER_HOST_DEVICE void operator()(Group const& group, std::uint64_t item, pulseinfer::scratch_ref scratch) const
  {
    op(group, item, scratch);
  }
};

/// Calls until the memory that they read is several times the device's cache, or `most`.
[[nodiscard]] inline std::uint32_t calls_of(std::uint64_t bytes, std::uint32_t most)
{
  std::uint64_t const wanted = (std::uint64_t{256} << 20U) / std::max<std::uint64_t>(bytes, 1) + 1;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(wanted, 2, most));
}

}  // namespace pulseinfer_bench
