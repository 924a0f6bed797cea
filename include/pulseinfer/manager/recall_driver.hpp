#pragma once

/// Brings what has been selected: resolves, plans, lets the transfer engine copy, and knows what has landed.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/recall_ring.hpp>
#include <pulseinfer/manager/slot_budget.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/resolve_background.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/ticket.hpp>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace pulseinfer {

/// The recalls of a manager, from a selection to blocks in their slots. It knows rows and layers, not steps.
///
/// Stream order: resolving and planning go to the stream given, the copies to a stream of the driver's own, behind the
/// plan and with it behind the last attention that read the slots which they fill.
template <class B, class TransferEngine, replacement Replacement>
class recall_driver {
 public:
  using stream_ref = typename B::stream_ref;
  static constexpr bool plans_on_host = TransferEngine::plans_on == plan_place::host;
  /// @throws configuration_error, resource_error
  recall_driver(
    B& backend, block_keeper<B, Replacement>& keeper, kv_geometry const& geometry, manager_options const& options,
    slot_budget const& budget, TransferEngine const& transfer, Replacement const& policy)
    : backend_{&backend},
      keeper_{&keeper},
      layout_{make_block_layout(geometry)},
      head_groups_{geometry.head_groups},
      budget_blocks_{budget.budget_blocks},
      wait_limit_{options.wait_limit},
      background_bytes_{options.background_bytes},
      policy_{policy},
      transfer_{transfer.bind(
        backend,
        transfer_limits{
          .max_rows = options.max_rows,
          .max_entries = max_entries(geometry, options, budget),
          .head_groups = geometry.head_groups,
          .layout = layout_})},
      copies_{backend, stream_priority::high},
      recalls_{
        backend,
        options.recalls == 0 ? options.max_rows + 16 : options.recalls,
        options.max_rows,
        max_entries(geometry, options, budget),
        TransferEngine::plans_on,
        options.captured_steps * geometry.layers},
      mailbox_{backend, memory_space::pinned, std::uint64_t{options.max_rows} * 2 * sizeof(row_mailbox)},
      numbers_(options.max_rows, 0),
      background_numbers_(options.max_rows, 0),
      layers_{geometry.layers},
      background_missed_(std::size_t{options.max_rows} * geometry.layers, 0),
      traffic_(geometry.layers),
      joined_{backend},
      seen_(keeper.store().most_blocks(), 0)
  {
    captured_lists_ = slab<B>{
      backend, memory_space::pinned,
      std::uint64_t{options.captured_steps} * captured_list_count * options.max_rows * sizeof(row_id)};
    captured_.resize(options.captured_steps);
    for (std::uint32_t i = 0; i < options.captured_steps; ++i) {
      recall<B>* const first = &captured_recall(i, layer_id{0});
      for (std::uint32_t layer = 0; layer < layers_; ++layer) { first[layer].landed_event = first->landed_event; }
    }
    for (std::uint32_t r = 0; r < 2 * options.max_rows; ++r) { mailbox_.template as<row_mailbox>()[r] = row_mailbox{}; }
  }

  recall_driver(recall_driver&&) = delete;

  // -- recalls

  /// A place for a new recall. @status see recall_ring::acquire; busy also while the device does not know of a recall that
  /// went wrong: nothing may be resolved before that
  status take(ticket& given) noexcept { return take(given, backend_->now() + wait_limit_); }
  /// @param deadline of the sleep where every place flies
  status take(ticket& given, nanoseconds deadline) noexcept
  {
    if (unsettled()) {
      settle_all();
      if (unsettled()) { return status::busy; }
    }
    return recalls_.acquire(given, deadline, [this](recall<B>& r) {
      issue_planned(r);
      settle(r);
      if (r.priority == recall_priority::background) { settle_background(); }
      count_traffic(r);
    });
  }

  /// The recall of a ticket; nullptr where it is stale.
  [[nodiscard]] recall<B>* find(ticket t) noexcept { return recalls_.find(t); }
  /// @thread_safety as recall_ring::abort
  status abort(ticket t) noexcept { return recalls_.abort(t); }
  [[nodiscard]] bool is_aborted(recall<B> const& r) const noexcept { return recall_ring<B>::is_aborted(r); }
  [[nodiscard]] recall<B>& at(std::uint32_t place) noexcept { return recalls_[place]; }
  [[nodiscard]] std::uint32_t size() const noexcept { return recalls_.size(); }

  /// Gives a row's recall its number.
  void number_row(recall<B>& r, std::uint32_t place, row_id row) noexcept
  {
    std::uint32_t& number = numbers_[to_index(row)];
    number = number + 1 == 0 ? 1 : number + 1;
    r.rows[place] = row;
    r.place_of[to_index(row)] = place;
    r.sequence[place] = number;
    r.missed[place] = recall_failure{};
  }

  /// The row's place among those of a demand recall; row_count where it has none.
  [[nodiscard]] static std::uint32_t place_of(recall<B> const& r, row_id row) noexcept
  {
    std::uint32_t const place = r.place_of[to_index(row)];
    return place < r.row_count && r.rows[place] == row ? place : r.row_count;
  }

  /// Number of the row's last recall.
  [[nodiscard]] std::uint32_t number_of(row_id row) const noexcept { return numbers_[to_index(row)]; }

  /// Resolves what has been selected for the recall's rows into the recall's lists, plans, and starts the copies.
  status bring(recall<B>& r, stream_ref stream) noexcept
  {
    row_list const rows{.ids = r.rows, .count = r.row_count};
    status const resolved = resolve(r.layer, rows, stream, r.lists);
    return resolved == status::ok ? start(r, stream) : resolved;
  }

  // -- recalls of captured steps: one for each layer, their lists and plans at addresses that never change

  /// Lists of rows that a captured step has, each of max_rows places.
  static constexpr std::uint32_t captured_list_count = 2;

  /// A place for a captured step, whose last replay is complete; sleeps for one that ended with its replay under way.
  /// @return the place; its number of places where all are taken or nothing got on
  [[nodiscard]] std::uint32_t take_captured() noexcept
  {
    for (std::uint32_t i = 0; i < captured_.size(); ++i) {
      if (captured_[i].taken || wait_captured(i) != status::ok) { continue; }
      captured_[i].taken = true;
      return i;
    }
    return static_cast<std::uint32_t>(captured_.size());
  }
  void give_captured_back(std::uint32_t place) noexcept { captured_[place].taken = false; }
  [[nodiscard]] std::uint32_t captured_places() const noexcept { return static_cast<std::uint32_t>(captured_.size()); }

  [[nodiscard]] recall<B>& captured_recall(std::uint32_t place, layer_id layer) noexcept
  {
    return recalls_[recalls_.ring() + place * layers_ + static_cast<std::uint32_t>(to_index(layer))];
  }
  [[nodiscard]] row_id* captured_list(std::uint32_t place, std::uint32_t list) const noexcept
  {
    std::uint64_t const first = (std::uint64_t{place} * captured_list_count + list) * numbers_.size();
    return captured_lists_.template as<row_id>() + first;
  }

  /// Enqueues resolving, plan and copies of a captured step's recall, for a stream that is being captured. The host learns
  /// nothing of it before the replay's end, so that no copy waits for what is posted of the plan. `stream` stands before the copies
  /// where attention of hits comes between, else behind them: see await_captured.
  status capture(recall<B>& r, stream_ref stream) noexcept
  {
    r.stream = stream;
    status result = resolve(r.layer, {.ids = r.rows, .count = r.row_count}, stream, r.lists);
    plan_recall planning = plan_recall_of(r);
    planning.posts = false;
    if (result == status::ok) { result = backend_->launch(stream, planning); }
    recall_plan_ref copies = captured_plan_of(r);
    if (r.lists == recall_lists::whole) {
      landed_ref landed = landed_of(r);
      landed.counts = planning.lanes.counts();
      copies.behind_plan = true;
      if (result == status::ok) { result = transfer_.recall_async(stream, copies, landed); }
      return result == status::ok ? backend_->record(stream, r.planned_event) : result;
    }
    if (result == status::ok) { result = backend_->record(stream, r.planned_event); }
    if (result == status::ok) { result = backend_->launch(stream, planning.posting()); }
    if (result == status::ok) { result = backend_->wait(copies_.get(), r.planned_event); }
    if (result == status::ok) { result = transfer_.recall_async(copies_.get(), copies, landed_of(r)); }
    // The event that says so to the host is recorded behind each replay: an event of a capture can't be asked.
    if (result == status::ok) { result = backend_->record(copies_.get(), r.planned_event); }
    return result;
  }
  /// Lets the captured stream wait for the copies of the recall that was captured last in this place.
  status await_captured(recall<B> const& r, stream_ref stream) noexcept
  {
    return backend_->wait(stream, r.planned_event);
  }

  /// Lets `stream` wait for all copies that have been enqueued: a replay's own come on no stream of the driver's.
  status await_copies(stream_ref stream) noexcept
  {
    status const recorded = backend_->record(copies_.get(), joined_.get());
    return recorded == status::ok ? backend_->wait(stream, joined_.get()) : recorded;
  }

  /// A captured step has been launched on `stream`: its recalls are under way.
  status mark_replayed(std::uint32_t place, stream_ref stream) noexcept
  {
    status const marked = backend_->record(stream, captured_recall(place, layer_id{0}).landed_event);
    captured_[place].unmarked = marked != status::ok;
    captured_[place].stream = stream;
    return marked;
  }
  /// Sleeps until the place's last replay is complete.
  status wait_captured(std::uint32_t place) noexcept
  {
    captured_place& at = captured_[place];
    if (at.unmarked) {
      if (status const marked = mark_replayed(place, at.stream); marked != status::ok) { return marked; }
    }
    typename B::event_ref const event = captured_recall(place, layer_id{0}).landed_event;
    if (backend_->done(event) == event_state::done) { return status::ok; }
    return backend_->wait_any({&event, 1}, backend_->now() + wait_limit_);
  }

  /// Plans what a captured visit has resolved for the recall's rows, and starts the copies.
  status bring_resolved(recall<B>& r, stream_ref stream) noexcept { return start(r, stream); }

  // -- background

  /// Most rows that one background recall may bring a block of each lane for; 0 where those of one row are too many bytes.
  [[nodiscard]] std::uint32_t background_rows() const noexcept
  {
    return static_cast<std::uint32_t>(background_bytes_ / (std::uint64_t{head_groups_} * layout_.block_bytes));
  }
  /// The rows among `rows` whose turn it is to travel in the background, neighbours in the list.
  [[nodiscard]] row_list background_turn(row_list rows) noexcept
  {
    std::uint32_t const most = background_rows();
    if (rows.count <= most || most == 0) { return {.ids = rows.ids, .count = most == 0 ? 0 : rows.count}; }
    std::uint32_t const first = background_turns_++ % divide_up(rows.count, most) * most;
    return {.ids = rows.ids + first, .count = std::min(most, rows.count - first)};
  }

  /// Most blocks of a lane that one background recall of `rows` rows may bring: with all of them under way a demand still
  /// finds slots for a whole selection, and copies before it on the link are short.   @pre rows <= background_rows()
  [[nodiscard]] std::uint32_t background_blocks(std::uint32_t rows) const noexcept
  {
    std::uint32_t const slots = keeper_->least_lease() + 1;
    std::uint32_t const left = slots - std::min(slots, budget_blocks_);
    std::uint64_t const lanes = std::uint64_t{rows} * head_groups_;
    std::uint64_t const blocks = background_bytes_ / layout_.block_bytes;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(left, blocks / lanes));
  }

  /// Whether the last background recall is still under way. They go one at a time.
  [[nodiscard]] bool background_flies() noexcept
  {
    recall<B>* const r = recalls_.find(background_);
    if (r == nullptr) { return false; }
    // Asked first: what did not arrive has been told by the time that the copies are seen complete.
    bool const complete = recalls_.copies_done(*r);
    bool const failing = r->failing;
    settle_background();
    return !complete || r->failing != failing;
  }

  /// Brings, in the background, blocks that `device_books::expected` names: behind the demand recalls so far, in the stream
  /// order of the copies. No table and no selection changes.
  /// @param r its rows and layer are set
  status bring_background(recall<B>& r, ticket given, stream_ref stream) noexcept
  {
    r.priority = recall_priority::background;
    background_ = given;
    for (std::uint32_t i = 0; i < r.row_count; ++i) {
      std::uint32_t& number = background_numbers_[to_index(r.rows[i])];
      number = number + 1 == 0 ? 1 : number + 1;
      r.sequence[i] = number;
      r.missed[i] = recall_failure{};
      // What is selected from here on waits for this one: blocks of those before are resident, or misses.
      background_missed(r.rows[i], r.layer) = 0;
    }
    device_books<B> const& books = keeper_->books();
    status const resolved = backend_->launch(
      stream,
      resolve_background<Replacement>{
        .rows = {.ids = r.rows, .count = r.row_count},
        .selection = books.expected(),
        .residency = books.residency(),
        .pool = keeper_->pool().ref(),
        .host_blocks = books.host_blocks(),
        .plan = books.plan(),
        .step = books.step(),
        .layer = r.layer,
        .head_groups = head_groups_,
        .most_misses = background_blocks(r.row_count),
        .policy = policy_});
    return resolved == status::ok ? start(r, stream) : resolved;
  }

  /// Whether blocks of the row in a layer that a background recall was to bring did not arrive, however many have begun since.
  /// They are misses again.
  [[nodiscard]] bool background_failed(row_id row, layer_id layer) noexcept
  {
    settle_background();
    return background_missed(row, layer) != 0;
  }
  /// Whether the last background recall, not yet seen complete, names the row in the layer. One that failed is complete once the
  /// device has been told.
  [[nodiscard]] bool background_pending(row_id row, layer_id layer) noexcept
  {
    bool const flies = background_flies();
    recall<B>* const r = recalls_.find(background_);
    return flies && r != nullptr && r->priority == recall_priority::background && r->layer == layer && names(*r, row);
  }
  /// The last background recall; nullptr where its place has been given out again.
  [[nodiscard]] recall<B> const* background() noexcept { return recalls_.find(background_); }
  /// What failed is brought by a demand.
  void forgive_background(row_id row, layer_id layer) noexcept { background_missed(row, layer) = 0; }

  /// Enqueues the resolving of the rows' selections: tables, hits and misses, and the slots that misses will fill.
  status resolve(layer_id layer, row_list rows, stream_ref stream, recall_lists lists) noexcept
  {
    return backend_->launch(
      stream,
      resolve_blocks<Replacement>{
        .rows = rows,
        .selection = keeper_->books().selection(),
        .residency = keeper_->books().residency(),
        .pool = keeper_->pool().ref(),
        .host_blocks = keeper_->books().host_blocks(),
        .plan = keeper_->books().plan(),
        .table = keeper_->books().table(),
        .step = keeper_->books().step(),
        .layer = layer,
        .head_groups = head_groups_,
        .list_hits_only = lists == recall_lists::hits_then_landed,
        .policy = policy_});
  }

  /// Sees to it that the device knows of a recall that went wrong: its blocks become misses, their slots free, its rows are
  /// posted as failed. What is refused is tried again at the next call.
  void settle(recall<B>& r) noexcept
  {
    if (r.unplanned) {
      r.code = r.code == status::ok ? status::transfer_failed : r.code;
      if (plan(r) != status::ok) { return; }
      if (!plans_on_host) { static_cast<void>(issue(r)); }
    } else if (r.owes || copies_failed(r)) {
      static_cast<void>(fail(r));
    }
  }

  /// As settle, for every recall.
  void settle_all() noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      if (recalls_[i].active) { settle(recalls_[i]); }
    }
  }

  /// For engines that plan on the host: enqueues the copies once the plan is there. In the order of the recalls: a row may
  /// wait for blocks that an earlier recall brings.
  void issue_planned(recall<B>& r) noexcept
  {
    if constexpr (TransferEngine::plans_on == plan_place::host) {
      while (r.active && r.planned && !r.issued) {
        recall<B>& next = *recalls_.oldest_planned();
        if (backend_->done(next.planned_event) != event_state::done) { return; }
        static_cast<void>(issue(next));
      }
    }
  }

  /// As issue_planned, but sleeps until the plan is there.
  status issue_waiting(recall<B>& r) noexcept
  {
    if constexpr (TransferEngine::plans_on == plan_place::host) {
      while (r.active && r.planned && !r.issued) {
        recall<B>& next = *recalls_.oldest_planned();
        typename B::event_ref const event = next.planned_event;
        status const waited = backend_->wait_any({&event, 1}, backend_->now() + wait_limit_);
        if (waited != status::ok) { return waited; }
        static_cast<void>(issue(next));
      }
    }
    return r.code;
  }

  /// Blocks that demand recalls of a layer have moved, and found, since take_traffic. Recalls are counted once their place is
  /// wanted again: those of the last step may be lacking.
  struct layer_traffic {
    std::uint64_t missed = 0;
    std::uint64_t hits = 0;
  };
  /// What has been counted of a layer, which begins anew.
  [[nodiscard]] layer_traffic take_traffic(layer_id layer) noexcept
  {
    return std::exchange(traffic_[to_index(layer)], layer_traffic{});
  }

  // -- what has come of them

  [[nodiscard]] row_mailbox& box(row_id row) const noexcept { return boxes(recall_priority::demand)[to_index(row)]; }
  /// The row's words that speak of its background recalls.
  [[nodiscard]] row_mailbox& background_box(row_id row) const noexcept
  {
    return boxes(recall_priority::background)[to_index(row)];
  }

  /// Whether blocks of the row at a place of the recall found no slot.
  [[nodiscard]] bool row_stalled(recall<B> const& r, std::uint32_t place) const noexcept
  {
    return device::load_acquire(&r.missed[place].stalled) != 0;
  }
  /// Whether the row at a place of the recall selected blocks that another recall brings.
  [[nodiscard]] bool row_waited(recall<B> const& r, std::uint32_t place) const noexcept
  {
    return device::load_acquire(&r.missed[place].flying) != 0;
  }
  /// Whether blocks of the row at a place of the recall did not arrive, whatever has come of the row's later recalls.
  [[nodiscard]] bool row_missed(recall<B> const& r, std::uint32_t place) const noexcept
  {
    return device::load_acquire(&r.missed[place].failed) != 0;
  }
  /// What the recall did not bring of a row has been asked for again.
  void forgive(recall<B>& r, row_id row) noexcept
  {
    for (std::uint32_t place = 0; place < r.row_count; ++place) {
      if (r.rows[place] == row) { r.missed[place].failed = 0; }
    }
  }
  /// Whether the row at a place of the recall has all of its blocks.
  [[nodiscard]] bool row_landed(recall<B> const& r, std::uint32_t place) noexcept
  {
    if (row_stalled(r, place)) { return false; }
    row_mailbox const& words = box(r.rows[place]);
    // Recalls of a row end in their order: one that has landed says so of those before it.
    std::uint32_t const landed = device::load_acquire(&words.landed);
    if (row_waited(r, place) && background_pending(r.rows[place], r.layer)) { return false; }
    if (row_failed(r, place)) { return false; }
    if (static_cast<std::int32_t>(landed - r.sequence[place]) >= 0) { return true; }
    return device::load_acquire(&words.posted) == r.sequence[place] && words.misses + words.flying == 0;
  }
  /// Whether a copy of the row at a place of the recall failed, or one of a background recall that it waited for.
  [[nodiscard]] bool row_failed(recall<B> const& r, std::uint32_t place) noexcept
  {
    return row_missed(r, place) || (row_waited(r, place) && background_failed(r.rows[place], r.layer));
  }

  /// Whether the recall's copies ended in failure and no row has been told.
  [[nodiscard]] bool copies_failed(recall<B>& r) noexcept
  {
    if (!r.active || !r.issued || r.failing || r.over) { return false; }
    event_state const state = backend_->done(r.landed_event);
    r.over = state == event_state::done;
    return state == event_state::failed;
  }

  /// Whether the row's last recall is known to have landed, or to have had nothing to bring.
  [[nodiscard]] bool box_landed(row_id row) const noexcept
  {
    row_mailbox const& words = box(row);
    std::uint32_t const number = number_of(row);
    if (device::load_acquire(&words.landed) == number) { return true; }
    return device::load_acquire(&words.posted) == number && words.misses + words.flying == 0;
  }

  /// The recall that has that number for the row; nullptr where its place has been given out again.
  [[nodiscard]] recall<B> const* numbered(row_id row, std::uint32_t number) noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      recall<B> const& r = recalls_[i];
      if (!r.active || r.priority != recall_priority::demand) { continue; }
      std::uint32_t const place = place_of(r, row);
      if (place < r.row_count && r.sequence[place] == number) { return &r; }
    }
    return nullptr;
  }

  /// Whether copies of the recall are not complete.
  [[nodiscard]] bool flies(recall<B> const& r) noexcept { return !recalls_.copies_done(r); }

  /// Whether any recall that names the row's slots is not complete.
  [[nodiscard]] bool flies(row_id row) noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      recall<B>& r = recalls_[i];
      issue_planned(r);
      settle(r);
      if (names(r, row) && !recalls_.copies_done(r)) { return true; }
    }
    return false;
  }

  /// Recalls that are not complete.
  [[nodiscard]] std::uint32_t flying() noexcept
  {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) { count += recalls_.copies_done(recalls_[i]) ? 0U : 1U; }
    return count;
  }

  /// Whether a recall besides this one that names the row's slots is not complete.
  [[nodiscard]] bool others_fly(recall<B> const& r, row_id row) noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      if (&recalls_[i] != &r && names(recalls_[i], row) && !recalls_.copies_done(recalls_[i])) { return true; }
    }
    return false;
  }

  /// Sleeps until no recall that names the row's slots is under way.
  status wait_row(row_id row, nanoseconds deadline) noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      if (!recalls_[i].active || !names(recalls_[i], row)) { continue; }
      if (status const waited = wait(recalls_[i], deadline); waited != status::ok) { return waited; }
    }
    return status::ok;
  }

  /// Sleeps until no recall is under way.
  status drain(nanoseconds deadline) noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      if (status const waited = wait(recalls_[i], deadline); waited != status::ok) { return waited; }
    }
    return status::ok;
  }

  /// The transfer engine, which moves what is written back too.
  [[nodiscard]] bound_transfer_t<TransferEngine, B>& mover() noexcept { return transfer_; }
  [[nodiscard]] bound_transfer_t<TransferEngine, B> const& mover() const noexcept { return transfer_; }

 private:
  [[nodiscard]] static std::uint32_t max_entries(
    kv_geometry const& geometry, manager_options const& options, slot_budget const& budget)
  {
    return options.max_rows * geometry.head_groups * budget.max_selected;
  }

  [[nodiscard]] static bool names(recall<B> const& r, row_id row) noexcept
  {
    for (std::uint32_t place = 0; place < r.row_count; ++place) {
      if (r.rows[place] == row) { return true; }
    }
    return false;
  }

  /// Sleeps until the recall's copies are complete.
  status wait(recall<B>& r, nanoseconds deadline) noexcept
  {
    for (;;) {
      issue_planned(r);
      settle(r);
      if (recalls_.copies_done(r)) { return status::ok; }
      if (r.unplanned || r.owes) { return r.code == status::ok ? status::busy : r.code; }
      typename B::event_ref const event = r.issued ? r.landed_event : r.planned_event;
      if (status const waited = backend_->wait_any({&event, 1}, deadline); waited != status::ok) { return waited; }
    }
  }

  /// Enqueues the planning of what has been resolved for the recall's rows, and starts the copies.
  status start(recall<B>& r, stream_ref stream) noexcept
  {
    r.stream = stream;
    status const planned = plan(r);
    return planned == status::ok && !plans_on_host ? issue(r) : planned;
  }

  /// A background recall whose copies ended in failure gives its blocks up.
  void settle_background() noexcept
  {
    recall<B>* const r = recalls_.find(background_);
    if (r == nullptr || r->priority != recall_priority::background) { return; }
    settle(*r);
    // Another may take its place before those who wait for its blocks ask.
    for (std::uint32_t i = 0; i < r->row_count; ++i) {
      if (!row_missed(*r, i)) { continue; }
      r->missed[i].failed = 0;
      background_missed(r->rows[i], r->layer) = 1;
    }
  }

  void count_traffic(recall<B>& r) noexcept
  {
    bool const counts = r.priority == recall_priority::demand && r.row_count != 0 && r.code == status::ok;
    if (r.counted || !counts || !recalls_.copies_done(r)) { return; }
    r.counted = true;
    layer_traffic& layer = traffic_[to_index(r.layer)];
    for (std::uint32_t place = 0; place < r.row_count; ++place) {
      layer.missed += r.missed[place].planned;
      layer.hits += r.missed[place].hits;
    }
  }

  [[nodiscard]] std::uint8_t& background_missed(row_id row, layer_id layer) noexcept
  {
    return background_missed_[to_index(row) * layers_ + to_index(layer)];
  }

  [[nodiscard]] row_mailbox* boxes(recall_priority priority) const noexcept
  {
    std::size_t const first = priority == recall_priority::demand ? 0 : numbers_.size();
    return mailbox_.template as<row_mailbox>() + first;
  }

  /// Whether two of `count` rows, row_at(0) .. row_at(count - 1), hold host blocks together. They come to do so with all blocks
  /// before, so the first one tells.
  template <class RowAt>
  [[nodiscard]] bool rows_share(std::uint32_t count, RowAt row_at) noexcept
  {
    if (++looked_ == 0) {
      std::fill(seen_.begin(), seen_.end(), 0U);
      looked_ = 1;
    }
    for (std::uint32_t i = 0; count > 1 && i < count; ++i) {
      sequence_state const& sequence = keeper_->sequences()[row_at(i)];
      host_block_id const first = sequence.host_blocks.empty() ? none<host_block_id> : sequence.host_blocks[0];
      if (is_none(first) || keeper_->store().references(first) < 2) { continue; }
      if (std::exchange(seen_[to_index(first)], looked_) == looked_) { return true; }
    }
    return false;
  }

  [[nodiscard]] recall_plan_ref plan_of(recall<B> const& r) noexcept
  {
    return {
      .entries = r.entries,
      .row_begin = r.row_begin,
      .failed = r.failed,
      .rows = {.ids = r.rows, .count = r.row_count},
      .host = keeper_->store().ref(),
      .pool = keeper_->pool().ref(),
      .layer = r.layer,
      .head_groups = head_groups_,
      .block_bytes = layout_.block_bytes,
      .capacity = r.row_count * head_groups_ * budget_blocks_,
      .priority = r.priority,
      .may_share = rows_share(r.row_count, [&](std::uint32_t place) { return r.rows[place]; })};
  }
  /// Of a captured step's recall: any rows may stand in it at a replay.
  [[nodiscard]] recall_plan_ref captured_plan_of(recall<B> const& r) noexcept
  {
    recall_plan_ref plan = plan_of(r);
    auto const rows = static_cast<std::uint32_t>(numbers_.size());
    plan.may_share = rows_share(rows, [](std::uint32_t row) { return static_cast<row_id>(row); });
    return plan;
  }

  [[nodiscard]] landed_ref landed_of(recall<B> const& r) const noexcept
  {
    return {
      .mailbox = boxes(r.priority),
      .sequence = r.sequence,
      .residency = keeper_->books().residency(),
      .table = keeper_->books().table(),
      .checksums = keeper_->checksums(),
      .failures = r.failures,
      .failed = r.missed};
  }

  /// Enqueues the copies of a planned recall. They wait for the plan, and with it for the last attention that read the
  /// slots which they fill. A recall that is refused is failed on the device, so that its rows learn of it as of any other
  /// failure.
  status issue(recall<B>& r) noexcept
  {
    r.issued = true;
    status result = order(r);
    if (result == status::ok) { result = r.code; }
    if (result == status::ok) { result = transfer_.recall_async(copies_.get(), plan_of(r), landed_of(r)); }
    if (result == status::ok) { result = backend_->record(copies_.get(), r.landed_event); }
    if (result == status::ok) { return result; }
    result = fail(r);
    if (result != status::ok) { r.code = result; }
    return result;
  }

  /// Lets the copies' stream wait for the recall's plan.
  status order(recall<B>& r) noexcept
  {
    if (r.ordered) { return status::ok; }
    status const ordered = backend_->wait(copies_.get(), r.planned_event);
    r.ordered = ordered == status::ok;
    return ordered;
  }

  /// Enqueues the plan of what has been resolved.
  status plan(recall<B>& r) noexcept
  {
    status result = backend_->launch(r.stream, plan_recall_of(r));
    if (result == status::ok) { result = backend_->record(r.stream, r.planned_event); }
    r.planned = result == status::ok;
    r.unplanned = result != status::ok && result != status::device_lost;
    return result;
  }

  [[nodiscard]] plan_recall plan_recall_of(recall<B> const& r) const noexcept
  {
    return {
      .rows = {.ids = r.rows, .count = r.row_count},
      .lanes = keeper_->books().plan(),
      .entries = r.entries,
      .row_begin = r.row_begin,
      .failed = r.failed,
      .mailbox = boxes(r.priority),
      .sequence = r.sequence,
      .outcome = r.missed,
      .block_bytes = layout_.block_bytes,
      .head_groups = head_groups_,
      .max_selected = keeper_->books().sizes().max_selected};
  }

  /// Ends a recall's rows that have not been posted, on the device, behind what has been enqueued of it.
  status fail(recall<B>& r) noexcept
  {
    status result = order(r);
    if (result == status::ok) {
      result = backend_->launch(
        copies_.get(),
        land_rows{
          .plan = plan_of(r),
          .landed = landed_of(r),
          .first_row = 0,
          .row_count = r.row_count,
          .how = landing::failed});
    }
    // Who waits for the recall now waits for this, and what is resolved from now on sees it.
    if (result == status::ok) { result = backend_->record(copies_.get(), r.landed_event); }
    if (result == status::ok) { result = backend_->wait(r.stream, r.landed_event); }
    r.failing = result == status::ok;
    r.owes = !r.failing && result != status::device_lost;
    return result;
  }

  /// Whether something of a recall that went wrong could not be told to the device.
  [[nodiscard]] bool unsettled() noexcept
  {
    for (std::uint32_t i = 0; i < recalls_.size(); ++i) {
      if (recalls_[i].active && (recalls_[i].unplanned || recalls_[i].owes)) { return true; }
    }
    return false;
  }

  struct captured_place {
    bool taken = false;
    bool unmarked = false;  ///< its last replay was launched, and no event stands behind it
    stream_ref stream = {};
  };

  B* backend_;
  block_keeper<B, Replacement>* keeper_;
  block_layout layout_;
  std::uint32_t head_groups_;
  std::uint32_t budget_blocks_;
  nanoseconds wait_limit_;
  std::uint64_t background_bytes_;
  Replacement policy_;
  bound_transfer_t<TransferEngine, B> transfer_;
  detail::owned_stream<B> copies_;
  recall_ring<B> recalls_;
  slab<B> mailbox_;                                // [2, max_rows] row_mailbox: of demand and of background recalls
  std::vector<std::uint32_t> numbers_;             // [max_rows] of the last demand recall
  std::vector<std::uint32_t> background_numbers_;  // [max_rows]
  std::uint32_t layers_;
  std::vector<std::uint8_t> background_missed_;  // [max_rows, layers] 1: blocks did not arrive, nobody dealt with it
  std::vector<layer_traffic> traffic_;           // [layers]
  ticket background_ = {};
  std::uint32_t background_turns_ = 0;
  detail::owned_event<B> joined_;
  std::vector<std::uint32_t> seen_;  // [host blocks] number of the look that met the block as a row's first
  std::uint32_t looked_ = 0;
  slab<B> captured_lists_;                // [captured_steps, captured_list_count, max_rows] row_id
  std::vector<captured_place> captured_;  // [captured_steps]
};

}  // namespace pulseinfer
