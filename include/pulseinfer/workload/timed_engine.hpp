#pragma once

/// A host engine without a model: its layers take the time that a cost model says.

#include <pulseinfer/backend/host_function.hpp>
#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/sim/compute_model.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>
#include <pulseinfer/view/visit.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace pulseinfer {

/// Costs of an engine's visits.
struct engine_cost {
  pass_cost pass = {};
  nanoseconds hits_launch{0};  ///< what a visit of the hits costs beside its attention
};

/// A visit and when it ran.
struct visit_record {
  layer_id layer = none<layer_id>;
  std::uint32_t rows = 0;
  pulseinfer::part part = pulseinfer::part::whole;
  observation seen = {};
};

/// What a visit takes. `Shares` says how much of its selection a row attends: shares(row, layer, part) -> selections.
template <class Shares>
struct timed_visit {
  static constexpr char const* name = "visit";
  static constexpr operation_kind kind = operation_kind::data;

  engine_cost engine = {};
  row_list rows = {};
  layer_id layer = none<layer_id>;
  pulseinfer::part part = pulseinfer::part::whole;
  Shares* shares = nullptr;

  [[nodiscard]] launch_shape shape() const { return {.items = 1, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    double attended = 0.0;
    for (row_id const row : rows) { attended += (*shares)(row, layer, part); }
    nanoseconds const rest = part == pulseinfer::part::hits ? engine.hits_launch : engine.pass.rest(rows.count);
    return {.device_ns = (engine.pass.attention(attended) + rest).count()};
  }
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {}
};

/// Drives a manager over a simulated backend, one token a row and step. A row's queries are those of its place; keys and values
/// are never written.
template <class Backend, class Manager, class Shares>
class timed_engine {
 public:
  /// @param shares must outlive the engine and all that it enqueues
  timed_engine(
    Backend& backend, typename Backend::stream_ref stream, Manager& manager, std::uint32_t max_rows,
    engine_cost const& cost, Shares& shares)
    : backend_{&backend},
      stream_{stream},
      kv_{&manager},
      cost_{cost},
      shares_{&shares},
      queries_(std::size_t{max_rows} * query_width()),
      max_rows_{max_rows},
      in_step_(max_rows, 0),
      owed_(max_rows, none<layer_id>)
  {
    entering_.reserve(max_rows);
    refused_.reserve(max_rows);
    step_rows_.reserve(max_rows);
    commit_rows_.reserve(max_rows);
  }

  /// Costs from now on.
  void set_cost(engine_cost const& cost) noexcept { cost_ = cost; }

  /// One step of `rows`; those that an earlier step left late go on in it whether they are named or not. What is refused to some
  /// rows ends nothing for the others: the step goes on and commits what it sampled. Rows that could not enter a layer are late, and
  /// enter it in the next step.
  /// @return the first status that was not ok
  /// @param begun called in stream order with each row that begins a step, before its first layer; trivially copyable
  /// @param ended called in stream order when the step's last visit is through, trivially copyable
  template <class Begun, class Ended>
  status step(std::span<row_id const> rows, Begun begun, Ended ended)
  {
    step_rows_.clear();
    for (row_id const row : rows) {
      if (kv_->is_late(row)) { continue; }
      step_rows_.push_back({.row = row, .tokens = 1, .token_offset = static_cast<std::uint32_t>(to_index(row))});
    }
    return run(begun, ended);
  }

  /// A step of one row alone that appends `tokens` of its prompt.
  status append(row_id row, std::uint32_t tokens)
  {
    step_rows_.assign(1, {.row = row, .tokens = tokens});
    prompt_tokens_ = std::max(prompt_tokens_, tokens);
    if (queries_.size() < std::size_t{prompt_tokens_} * query_width()) {
      queries_.resize(std::size_t{prompt_tokens_} * query_width());
    }
    return run([](row_id) {}, [] {});
  }

  /// Rows that the last step sampled.
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }

  std::uint64_t visits = 0;
  std::uint64_t passes = 0;                                   ///< visits that read a layer's weights
  std::deque<visit_record>* timeline = nullptr;               ///< every visit, where someone wants them
  std::function<void(layer_id, row_list)> before_enter = {};  ///< called on the host, to import selections

 private:
  /// The step of step_rows_, of which all tokens are kept.
  template <class Begun, class Ended>
  status run(Begun begun, Ended ended)
  {
    if (status const ready = kv_->begin_step(step_rows_); ready != status::ok) { return ready; }
    for (step_row const& r : step_rows_) {
      in_step_[to_index(r.row)] = r.tokens;
      owed_[to_index(r.row)] = none<layer_id>;  // of a sequence that was closed since
    }
    tokens_ = 0;
    status result = status::ok;
    auto const note = [&result](status said) { result = result == status::ok ? said : result; };
    if (kv_->rows().count != 0) {
      auto const begin = [begun, list = kv_->rows()] {
        for (row_id const row : list) { begun(row); }
      };
      note(tell(begin));
    }
    note(enter_owed());
    if (kv_->rows().count != 0) { note(enter_or_owe(kv_->first_layer(), kv_->rows())); }
    for (visit const& v : kv_->step()) {
      ++visits;
      passes += v.part == part::hits ? 0U : 1U;
      backend_->charge_segment();
      observation* seen = nullptr;
      if (timeline != nullptr) {
        seen = &timeline->emplace_back(visit_record{.layer = v.layer, .rows = v.rows.count, .part = v.part}).seen;
      }
      note(backend_->launch(
        stream_,
        timed_visit<Shares>{.engine = cost_, .rows = v.rows, .layer = v.layer, .part = v.part, .shares = shares_},
        seen));
      if (v.part == part::hits) { continue; }
      if (v.last) {
        tokens_ += v.rows.count;
        continue;
      }
      note(enter_or_owe(v.next, v.rows));
    }
    note(tell(ended));
    note(commit());
    return result;
  }

  status enter_or_owe(layer_id layer, row_list rows)
  {
    status const entered = enter(layer, rows);
    if (entered != status::ok) {
      for (row_id const row : rows) { owed_[to_index(row)] = layer; }
    }
    return entered;
  }

  /// What an earlier step could not enter, those of a layer together.
  status enter_owed()
  {
    status result = status::ok;
    for (std::uint32_t r = 0; r < max_rows_; ++r) {
      layer_id const layer = owed_[r];
      if (is_none(layer)) { continue; }
      entering_.clear();
      for (std::uint32_t other = r; other < max_rows_; ++other) {
        if (owed_[other] != layer) { continue; }
        owed_[other] = none<layer_id>;
        if (kv_->is_late(static_cast<row_id>(other))) { entering_.push_back(static_cast<row_id>(other)); }
      }
      if (entering_.empty()) { continue; }
      status const entered =
        enter(layer, {.ids = entering_.data(), .count = static_cast<std::uint32_t>(entering_.size())});
      if (entered == status::ok) { continue; }
      result = result == status::ok ? entered : result;
      for (row_id const row : entering_) { refused_.push_back({row, layer}); }
    }
    for (auto const& [row, layer] : refused_) { owed_[to_index(row)] = layer; }
    refused_.clear();
    return result;
  }

  status enter(layer_id layer, row_list rows)
  {
    if (before_enter) { before_enter(layer, rows); }
    tensor_view const queries = contiguous_tensor(
      queries_.data(), dtype::float32, std::max(max_rows_, prompt_tokens_), kv_->geometry().query_heads,
      kv_->geometry().head_dim);
    return kv_->enter(layer, rows, tensor_view{}, tensor_view{}, queries);
  }

  [[nodiscard]] std::size_t query_width() const noexcept
  {
    return std::size_t{kv_->geometry().query_heads} * kv_->geometry().head_dim;
  }

  /// Calls `function` in stream order.
  template <class Function>
  status tell(Function function) noexcept
  {
    return backend_->launch(stream_, named_host_function<"note", operation_kind::metadata>(function));
  }

  status commit()
  {
    commit_rows_.clear();
    for (std::uint32_t r = 0; r < max_rows_; ++r) {
      auto const row = static_cast<row_id>(r);
      if (in_step_[r] == 0 || kv_->is_late(row)) { continue; }
      commit_rows_.push_back({.row = row, .accepted = in_step_[r]});
      in_step_[r] = 0;
    }
    return kv_->commit(commit_rows_);
  }

  Backend* backend_;
  typename Backend::stream_ref stream_;
  Manager* kv_;
  engine_cost cost_;
  Shares* shares_;
  std::vector<float> queries_;
  std::uint32_t max_rows_;
  std::uint32_t tokens_ = 0;
  std::uint32_t prompt_tokens_ = 0;     // most of a step
  std::vector<std::uint32_t> in_step_;  // tokens of the step that a row is in; 0: it is in none
  std::vector<layer_id> owed_;          // to be entered in the next step
  std::vector<row_id> entering_;
  std::vector<std::pair<row_id, layer_id>> refused_;
  std::vector<step_row> step_rows_;
  std::vector<commit_row> commit_rows_;
};

}  // namespace pulseinfer
