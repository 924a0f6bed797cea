#pragma once

/// A small recurrent transformer with random weights, driven through the loop over visits as a user's engine would be. Its
/// inputs depend on (sequence seed, position) alone, so that every run of a sequence feeds the same tokens.

#include "synthetic_operations.hpp"
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/operation/merge_partials.hpp>
#include <pulseinfer/operation/paged_attention.hpp>
#include <pulseinfer/store/slab.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace pulseinfer_test {

/// Sizes and weights. Projections are [out, in], row-major, one set per layer.
struct synthetic_model {
  pulseinfer::kv_geometry geometry;
  std::uint32_t width = 0;
  std::vector<std::vector<float>> query, key, value, output;

  explicit synthetic_model(pulseinfer::kv_geometry g, std::uint32_t hidden = 24, std::uint64_t seed = 7)
    : geometry{std::move(g)}, width{hidden}
  {
    std::mt19937_64 random{seed};
    std::normal_distribution<float> normal{0.0F, 1.0F};
    auto const matrix = [&](std::uint32_t rows, std::uint32_t columns, float gain) {
      std::vector<float> m(std::size_t{rows} * columns);
      for (float& w : m) { w = gain * normal(random) / std::sqrt(static_cast<float>(columns)); }
      return m;
    };
    for (std::uint32_t l = 0; l < geometry.layers; ++l) {
      query.push_back(matrix(geometry.query_heads * geometry.head_dim, width, 2.0F));
      key.push_back(matrix(geometry.kv_heads * geometry.head_dim, width, 2.0F));
      value.push_back(matrix(geometry.kv_heads * geometry.value_elements(), width, 1.0F));
      output.push_back(matrix(width, geometry.query_heads * geometry.value_elements(), 1.5F));
    }
  }

  /// What a token of a sequence feeds into the first layer.
  void embed(std::uint64_t sequence_seed, std::uint32_t position, float* hidden) const
  {
    std::mt19937_64 random{sequence_seed * 1000003ULL + position};
    std::normal_distribution<float> normal{0.0F, 1.0F};
    for (std::uint32_t i = 0; i < width; ++i) { hidden[i] = normal(random); }
  }

  static void multiply(
    std::vector<float> const& m, float const* in, float* out, std::uint32_t rows, std::uint32_t columns)
  {
    for (std::uint32_t r = 0; r < rows; ++r) {
      float sum = 0.0F;
      for (std::uint32_t c = 0; c < columns; ++c) { sum += m[std::size_t{r} * columns + c] * in[c]; }
      out[r] = sum;
    }
  }
};

/// Dense attention over everything, token by token, in double precision: the outputs of a sequence's first `tokens` tokens.
/// Windowed layers see what they would if each token were a step of its own.
inline std::vector<std::vector<float>> dense_outputs(
  synthetic_model const& model, std::uint64_t sequence_seed, std::uint32_t tokens)
{
  pulseinfer::kv_geometry const& g = model.geometry;
  std::uint32_t const value_dim = g.value_elements();
  std::vector<std::vector<float>> outputs(tokens, std::vector<float>(model.width));
  for (std::uint32_t t = 0; t < tokens; ++t) { model.embed(sequence_seed, t, outputs[t].data()); }
  for (std::uint32_t l = 0; l < g.layers; ++l) {
    std::vector<std::vector<float>> keys(tokens), values(tokens), queries(tokens);
    for (std::uint32_t t = 0; t < tokens; ++t) {
      keys[t].resize(g.kv_heads * g.head_dim);
      values[t].resize(g.kv_heads * value_dim);
      queries[t].resize(g.query_heads * g.head_dim);
      model.multiply(model.key[l], outputs[t].data(), keys[t].data(), g.kv_heads * g.head_dim, model.width);
      model.multiply(model.value[l], outputs[t].data(), values[t].data(), g.kv_heads * value_dim, model.width);
      for (std::uint32_t i = 0; g.value_is_key_prefix && i < g.kv_heads * value_dim; ++i) {
        values[t][i] = keys[t][i / value_dim * g.head_dim + i % value_dim];
      }
      model.multiply(model.query[l], outputs[t].data(), queries[t].data(), g.query_heads * g.head_dim, model.width);
    }
    pulseinfer::layer_group const group = g.group_of(static_cast<pulseinfer::layer_id>(l));
    bool const windowed = group.kind == pulseinfer::layer_kind::windowed;
    for (std::uint32_t t = 0; t < tokens; ++t) {
      std::vector<float> attended(g.query_heads * value_dim);
      for (std::uint32_t h = 0; h < g.query_heads; ++h) {
        std::uint32_t const kv = h / g.query_group();
        std::vector<double> scores;
        std::vector<std::uint32_t> seen;
        for (std::uint32_t j = 0; j <= t; ++j) {
          // Windowed layers read whole blocks, as their tables list them.
          bool const in_window =
            j / g.block_tokens >= pulseinfer::first_window_block(t + 1, 1, group.window_tokens, g.block_tokens) ||
            j / g.block_tokens < pulseinfer::sink_blocks(group.sink_tokens, g.block_tokens);
          if (windowed && !in_window) { continue; }
          double s = 0.0;
          for (std::uint32_t d = 0; d < g.head_dim; ++d) {
            s += double{queries[t][h * g.head_dim + d]} * keys[j][kv * g.head_dim + d];
          }
          scores.push_back(s / std::sqrt(double{1.0} * g.head_dim));
          seen.push_back(j);
        }
        double top = -std::numeric_limits<double>::infinity();
        for (double const s : scores) { top = std::max(top, s); }
        double sum = 0.0;
        for (double& s : scores) { sum += (s = std::exp(s - top)); }
        for (std::uint32_t d = 0; d < value_dim; ++d) {
          double v = 0.0;
          for (std::size_t i = 0; i < seen.size(); ++i) { v += scores[i] / sum * values[seen[i]][kv * value_dim + d]; }
          attended[h * value_dim + d] = static_cast<float>(v);
        }
      }
      std::vector<float> added(model.width);
      model.multiply(model.output[l], attended.data(), added.data(), model.width, g.query_heads * value_dim);
      for (std::uint32_t i = 0; i < model.width; ++i) { outputs[t][i] = std::tanh(outputs[t][i] + added[i]); }
    }
  }
  return outputs;
}

/// The host engine: its tensors are indexed by token place, row r's tokens at r * tokens_per_row.
template <class Backend, class Manager>
class synthetic_engine {
 public:
  synthetic_engine(
    Backend& backend, typename Backend::stream_ref stream, synthetic_model const& model, Manager& manager,
    std::uint32_t max_rows, std::uint32_t tokens_per_row)
    : backend_{backend}, stream_{stream}, model_{model}, kv_{manager}, per_row_{tokens_per_row}, rows_(max_rows)
  {
    pulseinfer::kv_geometry const& g = model.geometry;
    std::size_t const tokens = std::size_t{max_rows} * tokens_per_row;
    auto const floats = [&](std::size_t count) {
      return pulseinfer::slab<Backend>{backend, pulseinfer::memory_space::pinned, count * sizeof(float)};
    };
    inputs_ = floats(tokens * model.width);
    hidden_ = floats(tokens * model.width);
    keys_ = floats(tokens * g.kv_heads * g.head_dim);
    values_ = floats(tokens * g.kv_heads * g.value_elements());
    queries_ = floats(tokens * g.query_heads * g.head_dim);
    out_ = floats(tokens * g.query_heads * g.value_elements());
    other_ = floats(tokens * g.query_heads * g.value_elements());
    lse_ = floats(tokens * g.query_heads);
    other_lse_ = floats(tokens * g.query_heads);
    for (std::uint32_t layer = 0; layer < g.layers; ++layer) {
      for (auto const* const matrix :
           {&model.query[layer], &model.key[layer], &model.value[layer], &model.output[layer]}) {
        weights_.push_back(floats(matrix->size()));
        std::copy(matrix->begin(), matrix->end(), weights_.back().template as<float>());
      }
    }
  }

  /// Names the sequence that runs in a row.
  void assign(pulseinfer::row_id row, std::uint64_t sequence_seed) { rows_[to_index(row)] = {.seed = sequence_seed}; }

  /// One step of these rows; every appended token is accepted, unless `accepted` says how many per row: those behind them
  /// are drafts that guessed wrong, tokens of no sequence.
  void step(std::vector<pulseinfer::step_row> rows, std::uint32_t accepted = ~0U)
  {
    name_tokens(rows, accepted);
    require(kv_.begin_step(rows), "begin_step");
    run_body(kv_.rows());
    std::vector<pulseinfer::commit_row> kept;
    for (pulseinfer::step_row const& r : rows) {
      kept.push_back({.row = r.row, .accepted = std::min(accepted, r.tokens)});
    }
    require(kv_.commit(kept), "commit");
  }

  /// As step, with something else in place of the loop: run(), which ends with the rows through all layers.
  template <class Run>
  void step_with(std::vector<pulseinfer::step_row> rows, Run run)
  {
    name_tokens(rows, ~0U);
    require(kv_.begin_step(rows), "begin_step");
    write_inputs(kv_.rows());
    run();
    sample(kv_.rows());
    std::vector<pulseinfer::commit_row> kept;
    for (pulseinfer::step_row const& r : rows) { kept.push_back({.row = r.row, .accepted = r.tokens}); }
    require(kv_.commit(kept), "commit");
  }

  /// Draws what the next steps feed, whoever reads it when.
  void scramble_inputs(std::uint64_t seed)
  {
    for (std::size_t place = 0; place < rows_.size() * per_row_; ++place) {
      model_.embed(seed, static_cast<std::uint32_t>(place), inputs_.template as<float>() + place * model_.width);
    }
  }

  /// Enqueues a step's body for a captured step: what `step` does between begin_step and the sampling.
  template <class Captured>
  void enqueue_body(Captured& steps)
  {
    take(steps.rows());
    project(steps.first_layer(), steps.rows());
    enter_at(steps, steps.first_layer(), steps.rows());
    for (pulseinfer::visit const& v : steps.step()) {
      attend(v.table, v.rows, v.part);
      if (v.part == pulseinfer::part::hits) { continue; }
      feed_forward(v.layer, v.rows);
      if (v.last) { continue; }
      project(v.next, v.rows);
      enter_at(steps, v.next, v.rows);
    }
  }

  /// Enqueues a visit's work for a captured visit.
  template <class Captured>
  void enqueue_visit(Captured& captured)
  {
    pulseinfer::visit const& v = captured.get();
    if (is_none(v.layer)) {
      take(v.rows);
    } else {
      attend(v.table, v.rows, v.part);
      if (v.part == pulseinfer::part::hits) { return; }
      feed_forward(v.layer, v.rows);
    }
    if (!captured.enters()) { return; }
    project(v.next, v.rows);
    require(captured.enter(key_view(), value_view(), query_view()), "enter");
  }

  /// Brings a prompt of `tokens` in, in chunks.
  void prefill(pulseinfer::row_id row, std::uint32_t tokens, std::uint32_t chunk)
  {
    for (std::uint32_t done = 0; done < tokens;) {
      std::uint32_t const now = std::min(chunk, tokens - done);
      step({{.row = row, .tokens = now}});
      done += now;
    }
  }

  /// Outputs by (sequence seed, position), as far as they were computed.
  [[nodiscard]] std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<float>> const& outputs() const
  {
    return outputs_;
  }

  /// The last layer's output of a token.
  [[nodiscard]] std::vector<float> const& output(std::uint64_t seed, std::uint32_t position) const
  {
    return outputs_.at({seed, position});
  }

  bool warm_up = false;
  bool stream_may_fail = false;
  std::uint64_t visits = 0;
  std::uint64_t parts = 0;                                    ///< of streams
  pulseinfer::status stream_status = pulseinfer::status::ok;  ///< of the last stream
  std::function<void(pulseinfer::visit const&)> attended;     ///< called when a visit's attention has been enqueued

  [[nodiscard]] pulseinfer::tensor_view query_view()
  {
    return view(queries_, model_.geometry.query_heads, model_.geometry.head_dim);
  }
  /// What the last visits of the rows have attended, hits and landed parts merged.
  [[nodiscard]] pulseinfer::tensor_view attention_view()
  {
    return view(out_, model_.geometry.query_heads, model_.geometry.value_elements());
  }

 private:
  void name_tokens(std::vector<pulseinfer::step_row>& rows, std::uint32_t accepted)
  {
    for (pulseinfer::step_row& r : rows) {
      r.token_offset = static_cast<std::uint32_t>(to_index(r.row)) * per_row_;
      row_state& state = rows_[to_index(r.row)];
      state.begin = kv_.tokens_of(r.row);
      state.count = r.tokens;
      state.accepted = std::min(accepted, r.tokens);
    }
  }

  /// The step's loop over visits.
  void run_body(pulseinfer::row_list rows)
  {
    if (rows.count != 0) {
      embed(rows);
      project(kv_.first_layer(), rows);
      enter(kv_.first_layer(), rows);
    }
    for (pulseinfer::visit const& v : kv_.step()) {
      attend(v);
      if (attended) { attended(v); }
      if (warm_up && v.part != pulseinfer::part::hits) {
        require(kv_.warm_up(v.layer, v.rows, query_view()), "warm_up");
      }
      if (v.part == pulseinfer::part::hits) { continue; }
      feed_forward(v.layer, v.rows);
      if (v.last) {
        sample(v.rows);
        continue;
      }
      project(v.next, v.rows);
      enter(v.next, v.rows);
    }
  }

  struct row_state {
    std::uint64_t seed = 0;
    std::uint32_t begin = 0;
    std::uint32_t count = 0;
    std::uint32_t accepted = 0;
  };

  static void require(pulseinfer::status s, char const* call)
  {
    if (s != pulseinfer::status::ok) { throw std::runtime_error{std::string{call} + ": " + name_of(s)}; }
  }

  template <class Op>
  void enqueue(Op const& op)
  {
    require(backend_.launch(stream_, op), Op::name);
  }

  [[nodiscard]] new_tokens tokens_of(pulseinfer::row_list rows) const
  {
    return {.rows = rows, .info = kv_.books().info(), .most = per_row_};
  }

  /// Calls f(token place, position, row) for each token of the rows, here and now.
  template <class F>
  void each_token(pulseinfer::row_list rows, F f)
  {
    for (pulseinfer::row_id const row : rows) {
      row_state const& state = rows_[to_index(row)];
      for (std::uint32_t t = 0; t < state.count; ++t) { f(to_index(row) * per_row_ + t, state.begin + t, row); }
    }
  }

  void embed(pulseinfer::row_list rows)
  {
    write_inputs(rows);
    take(rows);
  }

  void write_inputs(pulseinfer::row_list rows)
  {
    // Where no row of a step was sampled, its inputs may not have been read yet.
    if (!inputs_are_read_) { require(backend_.synchronize(stream_), "synchronize"); }
    inputs_are_read_ = false;
    each_token(rows, [this](std::size_t place, std::uint32_t position, pulseinfer::row_id row) {
      row_state const& state = rows_[to_index(row)];
      bool const right = position < state.begin + state.accepted;
      model_.embed(right ? state.seed : ~state.seed, position, inputs_.template as<float>() + place * model_.width);
    });
  }

  void take(pulseinfer::row_list rows)
  {
    enqueue(take_inputs{
      .tokens = tokens_of(rows),
      .inputs = inputs_.template as<float>(),
      .hidden = hidden_.template as<float>(),
      .width = model_.width});
  }

  enum weight : std::size_t { query_weights, key_weights, value_weights, output_weights, weights_of_layer };

  void multiply(
    pulseinfer::row_list rows, pulseinfer::layer_id layer, weight which, pulseinfer::slab<Backend> const& source,
    std::uint32_t inputs, pulseinfer::slab<Backend> const& target, std::uint32_t outputs)
  {
    enqueue(project_tokens{
      .tokens = tokens_of(rows),
      .matrix = weights_[to_index(layer) * weights_of_layer + which].template as<float>(),
      .source = source.template as<float>(),
      .target = target.template as<float>(),
      .inputs = inputs,
      .outputs = outputs,
      .adds = which == output_weights});
  }

  void project(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    pulseinfer::kv_geometry const& g = model_.geometry;
    multiply(rows, layer, query_weights, hidden_, model_.width, queries_, g.query_heads * g.head_dim);
    multiply(rows, layer, key_weights, hidden_, model_.width, keys_, g.kv_heads * g.head_dim);
    multiply(rows, layer, value_weights, hidden_, model_.width, values_, g.kv_heads * g.value_elements());
  }

  [[nodiscard]] pulseinfer::tensor_view view(
    pulseinfer::slab<Backend> const& data, std::uint32_t heads, std::uint32_t dim)
  {
    return pulseinfer::contiguous_tensor(data.data(), pulseinfer::dtype::float32, rows_.size() * per_row_, heads, dim);
  }

  [[nodiscard]] pulseinfer::tensor_view key_view()
  {
    return view(keys_, model_.geometry.kv_heads, model_.geometry.head_dim);
  }
  [[nodiscard]] pulseinfer::tensor_view value_view()
  {
    pulseinfer::kv_geometry const& g = model_.geometry;
    return g.value_is_key_prefix ? pulseinfer::tensor_view{} : view(values_, g.kv_heads, g.value_elements());
  }

  void enter(pulseinfer::layer_id layer, pulseinfer::row_list rows) { enter_at(kv_, layer, rows); }

  template <class Steps>
  void enter_at(Steps& steps, pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    require(steps.enter(layer, rows, key_view(), value_view(), query_view()), "enter");
  }

  void attend(pulseinfer::visit const& v)
  {
    ++visits;
    attend(v.table, v.rows, v.part);
    if (v.part == pulseinfer::part::landed) { return; }
    for (pulseinfer::row_id const row : v.rows) {
      pulseinfer::block_stream<Manager> earlier = kv_.stream_blocks(v.layer, row);
      for (pulseinfer::stream_part const& part : earlier) {
        ++parts;
        attend(part.table, part.rows, part.part);
      }
      stream_status = earlier.status();
      if (!stream_may_fail) { require(stream_status, "stream_blocks"); }
    }
  }

  /// A landed part is merged with what its rows have attended before.
  void attend(pulseinfer::block_table const& table, pulseinfer::row_list rows, pulseinfer::part part)
  {
    pulseinfer::kv_geometry const& g = model_.geometry;
    bool const landed = part == pulseinfer::part::landed;
    std::uint32_t const value_dim = g.value_elements();
    pulseinfer::tensor_view const whole = view(out_, g.query_heads, value_dim);
    pulseinfer::tensor_view const rest = view(other_, g.query_heads, value_dim);
    require(
      backend_.launch(
        stream_,
        pulseinfer::paged_attention{
          .table = table,
          .rows = rows,
          .queries = query_view(),
          .out = landed ? rest : whole,
          .lse = (landed ? other_lse_ : lse_).template as<float>(),
          .scale = 1.0F / std::sqrt(static_cast<float>(g.head_dim)),
          .most_queries = per_row_}),
      "attention");
    if (landed) {
      require(
        backend_.launch(
          stream_,
          pulseinfer::merge_partials{
            .rows = rows,
            .info = table.info,
            .result = whole,
            .result_lse = lse_.template as<float>(),
            .other = rest,
            .other_lse = other_lse_.template as<float>(),
            .most_queries = per_row_}),
        "merge");
    }
  }

  void feed_forward(pulseinfer::layer_id layer, pulseinfer::row_list rows)
  {
    pulseinfer::kv_geometry const& g = model_.geometry;
    multiply(rows, layer, output_weights, out_, g.query_heads * g.value_elements(), hidden_, model_.width);
  }

  void sample(pulseinfer::row_list rows)
  {
    require(backend_.synchronize(stream_), "synchronize");
    inputs_are_read_ = true;
    each_token(rows, [this](std::size_t place, std::uint32_t position, pulseinfer::row_id row) {
      if (position >= rows_[to_index(row)].begin + rows_[to_index(row)].accepted) { return; }
      float const* const h = hidden_.template as<float>() + place * model_.width;
      outputs_[{rows_[to_index(row)].seed, position}].assign(h, h + model_.width);
    });
  }

  Backend& backend_;
  typename Backend::stream_ref stream_;
  synthetic_model const& model_;
  Manager& kv_;
  std::uint32_t per_row_;
  std::vector<row_state> rows_;
  pulseinfer::slab<Backend> inputs_, hidden_, keys_, values_, queries_, out_, other_, lse_, other_lse_;
  std::vector<pulseinfer::slab<Backend>> weights_;  // [layers, weights_of_layer]
  bool inputs_are_read_ = true;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<float>> outputs_;
};

/// Largest absolute difference of two outputs.
inline float difference(std::vector<float> const& a, std::vector<float> const& b)
{
  float most = a.size() == b.size() ? 0.0F : std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    float const d = std::fabs(a[i] - b[i]);
    most = d <= most ? most : d;  // NaN counts as a difference
    if (std::isnan(d)) { most = std::numeric_limits<float>::infinity(); }
  }
  return most;
}

}  // namespace pulseinfer_test
