/// The engine on a GPU as the library meets it: as paged_engine, with attention by the library's own operation.
#pragma once

#include "engine/cuda_graph.cuh"
#include "engine/cuda_llama_engine.cuh"
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace decode_text {

/// What the engine computes, enqueued on a stream of a CUDA backend.
template <class Backend>
class cuda_paged_engine {
 public:
  using backend_type = Backend;
  using weights_type = host_engine::cuda_llama_weights;
  using graph_type = host_engine::cuda_graph;
  static constexpr bool captures = true;

  cuda_paged_engine(
    Backend& backend, typename Backend::stream_ref stream, weights_type const& weights,
    host_engine::llama_engine::size_limits limits)
    : backend_{backend},
      stream_{stream},
      engine_{weights, limits, stream.stream},
      partial_{engine_.token_slots() * weights.geometry.query_width()},
      log_sums_{engine_.token_slots() * weights.geometry.query_heads},
      partial_log_sums_{log_sums_.size()}
  {}

  /// The library's attention reads any layout.
  static void expect(pulseinfer::block_layout const&, host_engine::llama_geometry const&) {}

  /// @pre the row's work of the step before is complete
  void feed(pulseinfer::row_id row, std::span<std::int32_t const> tokens, std::uint32_t position)
  {
    engine_.feed(number(row), tokens, position);
  }

  void project(pulseinfer::layer_id layer, pulseinfer::row_list rows) { engine_.project(number(layer), take(rows)); }

  void attend(
    pulseinfer::layer_id layer, pulseinfer::row_list rows, pulseinfer::block_table const& table, pulseinfer::part which)
  {
    std::uint32_t most = 1;
    if (!listing_) {
      for (pulseinfer::row_id const row : rows) most = std::max(most, engine_.tokens(number(row)));
    }
    attend(layer, rows, table, which, most);
  }
  /// For rows that only the device reads, none of which appends more than `most` tokens.
  void attend(
    pulseinfer::layer_id, pulseinfer::row_list rows, pulseinfer::block_table const& table, pulseinfer::part which,
    std::uint32_t most)
  {
    bool const landed = which == pulseinfer::part::landed;
    pulseinfer::tensor_view const whole = view(engine_.attended(), engine_.geometry().query_heads);
    pulseinfer::tensor_view const rest = view(partial_.data(), engine_.geometry().query_heads);
    launch(pulseinfer::paged_attention{
      .table = table,
      .rows = rows,
      .queries = queries(),
      .out = landed ? rest : whole,
      .lse = landed ? partial_log_sums_.data() : log_sums_.data(),
      .most_queries = most});
    if (!landed) return;
    launch(pulseinfer::merge_partials{
      .rows = rows,
      .info = table.info,
      .result = whole,
      .result_lse = log_sums_.data(),
      .other = rest,
      .other_lse = partial_log_sums_.data(),
      .most_queries = most});
  }

  void feed_forward(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    engine_.feed_forward(number(layer), take(rows));
  }

  void sample(pulseinfer::row_list rows) { engine_.sample(take(rows)); }

  /// What `enqueue` makes of the calls above, to be launched for whatever rows lie at the list then, with one token each.
  /// @throws host_engine::cuda_engine_error
  template <class Enqueue>
  [[nodiscard]] graph_type capture(pulseinfer::row_list rows, Enqueue enqueue)
  {
    struct listing {
      cuda_paged_engine& engine;
      explicit listing(cuda_paged_engine& of, pulseinfer::row_list listed) : engine{of}
      {
        engine.engine_.begin_list(reinterpret_cast<std::uint32_t const*>(listed.ids), listed.count);
        engine.listing_ = true;
      }
      ~listing()
      {
        engine.listing_ = false;
        engine.engine_.end_list();
      }
    } const lists{*this, rows};
    return graph_type{stream_.stream, enqueue};
  }
  [[nodiscard]] pulseinfer::status launch(graph_type const& graph)
  {
    return graph.launch(stream_.stream) == cudaSuccess ? pulseinfer::status::ok : pulseinfer::status::device_lost;
  }

  [[nodiscard]] pulseinfer::tensor_view queries() const
  {
    return view(engine_.queries(), engine_.geometry().query_heads);
  }
  [[nodiscard]] pulseinfer::tensor_view keys() const { return view(engine_.keys(), engine_.geometry().kv_heads); }
  [[nodiscard]] pulseinfer::tensor_view values() const { return view(engine_.values(), engine_.geometry().kv_heads); }

  [[nodiscard]] std::uint32_t first_token(pulseinfer::row_id row) const noexcept
  {
    return engine_.first_token(number(row));
  }
  /// @pre the stream has run
  [[nodiscard]] std::span<float const> logits(pulseinfer::row_id row) const noexcept
  {
    return engine_.logits(number(row));
  }

  template <class Op>
  void launch(Op const& op)
  {
    pulseinfer::status const result = backend_.launch(stream_, op);
    if (result != pulseinfer::status::ok) {
      throw std::runtime_error{std::string{Op::name} + " could not be enqueued: " + name_of(result)};
    }
  }

 private:
  template <pulseinfer::strong_id Id>
  [[nodiscard]] static std::uint32_t number(Id id) noexcept
  {
    return static_cast<std::uint32_t>(to_index(id));
  }

  [[nodiscard]] std::span<std::uint32_t const> take(pulseinfer::row_list rows)
  {
    rows_.clear();
    if (listing_) return rows_;  // the device alone reads the list
    for (pulseinfer::row_id const row : rows) rows_.push_back(number(row));
    return rows_;
  }

  [[nodiscard]] pulseinfer::tensor_view view(float* data, std::uint32_t heads) const
  {
    return pulseinfer::contiguous_tensor(
      data, pulseinfer::dtype::float32, engine_.token_slots(), heads, engine_.geometry().head_dim);
  }

  Backend& backend_;
  typename Backend::stream_ref stream_;
  host_engine::cuda_llama_engine engine_;
  host_engine::cuda_floats partial_, log_sums_, partial_log_sums_;  // by token slot
  std::vector<std::uint32_t> rows_;
  bool listing_ = false;
};

}  // namespace decode_text
