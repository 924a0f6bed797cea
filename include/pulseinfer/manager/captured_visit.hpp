#pragma once

/// A visit's work that is captured once and replayed.

#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/captured_step.hpp>
#include <pulseinfer/manager/recall_ring.hpp>
#include <pulseinfer/manager/row_runtime.hpp>
#include <pulseinfer/manager/tensor_shapes.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/tensor_view.hpp>
#include <pulseinfer/view/ticket.hpp>
#include <pulseinfer/view/visit.hpp>

#include <algorithm>
#include <cstdint>
#include <string>

namespace pulseinfer {

/// What the compute stream does between two interrupt points, for any rows: attention of one part at one layer, and, unless the
/// part is hits or the layer the last, what leads to the next layer with its append and selection. Rows are read at an address
/// that stays. The next layer's recall is no part of it: a replay enqueues it behind the graph, so that no graph waits for it
/// and other rows may run meanwhile. Any scheduler and transfer engine.
///
///     auto at = kv.capture_visit({.rows = 8}, layer, part::whole);
///     begin the capture of the compute stream;
///       attend at.get(); feed forward; project;
///       if (at.enters()) { at.enter(keys, values, queries); }
///     end it, instantiate
///     // in the loop, for a visit v of that layer and part with at most 8 rows:
///     at.replay(v.rows, [&] { launch the graph on the compute stream; return status::ok; });
///
/// Captured for no layer, it is what comes before the first layer, for the rows that begin_step has named.
/// One thread, the manager's. The manager must outlive it. All captured visits share one address of rows: their graphs run on
/// the compute stream, in the order of the replays, and nowhere else.
template <class Manager>
class captured_visit {
 public:
  captured_visit(captured_visit&&) noexcept = default;

  /// The visit with its rows at the address that stays: always as many as there are places, in memory that only the device
  /// reads. Without layer, a visit of which only `rows` and `next` mean something.
  [[nodiscard]] visit const& get() const noexcept { return visit_; }
  /// Whether a layer is entered behind it: `get().next`.
  [[nodiscard]] bool enters() const noexcept { return !is_none(entered_); }

  /// The part of offload_manager::enter that comes before the recall, at `get().next`, for the rows of `get()`.
  /// @status invalid_state: nothing is entered; invalid_argument: tensors that the geometry does not have; what the backend
  ///         says, after which the capture is no good
  template <host_tensor Keys, host_tensor Values, host_tensor Queries>
  status enter(Keys const& keys, Values const& values, Queries const& queries) noexcept
  {
    complete_ = false;
    status const entered = enqueue(
      tensor_traits<Keys>::view(keys), tensor_traits<Values>::view(values), tensor_traits<Queries>::view(queries));
    complete_ = entered == status::ok;
    return entered;
  }

  /// Runs the visit for `rows`, by `launch() -> status`, which launches the graph on the compute stream, and begins their recall at
  /// the layer that is entered. After a status other than ok the rows stand where they stood and may go on without the graph. A
  /// recall that is refused is told by the loop: its rows fail.
  /// @param rows of a visit with this layer and part; before the first layer, of begin_step
  /// @status capture_unsupported: nothing has been captured, or a row streams its prompt; invalid_state: a row that is not due there,
  ///         or named twice; capacity_exceeded: more rows, tokens or blocks than captured; invalid_argument: a row's tokens lie outside of the
  ///         captured tensors; busy: a list needs a row to be filled with and every row has a sequence, or places of lists or recalls
  ///         are used up; device_lost; what `launch` returns
  template <class Launch>
  status replay(row_list rows, Launch launch) noexcept
  {
    return manager_->noted(replay_rows(rows, launch));
  }

 private:
  friend Manager;

  captured_visit(Manager& manager, capture_options const& options, layer_id layer, part which)
    : manager_{&manager}, options_{options}
  {
    manager.check_capture(options);
    kv_geometry const& geometry = manager.geometry_;
    bool const begins = is_none(layer);
    bool const split = Manager::hits_first && !begins && manager.has_layer(layer) &&
      geometry.group_of(layer).kind == layer_kind::selected;
    bool const known = begins ? which == part::whole : manager.has_layer(layer) && (split || which == part::whole);
    if (!known) {
      throw configuration_error{
        "a capture of part " + std::string{name_of(which)} + " of layer " + std::to_string(to_number(layer)) +
        ": no visit of the " + std::to_string(geometry.layers) + " layers has it"};
    }
    rows_ = manager.captured_bounds(options);
    auto* const lists = manager.fixed_lists_.template as<row_id>();
    rows_.all = {.ids = lists, .count = options.rows};
    rows_.offloading = {.ids = lists + manager.options_.max_rows, .count = options.rows};
    rows_.choosing = {.ids = lists + 2 * std::uint64_t{manager.options_.max_rows}, .count = options.rows};
    bool const last = !begins && to_index(layer) + 1 == geometry.layers;
    visit_ = visit{.layer = layer, .rows = rows_.all, .part = which, .last = last};
    if (begins) {
      visit_.next = layer_id{0};
    } else {
      visit_.table = manager.keeper_.table(layer, which);
      visit_.next = last ? none<layer_id> : static_cast<layer_id>(to_number(layer) + 1);
    }
    entered_ = which == part::hits ? none<layer_id> : visit_.next;
    complete_ = is_none(entered_);
  }

  [[nodiscard]] layer_kind kind_of(layer_id layer) const noexcept { return manager_->geometry_.group_of(layer).kind; }

  status enqueue(tensor_view keys, tensor_view values, tensor_view queries) noexcept
  {
    Manager& m = *manager_;
    if (is_none(entered_)) { return status::invalid_state; }
    if (!fits_keys(m.geometry_, keys, values) || !fits_queries(m.geometry_, queries)) {
      return status::invalid_argument;
    }
    tensor_tokens_ = queries.tokens;
    if (!keys.empty()) { tensor_tokens_ = std::min<std::uint64_t>(tensor_tokens_, keys.tokens); }
    if (!values.empty()) { tensor_tokens_ = std::min<std::uint64_t>(tensor_tokens_, values.tokens); }
    if (status const entered = m.enter_captured(entered_, rows_, keys, values, queries); entered != status::ok) {
      return entered;
    }
    switch (kind_of(entered_)) {
      case layer_kind::selected:
        return m.recalls_.resolve(entered_, rows_.choosing, m.compute_, Manager::default_lists);
      case layer_kind::windowed: return m.list_window(entered_, rows_.all, m.compute_, Manager::default_lists);
      default: return status::ok;
    }
  }

  template <class Launch>
  status replay_rows(row_list rows, Launch launch) noexcept
  {
    Manager& m = *manager_;
    m.drive();
    if (!complete_) { return status::capture_unsupported; }
    if (m.queue_.lost()) { return status::device_lost; }
    auto const runs = [&](row_id row) { return !m.has_failed(row); };
    std::uint32_t count = 0;
    for (row_id const row : rows) {
      if (!m.keeper_.sequences().in_range(row)) { return status::out_of_range; }
      if (!runs(row)) { continue; }
      bool const due = is_none(entered_) ? m.queue_.stands_at(row, visit_.layer) : m.due_at(row, entered_);
      if (!due) { return status::invalid_state; }
      std::uint64_t const tokens = is_none(entered_) ? ~std::uint64_t{0} : tensor_tokens_;
      if (status const fits = m.fits_capture(row, rows_, tokens); fits != status::ok) { return fits; }
      ++count;
    }
    if (m.names_twice(rows)) { return status::invalid_state; }
    if (count == 0) { return status::ok; }
    if (count > options_.rows) { return status::capacity_exceeded; }

    row_id const pad = m.free_row();
    row_id* const lists = m.arena_.take(std::uint64_t{options_.rows} * Manager::fixed_list_count);
    if (lists == nullptr) { return status::busy; }
    row_id* const digested = lists + options_.rows;
    row_id* const chosen = digested + options_.rows;
    static_cast<void>(Manager::fill_list(lists, options_.rows, rows, pad, runs));
    row_list const kept{.ids = lists, .count = count};
    std::uint32_t const offloading =
      Manager::fill_list(digested, options_.rows, kept, pad, [&](row_id row) { return m.keeper_.row(row).offloads; });
    std::uint32_t const choosing =
      Manager::fill_list(chosen, options_.rows, kept, pad, [&](row_id row) { return m.is_sparse(row); });
    bool const pads = std::min({count, offloading, choosing}) < options_.rows;
    if (pads && is_none(pad)) { return status::busy; }

    ticket given;
    if (enters()) {
      if (status const got = m.recalls_.take(given); got != status::ok) { return got; }
    }
    copy_run runs_of_lists[Manager::fixed_list_count];
    for (std::uint32_t i = 0; i < Manager::fixed_list_count; ++i) {
      auto* const target = m.fixed_lists_.template as<row_id>() + std::uint64_t{i} * m.options_.max_rows;
      runs_of_lists[i] = {
        .target = reinterpret_cast<std::byte*>(target),
        .source = reinterpret_cast<std::byte const*>(lists + std::uint64_t{i} * options_.rows),
        .bytes = options_.rows * sizeof(row_id)};
    }
    status const told = m.backend_->copy(
      m.compute_,
      {.runs = runs_of_lists,
       .count = enters() ? Manager::fixed_list_count : 1U,
       .direction = copy_direction::host_to_device});
    if (told != status::ok) { return told; }
    if (status const launched = launch(); launched != status::ok) { return launched; }
    if (enters()) { begin_recall(given, kept, {.ids = chosen, .count = choosing}); }
    return status::ok;
  }

  /// As the end of offload_manager::enter, for rows that have been resolved.
  void begin_recall(ticket given, row_list kept, row_list choosing) noexcept
  {
    Manager& m = *manager_;
    recall<typename Manager::backend_type>& r = m.recalls_.at(given.index);
    r.layer = entered_;
    r.lists = Manager::default_lists;
    r.passed = kept.count;
    if (kind_of(entered_) == layer_kind::selected && choosing.count != 0) {
      r.row_count = choosing.count;
      for (std::uint32_t i = 0; i < choosing.count; ++i) { m.recalls_.number_row(r, i, choosing[i]); }
      r.code = m.recalls_.bring_resolved(r, m.compute_);
    }
    m.queue_.stand(entered_, kept, given.index, [&](row_id row) { return !m.travels(row, entered_); });
  }

  Manager* manager_;
  capture_options options_;
  captured_rows rows_ = {};
  visit visit_ = {};
  layer_id entered_ = none<layer_id>;  // behind the visit
  std::uint64_t tensor_tokens_ = 0;    // of the smallest tensor
  bool complete_ = false;
};

}  // namespace pulseinfer
