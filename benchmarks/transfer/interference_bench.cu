/// What a recall costs the kernels beside it, and they it.

#include "recall_store.cuh"
#include <pulseinfer/operation/gather_blocks.hpp>

#include <benchmark/benchmark.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <string>
#include <vector>

using namespace pulseinfer;
using namespace pulseinfer_bench;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20U;

__global__ void fill_bfloats(__nv_bfloat16* values, std::uint64_t count)
{
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    values[i] = __float2bfloat16(static_cast<float>(word_at(i) % 2001) / 1000.0F - 1.0F);
  }
}

/// [m, k] times [k, n].
struct product_shape {
  char const* name;
  std::uint32_t m, n, k;
  bool by_columns = true;  ///< the weights' columns lie together, as [n, k]; else their rows
};

/// Work on a low-priority stream, as a model's.
class neighbour {
 public:
  neighbour(recall_store& made, product_shape const& shape)
    : rows{shape.m},
      columns{shape.n},
      depth{shape.k},
      by_columns{shape.by_columns},
      stream{made.backend.create_stream(stream_priority::low)},
      backend_{&made.backend},
      a_{made.backend, memory_space::device, std::uint64_t{shape.m} * shape.k * 2},
      b_{made.backend, memory_space::device, std::uint64_t{shape.n} * shape.k * 2},
      c_{made.backend, memory_space::device, std::uint64_t{shape.m} * shape.n * 2}
  {
    for (slab<cuda_backend>* const part : {&a_, &b_}) {
      fill_bfloats<<<1024, 256, 0, stream.stream>>>(part->as<__nv_bfloat16>(), part->bytes() / 2);
    }
    if (cublasCreate(&blas_) != CUBLAS_STATUS_SUCCESS) { require(cudaErrorUnknown, "cublasCreate"); }
    static_cast<void>(cublasSetStream(blas_, stream.stream));
    for (cudaEvent_t& event : events) { require(cudaEventCreate(&event), "cudaEventCreate"); }
    static_cast<void>(run(3));
  }
  neighbour(neighbour&&) = delete;
  ~neighbour()
  {
    static_cast<void>(cublasDestroy(blas_));
    for (cudaEvent_t const event : events) { static_cast<void>(cudaEventDestroy(event)); }
    backend_->destroy_stream(stream);
  }

  void enqueue()
  {
    float const one = 1.0F;
    float const zero = 0.0F;
    cublasStatus_t const done = cublasGemmEx(
      blas_, by_columns ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, static_cast<int>(columns), static_cast<int>(rows),
      static_cast<int>(depth), &one, b_.data(), CUDA_R_16BF, static_cast<int>(by_columns ? depth : columns), a_.data(),
      CUDA_R_16BF, static_cast<int>(depth), &zero, c_.data(), CUDA_R_16BF, static_cast<int>(columns),
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (done != CUBLAS_STATUS_SUCCESS) { require(cudaErrorUnknown, "cublasGemmEx"); }
  }
  /// Microseconds of one, of `count` in a row.
  [[nodiscard]] double run(std::uint32_t count)
  {
    begin();
    for (std::uint32_t i = 0; i < count; ++i) { enqueue(); }
    return end() / count;
  }
  void begin() { require(cudaEventRecord(events[0], stream.stream), "cudaEventRecord"); }
  [[nodiscard]] double end()
  {
    require(cudaEventRecord(events[1], stream.stream), "cudaEventRecord");
    require(cudaEventSynchronize(events[1]), "cudaEventSynchronize");
    float milliseconds = 0.0F;
    require(cudaEventElapsedTime(&milliseconds, events[0], events[1]), "cudaEventElapsedTime");
    return double{1000.0} * static_cast<double>(milliseconds);
  }

  std::uint32_t rows, columns, depth;
  bool by_columns;
  cuda_backend::stream_ref stream;
  cudaEvent_t events[2] = {};

 private:
  cuda_backend* backend_;
  slab<cuda_backend> a_, b_, c_;
  cublasHandle_t blas_ = nullptr;
};

/// Recalls without a pause on the high-priority stream while the products run: each works at least as long as the other.
template <class Recall>
void beside(benchmark::State& state, product_shape const& shape, std::uint64_t volume, Recall recall)
{
  recall_store& store = shared_store();
  neighbour product{store, shape};
  require(store.backend.synchronize(), "synchronize");
  double const alone = product.run(20);
  double const contiguous = store.time_contiguous(volume, 1);
  double const recall_alone = store.time([&] { recall(); });
  cudaEvent_t marks[2] = {};
  for (cudaEvent_t& mark : marks) { require(cudaEventCreate(&mark), "cudaEventCreate"); }
  for (auto _ : state) {
    // Recalls enough to outlast the products at twice their time, and products measured from the first to the last.
    std::uint32_t const products = 40;
    auto const recalls = static_cast<std::uint32_t>(3.0 * products * alone / recall_alone) + 2;
    require(cudaEventRecord(marks[0], store.stream.stream), "cudaEventRecord");
    for (std::uint32_t i = 0; i < recalls; ++i) { recall(); }
    for (std::uint32_t i = 0; i < 5; ++i) { product.enqueue(); }
    double const with = product.run(products);
    bool const outlasted = cudaStreamQuery(store.stream.stream) == cudaErrorNotReady;
    static_cast<void>(cudaGetLastError());
    require(store.backend.synchronize(), "synchronize");
    // The recall's rate while products run: the same number of recalls beside products that outlast them.
    require(cudaEventRecord(marks[0], store.stream.stream), "cudaEventRecord");
    std::uint32_t const timed = 10;
    auto const long_enough = static_cast<std::uint32_t>(4.0 * timed * recall_alone / alone) + 10;
    for (std::uint32_t i = 0; i < long_enough; ++i) { product.enqueue(); }
    require(cudaEventRecord(marks[0], store.stream.stream), "cudaEventRecord");
    for (std::uint32_t i = 0; i < timed; ++i) { recall(); }
    require(cudaEventRecord(marks[1], store.stream.stream), "cudaEventRecord");
    require(cudaEventSynchronize(marks[1]), "cudaEventSynchronize");
    bool const busy = cudaStreamQuery(product.stream.stream) == cudaErrorNotReady;
    static_cast<void>(cudaGetLastError());
    float milliseconds = 0.0F;
    require(cudaEventElapsedTime(&milliseconds, marks[0], marks[1]), "cudaEventElapsedTime");
    require(store.backend.synchronize(), "synchronize");
    double const recall_with = double{1000.0} * static_cast<double>(milliseconds) / timed;
    state.SetIterationTime(with * 1e-6);
    state.counters["alone_microseconds"] = alone;
    state.counters["slowdown"] = with / alone;
    state.counters["recall_bytes_per_second"] = static_cast<double>(volume) / (recall_with * 1e-6);
    state.counters["link_ratio"] = contiguous / recall_with;
    state.counters["overlapped"] = outlasted && busy ? 1 : 0;
  }
  for (cudaEvent_t const mark : marks) { require(cudaEventDestroy(mark), "cudaEventDestroy"); }
}

bool const registered = [] {
  auto const add = [](std::string const& name, product_shape const& p, std::uint64_t fragment, auto recall) {
    std::string const full = "transfer/interference/" + name + "/" + p.name + "/fragment:" + std::to_string(fragment);
    benchmark::RegisterBenchmark(
      full.c_str(),
      [=](benchmark::State& state) {
        recall_store& store = shared_store();
        random_plan const plan{store, fragment, 64 * mib, 5, false, memory_space::device};
        beside(state, p, 64 * mib, [&] { recall(store, plan.ref()); });
      })
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
  };
  auto const gather = [](std::uint32_t groups, std::uint64_t paused) {
    return [=](recall_store& store, recall_plan_ref const& plan) {
      require(
        store.backend.launch(
          store.stream, gather_blocks{.plan = plan, .first_row = 0, .row_count = 1, .groups = groups}),
        "gather");
      if (paused > 0) {
        keep_busy<<<1, 1, 0, store.stream.stream>>>(paused);
        require(cudaGetLastError(), "pause");
      }
    };
  };
  product_shape const decode{"decode_gemm", 64, 28672, 8192};
  for (product_shape const& p : {decode, product_shape{"gemm_8192", 8192, 8192, 8192}}) {
    for (std::uint64_t const fragment : {std::uint64_t{4096}, std::uint64_t{65536}}) {
      for (std::uint32_t const groups : {4U, 6U, 8U, 12U}) {
        add("gather_blocks:" + std::to_string(groups), p, fragment, gather(groups, 0));
      }
      add("contiguous", p, fragment, [](recall_store& store, recall_plan_ref const&) {
        require(
          cudaMemcpyAsync(
            store.slots.data(), store.store.data(), 64 * mib, cudaMemcpyHostToDevice, store.stream.stream),
          "cudaMemcpyAsync");
      });
    }
  }
  // What the slowdown depends on: which kernel the product is, and how much of the time a recall runs.
  product_shape by_rows = decode;
  by_rows.name = "decode_gemm_by_rows";
  by_rows.by_columns = false;
  for (std::uint32_t const groups : {4U, 6U, 8U}) {
    add("gather_blocks:" + std::to_string(groups), by_rows, 65536, gather(groups, 0));
  }
  for (std::uint64_t const paused : {std::uint64_t{100}, std::uint64_t{600}, std::uint64_t{1300}}) {
    add("gather_blocks:8/paused_us:" + std::to_string(paused), decode, 65536, gather(8, paused * 1000));
  }
  return true;
}();

}  // namespace
