#pragma once

/// The rows of a step, and which of them the host engine is handed next.

#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/list_arena.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/recall_driver.hpp>
#include <pulseinfer/manager/row_runtime.hpp>
#include <pulseinfer/scheduler/link_rate.hpp>
#include <pulseinfer/view/decision.hpp>
#include <pulseinfer/view/failure_record.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/step_sample.hpp>
#include <pulseinfer/view/visit.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pulseinfer {

/// Where each row stands, and the loop over visits. It reads the mailbox, lets the scheduler decide, hands visits out, and
/// tries recalls again that failed.
template <class B, class TransferEngine, class LayerScheduler, replacement Replacement>
class visit_queue {
 public:
  using stream_ref = typename B::stream_ref;
  using driver = recall_driver<B, TransferEngine, Replacement>;
  static constexpr bool hits_first = LayerScheduler::hits_first;
  static constexpr std::size_t max_failures = 1024;

  /// @param sample where visits, waits and failures are counted
  visit_queue(
    B& backend, stream_ref compute, block_keeper<B, Replacement>& keeper, driver& recalls, list_arena<B>& arena,
    step_sample& sample, std::uint32_t layers, manager_options const& options, LayerScheduler const& scheduler)
    : backend_{&backend},
      compute_{compute},
      keeper_{&keeper},
      recalls_{&recalls},
      arena_{&arena},
      sample_{&sample},
      layers_{layers},
      max_tries_{options.max_tries},
      wait_limit_{options.wait_limit},
      scheduler_{scheduler},
      rows_(options.max_rows),
      chosen_(options.max_rows)
  {
    scheduler_rows_.reserve(options.max_rows);
    step_rows_.reserve(options.max_rows);
    due_.reserve(options.max_rows);
    failures_.reserve(max_failures);
    waits_.reserve(std::size_t{2} * options.max_rows);
  }

  visit_queue(visit_queue&&) = delete;

  // -- rows

  [[nodiscard]] row_runtime& operator[](row_id row) noexcept { return rows_[to_index(row)]; }
  [[nodiscard]] row_runtime const& operator[](row_id row) const noexcept { return rows_[to_index(row)]; }

  /// Rows of the step, late ones of the step before included.
  [[nodiscard]] std::span<row_id const> rows() const noexcept { return step_rows_; }

  /// The row begins a step.
  void begin(row_id row, std::uint32_t new_tokens, std::uint32_t token_offset) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    state.progress = row_progress::begun;
    state.code = status::ok;
    state.layer = none<layer_id>;
    state.new_tokens = new_tokens;
    state.token_offset = token_offset;
    state.unproven_before = state.unproven_last;
    step_rows_.push_back(row);
  }

  /// The row has gone through `layer` outside the loop.
  void pass(row_id row, layer_id layer) noexcept
  {
    leave(row);
    rows_[to_index(row)].progress = to_index(layer) + 1 == layers_ ? row_progress::done : row_progress::handed;
    rows_[to_index(row)].layer = layer;
  }

  /// The row has gone through all layers in a captured step.
  /// @param first,last numbers of its recalls, whose end the host has yet to see; 0: it has none
  void pass_all(row_id row, std::uint32_t first, std::uint32_t last) noexcept
  {
    pass(row, static_cast<layer_id>(layers_ - 1));
    if (last == 0) { return; }
    row_runtime& state = rows_[to_index(row)];
    state.unproven_last = last;
    if (state.unproven_first == 0) { state.unproven_first = first; }
  }

  /// The row gets no further visit in its step, which will be dropped.
  void give_up(row_id row, status code) noexcept { fail(row, code); }

  /// As prove, where what is known of the row's recalls is about to be forgotten: a row of which blocks did not arrive has
  /// failed if it is in a step, and cannot go on.
  void settle_proof(row_id row) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    bool const outside = state.progress == row_progress::outside;
    status const proven = prove(row);
    if (proven == status::ok || proven == status::busy) { return; }
    state.unsound = true;
    if (outside) { state.progress = row_progress::outside; }
  }

  /// Rows have entered `layer`.
  /// @param resident (row) whether nothing of the layer can travel   @param place of their recall in the ring
  template <class Resident>
  void stand(layer_id layer, row_list rows, std::uint32_t place, Resident resident) noexcept
  {
    for (row_id const row : rows) {
      leave(row);
      row_runtime& state = rows_[to_index(row)];
      state.progress = row_progress::standing;
      state.layer = layer;
      state.attended_hits = false;
      state.tries = 0;
      state.misses = 0;
      state.bytes = 0;
      state.flying = false;
      state.stalled = false;
      state.entered = backend_->now();
      state.resident = resident(row);
      if (!state.resident) {
        state.recall = place;
        ++recalls_->at(place).users;
      }
    }
    if constexpr (hits_first) { due_.insert(due_.end(), rows.begin(), rows.end()); }
  }

  /// Whether a row has entered `layer`, or has gone through it outside the loop, and no further one.
  [[nodiscard]] bool stands_at(row_id row, layer_id layer) const noexcept
  {
    row_runtime const& state = rows_[to_index(row)];
    bool const entered = state.progress == row_progress::standing || state.progress == row_progress::handed ||
      state.progress == row_progress::done;
    return entered && state.layer == layer;
  }

  /// Blocks of the row at a layer, [first, first + count), could not be brought outside of recalls: it gets no further
  /// visit, and its step will be dropped.
  void lose_blocks(
    row_id row, layer_id layer, std::uint32_t first, std::uint32_t count, status code, std::uint32_t tries) noexcept
  {
    ++sample_->failed_transfers;
    for (std::uint32_t i = 0; i < count && failures_.size() < max_failures; ++i) {
      failures_.push_back(
        {.sequence = keeper_->sequences()[row].id,
         .row = row,
         .layer = layer,
         .block = static_cast<block_id>(first + i),
         .code = code,
         .tries = tries});
    }
    fail(row, code);
    std::erase(due_, row);
  }

  /// The row leaves its step, wherever it stands.
  void remove(row_id row) noexcept
  {
    leave(row);
    rows_[to_index(row)].progress = row_progress::outside;
    std::erase(step_rows_, row);
    std::erase(due_, row);
  }

  /// Whether a row has been sampled; also where the loop was left with its last visit in hand.
  [[nodiscard]] bool finished(row_id row) const noexcept
  {
    row_runtime const& state = rows_[to_index(row)];
    bool const in_last = state.progress == row_progress::handed && to_index(state.layer) + 1 == layers_;
    return state.progress == row_progress::done || in_last;
  }

  /// Whether recalls that the stream waited for, and the host did not, brought all that the row has attended. Where they did
  /// not, their blocks are recorded and the row has failed. May sleep then, until the device knows of it.
  /// @status ok; busy: not known yet; transfer_failed, or what refused the recall
  status prove(row_id row) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    if (state.unproven_last == 0) { return status::ok; }
    status result = status::ok;
    bool travels = false;
    // What an earlier step lacked is in the cache for good: its tokens are committed.
    auto const lose = [&](std::uint32_t number, status code) {
      result = code;
      bool const earlier =
        state.unproven_before != 0 && number - state.unproven_first <= state.unproven_before - state.unproven_first;
      state.unsound = state.unsound || earlier;
    };
    for (std::uint32_t i = 0; i < recalls_->size(); ++i) {
      recall<B>& r = recalls_->at(i);
      if (!r.active) { continue; }
      std::uint32_t const place = unproven_place(r, row);
      if (place == r.row_count) { continue; }
      recalls_->settle(r);
      if (r.failing) {
        typename B::event_ref const told = r.landed_event;
        static_cast<void>(backend_->wait_any({&told, 1}, backend_->now() + wait_limit_));
      }
      if (r.owes || r.code != status::ok) {
        lose(r.sequence[place], r.code == status::ok ? status::transfer_failed : r.code);
      }
      if (recalls_->row_missed(r, place)) {
        // The row's mailbox may speak of a later failure.
        lose(r.sequence[place], status::transfer_failed);
        record(r, row, r.missed[place].begin, r.missed[place].blocks, 1);
      }
      bool const waits = recalls_->row_waited(r, place) && recalls_->background_pending(row, r.layer);
      if (recalls_->flies(r) || waits) {
        travels = true;
        continue;
      }
      if (recalls_->row_stalled(r, place)) { lose(r.sequence[place], status::stalled); }
      if (recalls_->row_waited(r, place) && recalls_->background_failed(row, r.layer)) {
        recalls_->forgive_background(row, r.layer);
        lose(r.sequence[place], status::transfer_failed);
      }
    }
    // Of a recall whose place has been given out again the mailbox may still tell.
    std::uint32_t const last = device::load_acquire(&recalls_->box(row).failed);
    if (result == status::ok && is_unproven(state, last) && recalls_->numbered(row, last) == nullptr) {
      lose(last, status::transfer_failed);
      record_failures(row);
    }
    if (result == status::ok && travels) { return status::busy; }
    state.unproven_first = state.unproven_last = state.unproven_before = 0;
    if (result != status::ok) { fail(row, result); }
    return result;
  }

  [[nodiscard]] bool is_late(row_id row) const noexcept
  {
    row_progress const progress = rows_[to_index(row)].progress;
    return progress == row_progress::standing || progress == row_progress::begun || progress == row_progress::handed;
  }

  /// The device is lost: every row that stands in a step has failed, and there are no more visits.
  void lose() noexcept
  {
    lost_ = true;
    for (row_id const row : step_rows_) {
      if (!finished(row)) { fail(row, status::device_lost); }
    }
    due_.clear();
    handed_ = visit{};
  }
  [[nodiscard]] bool lost() const noexcept { return lost_; }

  /// Between two steps: who was left late.
  void note_lateness() noexcept
  {
    for (std::uint32_t r = 0; r < rows_.size(); ++r) {
      bool const late = is_late(static_cast<row_id>(r));
      rows_[r].late_history = static_cast<std::uint8_t>((rows_[r].late_history << 1U) | (late ? 1U : 0U));
    }
  }

  [[nodiscard]] std::span<failure_record const> failures() const noexcept { return failures_; }
  void clear_failures() noexcept { failures_.clear(); }

  // -- visits

  /// Finds the next visit. @return false: every row of the step is sampled, late or failed
  /// @param looked called each time that the mailbox has been read, before anything is decided: what may begin now may
  template <class Looked>
  bool next(visit& v, Looked looked) noexcept
  {
    settle_visit();
    slept_ = false;
    if (lost_) { return false; }
    if constexpr (hits_first) {
      if (!due_.empty()) { return hand_due(v); }
    }
    for (;;) {
      observe();
      if (lost_) {
        lose();
        return false;
      }
      looked();
      if (scheduler_rows_.empty()) { return false; }
      decision const d = scheduler_.decide(scheduler_rows_, link_, backend_->now(), chosen_);
      if (d.kind == decision_kind::end_step) { return false; }
      if (d.kind == decision_kind::run && d.rows != 0) {
        if (hand_chosen(d, v)) { return true; }
        continue;
      }
      if (!sleep(d.until)) { return false; }
    }
  }

 private:
  /// The row no longer stands at its recall.
  void leave(row_id row) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    bool const stands = state.progress == row_progress::standing || state.progress == row_progress::handed;
    if (stands && !state.resident) { --recalls_->at(state.recall).users; }
    state.resident = true;
  }

  /// Rows of the visit that the host engine has finished with: sampled ones are done. Rows that were not entered again
  /// stay where they are, and the step ends without them.
  void settle_visit() noexcept
  {
    for (row_id const row : handed_.rows) {
      row_runtime& state = rows_[to_index(row)];
      if (state.progress == row_progress::handed && handed_.last) {
        leave(row);
        state.progress = row_progress::done;
      }
    }
    handed_ = visit{};
  }

  /// Rows that have just entered a layer attend what they have, without a decision.
  bool hand_due(visit& v) noexcept
  {
    row_id* const list = arena_->take(due_.size());
    if (list == nullptr) { return false; }
    // An engine may enter several groups of rows before it asks for the next visit: one layer at a time.
    layer_id const layer = rows_[to_index(due_.front())].layer;
    std::uint32_t count = 0;
    for (row_id const row : due_) {
      if (rows_[to_index(row)].layer == layer) { list[count++] = row; }
    }
    std::erase_if(due_, [&](row_id row) { return rows_[to_index(row)].layer == layer; });
    row_list const rows{.ids = list, .count = count};
    bool const whole = std::ranges::all_of(rows, [&](row_id row) { return rows_[to_index(row)].resident; });
    for (row_id const row : rows) {
      row_runtime& state = rows_[to_index(row)];
      state.attended_hits = true;
      if (whole) { state.progress = row_progress::handed; }
    }
    hand(v, layer, rows, whole ? part::whole : part::hits);
    return true;
  }

  bool hand_chosen(decision const& d, visit& v) noexcept
  {
    row_id* const list = arena_->take(d.rows);
    if (list == nullptr) { return false; }
    // A visit has one part: rows whose hits were attended and rows that attend everything go one after the other.
    bool const attended = rows_[to_index(chosen_.front())].attended_hits;
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < d.rows; ++i) {
      if (rows_[to_index(chosen_[i])].attended_hits == attended) { list[count++] = chosen_[i]; }
    }
    row_list const rows{.ids = list, .count = count};
    std::uint32_t waited = recalls_->size();
    for (row_id const row : rows) {
      row_runtime& state = rows_[to_index(row)];
      if (state.resident) { continue; }
      recall<B>& r = recalls_->at(state.recall);
      if (d.enqueue_wait && state.recall != waited) {
        if (recalls_->issue_waiting(r) != status::ok || backend_->wait(compute_, r.landed_event) != status::ok) {
          fail(row, r.code == status::ok ? status::transfer_failed : r.code);
          return false;
        }
        waited = state.recall;
      }
    }
    for (row_id const row : rows) {
      row_runtime& state = rows_[to_index(row)];
      state.progress = row_progress::handed;
      bool const seen = state.resident || !d.enqueue_wait || recalls_->box_landed(row);
      if (seen) { continue; }
      state.unproven_last = recalls_->number_of(row);
      if (state.unproven_first == 0) { state.unproven_first = state.unproven_last; }
    }
    hand(v, d.layer, rows, attended ? part::landed : part::whole);
    return true;
  }

  void hand(visit& v, layer_id layer, row_list rows, part which) noexcept
  {
    bool const last = to_index(layer) + 1 == layers_;
    v = visit{
      .layer = layer,
      .next = last ? none<layer_id> : static_cast<layer_id>(to_number(layer) + 1),
      .rows = rows,
      .table = keeper_->table(layer, which),
      .part = which,
      .last = last};
    handed_ = which == part::hits ? visit{} : v;
    ++sample_->visits;
  }

  /// Reads the mailbox and makes the scheduler's view of the rows that stand at a layer.
  void observe() noexcept
  {
    scheduler_rows_.clear();
    link_.bytes_in_flight = 0;
    std::uint64_t landed = 0;
    for (row_id const row : step_rows_) {
      row_runtime& state = rows_[to_index(row)];
      if (state.progress != row_progress::standing) { continue; }
      row_phase phase = row_phase::ready;
      if (!state.resident) {
        recall<B>& r = recalls_->at(state.recall);
        recalls_->issue_planned(r);
        row_mailbox const& words = recalls_->box(row);
        if (r.code != status::ok) {
          fail(row, r.code);
          continue;
        }
        if (device::load_acquire(&words.failed) == recalls_->number_of(row)) {
          take_failure(row);
          if (state.progress != row_progress::standing) { continue; }
        } else {
          recalls_->settle(r);
          if (r.owes) {
            fail(row, r.code == status::ok ? status::transfer_failed : r.code);
            continue;
          }
        }
        bool posted = device::load_acquire(&words.posted) == recalls_->number_of(row);
        if (posted && words.stalled != 0) {
          // Slots may have been on their way to blocks of tickets that were given up, or of the background: with those landed
          // there are enough, also where they have landed by now.
          bool const may = recalls_->others_fly(r, row) || !state.stalled;
          state.stalled = true;
          bool const comes =
            may && recalls_->wait_row(row, backend_->now() + wait_limit_) == status::ok && try_again(row);
          if (!comes) {
            fail(row, status::stalled);
            continue;
          }
          posted = false;
        }
        if (posted) {
          state.misses = words.misses + words.flying;
          state.bytes = words.bytes;
        }
        // Asked before what might have failed: that was told before this.
        bool const landed_now = device::load_acquire(&words.landed) == recalls_->number_of(row);
        bool const pending = posted && words.flying != 0 && recalls_->background_pending(row, r.layer);
        // Blocks that a background recall was to bring are waited for here, and were struck from the lists if they failed.
        if (posted && words.flying != 0 && recalls_->background_failed(row, r.layer)) {
          recalls_->forgive_background(row, r.layer);
          if (!try_again(row)) {
            fail(row, status::transfer_failed);
            continue;
          }
          posted = false;
        }
        state.behind = pending && landed_now;
        bool const arrived = !pending && posted && (landed_now || state.misses == 0);
        phase = arrived ? row_phase::ready : posted ? row_phase::in_flight : row_phase::selecting;
        if (phase == row_phase::in_flight) { link_.bytes_in_flight += state.bytes; }
        if (phase == row_phase::ready && state.flying) { landed += state.bytes; }
        state.flying = phase == row_phase::in_flight;
      }
      scheduler_rows_.push_back(
        {.row = row,
         .layer = state.layer,
         .phase = phase,
         .attended_hits = state.attended_hits,
         .must_finish = (state.late_history & 0x7FU) != 0,
         .misses = state.misses,
         .bytes = state.bytes,
         .entered = state.entered});
    }
    rate_.look(backend_->now(), landed, link_.bytes_in_flight, woken_);
    link_.bytes_per_second = rate_.bytes_per_second();
    woken_ = false;
  }

  /// A recall of the row did not bring all of its blocks: the same selection is resolved again, blocks that did arrive are
  /// hits by now. After the last try the blocks are recorded and the row gets no further visit in this step.
  void take_failure(row_id row) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    ++sample_->failed_transfers;
    ++state.tries;
    recalls_->settle_all();
    recall<B>& failed = recalls_->at(state.recall);
    if (state.tries < max_tries_ && try_again(row)) {
      recalls_->forgive(failed, row);
      return;
    }
    record_failures(row);
    fail(row, status::transfer_failed);
  }

  /// Names the blocks that the row's last failed recall did not bring.
  void record_failures(row_id row) noexcept
  {
    row_mailbox const& words = recalls_->box(row);
    recall<B> const* const failed = recalls_->numbered(row, words.failed);
    if (failed == nullptr) { return; }
    record(
      *failed, row, words.failed_begin, words.failed_blocks, std::max<std::uint32_t>(rows_[to_index(row)].tries, 1));
  }

  void record(recall<B> const& r, row_id row, std::uint32_t begin, std::uint32_t blocks, std::uint32_t tries) noexcept
  {
    for (std::uint32_t i = 0; i < blocks && failures_.size() < max_failures; ++i) {
      failures_.push_back(
        {.sequence = keeper_->sequences()[row].id,
         .row = row,
         .layer = r.layer,
         .block = r.failures[begin + i].block,
         .code = status::transfer_failed,
         .tries = tries});
    }
  }

  [[nodiscard]] static bool is_unproven(row_runtime const& state, std::uint32_t number) noexcept
  {
    return number - state.unproven_first <= state.unproven_last - state.unproven_first;
  }
  /// The row's place among those of a recall whose end it has yet to learn; row_count where the recall is none of them.
  [[nodiscard]] std::uint32_t unproven_place(recall<B> const& r, row_id row) const noexcept
  {
    if (r.priority != recall_priority::demand) { return r.row_count; }
    std::uint32_t const place = recalls_->place_of(r, row);
    bool const unproven = place < r.row_count && is_unproven(rows_[to_index(row)], r.sequence[place]);
    return unproven ? place : r.row_count;
  }

  /// Starts another recall of what the row selected. It attends the whole selection once that is there: its hits may have
  /// been attended, but what has arrived since then is in no list of its own.
  [[nodiscard]] bool try_again(row_id row) noexcept
  {
    row_runtime& state = rows_[to_index(row)];
    ticket again;
    if (recalls_->take(again) != status::ok) { return false; }
    recall<B>& r = recalls_->at(again.index);
    r.layer = state.layer;
    r.row_count = 1;
    recalls_->number_row(r, 0, row);
    --recalls_->at(state.recall).users;
    state.recall = again.index;
    ++r.users;
    state.attended_hits = false;
    r.code = recalls_->bring(r, compute_);
    return r.code == status::ok;
  }

  /// Sleeps until something that a row waits for is complete, or until the time given. @return false where nothing is under way
  bool sleep(nanoseconds until) noexcept
  {
    waits_.clear();
    for (scheduler_row const& row : scheduler_rows_) {
      row_runtime const& state = rows_[to_index(row.row)];
      if (row.phase == row_phase::ready) { continue; }
      recall<B> const& r = recalls_->at(state.recall);
      recall<B> const* const other = state.behind ? recalls_->background() : nullptr;
      if (other != nullptr) {
        waits_.push_back(other->issued ? other->landed_event : other->planned_event);
        continue;
      }
      waits_.push_back(r.issued && row.phase == row_phase::in_flight ? r.landed_event : r.planned_event);
    }
    if (waits_.empty()) { return false; }
    nanoseconds const before = backend_->now();
    if (!slept_) { sleeping_since_ = before; }
    slept_ = true;
    nanoseconds const limit = sleeping_since_ + wait_limit_;
    status const woke = backend_->wait_any(waits_, std::min(limit, until));
    ++sample_->waits;
    sample_->stalled += backend_->now() - before;
    woken_ = woke == status::ok;
    if (woke == status::drain_timeout && backend_->now() < limit) { return true; }
    if (woke != status::ok) {
      for (scheduler_row const& row : scheduler_rows_) {
        if (row.phase != row_phase::ready) { fail(row.row, woke); }
      }
    }
    return true;
  }

  void fail(row_id row, status code) noexcept
  {
    leave(row);
    rows_[to_index(row)].progress = row_progress::failed;
    rows_[to_index(row)].code = code;
    lost_ = lost_ || code == status::device_lost;
  }

  B* backend_;
  stream_ref compute_;
  block_keeper<B, Replacement>* keeper_;
  driver* recalls_;
  list_arena<B>* arena_;
  step_sample* sample_;
  std::uint32_t layers_;
  std::uint32_t max_tries_;
  nanoseconds wait_limit_;
  bool slept_ = false;  ///< since the last visit was handed out
  nanoseconds sleeping_since_{0};
  LayerScheduler scheduler_;
  std::vector<row_runtime> rows_;
  std::vector<row_id> step_rows_;
  std::vector<row_id> due_;  // entered a layer, hits visit not handed out
  std::vector<scheduler_row> scheduler_rows_;
  std::vector<row_id> chosen_;
  std::vector<typename B::event_ref> waits_;
  std::vector<failure_record> failures_;
  visit handed_ = {};
  link_state link_ = {};
  link_rate rate_ = {};
  bool woken_ = false;  ///< by a landing, since the mailbox was last read
  bool lost_ = false;   // by a sticky error of the device
};

}  // namespace pulseinfer
