#pragma once

/// Sequences that are decoded step by step, by the loop over visits or by replays of what was captured, and what must be equal
/// then: every table, list and word of the books, and every output.

#include "synthetic_engine.hpp"
#include <pulseinfer/admission/fixed_admission.hpp>
#include <pulseinfer/manager/offload_manager.hpp>
#include <pulseinfer/selector/solo_head_selector.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/transfer/gather_scatter_engine.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace pulseinfer_test {

/// Selected layers between a windowed and a dense one.
inline pulseinfer::kv_geometry captured_geometry()
{
  return {
    .layers = 4,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 16,
    .block_tokens = 4,
    .head_groups = 2,
    .key_type = pulseinfer::dtype::float32,
    .value_type = pulseinfer::dtype::float32,
    .layer_groups = {
      {.first = 0, .count = 1, .kind = pulseinfer::layer_kind::windowed, .window_tokens = 12, .sink_tokens = 4},
      {.first = 1, .count = 2},
      {.first = 3, .count = 1, .kind = pulseinfer::layer_kind::dense}}};
}

/// @tparam Graphs captures on the backend: begin(stream), end() -> graph, launch(graph, stream) -> status; graphs end with it
template <class Backend, class Scheduler, class Graphs>
class captured_decode {
 public:
  using manager_type = pulseinfer::offload_manager<
    Backend, pulseinfer::solo_head_selector<>, pulseinfer::gather_scatter_engine, Scheduler,
    pulseinfer::fixed_admission>;
  using graph_type = typename Graphs::graph;
  static constexpr std::uint32_t rows = 5, per_row = 8, longest = 200;

  explicit captured_decode(
    Backend& made, bool verify = false, float hysteresis = 0.25F,
    pulseinfer::kv_geometry const& geometry = captured_geometry())
    : backend{made},
      stream{made.create_stream(pulseinfer::stream_priority::normal)},
      model{geometry},
      kv{
        made,
        stream,
        model.geometry,
        {.max_rows = rows,
         .max_tokens = longest,
         .max_step_tokens = 3,
         .max_prefill_tokens = per_row,
         .quota_tokens = 36,
         .captured_steps = 2,
         .verify = verify},
        {.budget_tokens = 24, .sink_tokens = 4, .recent_tokens = 8, .dense_tokens = 40, .hysteresis = hysteresis}},
      engine{made, stream, model, kv, rows, per_row},
      graphs{made}
  {}
  ~captured_decode() { static_cast<void>(backend.synchronize()); }

  pulseinfer::row_id open(std::uint64_t seed, std::uint32_t prompt, bool keep = false)
  {
    pulseinfer::row_id row = pulseinfer::none<pulseinfer::row_id>;
    REQUIRE(
      kv.open({.prompt_tokens = prompt, .max_tokens = longest, .keep_resident = keep}, row) ==
      pulseinfer::admission::admitted);
    engine.assign(row, seed);
    for (std::uint32_t done = 0; done < prompt; done += std::min(per_row, prompt - done)) {
      eager({{.row = row, .tokens = std::min(per_row, prompt - done)}});
    }
    return row;
  }

  /// A step through the loop over visits.
  void eager(std::vector<pulseinfer::step_row> const& batch)
  {
    engine.step(batch);
    settle();
  }

  /// A step by one graph, captured at the first call.
  void replayed(std::vector<pulseinfer::step_row> const& batch, std::uint32_t places)
  {
    if (!step) { capture(places, 3); }
    engine.step_with(batch, [&] { REQUIRE(replay() == pulseinfer::status::ok); });
    settle();
  }
  void capture(std::uint32_t places, std::uint32_t tokens, std::uint32_t max_tokens = 0)
  {
    step = std::make_unique<pulseinfer::captured_step<manager_type>>(
      kv.capture_step({.rows = places, .tokens = tokens, .max_tokens = max_tokens}));
    graphs.begin(stream);
    engine.enqueue_body(*step);
    step_graph = graphs.end();
  }
  [[nodiscard]] pulseinfer::status replay()
  {
    return step->replay([&] {
      ++launches;
      return graphs.launch(step_graph, stream);
    });
  }

  /// A step whose visits are graphs, each captured when its layer, part and number of places first come up.
  void by_visits(std::vector<pulseinfer::step_row> const& batch)
  {
    engine.step_with(batch, [&] {
      visit_by_graph(kv.rows(), pulseinfer::none<pulseinfer::layer_id>, pulseinfer::part::whole);
      for (pulseinfer::visit const& v : kv.step()) { visit_by_graph(v.rows, v.layer, v.part); }
    });
    settle();
  }

  /// Everything on the device that says which block is where, and what attention reads.
  [[nodiscard]] std::vector<std::uint32_t> books()
  {
    REQUIRE(kv.drain(pulseinfer::no_deadline) == pulseinfer::status::ok);
    std::vector<std::uint32_t> words;
    pulseinfer::residency_ref const residency = kv.books().residency();
    pulseinfer::selection_ref const selection = kv.books().selection();
    pulseinfer::lane_table_ref const table = kv.books().table();
    std::uint64_t const lanes = residency.lanes;
    std::uint64_t const lane_layers = residency.layers * lanes;
    read(words, residency.slot_of, lane_layers * residency.max_blocks);
    read(words, residency.slots, 4 * kv.pool().total_slots());
    read(words, residency.lease_count, lane_layers);
    read(words, selection.ids, lanes * selection.max_selected);
    read(words, selection.counts, lanes);
    read(words, selection.previous, lane_layers * selection.previous_words);
    read(words, table.listed, lane_layers * table.stride);
    read(words, table.listed_count, lane_layers);
    read(words, table.landed, lanes * table.max_selected);
    read(words, table.landed_count, lanes);
    return words;
  }

  Backend& backend;
  typename Backend::stream_ref stream;
  synthetic_model model;
  manager_type kv;
  synthetic_engine<Backend, manager_type> engine;
  Graphs graphs;
  std::unique_ptr<pulseinfer::captured_step<manager_type>> step;
  graph_type step_graph = {};
  std::uint32_t launches = 0;
  std::uint64_t recalled = 0;

 private:
  struct visit_graph {
    pulseinfer::captured_visit<manager_type> captured;
    graph_type graph;
  };

  /// Between steps everything lands: what the host learns, and with it which slots it hands out, depends on no clock.
  void settle()
  {
    REQUIRE(kv.drain(pulseinfer::no_deadline) == pulseinfer::status::ok);
    kv.finish_sample();
    recalled += kv.last_sample().recalled_blocks;
    REQUIRE(kv.audit() == "");
  }

  void visit_by_graph(pulseinfer::row_list list, pulseinfer::layer_id layer, pulseinfer::part part)
  {
    // Buckets of two and five places.
    std::uint32_t const places = list.count <= 2 ? 2 : rows;
    auto const key = std::tuple{to_number(layer), part, places};
    auto at = visits.find(key);
    if (at == visits.end()) {
      visit_graph made{kv.capture_visit({.rows = places, .tokens = 3}, layer, part), {}};
      graphs.begin(stream);
      engine.enqueue_visit(made.captured);
      made.graph = graphs.end();
      at = visits.emplace(key, std::move(made)).first;
    }
    REQUIRE(at->second.captured.replay(list, [&] {
      ++launches;
      return graphs.launch(at->second.graph, stream);
    }) == pulseinfer::status::ok);
  }

  template <class T>
  void read(std::vector<std::uint32_t>& words, T const* device, std::uint64_t count)
  {
    pulseinfer::slab<Backend> const here{backend, pulseinfer::memory_space::pinned, count * sizeof(std::uint32_t)};
    pulseinfer::copy_run const run{
      .target = here.data(), .source = reinterpret_cast<std::byte const*>(device), .bytes = here.bytes()};
    REQUIRE(
      backend.copy(stream, {.runs = &run, .count = 1, .direction = pulseinfer::copy_direction::device_to_host}) ==
      pulseinfer::status::ok);
    REQUIRE(backend.synchronize(stream) == pulseinfer::status::ok);
    auto const* const from = here.template as<std::uint32_t>();
    words.insert(words.end(), from, from + count);
  }

  std::map<std::tuple<std::int32_t, pulseinfer::part, std::uint32_t>, visit_graph> visits;
};

enum class captured_as : std::uint8_t { step, visits };

/// Sequences in all modes, steps of changing rows, one that ends and another that takes its place: two managers on the same
/// operations, one by the loop, one by graphs. @return blocks that were recalled
template <class Backend, class Scheduler, class Graphs>
std::uint64_t compare_with_loop(Backend& one, Backend& other, captured_as how, std::uint32_t steps)
{
  using decode = captured_decode<Backend, Scheduler, Graphs>;
  decode loop{one};
  decode graph{other};
  std::vector<pulseinfer::row_id> ids;
  auto const open = [&](std::uint64_t seed, std::uint32_t prompt, bool keep) {
    pulseinfer::row_id const row = loop.open(seed, prompt, keep);
    REQUIRE(graph.open(seed, prompt, keep) == row);
    ids.push_back(row);
  };
  open(1, 100, false);  // offloads from the begin
  open(2, 30, false);   // turns sparse on the way
  open(3, 70, true);    // selects, and keeps every block
  open(4, 9, false);    // dense to the end
  for (std::uint32_t t = 0; t < steps; ++t) {
    if (t == steps / 2) {
      for (decode* const run : {&loop, &graph}) { REQUIRE(run->kv.close(ids.front()) == pulseinfer::status::ok); }
      ids.erase(ids.begin());
      open(5, 60, false);
    }
    std::vector<pulseinfer::step_row> batch;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      // Some steps go without one of the rows, some have a row with a draft more.
      if ((t + i) % 7 == 0) { continue; }
      batch.push_back({.row = ids[i], .tokens = (t + i) % 11 == 0 ? 2U : 1U});
    }
    CAPTURE(t);
    loop.eager(batch);
    if (how == captured_as::step) {
      graph.replayed(batch, decode::rows);
    } else {
      graph.by_visits(batch);
    }
    REQUIRE((loop.books() == graph.books()));
    REQUIRE((loop.engine.outputs() == graph.engine.outputs()));
  }
  REQUIRE(loop.recalled == graph.recalled);
  REQUIRE(graph.kv.failures().empty());
  CHECK(graph.launches >= steps);
  return graph.recalled;
}

}  // namespace pulseinfer_test
