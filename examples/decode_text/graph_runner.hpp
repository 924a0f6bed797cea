/// Decode steps of all rows as graphs, for engines that can be captured.
#pragma once

#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/captured_step.hpp>
#include <pulseinfer/manager/captured_visit.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/visit.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace decode_text {

/// Runs nothing: every step goes launch by launch.
template <class Engine, class Manager, bool Captures = Engine::captures>
class graph_runner {
 public:
  static constexpr bool whole_steps = false;

  graph_runner(Manager&, Engine&) {}
  template <class Body>
  [[nodiscard]] bool run_step(std::uint32_t, Body)
  {
    return false;
  }
  [[nodiscard]] bool run_visit(pulseinfer::row_list, pulseinfer::layer_id, pulseinfer::part) { return false; }
  [[nodiscard]] std::uint64_t launched() const noexcept { return 0; }
};

/// Where the host decides nothing in a step, the step is one graph; else what comes between two decisions is, but for the
/// visits of hits, which are one launch anyway.
template <class Engine, class Manager>
class graph_runner<Engine, Manager, true> {
 public:
  static constexpr bool whole_steps =
    !Manager::layer_scheduler::reads_mailbox && Manager::transfer_engine::plans_on == pulseinfer::plan_place::device;

  /// Both borrowed.
  graph_runner(Manager& kv, Engine& engine) : kv_{kv}, engine_{engine} {}

  /// The step that has begun, of `rows` rows with one token each.
  /// @param body enqueues a step by the manager or by what stands for it
  /// @return false: nothing was launched, the step is to go launch by launch
  template <class Body>
  [[nodiscard]] bool run_step(std::uint32_t rows, Body body)
  {
    if constexpr (whole_steps) {
      if (!step_) {
        step_.emplace(kv_.capture_step({.rows = rows}));
        step_graph_.emplace(engine_.capture(step_->rows(), [&] { body(*step_); }));
      }
      return launched(step_->replay([&] { return engine_.launch(*step_graph_); }), "a captured step");
    } else {
      return false;
    }
  }

  /// A visit of `rows`, or with no layer what comes before the first one. As above.
  [[nodiscard]] bool run_visit(pulseinfer::row_list rows, pulseinfer::layer_id layer, pulseinfer::part part)
  {
    if constexpr (whole_steps) {
      return false;
    } else {
      if (part == pulseinfer::part::hits) return false;
      std::tuple const kind{layer, part, rows.count};
      auto at = visits_.find(kind);
      if (at == visits_.end()) {
        auto work = kv_.capture_visit({.rows = rows.count}, layer, part);
        auto graph = engine_.capture(work.get().rows, [&] { enqueue(work); });
        at = visits_.emplace(kind, captured{std::move(work), std::move(graph)}).first;
      }
      captured& found = at->second;
      return launched(found.work.replay(rows, [&] { return engine_.launch(found.graph); }), "a captured visit");
    }
  }

  [[nodiscard]] std::uint64_t launched() const noexcept { return launched_; }

 private:
  using visit_type = pulseinfer::captured_visit<Manager>;
  struct captured {
    visit_type work;
    typename Engine::graph_type graph;
  };

  // A list that would have to be filled with a row without sequence, where every row has one, is no failure.
  [[nodiscard]] bool launched(pulseinfer::status said, char const* what)
  {
    if (said == pulseinfer::status::ok) ++launched_;
    if (said == pulseinfer::status::ok || said == pulseinfer::status::busy) return said == pulseinfer::status::ok;
    throw std::runtime_error{std::string{what} + ": " + name_of(said)};
  }

  void enqueue(visit_type& work)
  {
    pulseinfer::visit const& v = work.get();
    if (!is_none(v.layer)) {
      engine_.attend(v.layer, v.rows, v.table, v.part);
      engine_.feed_forward(v.layer, v.rows);
      if (v.last) engine_.sample(v.rows);
    }
    if (!work.enters()) return;
    engine_.project(v.next, v.rows);
    pulseinfer::status const entered = work.enter(engine_.keys(), engine_.values(), engine_.queries());
    if (entered != pulseinfer::status::ok) throw std::runtime_error{std::string{"enter: "} + name_of(entered)};
  }

  Manager& kv_;
  Engine& engine_;
  std::optional<pulseinfer::captured_step<Manager>> step_;
  std::optional<typename Engine::graph_type> step_graph_;
  std::map<std::tuple<pulseinfer::layer_id, pulseinfer::part, std::uint32_t>, captured> visits_;  // and number of rows
  std::uint64_t launched_ = 0;
};

}  // namespace decode_text
