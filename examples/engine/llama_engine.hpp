/// A small host engine: it runs models of the Llama architecture (RMS norm, rotary positions, grouped queries, SwiGLU, tied
/// embeddings) in 32-bit floats, layer by layer, for any rows at any layers.
///
/// All state that lives from one call to the next belongs to a row and is indexed by it, never by the rows that happened to
/// run together: between two calls for a row, others may run, at the same layer or elsewhere.
///
///     engine.feed(row, tokens, position);              // this step's tokens of each row
///     for each layer:
///       engine.project(layer, rows);                   // queries(), keys(), values()
///       ... whoever owns the KV cache takes keys and values over ...
///       engine.attend(layer, rows, table, part::whole);
///       engine.feed_forward(layer, rows);
///     engine.sample(rows);                             // logits(row), sampled(row)
#pragma once

#include "block_attention.hpp"
#include "llama_weights.hpp"

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace host_engine {

/// What of a row's selection one call of `attend` reads.
enum class part : std::uint8_t {
  whole,   // all
  hits,    // the blocks that are there already
  landed,  // the rest, merged into the result of `hits`
};

/// Tells for each row, and each group of KV heads that shares a selection, which blocks to read.
template <class T>
concept kv_table = requires(T const& table, std::uint32_t row, std::uint32_t head_group) {
  { table.head_groups() } -> std::convertible_to<std::uint32_t>;
  { table.blocks(row, head_group) } -> std::convertible_to<kv_blocks>;
};

/// [tokens, heads, dim], without gaps. Borrowed from the engine.
struct token_tensor {
  float const* data = nullptr;
  std::size_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t dim = 0;

  [[nodiscard]] float const* row(std::size_t token, std::uint32_t head) const noexcept
  {
    return data + (token * heads + head) * dim;
  }
};

class llama_engine {
 public:
  struct size_limits {
    std::uint32_t rows = 1;
    std::uint32_t row_tokens = 256;  // most tokens of one row in one step: 1 for plain decoding, more for prefill
  };
  using row_span = std::span<std::uint32_t const>;

  /// @param weights borrowed, must outlive the engine
  llama_engine(llama_weights const& weights, size_limits limits);

  [[nodiscard]] llama_geometry const& geometry() const noexcept { return weights_->geometry; }

  /// Gives a row its tokens of this step, of which the first stands at `position` of its sequence.
  /// @throws std::out_of_range with the numbers
  void feed(std::uint32_t row, std::span<std::int32_t const> tokens, std::uint32_t position);

  /// Puts a row before `layer` with what another run had there, instead of `feed`.
  /// @param hidden [tokens, hidden]   @throws std::out_of_range with the numbers
  void resume(std::uint32_t row, std::span<float const> hidden, std::uint32_t position, std::uint32_t layer);

  /// Computes queries, keys and values of these rows' tokens at `layer`.
  /// @throws std::logic_error if a row is not at this layer
  void project(std::uint32_t layer, row_span rows);

  /// Attends the blocks that the table names for these rows.
  template <kv_table Table>
  void attend(std::uint32_t layer, row_span rows, Table const& table, part which)
  {
    std::uint32_t const groups = table.head_groups();
    for (std::uint32_t const row : rows) {
      for (std::uint32_t group = 0; group < groups; ++group) {
        attend_row(layer, row, group, groups, table.blocks(row, group), which);
      }
    }
  }

  /// Where the attention of a row's tokens goes, [tokens, query_heads * head_dim]: `attend` writes it, or whoever attends by
  /// other means, between `project` and `feed_forward`.
  [[nodiscard]] std::span<float> attended(std::uint32_t row) noexcept;

  /// Finishes `layer` for these rows: output projection, MLP, residuals.
  void feed_forward(std::uint32_t layer, row_span rows);

  /// Computes the logits of each row's last token and picks the likeliest next one.
  void sample(row_span rows);

  /// Computes the logits of some of a row's tokens, not the last alone.
  /// @param first, count of the row's tokens of this step   @param out [count, vocabulary]
  /// @throws std::out_of_range if the row has no such tokens, std::logic_error if it is not behind the last layer
  void token_logits(std::uint32_t row, std::uint32_t first, std::uint32_t count, float* out);

  /// What stands before the layer at which a row is, [tokens, hidden].
  [[nodiscard]] std::span<float const> hidden(std::uint32_t row) const noexcept;
  /// The queries of another layer for what stands before this one: a guess of those that it will have.
  /// @param out [tokens, query_heads * head_dim], with rotary positions
  void guess_queries(std::uint32_t row, std::uint32_t layer, float* out);

  // The tensors are indexed by token slot: those of a row begin at `first_token(row)`.
  [[nodiscard]] std::uint32_t first_token(std::uint32_t row) const noexcept { return row * limits_.row_tokens; }
  [[nodiscard]] token_tensor queries() const noexcept { return tensor(queries_, geometry().query_heads); }
  [[nodiscard]] token_tensor keys() const noexcept { return tensor(keys_, geometry().kv_heads); }
  [[nodiscard]] token_tensor values() const noexcept { return tensor(values_, geometry().kv_heads); }
  [[nodiscard]] std::uint32_t tokens(std::uint32_t row) const noexcept { return rows_[row].tokens; }
  [[nodiscard]] std::uint32_t position(std::uint32_t row) const noexcept { return rows_[row].position; }

  [[nodiscard]] std::span<float const> logits(std::uint32_t row) const noexcept;  // [vocabulary]
  [[nodiscard]] std::int32_t sampled(std::uint32_t row) const noexcept { return rows_[row].sampled; }

 private:
  struct row_state {
    std::uint32_t tokens = 0;
    std::uint32_t position = 0;
    std::uint32_t layer = 0;
    std::int32_t sampled = -1;
  };

  [[nodiscard]] token_tensor tensor(std::vector<float> const& values, std::uint32_t heads) const noexcept
  {
    std::size_t const tokens = std::size_t{limits_.rows} * limits_.row_tokens;
    return {.data = values.data(), .tokens = tokens, .heads = heads, .dim = geometry().head_dim};
  }
  void expect_layer(std::uint32_t layer, row_span rows, char const* call) const;
  [[nodiscard]] std::size_t count_tokens(row_span rows) const noexcept;
  // Calls `body(slot, index)` for each token of the rows: its slot, and its place in scratch tensors without gaps.
  template <class Body>
  void for_each_token(row_span rows, Body&& body) const;
  void attend_row(
    std::uint32_t layer, std::uint32_t row, std::uint32_t group, std::uint32_t groups, kv_blocks const& kv, part which);
  void rotate(float* head, std::uint32_t position) const noexcept;

  llama_weights const* weights_;
  size_limits limits_;
  std::vector<row_state> rows_;
  std::vector<float> rotation_;  // [context_tokens, head_dim / 2, cosine|sine]

  // By token slot.
  std::vector<float> hidden_, queries_, keys_, values_, attended_, log_sums_;
  std::vector<float> logits_;  // [rows, vocabulary]

  // Of one call.
  std::vector<float> normed_, stacked_, projected_, partial_, partial_log_sums_;
  attention_scratch attention_;
};

// What this engine and the one on a GPU share.

/// Cosines and sines by which positions turn pairs of channels, [context_tokens, head_dim / 2, cosine|sine].
[[nodiscard]] std::vector<float> make_rotation(llama_geometry const& model);

/// What `feed` refuses. @throws std::out_of_range with the numbers
void check_fed_tokens(
  llama_geometry const& model, llama_engine::size_limits limits, std::uint32_t row,
  std::span<std::int32_t const> tokens, std::uint32_t position);

}  // namespace host_engine
