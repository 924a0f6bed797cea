#pragma once

/// A decoder layer's work at the size of a model of 8 billion parameters, with random weights: the products by cuBLAS and small
/// kernels between them, one token a row. Only queries and keys are not what the products give. Queries drift from step to step
/// and keys of a block lie around a centre, so that selections change as slowly as `drift` says.

#include "../on_gpu.cuh"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pulseinfer_bench {

struct model_shape {
  std::uint32_t layers, hidden, query_heads, kv_heads, head_dim, feed_forward, vocabulary;

  [[nodiscard]] std::uint32_t query_width() const { return query_heads * head_dim; }
  [[nodiscard]] std::uint32_t kv_width() const { return kv_heads * head_dim; }
  [[nodiscard]] std::uint64_t layer_weights() const
  {
    std::uint64_t const by_hidden = query_width() + 2 * kv_width() + query_width() + 3 * feed_forward;
    return by_hidden * hidden;
  }
  [[nodiscard]] pulseinfer::kv_geometry cache(std::uint32_t head_groups = 1) const
  {
    return {
      .layers = layers,
      .query_heads = query_heads,
      .kv_heads = kv_heads,
      .head_dim = head_dim,
      .head_groups = head_groups,
      .key_type = pulseinfer::dtype::bfloat16,
      .value_type = pulseinfer::dtype::bfloat16};
  }
};

/// That of Llama 3.1 8B.
inline constexpr model_shape eight_billion{32, 4096, 32, 8, 128, 14336, 128256};

namespace kernels {

using bfloat = __nv_bfloat16;
constexpr unsigned int threads = 256;

__device__ inline std::uint64_t mixed(std::uint64_t x)
{
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31U);
}

/// A normal number that belongs to `key`.
__device__ inline float normal(std::uint64_t key)
{
  std::uint64_t const bits = mixed(key);
  float const radius = sqrtf(-2.0F * __logf((static_cast<float>(bits >> 40U) + 1.0F) * 0x1p-24F));
  return radius * __cosf(6.2831853F * static_cast<float>(bits & 0xFFFFFFU) * 0x1p-24F);
}

/// Element `at` of a token's keys: 0.8 of a centre that its block shares, 0.6 of its own.
__device__ inline float key_element(std::uint64_t row, std::uint64_t layer, std::uint64_t token, std::uint64_t at)
{
  std::uint64_t const place = mixed((row << 32U) + layer) + (at << 40U);
  return 0.8F * normal(place + token / 16) + 0.6F * normal(~place + token);
}

inline __global__ void fill_weights(bfloat* weights, std::uint64_t count, float scale, std::uint64_t seed)
{
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    weights[i] = __float2bfloat16(scale * (static_cast<float>(mixed(i + (seed << 48U)) >> 40U) * 0x1p-23F - 1.0F));
  }
}

/// Keys and values of a prompt's tokens, [tokens, width]; a block of threads each.
inline __global__ void make_prompt(
  bfloat* keys, bfloat* values, std::uint32_t width, std::uint32_t row, std::uint32_t layer, std::uint32_t first)
{
  std::uint64_t const token = first + blockIdx.x;
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    std::uint64_t const to = std::uint64_t{blockIdx.x} * width + at;
    keys[to] = __float2bfloat16(key_element(row, layer, token, at));
    values[to] = __float2bfloat16(normal((token << 20U) + at + (std::uint64_t{layer} << 52U)));
  }
}

inline __global__ void begin_queries(float* state, std::uint64_t count)
{
  std::uint64_t const i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
  if (i < count) { state[i] = normal(i + (std::uint64_t{7} << 56U)); }
}

// The kernels of a layer: a block of threads a row of the list. Tensors by place have the list's order without gaps.

inline __global__ void embed(
  pulseinfer::row_list const rows, pulseinfer::row_info const* info, bfloat* hidden, std::uint32_t width)
{
  auto const row = static_cast<std::uint32_t>(rows[blockIdx.x]);
  auto const token = static_cast<std::uint64_t>(info[row].tokens);
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    hidden[std::uint64_t{row} * width + at] =
      __float2bfloat16(normal((token << 24U) + at + (std::uint64_t{row} << 50U)));
  }
}

/// hidden[row] += added[place], unless null; normed[place] = hidden[row] over its root mean square.
inline __global__ void add_and_norm(
  pulseinfer::row_list const rows, bfloat* hidden, bfloat const* added, bfloat* normed, std::uint32_t width)
{
  __shared__ float of_warp[threads / 32];
  auto const row = static_cast<std::uint32_t>(rows[blockIdx.x]);
  bfloat* const own = hidden + std::uint64_t{row} * width;
  float squares = 0.0F;
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    float x = __bfloat162float(own[at]);
    if (added != nullptr) {
      x += __bfloat162float(added[std::uint64_t{blockIdx.x} * width + at]);
      own[at] = __float2bfloat16(x);
    }
    squares += x * x;
  }
  for (int apart = 16; apart > 0; apart /= 2) { squares += __shfl_xor_sync(0xFFFFFFFFU, squares, apart); }
  if (threadIdx.x % 32 == 0) { of_warp[threadIdx.x / 32] = squares; }
  __syncthreads();
  float sum = 0.0F;
  for (float const part : of_warp) { sum += part; }
  float const inverse = rsqrtf(sum / static_cast<float>(width) + 1e-5F);
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    normed[std::uint64_t{blockIdx.x} * width + at] = __float2bfloat16(__bfloat162float(own[at]) * inverse);
  }
}

/// Queries, keys and values of a row, from what the product gave (which they only touch, so that they wait for it) and from where
/// the row's queries have drifted.
inline __global__ void take_projected(
  pulseinfer::row_list const rows, pulseinfer::row_info const* info, bfloat const* stacked, float* drifting,
  bfloat* queries, bfloat* keys, bfloat* values, std::uint32_t query_width, std::uint32_t kv_width, std::uint32_t layer,
  float const* drift)
{
  auto const row = static_cast<std::uint32_t>(rows[blockIdx.x]);
  auto const token = static_cast<std::uint64_t>(info[row].tokens);
  bfloat const* const from = stacked + std::uint64_t{blockIdx.x} * (query_width + 2 * kv_width);
  float const keeps = *drift;
  float const moves = sqrtf(1.0F - keeps * keeps);
  std::uint64_t const place = mixed((std::uint64_t{row} << 32U) + layer + (token << 40U));
  for (std::uint32_t at = threadIdx.x; at < query_width; at += blockDim.x) {
    float& state = drifting[std::uint64_t{row} * query_width + at];
    state = keeps * state + moves * normal(place + (std::uint64_t{at} << 20U));
    queries[std::uint64_t{row} * query_width + at] = __float2bfloat16(state + 1e-30F * __bfloat162float(from[at]));
  }
  for (std::uint32_t at = threadIdx.x; at < kv_width; at += blockDim.x) {
    std::uint64_t const to = std::uint64_t{row} * kv_width + at;
    keys[to] = __float2bfloat16(key_element(row, layer, token, at) + 1e-30F * __bfloat162float(from[query_width + at]));
    values[to] = __float2bfloat16(normal(place + at) + 1e-30F * __bfloat162float(from[query_width + kv_width + at]));
  }
}

inline __global__ void collect(
  pulseinfer::row_list const rows, bfloat const* by_row, bfloat* by_place, std::uint32_t width)
{
  auto const row = static_cast<std::uint32_t>(rows[blockIdx.x]);
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    by_place[std::uint64_t{blockIdx.x} * width + at] = by_row[std::uint64_t{row} * width + at];
  }
}

inline __global__ void gate(bfloat const* stacked, bfloat* gated, std::uint32_t width)
{
  bfloat const* const from = stacked + std::uint64_t{blockIdx.x} * 2 * width;
  for (std::uint32_t at = blockIdx.y * blockDim.x + threadIdx.x; at < width; at += gridDim.y * blockDim.x) {
    float const x = __bfloat162float(from[at]);
    gated[std::uint64_t{blockIdx.x} * width + at] =
      __float2bfloat16(x / (1.0F + __expf(-x)) * __bfloat162float(from[width + at]));
  }
}

}  // namespace kernels

/// Random weights in device memory.
class model_weights {
 public:
  using bfloat = kernels::bfloat;

  explicit model_weights(model_shape const& of)
    : shape{of},
      memory_{
        backend_, pulseinfer::memory_space::device,
        (of.layers * of.layer_weights() + std::uint64_t{of.vocabulary} * of.hidden) * sizeof(bfloat)}
  {
    kernels::fill_weights<<<2048, kernels::threads>>>(memory_.as<bfloat>(), memory_.bytes() / sizeof(bfloat), 0.02F, 1);
    require(cudaGetLastError(), "fill_weights");
    require(cudaDeviceSynchronize(), "fill_weights");
  }

  [[nodiscard]] bfloat const* qkv(std::uint32_t layer) const
  {
    return memory_.as<bfloat>() + layer * shape.layer_weights();
  }
  [[nodiscard]] bfloat const* output(std::uint32_t layer) const
  {
    return qkv(layer) + std::uint64_t{shape.query_width() + 2 * shape.kv_width()} * shape.hidden;
  }
  [[nodiscard]] bfloat const* gate_up(std::uint32_t layer) const
  {
    return output(layer) + std::uint64_t{shape.query_width()} * shape.hidden;
  }
  [[nodiscard]] bfloat const* down(std::uint32_t layer) const
  {
    return gate_up(layer) + std::uint64_t{2} * shape.feed_forward * shape.hidden;
  }
  [[nodiscard]] bfloat const* head() const { return qkv(shape.layers); }
  [[nodiscard]] std::uint64_t bytes() const { return memory_.bytes(); }

  model_shape shape;

 private:
  pulseinfer::cuda_backend backend_;
  pulseinfer::slab<pulseinfer::cuda_backend> memory_;
};

/// The model of some rows, on one stream. Lists of rows lie in memory that the device reads.
class model {
 public:
  using bfloat = kernels::bfloat;
  using slab_type = pulseinfer::slab<pulseinfer::cuda_backend>;

  model(
    pulseinfer::cuda_backend& backend, pulseinfer::cuda_backend::stream_ref stream, model_weights const& weights,
    std::uint32_t rows, std::uint32_t prompt_tokens)
    : backend_{&backend},
      stream_{stream},
      weights_{&weights},
      shape_{weights.shape},
      rows_{rows},
      prompt_tokens_{prompt_tokens},
      hidden_{take(rows, shape_.hidden)},
      normed_{take(rows, std::max(shape_.hidden, shape_.query_width()))},
      stacked_{take(rows, std::max(shape_.query_width() + 2 * shape_.kv_width(), 2 * shape_.feed_forward))},
      gated_{take(rows, shape_.feed_forward)},
      projected_{take(rows, shape_.hidden)},
      predicted_{take(rows, shape_.vocabulary)},
      queries_{take(std::max(rows, prompt_tokens), shape_.query_width())},
      keys_{take(std::max(rows, prompt_tokens), shape_.kv_width())},
      values_{take(std::max(rows, prompt_tokens), shape_.kv_width())},
      attended_{take(rows, shape_.query_width())},
      rest_{take(rows, shape_.query_width())},
      log_sums_{
        backend, pulseinfer::memory_space::device, std::uint64_t{2} * rows * shape_.query_heads * sizeof(float)},
      drifting_{
        backend, pulseinfer::memory_space::device,
        std::uint64_t{shape_.layers} * rows * shape_.query_width() * sizeof(float)},
      drift_{backend, pulseinfer::memory_space::device, sizeof(float)},
      workspace_{backend, pulseinfer::memory_space::device, std::uint64_t{64} << 20U}
  {
    std::uint64_t const queries = std::uint64_t{shape_.layers} * rows * shape_.query_width();
    kernels::
      begin_queries<<<static_cast<unsigned>(queries / kernels::threads + 1), kernels::threads, 0, stream_.stream>>>(
        drifting_.as<float>(), queries);
    require(cudaGetLastError(), "begin_queries");
    require_cublas(cublasCreate(&products_));
    require_cublas(cublasSetStream(products_, stream_.stream));
    require_cublas(cublasSetWorkspace(products_, workspace_.data(), workspace_.bytes()));
    keep_queries(1.0F);
  }
  model(model&&) = delete;
  ~model()
  {
    static_cast<void>(cudaStreamSynchronize(stream_.stream));
    static_cast<void>(cublasDestroy(products_));
  }

  /// Correlation of a row's queries from one step to the next.
  void keep_queries(float correlation)
  {
    require(cudaStreamSynchronize(stream_.stream), "drift");
    require(cudaMemcpy(drift_.data(), &correlation, sizeof(correlation), cudaMemcpyHostToDevice), "drift");
  }

  void embed(pulseinfer::row_list rows, pulseinfer::row_info const* info)
  {
    kernels::embed<<<rows.count, kernels::threads, 0, stream_.stream>>>(
      rows, info, hidden_.as<bfloat>(), shape_.hidden);
    norm(rows, nullptr);
  }
  void project(std::uint32_t layer, pulseinfer::row_list rows, pulseinfer::row_info const* info)
  {
    multiply(
      normed_.as<bfloat>(), rows.count, weights_->qkv(layer), shape_.hidden,
      shape_.query_width() + 2 * shape_.kv_width(), stacked_.as<bfloat>());
    kernels::take_projected<<<rows.count, kernels::threads, 0, stream_.stream>>>(
      rows, info, stacked_.as<bfloat>(), drifting_.as<float>() + std::uint64_t{layer} * rows_ * shape_.query_width(),
      queries_.as<bfloat>(), keys_.as<bfloat>(), values_.as<bfloat>(), shape_.query_width(), shape_.kv_width(), layer,
      drift_.as<float>());
    require(cudaGetLastError(), "take_projected");
  }
  void attend(pulseinfer::row_list rows, pulseinfer::block_table const& table, pulseinfer::part which)
  {
    bool const landed = which == pulseinfer::part::landed;
    pulseinfer::tensor_view const whole = view(attended_, rows_, shape_.query_heads);
    pulseinfer::tensor_view const rest = view(rest_, rows_, shape_.query_heads);
    float* const sums = log_sums_.as<float>();
    float* const rest_sums = sums + std::uint64_t{rows_} * shape_.query_heads;
    launch(pulseinfer::paged_attention{
      .table = table,
      .rows = rows,
      .queries = view(queries_, rows_, shape_.query_heads),
      .out = landed ? rest : whole,
      .lse = landed ? rest_sums : sums,
      .most_queries = 1});
    if (!landed) { return; }
    launch(pulseinfer::merge_partials{
      .rows = rows,
      .info = table.info,
      .result = whole,
      .result_lse = sums,
      .other = rest,
      .other_lse = rest_sums,
      .most_queries = 1});
  }
  /// Behind it the rows may be projected at the next layer.
  void feed_forward(std::uint32_t layer, pulseinfer::row_list rows)
  {
    kernels::collect<<<rows.count, kernels::threads, 0, stream_.stream>>>(
      rows, attended_.as<bfloat>(), normed_.as<bfloat>(), shape_.query_width());
    multiply(
      normed_.as<bfloat>(), rows.count, weights_->output(layer), shape_.query_width(), shape_.hidden,
      projected_.as<bfloat>());
    norm(rows, projected_.as<bfloat>());
    multiply(
      normed_.as<bfloat>(), rows.count, weights_->gate_up(layer), shape_.hidden, 2 * shape_.feed_forward,
      stacked_.as<bfloat>());
    kernels::gate<<<dim3(rows.count, 8), kernels::threads, 0, stream_.stream>>>(
      stacked_.as<bfloat>(), gated_.as<bfloat>(), shape_.feed_forward);
    multiply(
      gated_.as<bfloat>(), rows.count, weights_->down(layer), shape_.feed_forward, shape_.hidden,
      projected_.as<bfloat>());
    norm(rows, projected_.as<bfloat>());
  }
  void sample(pulseinfer::row_list rows)
  {
    multiply(
      normed_.as<bfloat>(), rows.count, weights_->head(), shape_.hidden, shape_.vocabulary, predicted_.as<bfloat>());
  }
  void make_prompt(std::uint32_t row, std::uint32_t layer, std::uint32_t first, std::uint32_t tokens)
  {
    kernels::make_prompt<<<tokens, kernels::threads, 0, stream_.stream>>>(
      keys_.as<bfloat>(), values_.as<bfloat>(), shape_.kv_width(), row, layer, first);
    require(cudaGetLastError(), "make_prompt");
  }

  // Row r's token is token r of these; a prompt's tokens lie from 0 on.
  [[nodiscard]] pulseinfer::tensor_view queries() const { return view(queries_, most_tokens(), shape_.query_heads); }
  [[nodiscard]] pulseinfer::tensor_view keys() const { return view(keys_, most_tokens(), shape_.kv_heads); }
  [[nodiscard]] pulseinfer::tensor_view values() const { return view(values_, most_tokens(), shape_.kv_heads); }

  template <class Op>
  void launch(Op const& op)
  {
    require(backend_->launch(stream_, op), Op::name);
  }

 private:
  [[nodiscard]] slab_type take(std::uint64_t rows, std::uint64_t width) const
  {
    return slab_type{*backend_, pulseinfer::memory_space::device, rows * width * sizeof(bfloat)};
  }
  [[nodiscard]] std::uint64_t most_tokens() const { return std::max(rows_, prompt_tokens_); }
  [[nodiscard]] pulseinfer::tensor_view view(slab_type const& of, std::uint64_t tokens, std::uint32_t heads) const
  {
    return pulseinfer::contiguous_tensor(of.data(), pulseinfer::dtype::bfloat16, tokens, heads, shape_.head_dim);
  }
  void norm(pulseinfer::row_list rows, bfloat const* added)
  {
    kernels::add_and_norm<<<rows.count, kernels::threads, 0, stream_.stream>>>(
      rows, hidden_.as<bfloat>(), added, normed_.as<bfloat>(), shape_.hidden);
    require(cudaGetLastError(), "add_and_norm");
  }
  // out[rows, outputs] = in[rows, inputs] * matrix[outputs, inputs]^T
  void multiply(
    bfloat const* in, std::uint32_t rows, bfloat const* matrix, std::uint32_t inputs, std::uint32_t outputs,
    bfloat* out)
  {
    float const one = 1.0F;
    float const zero = 0.0F;
    require_cublas(cublasGemmEx(
      products_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(outputs), static_cast<int>(rows), static_cast<int>(inputs),
      &one, matrix, CUDA_R_16BF, static_cast<int>(inputs), in, CUDA_R_16BF, static_cast<int>(inputs), &zero, out,
      CUDA_R_16BF, static_cast<int>(outputs), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }
  static void require_cublas(cublasStatus_t code)
  {
    if (code != CUBLAS_STATUS_SUCCESS) { require(cudaErrorUnknown, cublasGetStatusString(code)); }
  }

  pulseinfer::cuda_backend* backend_;
  pulseinfer::cuda_backend::stream_ref stream_;
  model_weights const* weights_;
  model_shape shape_;
  std::uint32_t rows_, prompt_tokens_;
  slab_type hidden_, normed_, stacked_, gated_, projected_, predicted_;  // hidden_ by row, the others by place
  slab_type queries_, keys_, values_, attended_, rest_, log_sums_;       // by row
  slab_type drifting_;                                                   // [layers, rows, query_width] floats
  slab_type drift_, workspace_;
  cublasHandle_t products_ = nullptr;
};

}  // namespace pulseinfer_bench
