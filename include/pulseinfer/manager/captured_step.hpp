#pragma once

/// A step's body that is captured once and replayed.

#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/recall_ring.hpp>
#include <pulseinfer/manager/row_runtime.hpp>
#include <pulseinfer/manager/step_loop.hpp>
#include <pulseinfer/manager/tensor_shapes.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>
#include <pulseinfer/view/visit.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer {

/// What a capture has room for. Replays may have less of each.
struct capture_options {
  std::uint32_t rows = 1;    ///< places of the row lists; the rest of them is filled with a row that has no sequence
  std::uint32_t tokens = 1;  ///< most new tokens of a row
  std::uint32_t max_tokens = 0;  ///< no row is longer at a replay, its new tokens included; 0: the manager's max_tokens
};

/// Lists of a captured layer, at addresses that stay, and bounds of what their rows have at any replay.
struct captured_rows {
  row_list all = {};
  row_list offloading = {};  ///< those whose digests are kept
  row_list choosing = {};    ///< those that select
  std::uint32_t most_tokens = 1;
  std::uint32_t most_blocks = 0;
};

/// The whole body of a lockstep step, from the first layer's keys to the last layer's attention: `rows`, `enter` and `step` are
/// those of the manager, so that a host engine writes its body once. Called while the manager's compute stream is captured,
/// they enqueue what a step of any rows needs, at addresses that stay. The host decides nothing in it, so it needs
/// a lockstep scheduler and a transfer engine that reads plans on the device.
///
///     auto step = kv.capture_step({.rows = 8});
///     begin the capture of the compute stream; body(step); end it, instantiate
///     // each step:
///     kv.begin_step(rows);                                  // lengths, leases, write-backs: not in the graph
///     step.replay([&] { launch the graph on the compute stream; return status::ok; });
///     kv.commit(rows);
///
/// Rows of a replay need not be those of the capture, nor as many, nor in the same mode. Tables list what the loop's would, bit
/// for bit. Blocks that do not arrive are not tried again within the step: the row fails, `failures` names them, and
/// after commit it stands where it stood before.
///
/// One thread, the manager's. The manager must outlive it; the graph must not run once it has ended.
template <class Manager>
class captured_step {
 public:
  captured_step(captured_step&& other) noexcept
    : manager_{std::exchange(other.manager_, nullptr)},
      options_{other.options_},
      rows_{other.rows_},
      place_{other.place_},
      layer_{other.layer_},
      visits_left_{other.visits_left_},
      tensor_tokens_{other.tensor_tokens_},
      complete_{other.complete_},
      broken_{other.broken_},
      replayed_{std::move(other.replayed_)},
      firsts_{std::move(other.firsts_)}
  {}
  captured_step& operator=(captured_step&&) = delete;
  /// Sleeps until the last replay is complete.
  ~captured_step()
  {
    if (manager_ == nullptr) { return; }
    static_cast<void>(forget_replay());
    manager_->recalls_.give_captured_back(place_);
  }

  /// The rows of a replay, in device-readable memory: always as many as there are places.
  [[nodiscard]] row_list rows() const noexcept { return rows_.all; }
  [[nodiscard]] layer_id first_layer() const noexcept { return layer_id{0}; }

  /// As offload_manager::enter, for `rows()` at `layer`. Entering the first layer begins the body anew.
  /// @status invalid_argument: other rows, tensors that the geometry does not have; invalid_state: not the layer's turn; what
  ///         the backend says, after which the capture is no good
  template <host_tensor Keys, host_tensor Values, host_tensor Queries>
  status enter(layer_id layer, row_list rows, Keys const& keys, Values const& values, Queries const& queries) noexcept
  {
    status const entered = enqueue(
      layer, rows, tensor_traits<Keys>::view(keys), tensor_traits<Values>::view(values),
      tensor_traits<Queries>::view(queries));
    if (entered != status::ok) { broken_ = true; }
    return entered;
  }

  /// The visits of the body: each layer's rows together.
  [[nodiscard]] step_loop<captured_step> step() noexcept { return step_loop<captured_step>{*this}; }

  /// Runs the body for the rows that begin_step has named, by `launch() -> status`, which launches the graph on the compute
  /// stream. Rows that have failed are left out. After a status other than ok the rows stand where they stood and may go through the loop
  /// instead. What the host learns of a replay is kept until the next one of the same capture, which sleeps until the one before is
  /// complete: where steps are to be enqueued ahead of the device, capture two and replay them in turn.
  /// @status capture_unsupported: the body has not been captured to its end, or a row streams its prompt; invalid_state: no rows
  ///         have begun a step, or one of them has entered a layer; capacity_exceeded: more rows, tokens or blocks than captured;
  ///         invalid_argument: a row's tokens lie outside of the captured tensors; busy: a list needs a row to be filled with, and every
  ///         row has a sequence; drain_timeout, device_lost; what `launch` returns
  template <class Launch>
  status replay(Launch launch) noexcept
  {
    return manager_->noted(replay_begun(launch));
  }

 private:
  friend Manager;
  friend class step_loop<captured_step>;
  using backend_type = typename Manager::backend_type;

  captured_step(Manager& manager, capture_options const& options) : manager_{&manager}, options_{options}
  {
    if constexpr (Manager::transfer_engine::plans_on == plan_place::host) {
      throw configuration_error{
        "a captured step needs plans on the device: its transfer engine waits for them on the host"};
    }
    if constexpr (Manager::layer_scheduler::reads_mailbox) {
      throw configuration_error{"a captured step has no host to decide: its scheduler reads the mailbox"};
    }
    manager.check_capture(options);
    place_ = manager.recalls_.take_captured();
    if (place_ == manager.recalls_.captured_places()) {
      throw resource_error{
        "captured steps: all of captured_steps " + std::to_string(manager.recalls_.captured_places()) + " are in use"};
    }
    rows_ = manager.captured_bounds(options);
    rows_.all = {.ids = manager.recalls_.captured_list(place_, 0), .count = options.rows};
    rows_.offloading = {.ids = manager.recalls_.captured_list(place_, 1), .count = options.rows};
    replayed_.reserve(options.rows);
    firsts_.resize(manager.options_.max_rows);
    for (std::uint32_t layer = 0; layer < manager.geometry_.layers; ++layer) {
      recall<backend_type>& r = manager.recalls_.captured_recall(place_, static_cast<layer_id>(layer));
      r.active = r.issued = r.planned = r.unplanned = r.owes = r.failing = r.over = false;
      r.ordered = true;  // behind its plan, on the device
      r.code = status::ok;
      r.priority = recall_priority::demand;
      r.layer = static_cast<layer_id>(layer);
      r.lists = Manager::default_lists;
      r.row_count = options.rows;
      std::fill_n(r.rows, options.rows, row_id{0});  // told at each replay
    }
  }

  [[nodiscard]] recall<backend_type>& recall_of(layer_id layer) noexcept
  {
    return manager_->recalls_.captured_recall(place_, layer);
  }
  [[nodiscard]] bool selects(layer_id layer) const noexcept
  {
    return manager_->geometry_.group_of(layer).kind == layer_kind::selected;
  }

  // -- the capture

  status enqueue(layer_id layer, row_list rows, tensor_view keys, tensor_view values, tensor_view queries) noexcept
  {
    Manager& m = *manager_;
    if (!m.has_layer(layer) || rows.ids != rows_.all.ids || rows.count != rows_.all.count) {
      return status::invalid_argument;
    }
    bool const begins = layer == first_layer();
    bool const follows = !is_none(layer_) && visits_left_ == 0 && to_number(layer) == to_number(layer_) + 1;
    if (!begins && (!follows || broken_)) { return status::invalid_state; }
    if (!fits_keys(m.geometry_, keys, values) || !fits_queries(m.geometry_, queries)) {
      return status::invalid_argument;
    }
    if (begins) {
      tensor_tokens_ = queries.tokens;
      complete_ = broken_ = false;
    }
    tensor_tokens_ = std::min<std::uint64_t>(tensor_tokens_, queries.tokens);
    if (!keys.empty()) { tensor_tokens_ = std::min<std::uint64_t>(tensor_tokens_, keys.tokens); }
    if (!values.empty()) { tensor_tokens_ = std::min<std::uint64_t>(tensor_tokens_, values.tokens); }
    recall<backend_type>& r = recall_of(layer);
    rows_.choosing = {.ids = r.rows, .count = options_.rows};
    status result = m.enter_captured(layer, rows_, keys, values, queries);
    if (result == status::ok && selects(layer)) { result = m.recalls_.capture(r, m.compute_); }
    if (result == status::ok && m.geometry_.group_of(layer).kind == layer_kind::windowed) {
      result = m.list_window(layer, rows_.all, m.compute_, Manager::default_lists);
    }
    if (result != status::ok) { return result; }
    layer_ = layer;
    visits_left_ = Manager::hits_first && selects(layer) ? 2 : 1;
    return status::ok;
  }

  bool next_visit(visit& v) noexcept
  {
    Manager& m = *manager_;
    if (broken_ || is_none(layer_) || visits_left_ == 0) { return false; }
    bool const hits = visits_left_ == 2;
    part const which = hits ? part::hits : Manager::hits_first && selects(layer_) ? part::landed : part::whole;
    if (!hits && selects(layer_) && m.recalls_.await_captured(recall_of(layer_), m.compute_) != status::ok) {
      broken_ = true;
      return false;
    }
    --visits_left_;
    bool const last = to_index(layer_) + 1 == m.geometry_.layers;
    v = visit{
      .layer = layer_,
      .next = last ? none<layer_id> : static_cast<layer_id>(to_number(layer_) + 1),
      .rows = rows_.all,
      .table = m.keeper_.table(layer_, which),
      .part = which,
      .last = last};
    complete_ = last && !hits;
    return true;
  }

  // -- replays

  template <class Launch>
  status replay_begun(Launch launch) noexcept
  {
    Manager& m = *manager_;
    m.drive();
    if (!complete_ || broken_) { return status::capture_unsupported; }
    if (m.queue_.lost()) { return status::device_lost; }
    if (m.begun_.count == 0) { return status::invalid_state; }
    if (status const forgotten = forget_replay(); forgotten != status::ok) { return forgotten; }
    auto const runs = [&](row_id row) { return !m.has_failed(row); };
    std::uint32_t count = 0, offloading = 0, choosing = 0;
    for (row_id const row : m.begun_) {
      if (!runs(row)) { continue; }
      if (m.queue_[row].progress != row_progress::begun) { return status::invalid_state; }
      if (status const fits = m.fits_capture(row, rows_, tensor_tokens_); fits != status::ok) { return fits; }
      ++count;
      offloading += m.keeper_.row(row).offloads ? 1U : 0U;
      choosing += m.is_sparse(row) ? 1U : 0U;
    }
    if (count == 0) { return status::ok; }
    if (count > options_.rows) { return status::capacity_exceeded; }
    row_id const pad = m.free_row();
    bool const pads = count < options_.rows || offloading < options_.rows || choosing < options_.rows;
    if (pads && is_none(pad)) { return status::busy; }

    auto* const all = const_cast<row_id*>(rows_.all.ids);
    auto* const digested = const_cast<row_id*>(rows_.offloading.ids);
    static_cast<void>(Manager::fill_list(all, options_.rows, m.begun_, pad, runs));
    row_list const begun{.ids = all, .count = count};
    static_cast<void>(
      Manager::fill_list(digested, options_.rows, begun, pad, [&](row_id row) { return m.keeper_.row(row).offloads; }));
    for (row_id const row : begun) { firsts_[to_index(row)] = 0; }
    for (std::uint32_t layer = 0; layer < m.geometry_.layers; ++layer) {
      if (selects(static_cast<layer_id>(layer))) { number_rows(static_cast<layer_id>(layer), begun, pad); }
    }
    if (status const joined = m.recalls_.await_copies(m.compute_); joined != status::ok) { return joined; }
    if (status const launched = launch(); launched != status::ok) { return launched; }

    for (std::uint32_t layer = 0; layer < m.geometry_.layers; ++layer) {
      recall<backend_type>& r = recall_of(static_cast<layer_id>(layer));
      r.active = r.planned = r.issued = selects(r.layer);
      r.failing = r.owes = r.over = false;
      m.meter_.running().visits += Manager::hits_first && selects(r.layer) ? 2 : 1;
    }
    status const marked = m.recalls_.mark_replayed(place_, m.compute_);
    replayed_.assign(begun.begin(), begun.end());
    for (row_id const row : begun) {
      std::uint32_t const first = firsts_[to_index(row)];
      m.queue_.pass_all(row, first, first == 0 ? 0 : m.recalls_.number_of(row));
      // The replay runs, but the host would not learn of its end.
      if (marked != status::ok) { m.queue_.give_up(row, marked); }
    }
    return marked == status::device_lost ? marked : status::ok;
  }

  /// What is known of the last replay's recalls goes to its rows, before it is overwritten.
  status forget_replay() noexcept
  {
    Manager& m = *manager_;
    if (replayed_.empty()) { return status::ok; }
    if (status const waited = m.recalls_.wait_captured(place_); waited != status::ok) { return waited; }
    for (row_id const row : replayed_) { m.queue_.settle_proof(row); }
    replayed_.clear();
    return status::ok;
  }

  /// Gives the rows' recalls at a layer their numbers. The pad's own say nothing new of it.
  void number_rows(layer_id layer, row_list begun, row_id pad) noexcept
  {
    Manager& m = *manager_;
    recall<backend_type>& r = recall_of(layer);
    std::uint32_t place = 0;
    for (row_id const row : begun) {
      if (!m.is_sparse(row)) { continue; }
      m.recalls_.number_row(r, place++, row);
      std::uint32_t& first = firsts_[to_index(row)];
      if (first == 0) { first = m.recalls_.number_of(row); }
    }
    for (; place < options_.rows; ++place) {
      r.rows[place] = pad;
      r.sequence[place] = m.recalls_.number_of(pad);
      r.missed[place] = recall_failure{};
    }
  }

  Manager* manager_;
  capture_options options_;
  captured_rows rows_ = {};
  std::uint32_t place_ = 0;
  layer_id layer_ = none<layer_id>;  // entered last
  std::uint32_t visits_left_ = 0;    // of that layer
  std::uint64_t tensor_tokens_ = 0;  // of the smallest tensor
  bool complete_ = false;
  bool broken_ = false;
  std::vector<row_id> replayed_;       // rows of the last replay
  std::vector<std::uint32_t> firsts_;  // [max_rows] number of a row's first recall in the replay; 0: it has none
};

}  // namespace pulseinfer
