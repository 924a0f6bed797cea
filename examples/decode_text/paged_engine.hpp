/// The engine as the library meets it: rows, layers and tables have the library's types, and work takes its place in a stream.
#pragma once

#include "engine/llama_engine.hpp"
#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

/// How the library sees the engine's tensors.
template <>
struct pulseinfer::tensor_traits<host_engine::token_tensor> {
  [[nodiscard]] static tensor_view view(host_engine::token_tensor const& tensor) noexcept
  {
    return contiguous_tensor(const_cast<float*>(tensor.data), dtype::float32, tensor.tokens, tensor.heads, tensor.dim);
  }
};

namespace decode_text {

/// The library's table as the engine's attention reads it.
class paged_table {
 public:
  explicit paged_table(pulseinfer::block_table const& table) : table_{&table} {}

  [[nodiscard]] std::uint32_t head_groups() const noexcept { return table_->head_groups; }

  [[nodiscard]] host_engine::kv_blocks blocks(std::uint32_t row, std::uint32_t head_group) const
  {
    auto const lane = pulseinfer::lane_of(static_cast<pulseinfer::row_id>(row), head_group, table_->head_groups);
    std::uint32_t const count = table_->counts[to_index(lane)];
    blocks_.clear();
    for (std::uint32_t place = 0; place < count; ++place) {
      blocks_.push_back(reinterpret_cast<float const*>(table_->block(lane, place)));
    }
    // The blocks that landed are old ones; this step's tokens lie in the open blocks, at the end of the others.
    bool const landed = table_->which == pulseinfer::part::landed;
    return {
      .blocks = blocks_,
      .heads = table_->layout.heads,
      .block_tokens = table_->layout.block_tokens,
      .tokens = table_->tokens(lane),
      .new_tokens = landed ? 0U : static_cast<std::uint32_t>(table_->info[row].new_tokens)};
  }

  /// The engine reads blocks of 32-bit floats, [K|V][head][token][dim].
  /// @throws pulseinfer::configuration_error for any other layout
  static void expect(pulseinfer::block_layout const& layout, host_engine::llama_geometry const& model)
  {
    std::uint64_t const plane = std::uint64_t{layout.heads} * layout.block_tokens * model.head_dim * sizeof(float);
    if (layout.plane_count != 2 || layout.planes[1].offset != plane || layout.block_bytes != 2 * plane) {
      throw pulseinfer::configuration_error{
        "the engine reads blocks of 2 planes of " + std::to_string(plane) + " bytes, the cache has " +
        std::to_string(layout.plane_count) + " planes in blocks of " + std::to_string(layout.block_bytes)};
    }
  }

 private:
  pulseinfer::block_table const* table_;
  mutable std::vector<float const*> blocks_;
};

/// Enqueues the engine's work on a stream of a backend that runs on the host. Row lists and tables live until the work has run.
template <class Backend>
class paged_engine {
 public:
  using backend_type = Backend;
  using weights_type = host_engine::llama_weights;
  static constexpr bool captures = false;

  paged_engine(
    Backend& backend, typename Backend::stream_ref stream, host_engine::llama_weights const& weights,
    host_engine::llama_engine::size_limits limits)
    : backend_{backend}, stream_{stream}, engine_{weights, limits}
  {}

  /// @throws pulseinfer::configuration_error for a layout that the engine does not read
  static void expect(pulseinfer::block_layout const& layout, host_engine::llama_geometry const& model)
  {
    paged_table::expect(layout, model);
  }

  /// @pre the row's work of the step before is complete
  void feed(pulseinfer::row_id row, std::span<std::int32_t const> tokens, std::uint32_t position)
  {
    engine_.feed(number(row), tokens, position);
  }

  void project(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    enqueue<"project">([this, layer, rows] { engine_.project(number(layer), take(rows)); });
  }

  void attend(
    pulseinfer::layer_id layer, pulseinfer::row_list rows, pulseinfer::block_table const& table, pulseinfer::part which)
  {
    enqueue<"attend">([this, layer, rows, table, which] {
      auto const part = which == pulseinfer::part::whole ? host_engine::part::whole
        : which == pulseinfer::part::hits                ? host_engine::part::hits
                                                         : host_engine::part::landed;
      engine_.attend(number(layer), take(rows), paged_table{table}, part);
    });
  }

  void feed_forward(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    enqueue<"feed forward">([this, layer, rows] { engine_.feed_forward(number(layer), take(rows)); });
  }

  void sample(pulseinfer::row_list rows)
  {
    enqueue<"sample">([this, rows] { engine_.sample(take(rows)); });
  }

  [[nodiscard]] host_engine::token_tensor queries() const noexcept { return engine_.queries(); }
  [[nodiscard]] host_engine::token_tensor keys() const noexcept { return engine_.keys(); }
  [[nodiscard]] host_engine::token_tensor values() const noexcept { return engine_.values(); }

  [[nodiscard]] std::uint32_t first_token(pulseinfer::row_id row) const noexcept
  {
    return engine_.first_token(number(row));
  }
  [[nodiscard]] std::span<float const> logits(pulseinfer::row_id row) const noexcept
  {
    return engine_.logits(number(row));
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
    for (pulseinfer::row_id const row : rows) rows_.push_back(number(row));
    return rows_;
  }

  template <pulseinfer::operation_name Name, class Work>
  void enqueue(Work work)
  {
    pulseinfer::status const result = backend_.launch(stream_, pulseinfer::named_host_function<Name>(work));
    if (result != pulseinfer::status::ok) {
      throw std::runtime_error{std::string{Name.text} + " could not be enqueued: " + name_of(result)};
    }
  }

  Backend& backend_;
  typename Backend::stream_ref stream_;
  host_engine::llama_engine engine_;
  std::vector<std::uint32_t> rows_;  // of the work that runs: a stream runs one at a time
};

}  // namespace decode_text
