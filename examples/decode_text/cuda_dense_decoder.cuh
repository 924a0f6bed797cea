/// dense_decoder on a GPU: a cache that holds everything in device memory, read and written by the library's operations. A step
/// of all rows is one graph.
#pragma once

#include "cuda_paged_engine.cuh"
#include "decoder.hpp"
#include <pulseinfer/backend/cuda/cuda_backend.cuh>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/residency.hpp>
#include <pulseinfer/view/row_info.hpp>
#include <pulseinfer/view/table.hpp>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace decode_text {

class cuda_dense_decoder : public reference_decoder {
 public:
  using weights_type = host_engine::cuda_llama_weights;

  /// @param weights borrowed   @param max_tokens of the longest row
  cuda_dense_decoder(
    weights_type const& weights, std::uint32_t rows, std::uint32_t max_tokens, std::uint32_t chunk,
    std::uint32_t block_tokens)
    : weights_{&weights},
      rows_{rows},
      chunk_{chunk},
      row_blocks_{pulseinfer::divide_up(max_tokens, block_tokens)},
      layout_{make_block_layout(geometry_of(weights_->geometry, block_tokens))},
      engine_{backend_, stream_, *weights_, {.rows = rows, .row_tokens = chunk}},
      cache_{backend_, pulseinfer::memory_space::device, weights_->geometry.layers * layer_bytes()},
      lists_{backend_, pulseinfer::memory_space::pinned, list_bytes()},
      copied_{backend_, pulseinfer::memory_space::device, list_bytes()},
      lengths_(rows)
  {
    auto* next = lists_.data();
    auto const take = [&]<class T>(T*& array, std::size_t count) {
      array = reinterpret_cast<T*>(next);
      next += count * sizeof(T);
    };
    std::size_t const blocks = std::size_t{rows} * row_blocks_;
    take(bases_, weights_->geometry.layers);
    take(info_, rows);
    take(ids_, rows);
    take(counts_, rows);
    take(slots_, blocks);
    take(shown_, blocks);
    for (std::uint32_t layer = 0; layer < weights_->geometry.layers; ++layer) {
      bases_[layer] = cache_.data() + layer * layer_bytes();
    }
    for (std::uint32_t row = 0; row < rows; ++row) ids_[row] = static_cast<pulseinfer::row_id>(row);
    for (std::size_t block = 0; block < blocks; ++block) slots_[block] = static_cast<pulseinfer::slot_id>(block);
  }

  ~cuda_dense_decoder() override { static_cast<void>(backend_.synchronize(stream_)); }

  void prefill(std::uint32_t row, std::span<std::int32_t const> prompt, progress const& report) override
  {
    std::span<std::int32_t const> rest = prompt.first(prompt.size() - 1);
    while (!rest.empty()) {
      std::size_t const count = std::min<std::size_t>(chunk_, rest.size());
      feed(row, rest.first(count));
      run(row, 1, static_cast<std::uint32_t>(count), false);
      rest = rest.subspan(count);
      report(lengths_[row]);
    }
    feed(row, prompt.last(1));
    run(row, 1, 1, true);
    report(lengths_[row]);
  }

  void step(std::span<std::int32_t const> tokens) override
  {
    for (std::uint32_t row = 0; row < rows_; ++row) feed(row, tokens.subspan(row, 1));
    if (!stepped_) {  // what cuBLAS and CUDA do at their first calls is no part of a graph
      run(0, rows_, 1, true);
      stepped_ = true;
      return;
    }
    if (!graph_) {
      pulseinfer::row_list const all{.ids = there(ids_), .count = rows_};
      graph_.emplace(engine_.capture(all, [&] { enqueue(all, all, 1, true); }));
    }
    finish(engine_.launch(*graph_));
  }

  [[nodiscard]] std::span<float const> logits(std::uint32_t row) const override
  {
    return engine_.logits(static_cast<pulseinfer::row_id>(row));
  }

  void read_only(std::uint32_t sink_blocks, std::uint32_t recent_blocks) override
  {
    sink_blocks_ = sink_blocks;
    recent_blocks_ = recent_blocks;
  }

  void copy_prompts_from(reference_decoder const& other) override
  {
    auto const& from = dynamic_cast<cuda_dense_decoder const&>(other);
    if (from.cache_.bytes() != cache_.bytes()) {
      throw std::invalid_argument{
        "a cache of " + std::to_string(from.cache_.bytes()) + " bytes can't be copied into one of " +
        std::to_string(cache_.bytes())};
    }
    host_engine::require_cuda(
      cudaMemcpy(cache_.data(), from.cache_.data(), cache_.bytes(), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    lengths_ = from.lengths_;
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept override
  {
    std::uint64_t const tokens = std::accumulate(lengths_.begin(), lengths_.end(), std::uint64_t{0});
    return weights_->geometry.layers * tokens * (layout_.key().row_bytes + layout_.value().row_bytes) * layout_.heads;
  }

 private:
  [[nodiscard]] static pulseinfer::kv_geometry geometry_of(
    host_engine::llama_geometry const& model, std::uint32_t block_tokens)
  {
    return {
      .layers = model.layers,
      .query_heads = model.query_heads,
      .kv_heads = model.kv_heads,
      .head_dim = model.head_dim,
      .block_tokens = block_tokens,
      .key_type = pulseinfer::dtype::float32,
      .value_type = pulseinfer::dtype::float32};
  }

  [[nodiscard]] std::uint64_t layer_bytes() const { return std::uint64_t{rows_} * row_blocks_ * layout_.block_bytes; }
  [[nodiscard]] std::uint64_t list_bytes() const
  {
    return weights_->geometry.layers * sizeof(*bases_) + rows_ * (sizeof(*info_) + sizeof(*ids_) + sizeof(*counts_)) +
      std::uint64_t{rows_} * row_blocks_ * (sizeof(*slots_) + sizeof(*shown_));
  }

  void feed(std::uint32_t row, std::span<std::int32_t const> tokens)
  {
    auto const count = static_cast<std::uint32_t>(tokens.size());
    if (lengths_[row] + count > row_blocks_ * layout_.block_tokens) {
      throw std::out_of_range{
        "row " + std::to_string(row) + " would have " + std::to_string(lengths_[row] + count) +
        " tokens, the cache holds " + std::to_string(row_blocks_ * layout_.block_tokens)};
    }
    engine_.feed(static_cast<pulseinfer::row_id>(row), tokens, lengths_[row]);
    lengths_[row] += count;
    info_[row] = {
      .tokens = static_cast<std::int32_t>(lengths_[row]),
      .new_tokens = static_cast<std::int32_t>(count),
      .token_offset = static_cast<std::int32_t>(engine_.first_token(static_cast<pulseinfer::row_id>(row)))};
    list_shown(row);
  }

  // All blocks of the row, or the first and the last ones.
  void list_shown(std::uint32_t row)
  {
    std::uint32_t const count = info_[row].blocks(layout_.block_tokens), kept = sink_blocks_ + recent_blocks_;
    bool const all = kept == 0 || kept >= count;
    counts_[row] = all ? count : kept;
    auto const* const own = slots_ + std::size_t{row} * row_blocks_;
    auto* const shown = shown_ + std::size_t{row} * row_blocks_;
    std::copy_n(own, all ? count : sink_blocks_, shown);
    if (!all) std::copy_n(own + count - recent_blocks_, recent_blocks_, shown + sink_blocks_);
  }

  // Where the device reads what the host writes at `array`.
  template <class T>
  [[nodiscard]] T* there(T* array) const
  {
    return reinterpret_cast<T*>(copied_.data() + (reinterpret_cast<std::byte*>(array) - lists_.data()));
  }

  void run(std::uint32_t first, std::uint32_t count, std::uint32_t most_tokens, bool samples)
  {
    enqueue({.ids = ids_ + first, .count = count}, {.ids = there(ids_ + first), .count = count}, most_tokens, samples);
    finish(pulseinfer::status::ok);
  }
  void finish(pulseinfer::status launched)
  {
    if (launched != pulseinfer::status::ok || backend_.synchronize(stream_) != pulseinfer::status::ok) {
      throw std::runtime_error{"a step on the GPU: " + backend_.last_error()};
    }
  }

  // The same rows, as the host reads them and as the device does.
  void enqueue(pulseinfer::row_list named, pulseinfer::row_list rows, std::uint32_t most_tokens, bool samples)
  {
    host_engine::require_cuda(
      cudaMemcpyAsync(copied_.data(), lists_.data(), lists_.bytes(), cudaMemcpyHostToDevice, stream_.stream),
      "cudaMemcpyAsync");
    for (std::uint32_t layer = 0; layer < weights_->geometry.layers; ++layer) {
      auto const id = static_cast<pulseinfer::layer_id>(layer);
      pulseinfer::slot_pool_ref const pool{
        .layer_base = there(bases_ + layer), .slot_stride = layout_.block_bytes, .slots = rows_ * row_blocks_};
      engine_.project(id, named);
      engine_.launch(pulseinfer::append_tokens{
        .layer = pulseinfer::layer_id{0},  // of the pool, which is that of one layer
        .rows = rows,
        .info = there(info_),
        .keys = engine_.keys(),
        .values = engine_.values(),
        .residency = {.slot_of = there(slots_), .layers = 1, .lanes = rows_, .max_blocks = row_blocks_},
        .pool = pool,
        .layout = layout_,
        .most_tokens = most_tokens});
      engine_.attend(
        id, rows,
        {.slots = there(shown_),
         .counts = there(counts_),
         .info = there(info_),
         .pool = pool,
         .layout = layout_,
         .layer = pulseinfer::layer_id{0},
         .stride = row_blocks_},
        pulseinfer::part::whole, most_tokens);
      engine_.feed_forward(id, named);
    }
    if (samples) engine_.sample(named);
  }

  weights_type const* weights_;
  std::uint32_t rows_, chunk_, row_blocks_;
  pulseinfer::block_layout layout_;
  pulseinfer::cuda_backend backend_;
  pulseinfer::cuda_backend::stream_ref stream_ = backend_.create_stream();
  cuda_paged_engine<pulseinfer::cuda_backend> engine_;
  pulseinfer::slab<pulseinfer::cuda_backend> cache_;   // [layer][row][block][K|V][head][block_tokens][head_dim]
  pulseinfer::slab<pulseinfer::cuda_backend> lists_;   // what follows; the host writes it while the stream is idle
  pulseinfer::slab<pulseinfer::cuda_backend> copied_;  // the same, as each step's kernels read it
  std::byte** bases_ = nullptr;                        // [layers]
  pulseinfer::row_info* info_ = nullptr;               // [rows]
  pulseinfer::row_id* ids_ = nullptr;                  // [rows]
  std::uint32_t* counts_ = nullptr;                    // [rows]
  pulseinfer::slot_id* slots_ = nullptr;               // [rows, row_blocks], one behind the other
  pulseinfer::slot_id* shown_ = nullptr;               // [rows, row_blocks] what attention reads
  std::vector<std::uint32_t> lengths_;
  std::uint32_t sink_blocks_ = 0, recent_blocks_ = 0;
  bool stepped_ = false;
  std::optional<host_engine::cuda_graph> graph_;  // of a step of all rows
};

}  // namespace decode_text
