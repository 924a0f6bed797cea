#pragma once

/// Takes sequences off the device, brings them back, and cuts them: preemption, forks, kept prefixes, truncation.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/operation/forget_blocks.hpp>
#include <pulseinfer/sequence/saved_sequence.hpp>
#include <pulseinfer/store/free_list.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer {

/// Works between steps on rows that stand in none, and sleeps until its copies are complete: what it reports done is done.
/// Full blocks are shared with whoever holds them; a partial block is copied, so that nobody writes into another's.
template <class B, replacement Replacement>
class sequence_mover {
 public:
  using stream_ref = typename B::stream_ref;

  /// @param places saved sequences at once   @throws resource_error
  sequence_mover(
    B& backend, stream_ref compute, block_keeper<B, Replacement>& keeper, std::uint32_t places, nanoseconds wait_limit)
    : backend_{&backend},
      compute_{compute},
      keeper_{&keeper},
      wait_limit_{wait_limit},
      ready_{backend},
      copied_{backend},
      copies_{backend, stream_priority::low},
      book_{places, keeper.budget_.max_blocks, keeper.digests_.extents_for(keeper.budget_.max_blocks)},
      home_free_{places * keeper.digests_.extents_for(keeper.budget_.max_blocks)},
      home_{backend, memory_space::pinned, home_free_.size() * keeper.digests_.extent_bytes()},
      previous_{backend, memory_space::pinned, places * previous_bytes() * keeper.geometry_.layers},
      contents_{
        backend, memory_space::pinned,
        keeper.budget_.has_selected_layers ? std::uint64_t{keeper.geometry_.layers} * keeper.geometry_.head_groups *
            keeper.budget_.max_blocks * sizeof(slot_id)
                                           : 0},
      slot_marks_(keeper.pool_.total_slots(), 0)
  {
    runs_.reserve(runs_per_call);
  }

  sequence_mover(sequence_mover&&) = delete;

  /// Copies what of a row is not yet on the host, and keeps it there under `id`; the row goes on as it was.
  /// @param with_partial keep the last block although it is not full; else only full blocks are kept
  /// @param closes the row is closed next: what is kept back for it may be used
  /// @status busy: no free place; capacity_exceeded: too few host blocks; invalid_state: windowed layers no longer have what
  ///         the full blocks alone would need; transfer_failed, drain_timeout. Nothing changed in any of these cases
  template <class Mover>
  status save(row_id row, bool with_partial, bool closes, Mover& mover, saved_id& id) noexcept
  {
    if (!settle()) { return status::busy; }
    row_blocks& state = keeper_->rows_[to_index(row)];
    sequence_state const& sequence = keeper_->sequences_[row];
    if (state.offloads) {
      if (status const written = keeper_->wait_written(row, mover); written != status::ok) { return written; }
    }
    saved_sequence* const saved = book_.take(id);
    if (saved == nullptr) { return status::busy; }
    saved->tokens = with_partial ? sequence.tokens : sequence.sealed * keeper_->budget_.block_tokens;
    saved->blocks = keeper_->budget_.blocks(saved->tokens);
    saved->prompt_tokens = state.prompt_tokens;
    saved->max_tokens = sequence.max_tokens;
    saved->offloads = state.offloads;
    saved->keeps = state.keeps;
    saved->streams = state.streams;
    saved->goes_on = with_partial;
    status result = windows_hold(row, saved->tokens) ? status::ok : status::invalid_state;
    std::uint32_t const lent = closes ? state.host_reserved : 0;
    static_cast<void>(keeper_->store_.unreserve(lent));
    state.host_reserved -= lent;
    std::uint32_t held = 0;
    while (result == status::ok && held < saved->blocks) {
      result = name_block(row, *saved, held);
      held += result == status::ok ? 1U : 0U;
    }
    if (result == status::ok) { result = name_digests(row, *saved); }
    if (result == status::ok) { result = copy_out(row, *saved, mover); }
    if (result != status::ok) {
      left_ = {.row = row, .saved = saved, .held = held, .lent = lent};
      static_cast<void>(settle());
    }
    return result;
  }

  /// Begins a sequence in a free row from what is saved. `saved` stays.
  /// @status stale_ticket; what block_keeper::open says; transfer_failed, drain_timeout. The row is closed in these cases
  template <class Mover>
  status restore(
    saved_id id, row_id row, std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept,
    Mover& mover) noexcept
  {
    if (!settle()) { return status::busy; }
    saved_sequence* const saved = book_.find(id);
    if (saved == nullptr) { return status::stale_ticket; }
    if (saved->tokens > max_tokens) { return status::capacity_exceeded; }
    std::uint32_t const shared = shared_full_blocks(*saved, max_tokens);
    status const opened = keeper_->open(row, prompt_tokens, max_tokens, kept, shared);
    if (opened != status::ok) { return opened; }
    status result = take_over(row, *saved);
    if (result == status::ok) { result = keeper_->flush(); }
    if (result == status::ok) { result = copy_in(row, *saved, mover); }
    if (result != status::ok) {
      left_ = {.row = row, .source = saved, .closes = true};
      static_cast<void>(settle());
    }
    return result;
  }

  /// Cuts a row back to its first `tokens` tokens. A block that was full and is partial now becomes open again: its bytes
  /// come from the host where no slot of the host's keeping holds it.
  /// @status out_of_range: more than the row has; invalid_state: windowed layers no longer have what the shorter sequence
  ///         reads; busy: shared blocks must be written anew and too few host blocks are free; transfer_failed,
  ///         drain_timeout. Nothing of the sequence changed but in the last two
  template <class Mover>
  status cut(row_id row, std::uint32_t tokens, Mover& mover) noexcept
  {
    if (!settle()) { return status::busy; }
    row_blocks& state = keeper_->rows_[to_index(row)];
    sequence_state& sequence = keeper_->sequences_[row];
    slot_budget const& budget = keeper_->budget_;
    if (tokens > sequence.tokens) { return status::out_of_range; }
    if (tokens == sequence.tokens) { return status::ok; }
    if (status const told = keeper_->flush(); told != status::ok) { return told; }
    std::uint32_t const sealed = tokens / budget.block_tokens;
    std::uint32_t const blocks = budget.blocks(tokens);
    if (!windows_hold(row, tokens)) { return status::invalid_state; }
    if (state.offloads) {
      if (status const written = keeper_->wait_written(row, mover); written != status::ok) { return written; }
      if (shared_blocks(row, sealed) > keeper_->store_.available()) { return status::busy; }
    }
    bool const reopens = blocks > sealed && sealed < sequence.sealed;
    host_block_id const source = reopens ? sequence.host_blocks[sealed] : none<host_block_id>;
    bool fetched = false;
    if (state.mode == row_mode::sparse_offloaded) {
      if (status const quiet = keeper_->finish_exchanges(row); quiet != status::ok) { return quiet; }
      for (std::uint32_t i = 0; i < budget.ring; ++i) {
        ring_place& place = keeper_->leases_.ring(row, i);
        if (is_none(place.block) || to_index(place.block) < sealed) { continue; }
        bool const stays = blocks > sealed && to_index(place.block) == sealed;
        place = stays ? ring_place{.state = ring_state::open, .block = place.block} : ring_place{};
      }
      if (reopens && keeper_->ring_of(row, sealed) == budget.ring) {
        if (status const spare = keeper_->free_ring_place(row, mover); spare != status::ok) { return spare; }
        keeper_->leases_.ring(row, keeper_->leases_.find_ring(row, ring_state::spare)) = {
          .state = ring_state::open, .block = static_cast<block_id>(sealed)};
        fetched = true;
      }
    }
    if (reopens && keeper_->prompt_streams(row) && sealed < state.left) {
      fetched = true;
      if (!place_selected(row, sealed)) { return status::capacity_exceeded; }
    }
    status result = keeper_->flush();
    if (result == status::ok) {
      result = backend_->launch(
        compute_,
        forget_blocks{
          .row = row,
          .residency = keeper_->books_.residency(),
          .pool = keeper_->pool_.ref(),
          .selection = keeper_->books_.selection(),
          .host_blocks = keeper_->books_.host_blocks(),
          .first = sealed,
          .last = state.opened,
          .head_groups = keeper_->geometry_.head_groups});
    }
    if (result == status::ok && fetched) {
      result = fetch_block(row, sealed, source, mover);
      // The block that is still read stays: forget gives it back once more than it was taken.
      if (pending_ && keeper_->store_.share(source) == status::ok) { left_ = {.row = row, .read = source}; }
    }
    forget(row, sealed, blocks);
    sequence.tokens = tokens;
    sequence.sealed = sealed;
    state.opened = blocks;
    state.sent = std::min(state.sent, sealed);
    state.written = std::min(state.written, sealed);
    state.known = std::min(state.known, sealed);
    state.dirty = std::min(state.dirty, sealed);
    for (std::uint32_t l = 0; l < keeper_->geometry_.layers; ++l) {
      // Blocks that open again leave the windows again.
      keeper_->window_begin(row, l) = std::min(keeper_->window_begin(row, l), blocks);
    }
    // Blocks that open again may get other slots: the tables must not take them for those that they list.
    keeper_->list_blocks(row, std::min(blocks, state.listed));
    state.left = std::min(state.left, sealed);
    if (blocks > sealed) { tell_reopened(row, sealed); }
    return result == status::ok ? keeper_->flush() : result;
  }

  /// Brings every block of a row that offloads into slots: from then on it selects and recalls nothing. No recall of the row
  /// is under way.
  /// @status invalid_state: the row keeps its blocks already, or never offloads; capacity_exceeded: too few slots;
  ///         transfer_failed, drain_timeout. The row is unchanged in these cases
  template <class Mover>
  status promote(row_id row, Mover& mover) noexcept
  {
    if (!settle()) { return status::busy; }
    row_blocks& state = keeper_->rows_[to_index(row)];
    if (state.keeps || !state.offloads || keeper_->prompt_streams(row)) { return status::invalid_state; }
    if (state.mode == row_mode::dense_resident) { return keeper_->keep_all(row); }
    if (!keeper_->all_slots_fit(row)) { return status::capacity_exceeded; }
    if (status const written = keeper_->wait_written(row, mover); written != status::ok) { return written; }
    keeper_->tell_written(row);
    if (status const quiet = keeper_->finish_exchanges(row); quiet != status::ok) { return quiet; }
    if (status const flushed = keeper_->flush(); flushed != status::ok) { return flushed; }
    if (status const read = read_contents(row, mover); read != status::ok) { return read; }
    status result = begin_copies();
    for_selected(row, [&](layer_id layer, lane_id lane) { fill_lane(result, row, layer, lane, mover); });
    result = end_copies(result, mover, copy_direction::host_to_device);
    if (result != status::ok) {
      left_ = {.row = row, .empties = true};
      static_cast<void>(settle());
      return result;
    }
    for_selected(row, [&](layer_id layer, lane_id lane) { take_lane(row, layer, lane); });
    for (std::uint32_t i = 0; i < keeper_->budget_.ring; ++i) { keeper_->leases_.ring(row, i) = ring_place{}; }
    state.mode = row_mode::sparse_resident;
    state.keeps = true;
    state.streams = false;
    keeper_->keep_back(row, row_slots::all);
    return keeper_->flush();
  }

  /// Host blocks that a row restored from `saved` shares and so needs none of its own for.
  [[nodiscard]] std::uint32_t shared_full_blocks(saved_sequence const& saved, std::uint32_t max_tokens) const
  {
    return keeper_->budget_.offloads(max_tokens) ? saved.tokens / keeper_->budget_.block_tokens : 0;
  }

  [[nodiscard]] saved_sequence const* find(saved_id id) noexcept { return book_.find(id); }

  /// Gives a saved sequence's references back. @status stale_ticket
  status drop(saved_id id) noexcept
  {
    saved_sequence* const saved = book_.find(id);
    if (saved == nullptr) { return status::stale_ticket; }
    if (!settle() && left_.source == saved) {
      left_.drops_source = true;
    } else {
      release(*saved, saved->blocks);
    }
    return status::ok;
  }

  [[nodiscard]] std::uint32_t saved_sequences() const noexcept { return book_.used(); }

  /// Whether copies that were given up at the wait limit still name something of the row. It takes part in nothing then.
  [[nodiscard]] bool names(row_id row) noexcept { return !settle() && left_.row == row; }

  /// Whether copies that were given up at the wait limit are still under way.
  [[nodiscard]] bool flies() noexcept { return !settle(); }

  /// Sleeps until copies that were given up are complete. @status drain_timeout
  status drain(nanoseconds deadline) noexcept
  {
    if (settle()) { return status::ok; }
    typename B::event_ref const event = copied_.get();
    status const waited = backend_->wait_any({&event, 1}, deadline);
    static_cast<void>(settle());
    return waited;
  }

  /// Recounts who holds the host blocks and the places of digests. @return what is wrong, empty where nothing is
  [[nodiscard]] std::string audit() const
  {
    std::vector<std::uint32_t> holders(keeper_->store_.blocks(), 0);
    std::uint32_t reserved = 0;
    for (std::uint32_t r = 0; r < keeper_->sequences_.rows(); ++r) {
      sequence_state const& sequence = keeper_->sequences_[static_cast<row_id>(r)];
      if (!sequence.open()) { continue; }
      reserved += keeper_->rows_[r].host_reserved;
      for (host_block_id const block : sequence.host_blocks) {
        if (!is_none(block)) { ++holders[to_index(block)]; }
      }
    }
    std::uint32_t homes = 0;
    for (saved_sequence const& saved : book_.places()) {
      if (!saved.used) { continue; }
      homes += saved.digest_count;
      for (std::uint32_t b = 0; b < saved.blocks; ++b) { ++holders[to_index(saved.host_blocks[b])]; }
      for (std::uint32_t i = 0; i < saved.digest_count; ++i) {
        if (home_free_.is_free(static_cast<home_id>(saved.digest_places[i]))) {
          return "saved sequence " + std::to_string(saved.place) + " has digests in place " +
            std::to_string(saved.digest_places[i]) + ", which is free";
        }
      }
    }
    for (std::uint32_t b = 0; b < keeper_->store_.blocks(); ++b) {
      std::uint32_t const references = keeper_->store_.references(static_cast<host_block_id>(b));
      if (references != holders[b]) {
        return "host block " + std::to_string(b) + " has " + std::to_string(references) + " references, " +
          std::to_string(holders[b]) + " sequences name it";
      }
    }
    if (reserved != keeper_->store_.reserved()) {
      return std::to_string(keeper_->store_.reserved()) + " host blocks are reserved, rows keep " +
        std::to_string(reserved) + " back";
    }
    if (homes != home_free_.size() - home_free_.free_count()) {
      return std::to_string(home_free_.size() - home_free_.free_count()) +
        " places of digests are taken, saved sequences have " + std::to_string(homes);
    }
    return {};
  }

 private:
  enum class home_id : std::int32_t {};  // a place for one digest extent on the host

  static constexpr std::uint32_t runs_per_call = 256;

  /// What is given back once copies that did not end in time are complete: a save's blocks, a row that was to be restored, the
  /// slots of a promotion, the block that a cut read again.
  struct unfinished {
    row_id row = none<row_id>;
    saved_sequence* saved = nullptr;
    std::uint32_t held = 0;
    std::uint32_t lent = 0;
    saved_sequence* source = nullptr;
    bool closes = false;
    bool drops_source = false;
    bool empties = false;
    host_block_id read = none<host_block_id>;
  };

  /// Gives back what a failed call has left, if no copy names it any more. @return false: copies are still under way
  bool settle() noexcept
  {
    if (pending_ && backend_->done(copied_.get()) == event_state::pending) { return false; }
    pending_ = false;
    unfinished const left = std::exchange(left_, unfinished{});
    if (is_none(left.row)) { return true; }
    if (left.saved != nullptr) {
      release(*left.saved, left.held);
      static_cast<void>(keeper_->store_.reserve(left.lent));
      keeper_->rows_[to_index(left.row)].host_reserved += left.lent;
    }
    if (left.empties) {
      for_selected(left.row, [&](layer_id layer, lane_id lane) { empty_lane(left.row, layer, lane); });
    }
    if (left.closes) { keeper_->close(left.row); }
    if (left.drops_source) { release(*left.source, left.source->blocks); }
    if (!is_none(left.read)) { static_cast<void>(keeper_->store_.release(left.read)); }
    return true;
  }

  // -- promotion

  template <class F>
  void for_selected(row_id row, F f) noexcept
  {
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (keeper_->kind_of(layer) == layer_kind::selected) { f(layer, lane); }
    });
  }

  /// The device's word on which slot holds each block of a lane, as read_contents left it.
  [[nodiscard]] slot_id* contents(layer_id layer, lane_id lane) const
  {
    std::uint64_t const group = to_index(lane) % keeper_->geometry_.head_groups;
    std::uint64_t const place = to_index(layer) * keeper_->geometry_.head_groups + group;
    return contents_.template as<slot_id>() + place * keeper_->budget_.max_blocks;
  }

  template <class Mover>
  status read_contents(row_id row, Mover& mover) noexcept
  {
    status result = begin_copies();
    std::uint64_t const bytes = keeper_->rows_[to_index(row)].opened * sizeof(slot_id);
    for_selected(row, [&](layer_id layer, lane_id lane) {
      auto* const source = reinterpret_cast<std::byte*>(keeper_->books_.residency().slots_of_lane(layer, lane));
      auto* const target = reinterpret_cast<std::byte*>(contents(layer, lane));
      add(result, mover, copy_direction::device_to_host, {.target = target, .source = source, .bytes = bytes});
    });
    return end_copies(result, mover, copy_direction::device_to_host);
  }

  /// Calls f(slot) for each slot of a sparse lane: its lease and its ring.
  template <class F>
  void for_slots(layer_id layer, lane_id lane, F f) noexcept
  {
    lease_book& leases = keeper_->leases_;
    for (std::uint32_t i = 0; i < leases.lease_count(layer, lane); ++i) { f(leases.lease(layer, lane)[i]); }
    for (std::uint32_t i = 0; i < keeper_->budget_.ring; ++i) { f(leases.ring_slot(layer, lane, i)); }
  }

  [[nodiscard]] std::uint8_t& mark(layer_id layer, slot_id slot)
  {
    return slot_marks_[keeper_->pool_.ref().word(layer, slot)];
  }

  /// Chooses a slot for every block of a lane: where it is, or a slot of the lane without a block, or a free one; and
  /// enqueues the copies into the latter two.
  template <class Mover>
  void fill_lane(status& result, row_id row, layer_id layer, lane_id lane, Mover& mover) noexcept
  {
    std::uint32_t const opened = keeper_->rows_[to_index(row)].opened;
    slot_id const* const held = contents(layer, lane);
    for (std::uint32_t b = 0; b < opened; ++b) {
      keeper_->leases_.placed(layer, lane, b) = held[b];
      if (!is_none(held[b])) { mark(layer, held[b]) = 1; }
    }
    std::uint32_t next = 0;
    auto const next_missing = [&] {
      while (next < opened && !is_none(held[next])) { ++next; }
      return next < opened;
    };
    auto const fill = [&](slot_id slot) {
      keeper_->leases_.placed(layer, lane, next) = slot;
      add(
        result, mover, copy_direction::host_to_device,
        {.target = keeper_->pool_.ref().address(layer, slot),
         .source = host_address(layer, lane, keeper_->sequences_[row].host_blocks[next]),
         .bytes = keeper_->layout_.block_bytes});
      ++next;
    };
    for_slots(layer, lane, [&](slot_id slot) {
      if (mark(layer, slot) == 0 && next_missing()) { fill(slot); }
    });
    while (result == status::ok && next_missing()) {
      slot_id const slot = keeper_->take_slot(layer);
      if (is_none(slot)) {
        result = status::capacity_exceeded;
      } else {
        fill(slot);
      }
    }
    for (std::uint32_t b = 0; b < opened; ++b) {
      if (!is_none(held[b])) { mark(layer, held[b]) = 0; }
    }
  }

  /// The lane's blocks are where `placed` says: its lease ends, slots that hold nothing are free.
  void take_lane(row_id row, layer_id layer, lane_id lane) noexcept
  {
    std::uint32_t const opened = keeper_->rows_[to_index(row)].opened;
    slot_id const* const held = contents(layer, lane);
    leased_slot const* const ended = keeper_->staging_.lease(compute_, lease_change{.layer = layer, .lane = lane});
    if (ended == nullptr) { return; }  // the staging ring keeps the failure, and the flush returns it
    for (std::uint32_t b = 0; b < opened; ++b) {
      slot_id const slot = keeper_->leases_.placed(layer, lane, b);
      mark(layer, slot) = 1;
      if (is_none(held[b]) || b + keeper_->budget_.ring >= opened) { keeper_->tell_placed(row, layer, lane, b, slot); }
    }
    for_slots(layer, lane, [&](slot_id& slot) {
      if (mark(layer, slot) == 0) { keeper_->free_slot(layer, slot); }
      slot = none<slot_id>;
    });
    keeper_->leases_.lease_count(layer, lane) = 0;
    for (std::uint32_t b = 0; b < opened; ++b) { mark(layer, keeper_->leases_.placed(layer, lane, b)) = 0; }
  }

  /// Takes back what fill_lane has given: the lane stays as it was.
  void empty_lane(row_id row, layer_id layer, lane_id lane) noexcept
  {
    for_slots(layer, lane, [&](slot_id slot) { mark(layer, slot) = 1; });
    for (std::uint32_t b = 0; b < keeper_->rows_[to_index(row)].opened; ++b) {
      slot_id& slot = keeper_->leases_.placed(layer, lane, b);
      if (!is_none(slot) && mark(layer, slot) == 0) { keeper_->free_slot(layer, slot); }
      slot = none<slot_id>;
    }
    for_slots(layer, lane, [&](slot_id slot) { mark(layer, slot) = 0; });
  }

  /// Whether windowed layers still have every block that a sequence of `tokens` tokens would read next.
  [[nodiscard]] bool windows_hold(row_id row, std::uint32_t tokens) noexcept
  {
    bool hold = true;
    for_windows(row, tokens, [&](layer_id layer, lane_id lane, std::uint32_t block) {
      hold = hold && !is_none(keeper_->leases_.placed(layer, lane, block));
    });
    return hold;
  }

  template <class F>
  void for_windows(row_id row, std::uint32_t tokens, F f) noexcept
  {
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (keeper_->kind_of(layer) != layer_kind::windowed) { return; }
      for (std::uint32_t b = 0; b < keeper_->budget_.blocks(tokens); ++b) {
        if (in_window(layer, tokens, b)) { f(layer, lane, b); }
      }
    });
  }

  [[nodiscard]] bool in_window(layer_id layer, std::uint32_t tokens, std::uint32_t block) const
  {
    layer_group const group = keeper_->geometry_.group_of(layer);
    std::uint32_t const block_tokens = keeper_->geometry_.block_tokens;
    return block < sink_blocks(group.sink_tokens, block_tokens) ||
      block >= first_window_block(tokens + 1, 1, group.window_tokens, block_tokens);
  }

  /// Shares a sealed block that is on the host, or takes a host block for one that is not.
  status name_block(row_id row, saved_sequence& saved, std::uint32_t block) noexcept
  {
    sequence_state const& sequence = keeper_->sequences_[row];
    host_block_id const known = sequence.host_blocks[block];
    if (on_host(row, block)) {
      saved.host_blocks[block] = known;
      return keeper_->store_.share(known);
    }
    host_block_id const before = block == 0 ? none<host_block_id> : saved.host_blocks[block - 1];
    host_block_id const hint = is_none(before) ? before : static_cast<host_block_id>(to_number(before) + 1);
    saved.host_blocks[block] = keeper_->store_.acquire(hint, saved.blocks - block);
    return is_none(saved.host_blocks[block]) ? status::capacity_exceeded : status::ok;
  }

  [[nodiscard]] bool on_host(row_id row, std::uint32_t block) const
  {
    row_blocks const& state = keeper_->rows_[to_index(row)];
    return block < state.written && block < keeper_->sequences_[row].sealed;
  }

  status name_digests(row_id row, saved_sequence& saved) noexcept
  {
    if (!saved.offloads) { return status::ok; }
    std::uint32_t const wanted = keeper_->digests_.extents_for(saved.blocks);
    if (wanted > home_free_.free_count() || wanted > keeper_->digests_.extents(row).size()) {
      return wanted > home_free_.free_count() ? status::busy : status::invalid_state;
    }
    for (; saved.digest_count < wanted; ++saved.digest_count) {
      saved.digest_places[saved.digest_count] = to_number(home_free_.acquire());
    }
    return status::ok;
  }

  [[nodiscard]] slot_id slot_of(row_id row, layer_id layer, lane_id lane, std::uint32_t block) noexcept
  {
    if (!keeper_->in_lease(keeper_->rows_[to_index(row)], layer)) {
      return keeper_->leases_.placed(layer, lane, block);
    }
    for (std::uint32_t i = 0; i < keeper_->budget_.ring; ++i) {
      if (keeper_->leases_.ring(row, i).block == static_cast<block_id>(block)) {
        return keeper_->leases_.ring_slot(layer, lane, i);
      }
    }
    return none<slot_id>;
  }

  template <class Mover>
  status copy_out(row_id row, saved_sequence const& saved, Mover& mover) noexcept
  {
    status result = begin_copies();
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      bool const selected = keeper_->kind_of(layer) == layer_kind::selected;
      bool const windowed = keeper_->kind_of(layer) == layer_kind::windowed;
      for (std::uint32_t b = 0; b < saved.blocks; ++b) {
        if ((selected && on_host(row, b)) || (windowed && !in_window(layer, saved.tokens, b))) { continue; }
        add(
          result, mover, copy_direction::device_to_host,
          {.target = host_address(layer, lane, saved.host_blocks[b]),
           .source = keeper_->pool_.ref().address(layer, slot_of(row, layer, lane, b)),
           .bytes = keeper_->layout_.block_bytes});
      }
    });
    digest_store_ref const digests = keeper_->digests_.ref();
    for (std::uint32_t i = 0; i < saved.digest_count; ++i) {
      std::uint64_t const extent = to_index(keeper_->digests_.extents(row)[i]);
      add(
        result, mover, copy_direction::device_to_host,
        {.target = home_address(saved, i),
         .source = digests.base + extent * digests.extent_bytes,
         .bytes = digests.extent_bytes});
    }
    if (saved.offloads && saved.goes_on) {
      for (std::uint32_t l = 0; l < keeper_->geometry_.layers; ++l) {
        add(
          result, mover, copy_direction::device_to_host,
          {.target = previous_home(saved, l), .source = previous_of(row, l), .bytes = previous_bytes()});
      }
    }
    return end_copies(result, mover, copy_direction::device_to_host);
  }

  /// Host books of a restored row, and what the device must know before the copies.
  status take_over(row_id row, saved_sequence const& saved) noexcept
  {
    row_blocks& state = keeper_->rows_[to_index(row)];
    sequence_state& sequence = keeper_->sequences_[row];
    slot_budget const& budget = keeper_->budget_;
    sequence.tokens = saved.tokens;
    sequence.sealed = saved.tokens / budget.block_tokens;
    if (state.offloads) {
      for (std::uint32_t b = 0; b < sequence.sealed; ++b) {
        if (status const shared = keeper_->store_.share(saved.host_blocks[b]); shared != status::ok) { return shared; }
        sequence.host_blocks[b] = saved.host_blocks[b];
      }
      state.sent = state.written = state.dirty = sequence.sealed;
      if (status const covered = keeper_->cover_digests(row, saved.blocks); covered != status::ok) { return covered; }
    }
    bool const selects =
      state.offloads && saved.tokens >= state.prompt_tokens && (state.streams || saved.tokens >= budget.dense_tokens);
    if (selects && state.keeps) {
      state.mode = row_mode::sparse_resident;
    } else if (selects) {
      if (status const leased = keeper_->lease_empty(row, sequence.sealed, saved.blocks); leased != status::ok) {
        return leased;
      }
    }
    status result = status::ok;
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      bool const windowed = keeper_->kind_of(layer) == layer_kind::windowed;
      bool const selected = keeper_->kind_of(layer) == layer_kind::selected;
      bool const on_host_alone = selected && (keeper_->in_lease(state, layer) || keeper_->prompt_streams(row));
      std::uint32_t const from = on_host_alone ? sequence.sealed : 0;
      for (std::uint32_t b = from; b < saved.blocks && result == status::ok; ++b) {
        if (windowed && !in_window(layer, saved.tokens, b)) { continue; }
        if (!keeper_->place_block(row, layer, lane, b)) { result = status::capacity_exceeded; }
      }
    });
    for (std::uint32_t l = 0; l < keeper_->geometry_.layers; ++l) {
      layer_group const group = keeper_->geometry_.group_of(static_cast<layer_id>(l));
      if (group.kind != layer_kind::windowed) { continue; }
      keeper_->window_begin(row, l) =
        first_window_block(saved.tokens + 1, 1, group.window_tokens, keeper_->geometry_.block_tokens);
    }
    state.opened = saved.blocks;
    state.left = keeper_->prompt_streams(row) ? sequence.sealed : 0;
    return result;
  }

  template <class Mover>
  status copy_in(row_id row, saved_sequence const& saved, Mover& mover) noexcept
  {
    status result = begin_copies();
    row_blocks const& state = keeper_->rows_[to_index(row)];
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      std::uint32_t const from = keeper_->in_lease(state, layer) ? keeper_->sequences_[row].sealed : 0;
      for (std::uint32_t b = from; b < saved.blocks; ++b) {
        slot_id const slot = slot_of(row, layer, lane, b);
        if (is_none(slot)) { continue; }
        add(
          result, mover, copy_direction::host_to_device,
          {.target = keeper_->pool_.ref().address(layer, slot),
           .source = host_address(layer, lane, saved.host_blocks[b]),
           .bytes = keeper_->layout_.block_bytes});
      }
    });
    if (state.offloads) {
      digest_store_ref const digests = keeper_->digests_.ref();
      for (std::uint32_t i = 0; i < saved.digest_count; ++i) {
        std::uint64_t const extent = to_index(keeper_->digests_.extents(row)[i]);
        add(
          result, mover, copy_direction::host_to_device,
          {.target = digests.base + extent * digests.extent_bytes,
           .source = home_address(saved, i),
           .bytes = digests.extent_bytes});
      }
    }
    if (state.offloads && saved.offloads && saved.goes_on) {
      for (std::uint32_t l = 0; l < keeper_->geometry_.layers; ++l) {
        add(
          result, mover, copy_direction::host_to_device,
          {.target = previous_of(row, l), .source = previous_home(saved, l), .bytes = previous_bytes()});
      }
    }
    return end_copies(result, mover, copy_direction::host_to_device);
  }

  /// Blocks from `first` on that others hold too: their host blocks do not become free with this row's reference.
  [[nodiscard]] std::uint32_t shared_blocks(row_id row, std::uint32_t first) const
  {
    sequence_state const& sequence = keeper_->sequences_[row];
    std::uint32_t shared = 0;
    for (std::uint32_t b = first; b < sequence.sealed; ++b) {
      bool const held = !is_none(sequence.host_blocks[b]) && keeper_->store_.references(sequence.host_blocks[b]) > 1;
      shared += held ? 1U : 0U;
    }
    return shared;
  }

  /// Gives a block of a prompt that streams its slots back in selected layers. @return false: slots are lacking
  [[nodiscard]] bool place_selected(row_id row, std::uint32_t block) noexcept
  {
    bool placed = true;
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (keeper_->kind_of(layer) != layer_kind::selected) { return; }
      placed = placed && keeper_->place_block(row, layer, lane, block);
    });
    return placed;
  }

  /// Brings a block from the host into the slots that were opened for it.
  template <class Mover>
  status fetch_block(row_id row, std::uint32_t block, host_block_id source, Mover& mover) noexcept
  {
    status result = begin_copies();
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (keeper_->kind_of(layer) != layer_kind::selected) { return; }
      add(
        result, mover, copy_direction::host_to_device,
        {.target = keeper_->pool_.ref().address(layer, slot_of(row, layer, lane, block)),
         .source = host_address(layer, lane, source),
         .bytes = keeper_->layout_.block_bytes});
    });
    return end_copies(result, mover, copy_direction::host_to_device);
  }

  /// Host books of blocks that are cut off: slots that the host placed, and host blocks from `sealed` on.
  void forget(row_id row, std::uint32_t sealed, std::uint32_t blocks) noexcept
  {
    row_blocks& state = keeper_->rows_[to_index(row)];
    sequence_state& sequence = keeper_->sequences_[row];
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (keeper_->in_lease(state, layer)) { return; }
      for (std::uint32_t b = blocks; b < state.opened; ++b) { keeper_->free_placed(layer, lane, b); }
    });
    for (std::uint32_t b = sealed; b < sequence.sealed; ++b) {
      if (is_none(sequence.host_blocks[b])) { continue; }
      static_cast<void>(keeper_->store_.release(sequence.host_blocks[b]));
      sequence.host_blocks[b] = none<host_block_id>;
      if (state.offloads && keeper_->store_.reserve(1) == status::ok) { ++state.host_reserved; }
    }
  }

  /// The device learns where the block that is open again lies.
  void tell_reopened(row_id row, std::uint32_t block) noexcept
  {
    keeper_->for_lanes(row, [&](layer_id layer, lane_id lane) {
      slot_id const slot = slot_of(row, layer, lane, block);
      if (!is_none(slot)) { keeper_->tell_placed(row, layer, lane, block, slot); }
    });
  }

  [[nodiscard]] std::byte* host_address(layer_id layer, lane_id lane, host_block_id block) const
  {
    auto const group = static_cast<std::uint32_t>(to_index(lane) % keeper_->geometry_.head_groups);
    return keeper_->store_.ref().address(layer, group, block);
  }
  [[nodiscard]] std::byte* home_address(saved_sequence const& saved, std::uint32_t i) const
  {
    return home_.data() + static_cast<std::uint64_t>(saved.digest_places[i]) * keeper_->digests_.extent_bytes();
  }

  /// Bytes of one row's previous selection in one layer: its lanes lie side by side.
  [[nodiscard]] std::uint64_t previous_bytes() const
  {
    return std::uint64_t{keeper_->geometry_.head_groups} * keeper_->books_.selection().previous_words * 4;
  }
  [[nodiscard]] std::byte* previous_of(row_id row, std::uint32_t layer) const
  {
    lane_id const first = lane_of(row, 0, keeper_->geometry_.head_groups);
    return reinterpret_cast<std::byte*>(keeper_->books_.selection().previous_of(static_cast<layer_id>(layer), first));
  }
  [[nodiscard]] std::byte* previous_home(saved_sequence const& saved, std::uint32_t layer) const
  {
    return previous_.data() + (std::uint64_t{saved.place} * keeper_->geometry_.layers + layer) * previous_bytes();
  }

  /// Copies come after everything that the compute stream has been given: appends to be saved, reads of slots to be filled.
  status begin_copies() noexcept
  {
    runs_.clear();
    status const recorded = backend_->record(compute_, ready_.get());
    return recorded == status::ok ? backend_->wait(copies_.get(), ready_.get()) : recorded;
  }

  template <class Mover>
  void add(status& result, Mover& mover, copy_direction direction, copy_run const& run) noexcept
  {
    if (result != status::ok) { return; }
    if (runs_.size() == runs_per_call) { result = send(mover, direction); }
    runs_.push_back(run);
  }

  template <class Mover>
  status send(Mover& mover, copy_direction direction) noexcept
  {
    if (runs_.empty()) { return status::ok; }
    copy_list const list{
      .runs = runs_.data(), .count = static_cast<std::uint32_t>(runs_.size()), .direction = direction};
    status const sent = mover.move_async(copies_.get(), list);
    runs_.clear();
    return sent;
  }

  template <class Mover>
  status end_copies(status result, Mover& mover, copy_direction direction) noexcept
  {
    if (result == status::ok) { result = send(mover, direction); }
    status const recorded = backend_->record(copies_.get(), copied_.get());
    if (recorded != status::ok) { return result == status::ok ? recorded : result; }
    typename B::event_ref const event = copied_.get();
    status const waited = backend_->wait_any({&event, 1}, backend_->now() + wait_limit_);
    if (result == status::ok) { result = waited; }
    event_state const state = backend_->done(event);
    pending_ = state == event_state::pending;
    bool const failed = state == event_state::failed;
    return result == status::ok && failed ? status::transfer_failed : result;
  }

  void release(saved_sequence& saved, std::uint32_t blocks) noexcept
  {
    for (std::uint32_t b = 0; b < blocks; ++b) { static_cast<void>(keeper_->store_.release(saved.host_blocks[b])); }
    for (std::uint32_t i = 0; i < saved.digest_count; ++i) {
      static_cast<void>(home_free_.release(static_cast<home_id>(saved.digest_places[i])));
    }
    book_.give_back(saved);
  }

  B* backend_;
  stream_ref compute_;
  block_keeper<B, Replacement>* keeper_;
  nanoseconds wait_limit_;
  detail::owned_event<B> ready_;
  detail::owned_event<B> copied_;
  detail::owned_stream<B> copies_;
  saved_book book_;
  free_list<home_id> home_free_;
  slab<B> home_;      // [places * extents of the longest row, extent_bytes] digests of saved sequences
  slab<B> previous_;  // [places, layers, head_groups, previous_words] the selections that the next ones favour
  slab<B> contents_;  // [layers, head_groups, max_blocks] slots of the blocks of a row that is being promoted
  std::vector<std::uint8_t> slot_marks_;  // [slot words] 0 between calls
  std::vector<copy_run> runs_;
  unfinished left_ = {};
  bool pending_ = false;  // the last copies did not end within the wait limit
};

}  // namespace pulseinfer
