/// Decodes with the KV cache in the library's hands: this is what an engine writes.
#pragma once

#include "decoder.hpp"
#include "engine/llama_weights.hpp"
#include "graph_runner.hpp"
#include "offload_options.hpp"
#include "pace.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/backend/traced.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/observe/chrome_trace.hpp>
#include <pulseinfer/observe/counters.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace decode_text {

/// @tparam Engine the model in the library's terms, over a `traced` backend: see paged_engine
template <class Engine, class Selector, class TransferEngine, class LayerScheduler>
class pulseinfer_decoder : public offload_decoder {
 public:
  using backend_type = typename Engine::backend_type;
  using weights_type = typename Engine::weights_type;
  using manager_type =
    pulseinfer::offload_manager<backend_type, Selector, TransferEngine, LayerScheduler, pulseinfer::fixed_admission>;

  pulseinfer_decoder(
    weights_type const& weights, offload_options const& options, Selector const& selector,
    TransferEngine const& transfer, std::span<row_lengths const> rows)
    : options_{options},
      lengths_{rows.begin(), rows.end()},
      backend_{pulseinfer::trace_options{.max_records = options.trace_records}},
      compute_{backend_.create_stream("compute")},
      pace_{
        options.scheduler == scheduler_choice::interruptible, static_cast<std::uint32_t>(rows.size()),
        weights.geometry.layers, selected_bytes(weights.geometry, options),
        rows.size() >= pace::fewest_parked ? measure_link() : 0.0},
      kv_{backend_, compute_,        geometry_of(weights.geometry, options), sizes_of(options, rows), selector,
          transfer, make_scheduler()},
      engine_{
        backend_, compute_, weights, {.rows = static_cast<std::uint32_t>(rows.size()), .row_tokens = options.chunk}},
      graphs_{kv_, engine_},
      rows_(rows.size(), pulseinfer::none<pulseinfer::row_id>)
  {
    Engine::expect(kv_.layout(), weights.geometry);
  }

  // What is enqueued names members: it runs out before they go.
  ~pulseinfer_decoder() override { static_cast<void>(backend_.synchronize()); }

  void prefill(std::uint32_t row, std::span<std::int32_t const> prompt, progress const& report) override
  {
    open(row);
    std::span<std::int32_t const> rest = prompt.first(prompt.size() - 1);
    while (!rest.empty()) {
      std::size_t const count = std::min<std::size_t>(options_.chunk, rest.size());
      begin(rows_[row], rest.first(count));
      run_step(count == rest.size());
      rest = rest.subspan(count);
      report(static_cast<std::uint32_t>(prompt.size() - 1 - rest.size()));
    }
    // Its first step: the row leaves what it does not need in its slots, and the next prompt finds room.
    begin(rows_[row], prompt.last(1));
    pace_.note_single(run_step(false));
    kv_.finish_sample();
    report(static_cast<std::uint32_t>(prompt.size()));
  }

  void step(std::span<std::int32_t const> tokens) override
  {
    for (std::size_t row = 0; row < rows_.size(); ++row) begin(rows_[row], tokens.subspan(row, 1));
    decodes_ = true;
    pace_.note_step(run_step(false));
    decodes_ = false;
    ++decoded_;
    kv_.finish_sample();
    steps_.push_back(kv_.last_sample());
    counters_.add(kv_.last_sample());
  }

  [[nodiscard]] std::span<float const> logits(std::uint32_t row) const override { return engine_.logits(rows_[row]); }

  [[nodiscard]] pulseinfer::counters const& counters() const override { return counters_; }
  [[nodiscard]] std::uint64_t device_bytes() const override
  {
    pulseinfer::memory_use const used = kv_.memory();
    return used.slot_bytes + used.digest_bytes + used.book_bytes;
  }
  [[nodiscard]] std::uint64_t device_bytes_peak() const override
  {
    pulseinfer::memory_use const used = kv_.memory();
    return used.slot_bytes_peak + used.digest_bytes + used.book_bytes;
  }
  [[nodiscard]] pulseinfer::memory_use memory() const override { return kv_.memory(); }

  [[nodiscard]] std::string schedule() const override
  {
    return std::is_same_v<LayerScheduler, paced_scheduler> ? pace_.description() : "lockstep";
  }
  [[nodiscard]] std::uint64_t graph_launches() const override { return graphs_.launched(); }

  void write_timeline(std::ostream& out) override
  {
    expect(backend_.synchronize(), "synchronize");
    pulseinfer::write_chrome_trace(out, backend_, steps_);
    if (backend_.dropped() > 0) {
      std::fprintf(
        stderr, "the timeline holds the first %zu launches and copies, %llu later ones found no room\n",
        backend_.records().size(), static_cast<unsigned long long>(backend_.dropped()));
    }
  }

 private:
  [[nodiscard]] static pulseinfer::kv_geometry geometry_of(
    host_engine::llama_geometry const& model, offload_options const& options)
  {
    return {
      .layers = model.layers,
      .query_heads = model.query_heads,
      .kv_heads = model.kv_heads,
      .head_dim = model.head_dim,
      .block_tokens = options.block_tokens,
      .key_type = pulseinfer::dtype::float32,
      .value_type = pulseinfer::dtype::float32,
      .layer_groups = layer_groups(model.layers, options.dense_layers)};
  }

  [[nodiscard]] static pulseinfer::manager_options sizes_of(
    offload_options const& options, std::span<row_lengths const> rows)
  {
    std::uint32_t longest = 0;
    for (row_lengths const& row : rows) longest = std::max(longest, row.max_tokens);
    return {
      .max_rows = static_cast<std::uint32_t>(rows.size()),
      .max_tokens = longest,
      .max_prefill_tokens = options.chunk,
      .quota_tokens = options.slots_tokens,
      .captured_steps = graph_runner<Engine, manager_type>::whole_steps ? 1U : 0U};
  }

  // Of a row in a layer.
  [[nodiscard]] static std::uint64_t selected_bytes(
    host_engine::llama_geometry const& model, offload_options const& options)
  {
    return std::uint64_t{options.budget_tokens} * model.kv_heads * model.head_dim * 2 * sizeof(float);
  }

  // Bytes that one copy of 32 MiB brings from the host tier in a second.
  [[nodiscard]] double measure_link()
  {
    constexpr std::uint64_t bytes = std::uint64_t{32} << 20U;
    pulseinfer::slab<backend_type> const from{backend_, pulseinfer::memory_space::pinned, bytes};
    pulseinfer::slab<backend_type> const to{backend_, pulseinfer::memory_space::device, bytes};
    pulseinfer::copy_run const run{.target = to.data(), .source = from.data(), .bytes = bytes};
    double best = 0.0;
    for (int tried = 0; tried < 3; ++tried) {
      pulseinfer::nanoseconds const begun = backend_.now();
      pulseinfer::copy_list const list{
        .runs = &run, .count = 1, .direction = pulseinfer::copy_direction::host_to_device};
      expect(backend_.copy(compute_, list), "copy");
      expect(backend_.synchronize(compute_), "synchronize");
      auto const time = static_cast<double>(std::max<std::int64_t>((backend_.now() - begun).count(), 1));
      best = std::max(best, 1e9 * static_cast<double>(bytes) / time);
    }
    return best;
  }

  void open(std::uint32_t row)
  {
    pulseinfer::sequence_options const request{
      .prompt_tokens = lengths_[row].prompt_tokens, .max_tokens = lengths_[row].max_tokens};
    if (kv_.open(request, rows_[row]) != pulseinfer::admission::admitted) {
      throw std::runtime_error{"row " + std::to_string(row) + " was not admitted: it " + kv_.explain_refusal(request)};
    }
  }

  void begin(pulseinfer::row_id row, std::span<std::int32_t const> tokens)
  {
    engine_.feed(row, tokens, kv_.tokens_of(row));
    batch_.push_back(
      {.row = row, .tokens = static_cast<std::uint32_t>(tokens.size()), .token_offset = engine_.first_token(row)});
  }

  // A step, and the time from its first launch to its end.
  pulseinfer::nanoseconds run_step(bool ends_prompt)
  {
    expect(kv_.begin_step(batch_), "begin_step");
    pulseinfer::nanoseconds const begun = backend_.now();
    if (!uses_graphs() || !graphs_.run_step(static_cast<std::uint32_t>(batch_.size()), [&](auto& steps) {
          enqueue(steps, false);
        })) {
      enqueue(kv_, ends_prompt);
    }
    expect(backend_.synchronize(compute_), "synchronize");
    pulseinfer::nanoseconds const time = backend_.now() - begun;

    commits_.clear();
    for (pulseinfer::step_row const& row : batch_) {
      expect(kv_.row_status(row.row), "a row's step");
      commits_.push_back({.row = row.row, .accepted = row.tokens});
    }
    expect(kv_.commit(commits_), "commit");
    batch_.clear();
    return time;
  }

  // The first step of all rows goes launch by launch: what kernels do at their first call is no part of a graph. A timeline
  // shows launches.
  [[nodiscard]] bool uses_graphs() const noexcept
  {
    return Engine::captures && decodes_ && decoded_ > 0 && options_.trace_records == 0;
  }

  // The loop over visits. Rows split and merge as their blocks arrive; nothing here knows.
  template <class Steps>  // the manager, or what stands for it while a whole step is captured
  void enqueue(Steps& steps, bool ends_prompt)
  {
    bool const by_visits = uses_graphs() && std::is_same_v<Steps, manager_type>;
    if (
      !by_visits || !graphs_.run_visit(steps.rows(), pulseinfer::none<pulseinfer::layer_id>, pulseinfer::part::whole)) {
      engine_.project(steps.first_layer(), steps.rows());
      enter(steps, steps.first_layer(), steps.rows());
    }
    for (pulseinfer::visit const& v : steps.step()) {
      if (by_visits && v.rows.count == batch_.size() && graphs_.run_visit(v.rows, v.layer, v.part)) continue;
      engine_.attend(v.layer, v.rows, v.table, v.part);
      if (v.part == pulseinfer::part::hits) continue;
      if (ends_prompt) expect(kv_.warm_up(v.layer, v.rows, engine_.queries()), "warm_up");
      engine_.feed_forward(v.layer, v.rows);
      if (v.last) {
        engine_.sample(v.rows);
        continue;
      }
      engine_.project(v.next, v.rows);
      enter(steps, v.next, v.rows);
    }
  }

  template <class Steps>
  void enter(Steps& steps, pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    expect(steps.enter(layer, rows, engine_.keys(), engine_.values(), engine_.queries()), "enter");
  }

  [[nodiscard]] LayerScheduler make_scheduler()
  {
    if constexpr (std::is_same_v<LayerScheduler, paced_scheduler>) {
      return paced_scheduler{&pace_};
    } else {
      return {};
    }
  }

  static void expect(pulseinfer::status result, char const* call)
  {
    if (result != pulseinfer::status::ok) throw std::runtime_error{std::string{call} + ": " + name_of(result)};
  }

  offload_options options_;
  std::vector<row_lengths> lengths_;
  backend_type backend_;
  typename backend_type::stream_ref compute_;
  pace pace_;  // of rows whose scheduler asks it
  manager_type kv_;
  Engine engine_;
  graph_runner<Engine, manager_type> graphs_;
  std::vector<pulseinfer::row_id> rows_;
  std::vector<pulseinfer::step_row> batch_;
  std::vector<pulseinfer::commit_row> commits_;
  std::vector<pulseinfer::step_sample> steps_;
  pulseinfer::counters counters_;
  bool decodes_ = false;  // the step is one of all rows
  std::uint64_t decoded_ = 0;
};

}  // namespace decode_text
