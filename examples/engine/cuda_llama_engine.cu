#include "cuda_llama_engine.cuh"

#include <cublas_v2.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

namespace host_engine {

void require_cuda(cudaError_t code, char const* call)
{
  if (code == cudaSuccess) return;
  throw cuda_engine_error{std::string{call} + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code)};
}

namespace {

void free_on_device(float* memory) { static_cast<void>(cudaFree(memory)); }
void free_on_host(float* memory) { static_cast<void>(cudaFreeHost(memory)); }

}  // namespace

cuda_floats::cuda_floats(std::size_t count, place where) : size_{count}
{
  void* memory = nullptr;
  std::size_t const bytes = std::max<std::size_t>(count, 1) * sizeof(float);
  if (where == place::device) {
    require_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    memory_ = {static_cast<float*>(memory), free_on_device};
  } else {
    require_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped), "cudaHostAlloc");
    memory_ = {static_cast<float*>(memory), free_on_host};
  }
}

cuda_floats::cuda_floats(std::span<float const> values) : cuda_floats{values.size()}
{
  require_cuda(cudaMemcpy(data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

cuda_llama_weights::cuda_llama_weights(llama_weights const& host)
  : geometry{host.geometry},
    embedding{host.embedding},
    final_norm{host.final_norm},
    rotation{make_rotation(host.geometry)}
{
  for (llama_weights::layer const& from : host.layers) {
    layers.push_back(
      {.attention_norm = cuda_floats{from.attention_norm},
       .qkv = cuda_floats{from.qkv},
       .output = cuda_floats{from.output},
       .mlp_norm = cuda_floats{from.mlp_norm},
       .gate_up = cuda_floats{from.gate_up},
       .down = cuda_floats{from.down}});
  }
}

// The rows of one call: by value, so that no list has to outlive its work, or at an address. In the tensors of a call each row
// takes `most_tokens` places; those that it does not need hold zeros.
struct cuda_row_batch {
  std::uint32_t count = 0;
  std::uint32_t most_tokens = 1;
  std::uint32_t row_tokens = 1;  // slots of a row
  cuda_row_state const* states = nullptr;
  std::uint32_t const* list = nullptr;  // null: `numbers`
  std::uint8_t numbers[cuda_llama_engine::most_rows];

  [[nodiscard]] std::uint32_t places() const noexcept { return count * most_tokens; }
};
static_assert(cuda_llama_engine::most_rows <= 256);

namespace {

constexpr unsigned int kernel_threads = 128;
constexpr std::uint32_t no_slot = ~0U;

__device__ std::uint32_t number_of(cuda_row_batch const& batch, std::uint32_t index)
{
  return batch.list != nullptr ? batch.list[index] : batch.numbers[index];
}

// The slot of the token at a place; none where the row has fewer tokens.
__device__ std::uint32_t slot_of(cuda_row_batch const& batch, std::uint32_t place)
{
  std::uint32_t const row = number_of(batch, place / batch.most_tokens), token = place % batch.most_tokens;
  return token < batch.states[row].tokens ? row * batch.row_tokens + token : no_slot;
}

// One block of threads a place, in each of these.

__global__ void embed(
  cuda_row_batch const batch, float const* tokens, float const* embedding, float* hidden, std::uint32_t width)
{
  std::uint32_t const slot = slot_of(batch, blockIdx.x);
  if (slot == no_slot) return;
  auto const token = static_cast<std::size_t>(__float_as_int(tokens[slot]));
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    hidden[std::size_t{slot} * width + at] = embedding[token * width + at];
  }
}

__device__ float sum_of_block(float value)
{
  __shared__ float of_warp[kernel_threads / 32];
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(0xFFFFFFFFU, value, width);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0F;
  for (float const part : of_warp) sum += part;
  return sum;
}

// What `added` has for each place, unless it is null, is added to the hidden state first. `last_only`: one place a row, of its
// last token.
__global__ void rms_norm(
  cuda_row_batch const batch, float* hidden, float const* added, float const* weight, float epsilon, float* normed,
  std::uint32_t width, bool last_only)
{
  std::uint32_t slot = no_slot;
  if (last_only) {
    std::uint32_t const row = number_of(batch, blockIdx.x), tokens = batch.states[row].tokens;
    slot = tokens == 0 ? no_slot : row * batch.row_tokens + tokens - 1U;
  } else {
    slot = slot_of(batch, blockIdx.x);
  }
  float* const to = normed + std::size_t{blockIdx.x} * width;
  if (slot == no_slot) {
    for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) to[at] = 0.0F;
    return;
  }
  float* const from = hidden + std::size_t{slot} * width;
  float squares = 0.0F;
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    float value = from[at];
    if (added != nullptr) from[at] = value += added[std::size_t{blockIdx.x} * width + at];
    squares += value * value;
  }
  // Each thread reads again what it has written itself.
  float const inverse = 1.0F / sqrtf(sum_of_block(squares) / static_cast<float>(width) + epsilon);
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) to[at] = from[at] * inverse * weight[at];
}

// Takes queries, keys and values apart, and turns the first two by their position: channel i with channel i + head_dim / 2.
__global__ void take_projected(
  cuda_row_batch const batch, float const* stacked, float const* rotation, float* queries, float* keys, float* values,
  std::uint32_t query_width, std::uint32_t kv_width, std::uint32_t head_dim)
{
  std::uint32_t const slot = slot_of(batch, blockIdx.x);
  if (slot == no_slot) return;
  std::uint32_t const row = number_of(batch, blockIdx.x / batch.most_tokens);
  std::size_t const position = batch.states[row].position + slot - row * batch.row_tokens;
  float const* const from = stacked + std::size_t{blockIdx.x} * (query_width + 2 * kv_width);
  float const* const turns = rotation + position * head_dim;
  std::uint32_t const half = head_dim / 2;
  for (std::uint32_t at = threadIdx.x; at < (query_width + kv_width) / 2; at += blockDim.x) {
    std::uint32_t const low_channel = at / half * head_dim + at % half;
    float const cosine = turns[2 * (at % half)], sine = turns[2 * (at % half) + 1];
    float const low = from[low_channel], high = from[low_channel + half];
    bool const is_query = low_channel < query_width;
    float* const to = is_query ? queries + std::size_t{slot} * query_width + low_channel
                               : keys + std::size_t{slot} * kv_width + low_channel - query_width;
    to[0] = low * cosine - high * sine;
    to[half] = high * cosine + low * sine;
  }
  for (std::uint32_t at = threadIdx.x; at < kv_width; at += blockDim.x) {
    values[std::size_t{slot} * kv_width + at] = from[query_width + kv_width + at];
  }
}

// Rows that lie by slot, without gaps.
__global__ void collect(cuda_row_batch const batch, float const* by_slot, float* collected, std::uint32_t width)
{
  std::uint32_t const slot = slot_of(batch, blockIdx.x);
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    collected[std::size_t{blockIdx.x} * width + at] = slot == no_slot ? 0.0F : by_slot[std::size_t{slot} * width + at];
  }
}

__global__ void add(cuda_row_batch const batch, float const* projected, float* hidden, std::uint32_t width)
{
  std::uint32_t const slot = slot_of(batch, blockIdx.x);
  if (slot == no_slot) return;
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    hidden[std::size_t{slot} * width + at] += projected[std::size_t{blockIdx.x} * width + at];
  }
}

__global__ void gate(float const* stacked, float* gated, std::uint32_t width)
{
  float const* const from = stacked + std::size_t{blockIdx.x} * 2 * width;
  for (std::uint32_t at = threadIdx.x; at < width; at += blockDim.x) {
    float const x = from[at];
    gated[std::size_t{blockIdx.x} * width + at] = x / (1.0F + expf(-x)) * from[width + at];
  }
}

// What was predicted for each row goes to the row's place in host memory.
constexpr unsigned int hand_out_blocks = 16;
__global__ void hand_out(cuda_row_batch const batch, float const* predicted, float* logits, std::uint32_t width)
{
  std::size_t const row = number_of(batch, blockIdx.x);
  for (std::uint32_t at = blockIdx.y * blockDim.x + threadIdx.x; at < width; at += gridDim.y * blockDim.x) {
    logits[row * width + at] = predicted[std::size_t{blockIdx.x} * width + at];
  }
}

void require_launched(char const* kernel) { require_cuda(cudaGetLastError(), kernel); }

void require_cublas(cublasStatus_t code, char const* call)
{
  if (code == CUBLAS_STATUS_SUCCESS) return;
  throw cuda_engine_error{std::string{call} + ": " + cublasGetStatusString(code)};
}

}  // namespace

cuda_llama_engine::cuda_llama_engine(cuda_llama_weights const& weights, size_limits limits, cudaStream_t stream)
  : weights_{&weights}, limits_{limits}, stream_{stream}, rows_(limits.rows)
{
  llama_geometry const& model = geometry();
  if (limits.rows == 0 || limits.rows > most_rows || limits.row_tokens == 0 || limits.row_tokens > 0xFFFFU) {
    throw std::invalid_argument{
      "an engine on a GPU has 1 to " + std::to_string(most_rows) + " rows of 1 to 65535 tokens, given are " +
      std::to_string(limits.rows) + " of " + std::to_string(limits.row_tokens)};
  }
  std::size_t const slots = token_slots(), hidden = model.hidden, query_width = model.query_width(),
                    kv_width = model.kv_width();
  fed_ = cuda_floats{limits.rows * sizeof(cuda_row_state) / sizeof(float), cuda_floats::place::pinned};
  states_ = cuda_floats{fed_.size()};
  std::fill_n(fed_.data(), fed_.size(), 0.0F);
  tokens_ = cuda_floats{slots, cuda_floats::place::pinned};
  hidden_ = cuda_floats{slots * hidden};
  queries_ = cuda_floats{slots * query_width};
  keys_ = cuda_floats{slots * kv_width};
  values_ = cuda_floats{slots * kv_width};
  attended_ = cuda_floats{slots * query_width};
  normed_ = cuda_floats{slots * std::max(hidden, query_width)};
  stacked_ =
    cuda_floats{slots * std::max<std::size_t>(query_width + 2 * kv_width, std::size_t{2} * model.feed_forward)};
  gated_ = cuda_floats{slots * model.feed_forward};
  projected_ = cuda_floats{slots * hidden};
  predicted_ = cuda_floats{std::size_t{limits.rows} * model.vocabulary};
  logits_ = cuda_floats{std::size_t{limits.rows} * model.vocabulary, cuda_floats::place::pinned};
  require_cublas(cublasCreate(&products_), "cublasCreate");
  require_cublas(cublasSetStream(products_, stream), "cublasSetStream");
  // Of its own, so that captured products need no memory from elsewhere.
  workspace_ = cuda_floats{std::size_t{8} << 20U};
  require_cublas(
    cublasSetWorkspace(products_, workspace_.data(), workspace_.size() * sizeof(float)), "cublasSetWorkspace");
}

cuda_llama_engine::~cuda_llama_engine()
{
  static_cast<void>(cudaStreamSynchronize(stream_));
  if (products_ != nullptr) static_cast<void>(cublasDestroy(products_));
}

void cuda_llama_engine::feed(std::uint32_t row, std::span<std::int32_t const> tokens, std::uint32_t position)
{
  check_fed_tokens(geometry(), limits_, row, tokens, position);
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    tokens_.data()[first_token(row) + at] = std::bit_cast<float>(tokens[at]);
  }
  rows_[row] = {.tokens = static_cast<std::uint32_t>(tokens.size()), .position = position, .layer = 0};
  reinterpret_cast<cuda_row_state*>(fed_.data())[row] = {.tokens = rows_[row].tokens, .position = position};
}

void cuda_llama_engine::begin_list(std::uint32_t const* ids, std::uint32_t count)
{
  if (ids == nullptr || count == 0 || count > limits_.rows) {
    throw std::invalid_argument{
      "a list of " + std::to_string(count) + " rows for an engine of " + std::to_string(limits_.rows)};
  }
  list_ = ids;
  listed_ = count;
}

void cuda_llama_engine::end_list()
{
  list_ = nullptr;
  normed_layer_ = 0;
}

cuda_row_batch cuda_llama_engine::batch_of(std::uint32_t layer, row_span rows, char const* call) const
{
  cuda_row_batch batch;
  batch.row_tokens = limits_.row_tokens;
  batch.states = reinterpret_cast<cuda_row_state const*>(states_.data());
  if (list_ != nullptr) {
    batch.list = list_;
    batch.count = listed_;
    return batch;
  }
  for (std::uint32_t const row : rows) {
    if (row >= limits_.rows || rows_[row].tokens == 0 || rows_[row].layer != layer || batch.count == limits_.rows) {
      throw std::logic_error{
        std::string{call} + " of row " + std::to_string(row) + " at layer " + std::to_string(layer) +
        ": the engine has " + std::to_string(limits_.rows) + " rows, and this one " +
        (row < limits_.rows ? std::to_string(rows_[row].tokens) + " tokens at layer " + std::to_string(rows_[row].layer)
                            : std::string{"is none of them"})};
    }
    batch.most_tokens = std::max(batch.most_tokens, rows_[row].tokens);
    batch.numbers[batch.count++] = static_cast<std::uint8_t>(row);
  }
  return batch;
}

bool cuda_llama_engine::has_normed(std::uint32_t layer, row_span rows) const
{
  return layer > 0 && layer == normed_layer_ && (list_ != nullptr || std::ranges::equal(rows, normed_rows_));
}

void cuda_llama_engine::multiply(
  float const* in, std::size_t rows, cuda_floats const& matrix, std::size_t inputs, float* out)
{
  float const one = 1.0F, zero = 0.0F;
  auto const outputs = static_cast<int>(matrix.size() / inputs), columns = static_cast<int>(inputs);
  require_cublas(
    cublasSgemm(
      products_, CUBLAS_OP_T, CUBLAS_OP_N, outputs, static_cast<int>(rows), columns, &one, matrix.data(), columns, in,
      columns, &zero, out, outputs),
    "cublasSgemm");
}

void cuda_llama_engine::normalise(cuda_row_batch const& batch, cuda_floats const& weight)
{
  rms_norm<<<batch.places(), kernel_threads, 0, stream_>>>(
    batch, hidden_.data(), nullptr, weight.data(), geometry().norm_epsilon, normed_.data(), geometry().hidden, false);
  require_launched("rms_norm");
}

void cuda_llama_engine::add_and_normalise(cuda_row_batch const& batch, cuda_floats const& weight)
{
  rms_norm<<<batch.places(), kernel_threads, 0, stream_>>>(
    batch, hidden_.data(), projected_.data(), weight.data(), geometry().norm_epsilon, normed_.data(), geometry().hidden,
    false);
  require_launched("rms_norm");
}

void cuda_llama_engine::project(std::uint32_t layer, row_span rows)
{
  cuda_row_batch const batch = batch_of(layer, rows, "project");
  if (batch.count == 0) return;
  llama_geometry const& model = geometry();
  cuda_llama_weights::layer const& weights = weights_->layers[layer];
  if (layer == 0) {
    require_cuda(
      cudaMemcpyAsync(states_.data(), fed_.data(), fed_.size() * sizeof(float), cudaMemcpyHostToDevice, stream_),
      "cudaMemcpyAsync");
    embed<<<batch.places(), kernel_threads, 0, stream_>>>(
      batch, tokens_.data(), weights_->embedding.data(), hidden_.data(), model.hidden);
    require_launched("embed");
  }
  if (!has_normed(layer, rows)) normalise(batch, weights.attention_norm);
  normed_layer_ = 0;
  multiply(normed_.data(), batch.places(), weights.qkv, model.hidden, stacked_.data());
  take_projected<<<batch.places(), kernel_threads, 0, stream_>>>(
    batch, stacked_.data(), weights_->rotation.data(), queries_.data(), keys_.data(), values_.data(),
    model.query_width(), model.kv_width(), model.head_dim);
  require_launched("take_projected");
}

void cuda_llama_engine::feed_forward(std::uint32_t layer, row_span rows)
{
  cuda_row_batch const batch = batch_of(layer, rows, "feed_forward");
  if (batch.count == 0) return;
  llama_geometry const& model = geometry();
  cuda_llama_weights::layer const& weights = weights_->layers[layer];
  collect<<<batch.places(), kernel_threads, 0, stream_>>>(batch, attended_.data(), normed_.data(), model.query_width());
  require_launched("collect");
  multiply(normed_.data(), batch.places(), weights.output, model.query_width(), projected_.data());
  add_and_normalise(batch, weights.mlp_norm);
  multiply(normed_.data(), batch.places(), weights.gate_up, model.hidden, stacked_.data());
  gate<<<batch.places(), kernel_threads, 0, stream_>>>(stacked_.data(), gated_.data(), model.feed_forward);
  require_launched("gate");
  multiply(gated_.data(), batch.places(), weights.down, model.feed_forward, projected_.data());
  if (layer + 1 < model.layers) {
    add_and_normalise(batch, weights_->layers[layer + 1].attention_norm);
    normed_layer_ = layer + 1;
    normed_rows_.assign(rows.begin(), rows.end());
  } else {
    add<<<batch.places(), kernel_threads, 0, stream_>>>(batch, projected_.data(), hidden_.data(), model.hidden);
    require_launched("add");
    normed_layer_ = 0;
  }
  if (list_ != nullptr) return;
  for (std::uint32_t const row : rows) ++rows_[row].layer;
}

void cuda_llama_engine::sample(row_span rows)
{
  llama_geometry const& model = geometry();
  cuda_row_batch const batch = batch_of(model.layers, rows, "sample");
  if (batch.count == 0) return;
  normed_layer_ = 0;
  rms_norm<<<batch.count, kernel_threads, 0, stream_>>>(
    batch, hidden_.data(), nullptr, weights_->final_norm.data(), model.norm_epsilon, normed_.data(), model.hidden,
    true);
  require_launched("rms_norm");
  multiply(normed_.data(), batch.count, weights_->embedding, model.hidden, predicted_.data());
  hand_out<<<dim3{batch.count, hand_out_blocks}, kernel_threads, 0, stream_>>>(
    batch, predicted_.data(), logits_.data(), model.vocabulary);
  require_launched("hand_out");
}

std::span<float const> cuda_llama_engine::logits(std::uint32_t row) const noexcept
{
  std::size_t const width = geometry().vocabulary;
  return {logits_.data() + row * width, width};
}

}  // namespace host_engine
