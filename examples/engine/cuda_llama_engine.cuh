/// The engine of llama_engine.hpp on a GPU: the same model in the same 32-bit floats, matrix products by cuBLAS. Its calls
/// enqueue on one stream and return at once. Attention is not its own: whoever owns the KV cache reads `queries` and writes
/// `attended`.
///
///     engine.feed(row, tokens, position);
///     for each layer:
///       engine.project(layer, rows);        // queries(), keys(), values()
///       ... keys and values into the cache; attention from queries() to attended() ...
///       engine.feed_forward(layer, rows);
///     engine.sample(rows);                  // logits(row), once the stream has run
///
/// Kernels read what the rows hold in device memory, where layer 0's `project` brings it. So the calls between `begin_list` and
/// `end_list` can be captured as a graph, and replayed for other rows and other tokens.
#pragma once

#include "llama_engine.hpp"
#include "llama_weights.hpp"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

struct cublasContext;

namespace host_engine {

/// A CUDA or cuBLAS call that failed.
class cuda_engine_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// @throws cuda_engine_error with the call's name and CUDA's words
void require_cuda(cudaError_t code, char const* call);

/// Floats in device memory, or in host memory that the device reads and writes.
class cuda_floats {
 public:
  enum class place : std::uint8_t { device, pinned };

  cuda_floats() = default;
  explicit cuda_floats(std::size_t count, place where = place::device);
  explicit cuda_floats(std::span<float const> values);  // a copy on the device

  [[nodiscard]] float* data() const noexcept { return memory_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  std::unique_ptr<float, void (*)(float*)> memory_{nullptr, nullptr};
  std::size_t size_ = 0;
};

/// A model's weights in device memory, for any number of engines.
struct cuda_llama_weights {
  struct layer {
    cuda_floats attention_norm, qkv, output, mlp_norm, gate_up, down;
  };

  /// @throws cuda_engine_error
  explicit cuda_llama_weights(llama_weights const& host);

  llama_geometry geometry;
  cuda_floats embedding, final_norm;
  cuda_floats rotation;  // [context_tokens, head_dim / 2, cosine|sine], as the engine on the CPU has them
  std::vector<layer> layers;
};

struct cuda_row_batch;

/// What a row has been fed.
struct cuda_row_state {
  std::uint32_t tokens = 0;
  std::uint32_t position = 0;  // of the first of them
};

class cuda_llama_engine {
 public:
  using size_limits = llama_engine::size_limits;
  using row_span = llama_engine::row_span;
  static constexpr std::uint32_t most_rows = 256;

  /// @param weights borrowed   @param stream borrowed; both must outlive the engine
  /// @throws std::invalid_argument with the numbers; cuda_engine_error
  cuda_llama_engine(cuda_llama_weights const& weights, size_limits limits, cudaStream_t stream);
  cuda_llama_engine(cuda_llama_engine const&) = delete;
  cuda_llama_engine& operator=(cuda_llama_engine const&) = delete;
  ~cuda_llama_engine();

  [[nodiscard]] llama_geometry const& geometry() const noexcept { return weights_->geometry; }

  /// As llama_engine::feed. @pre the row's work of the step before is complete
  void feed(std::uint32_t row, std::span<std::int32_t const> tokens, std::uint32_t position);
  void project(std::uint32_t layer, row_span rows);
  void feed_forward(std::uint32_t layer, row_span rows);
  void sample(row_span rows);

  /// Until `end_list` calls are for the `count` rows whose numbers lie at `ids` when the work runs, in memory that the device
  /// reads, with one token each; the rows that a call names are passed over, and the host learns nothing of their layers. Each
  /// layer's `project` comes directly behind the `feed_forward` of the layer before, or is the first call.
  void begin_list(std::uint32_t const* ids, std::uint32_t count);
  void end_list();

  // Device memory, by token slot as in llama_engine.
  [[nodiscard]] std::uint32_t first_token(std::uint32_t row) const noexcept { return row * limits_.row_tokens; }
  [[nodiscard]] std::size_t token_slots() const noexcept { return std::size_t{limits_.rows} * limits_.row_tokens; }
  [[nodiscard]] float* queries() const noexcept { return queries_.data(); }    // [slots, query_heads, head_dim]
  [[nodiscard]] float* keys() const noexcept { return keys_.data(); }          // [slots, kv_heads, head_dim]
  [[nodiscard]] float* values() const noexcept { return values_.data(); }      // likewise
  [[nodiscard]] float* attended() const noexcept { return attended_.data(); }  // as queries

  [[nodiscard]] std::uint32_t tokens(std::uint32_t row) const noexcept { return rows_[row].tokens; }
  [[nodiscard]] std::uint32_t position(std::uint32_t row) const noexcept { return rows_[row].position; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

  /// [vocabulary] host memory. @pre the stream has run
  [[nodiscard]] std::span<float const> logits(std::uint32_t row) const noexcept;

 private:
  struct row_state {
    std::uint32_t tokens = 0;
    std::uint32_t position = 0;
    std::uint32_t layer = 0;
  };

  [[nodiscard]] cuda_row_batch batch_of(std::uint32_t layer, row_span rows, char const* call) const;
  [[nodiscard]] bool has_normed(std::uint32_t layer, row_span rows) const;
  // out[rows, outputs] = in[rows, inputs] * matrix[outputs, inputs]^T
  void multiply(float const* in, std::size_t rows, cuda_floats const& matrix, std::size_t inputs, float* out);
  void normalise(cuda_row_batch const& batch, cuda_floats const& weight);
  // Adds what was projected to the hidden state, which is then normalised.
  void add_and_normalise(cuda_row_batch const& batch, cuda_floats const& weight);

  cuda_llama_weights const* weights_;
  size_limits limits_;
  cudaStream_t stream_;
  cublasContext* products_ = nullptr;
  std::vector<row_state> rows_;
  std::uint32_t const* list_ = nullptr;  // between begin_list and end_list
  std::uint32_t listed_ = 0;
  std::uint32_t normed_layer_ = 0;  // not 0: normed_ holds what these rows' `project` of this layer begins with
  std::vector<std::uint32_t> normed_rows_;

  cuda_floats fed_, states_;  // [rows] cuda_row_state: of the host, and its copy on the device
  cuda_floats tokens_;        // [slots] token ids as the host feeds them, bits of int32
  cuda_floats hidden_, queries_, keys_, values_, attended_;       // by token slot
  cuda_floats normed_, stacked_, gated_, projected_, predicted_;  // of one call, rows without gaps
  cuda_floats logits_;                                            // [rows, vocabulary], host memory
  cuda_floats workspace_;                                         // of the products
};

}  // namespace host_engine
