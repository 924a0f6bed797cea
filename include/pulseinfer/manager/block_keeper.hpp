#pragma once

/// Keeps each row's blocks: where they open, when they go to the host, and which slots a row has.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/change_staging.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/slot_budget.hpp>
#include <pulseinfer/manager/write_back_queue.hpp>
#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/reset_row.hpp>
#include <pulseinfer/residency/device_books.hpp>
#include <pulseinfer/residency/lease_book.hpp>
#include <pulseinfer/sequence/sequence_book.hpp>
#include <pulseinfer/store/digest_store.hpp>
#include <pulseinfer/store/host_store.hpp>
#include <pulseinfer/store/set_up_work.hpp>
#include <pulseinfer/store/slot_pool.hpp>
#include <pulseinfer/view/step_sample.hpp>
#include <pulseinfer/view/table.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// Slots that are kept back for a row in its selected layers.
enum class row_slots : std::uint8_t {
  prompt,  ///< every block of the prompt, or of a sequence that never selects
  step,    ///< the blocks that one step of a prompt opens, or a lease where that is more: the prompt streams in
  lease,   ///< those of a decoding row that offloads
  all      ///< every block of the longest that the sequence may become
};

/// What the keeper knows of a row beside its sequence.
struct row_blocks {
  row_mode mode = row_mode::idle;
  row_slots slots = row_slots::prompt;
  bool keeps = false;          ///< every block stays in a slot also once the row selects
  bool hurries = false;        ///< its blocks are to be written although they stay resident
  bool streams = false;        ///< its prompt comes in without staying resident
  bool offloads = false;       ///< the row will leave blocks on the host alone once it is long enough
  bool placed_freely = false;  ///< admission may say whether the row offloads
  bool warm = false;           ///< warm_up has chosen the blocks that stay
  std::uint32_t prompt_tokens = 0;
  std::uint32_t opened = 0;         ///< blocks [0, opened) have, or had, a slot
  std::uint32_t listed = 0;         ///< length of the row's tables where every block is resident
  std::uint32_t left = 0;           ///< blocks [0, left) have left the slots of selected layers: the prompt streams in
  std::uint32_t step_listed = 0;    ///< length of the row's tables in those layers then
  std::uint32_t sent = 0;           ///< blocks [0, sent) have a write-back sent or complete
  std::uint32_t written = 0;        ///< blocks [0, written) are on the host
  std::uint32_t known = 0;          ///< blocks [0, known): the device knows their host block
  std::uint32_t dirty = 0;          ///< blocks [0, dirty): the device knows that they are sealed
  std::uint32_t host_reserved = 0;  ///< host blocks still kept back for the row
  std::uint32_t flying = 0;         ///< blocks whose write-back is under way
  std::uint32_t write_tries = 0;    ///< times that write-backs failed since one last arrived
  bool refused = false;             ///< a write-back failed; those behind it do not count, and no more are sent yet
};

template <class B, replacement Replacement>
class sequence_mover;

/// The host's half of residency, one row at a time. Everything on the device changes in the order of the stream given.
template <class B, replacement Replacement>
class block_keeper {
 public:
  using stream_ref = typename B::stream_ref;

  block_keeper(
    B& backend, stream_ref compute, kv_geometry const& geometry, block_layout const& layout,
    manager_options const& options, slot_budget const& budget, std::vector<std::uint64_t> const& digest_bytes,
    Replacement policy)
    : backend_{&backend},
      compute_{compute},
      geometry_{geometry},
      layout_{layout},
      budget_{budget},
      wait_limit_{options.wait_limit},
      low_slots_{options.write_back_below},
      pool_{backend, geometry.layers, layout, pool_options(geometry, options, budget)},
      store_{backend, geometry.layers, geometry.head_groups, layout, store_options(options, budget)},
      digests_{
        backend, digest_bytes,
        digest_store_options{
          .max_rows = options.max_rows, .max_blocks = budget.max_blocks, .extents = options.digest_extents}},
      books_{
        backend,
        book_sizes{
          .layers = geometry.layers,
          .rows = options.max_rows,
          .head_groups = geometry.head_groups,
          .max_blocks = budget.max_blocks,
          .max_selected = budget.max_selected,
          .max_lease = std::max(budget.max_lease, 1U),
          .ring = budget.ring,
          .slot_words = pool_.total_slots(),
          .wants = options.deferred_share > 0.0F || options.near_share > 0.0F,
          .owes = options.deferred_share > 0.0F}},
      leases_{
        geometry.layers, options.max_rows, geometry.head_groups, budget.max_blocks, std::max(budget.max_lease, 1U),
        budget.ring},
      sequences_{options.max_rows, budget.max_blocks, geometry.block_tokens},
      staging_{
        backend,
        books_,
        pool_.ref(),
        policy,
        patches_per_place,
        geometry.layers * geometry.head_groups * lanes_per_place,
        budget.max_lease + budget.ring,
        options.wait_limit},
      sums_{
        backend, memory_space::pinned,
        options.verify ? std::uint64_t{geometry.layers} * geometry.head_groups * store_.most_blocks() *
            layout.plane_count * sizeof(std::uint32_t)
                       : 0},
      writes_{
        backend, write_batches, write_blocks(options, budget), geometry.layers * geometry.head_groups,
        options.verify ? layout : block_layout{}},
      appended_{backend},
      warmed_{backend},
      settled_{backend},
      rows_(options.max_rows),
      layer_lease_(geometry.layers, budget.lease),
      by_lease_(geometry.layers),
      least_given_{budget.lease},
      reserved_(pool_.per_layer() ? geometry.layers : 1, 0),
      window_begin_(std::uint64_t{options.max_rows} * geometry.layers, 0),
      kept_mark_(budget.max_blocks, 0),
      extent_patches_(digests_.extents_for(budget.max_blocks) + 1)
  {
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) { by_lease_[layer] = static_cast<layer_id>(layer); }
    hold_stream_slots();
    // To its end: a construction that fails later frees this memory.
    set_up_work(backend, "clearing the books", [&](stream_ref stream) { return books_.clear(backend, stream); });
  }

  /// Slots that one row needs at its largest, by layer group, and host blocks: what admission weighs.
  [[nodiscard]] demand demand_of(
    std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept = row_slots::prompt) const
  {
    demand d{.prompt_tokens = prompt_tokens, .max_tokens = max_tokens};
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      layer_group const group = geometry_.group_of(static_cast<layer_id>(layer));
      // As many as are kept back for it in the layer, so that what is let in also fits.
      std::uint64_t const prefill = slots_of(group, prompt_tokens, max_tokens, kept);
      d.slots_prefill += prefill * geometry_.head_groups;
      d.slots_decode +=
        (kept == row_slots::all ? prefill : budget_.decode_slots(group, max_tokens)) * geometry_.head_groups;
    }
    d.host_blocks = budget_.offloads(max_tokens) ? budget_.blocks(max_tokens) : 0;
    d.digest_extents = budget_.offloads(max_tokens) ? digests_.extents_for(budget_.blocks(max_tokens)) : 0;
    return d;
  }

  [[nodiscard]] capacity capacity_now(std::uint32_t rows_running) const
  {
    std::uint64_t reserved = 0;
    for (std::uint64_t const slots : reserved_) { reserved += slots; }
    return {
      .rows_total = sequences_.rows(),
      .rows_running = rows_running,
      .host_blocks_free = store_.available(),
      .slots_free = pool_.total_slots() - reserved,
      .slots_total = pool_.total_slots() - stream_slots(),
      .host_blocks_total = store_.blocks(),
      .digest_extents_free = digests_.free_extents() - extents_reserved_,
      .digest_extents_total = digests_.total_extents()};
  }

  /// Whether each layer's pool can keep back what the row needs; `capacity` alone cannot say so for pools lent per layer.
  [[nodiscard]] bool slots_fit(
    std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept = row_slots::prompt) const
  {
    bool fits = true;
    std::uint64_t wanted = 0;  // of one layer, or of all where they share a pool
    for_reservation(prompt_tokens, max_tokens, kept, [&](std::size_t pool, std::uint64_t slots) {
      wanted = reserved_.size() > 1 ? slots : wanted + slots;
      fits = fits && reserved_[pool] + wanted <= pool_.total_slots() / reserved_.size();
    });
    return fits;
  }

  /// Begins a sequence in a free row; everything that it may need is kept back for it.
  /// @param shared full blocks that the row will share with a saved sequence
  status open(
    row_id row, std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept = row_slots::prompt,
    std::uint32_t shared = 0) noexcept
  {
    if (status const told = flush(); told != status::ok) { return told; }
    if (status const opened = sequences_.open(row, max_tokens); opened != status::ok) { return opened; }
    row_blocks& state = rows_[to_index(row)];
    state = row_blocks{
      .mode = row_mode::dense_resident,
      .slots = kept,
      .keeps = kept == row_slots::all && budget_.offloads(max_tokens),
      .streams = kept == row_slots::step,
      .offloads = budget_.offloads(max_tokens),
      .prompt_tokens = prompt_tokens};
    if (state.offloads) {
      state.host_reserved = budget_.blocks(max_tokens) - shared;
      if (status const held = store_.reserve(state.host_reserved); held != status::ok) {
        sequences_.close(row);
        state = row_blocks{};
        return held;
      }
      extents_reserved_ += digests_.extents_for(budget_.blocks(max_tokens));
    }
    for_reservation(
      prompt_tokens, max_tokens, state.slots, [&](std::size_t pool, std::uint64_t slots) { reserved_[pool] += slots; });
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) { window_begin(row, layer) = 0; }
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      leases_.lease_count(layer, lane) = 0;
      for (std::uint32_t i = 0; i < budget_.ring; ++i) { leases_.ring_slot(layer, lane, i) = none<slot_id>; }
    });
    for (std::uint32_t i = 0; i < budget_.ring; ++i) { leases_.ring(row, i) = ring_place{}; }
    status const cleared = clear_row(row);
    if (cleared != status::ok) { close(row); }
    return cleared;
  }

  /// Gives everything back that a row holds. No recall of the row flies; write-backs may: they hold what they name.
  void close(row_id row) noexcept
  {
    sequence_state& sequence = sequences_[row];
    row_blocks& state = rows_[to_index(row)];
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (in_lease(state, layer)) {
        slot_id const* const lease = leases_.lease(layer, lane);
        for (std::uint32_t i = 0; i < leases_.lease_count(layer, lane); ++i) { free_slot(layer, lease[i]); }
        for (std::uint32_t i = 0; i < budget_.ring; ++i) { free_slot(layer, leases_.ring_slot(layer, lane, i)); }
      } else {
        for (std::uint32_t b = 0; b < state.opened; ++b) { free_placed(layer, lane, b); }
      }
    });
    for (host_block_id const block : sequence.host_blocks) {
      if (!is_none(block)) { static_cast<void>(store_.release(block)); }
    }
    static_cast<void>(store_.unreserve(state.host_reserved));
    for_reservation(state.prompt_tokens, sequence.max_tokens, state.slots, [&](std::size_t pool, std::uint64_t slots) {
      reserved_[pool] -= slots;
    });
    if (state.offloads) {
      extents_reserved_ -= digests_.extents_for(budget_.blocks(sequence.max_tokens)) -
        static_cast<std::uint32_t>(digests_.extents(row).size());
      std::uint32_t written = 0;
      static_cast<void>(digests_.release(row, extent_patches_, written));
      // The device's extent table keeps the old numbers: nothing reads a row's extents past those that cover has given.
    }
    sequences_.close(row);
    state = row_blocks{};
    // A row without a sequence lists nothing, for launches that are padded with it. Should this be refused, open does it.
    static_cast<void>(clear_row(row));
  }

  /// Books that follow from copies which have completed since the last call. Never waits.
  void poll() noexcept
  {
    while (end_write_batch()) {}
  }

  /// Between two steps of a row: tells the device what has been written, takes exchanged slots in, and turns the row
  /// sparse where its length says so.
  status settle(row_id row, std::uint32_t new_tokens) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    tell_written(row);
    if (state.mode == row_mode::sparse_offloaded) { turn_ring(row); }
    if (!turns_sparse(row, new_tokens)) { return status::ok; }
    if (!state.keeps) { return leave_dense(row); }
    state.mode = row_mode::sparse_resident;
    return status::ok;
  }

  /// Opens the blocks that a row's new tokens touch, after `settle`.
  status open_blocks(row_id row, std::uint32_t new_tokens) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    sequence_state const& sequence = sequences_[row];
    std::uint32_t const needed = budget_.blocks(sequence.tokens + new_tokens);
    if (state.offloads) {
      if (status const covered = cover_digests(row, needed); covered != status::ok) { return covered; }
    }
    release_windows(row, new_tokens);
    release_streamed(row);
    for (std::uint32_t block = state.opened; block < needed; ++block) {
      if (status const opened = open_block(row, block); opened != status::ok) { return opened; }
    }
    state.opened = std::max(state.opened, needed);
    list_blocks(row, needed);
    if (prompt_streams(row)) { list_step(row, needed); }
    return staging_.failure();
  }

  /// Writes the row's words for this step.
  void tell_row(row_id row, std::uint32_t new_tokens, std::uint32_t token_offset) noexcept
  {
    row_info* const info = books_.info() + to_index(row);
    staging_.patch(compute_, &info->tokens, static_cast<std::int32_t>(sequences_[row].tokens + new_tokens));
    staging_.patch(compute_, &info->new_tokens, static_cast<std::int32_t>(new_tokens));
    staging_.patch(compute_, &info->token_offset, static_cast<std::int32_t>(token_offset));
    staging_.patch(compute_, &info->mode, rows_[to_index(row)].mode);
  }

  /// Keeps the accepted tokens of a row's step.
  status commit(row_id row, std::uint32_t accepted) noexcept
  {
    block_range sealed;
    if (status const kept = sequences_.commit(row, accepted, sealed); kept != status::ok) { return kept; }
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      ring_place& place = leases_.ring(row, i);
      if (place.state == ring_state::open && to_index(place.block) < sealed.last) { place.state = ring_state::sealed; }
    }
    return status::ok;
  }

  /// Sends sealed blocks of all rows that offload to the host, behind what the compute stream has been given so far.
  template <class Mover>
  status write_back(Mover& mover) noexcept
  {
    poll();
    bool wanted = false;
    for (std::uint32_t r = 0; r < sequences_.rows() && !wanted; ++r) { wanted = unsent(static_cast<row_id>(r)) != 0; }
    if (!wanted || !writes_.has_room()) { return status::ok; }
    if (status const recorded = backend_->record(compute_, appended_.get()); recorded != status::ok) {
      return recorded;
    }
    writes_.open();
    // Rows that leave their blocks to the host come first: they wait for places.
    for (bool const keeps : {false, true}) {
      for (std::uint32_t r = 0; r < sequences_.rows(); ++r) {
        auto const row = static_cast<row_id>(r);
        if (rows_[r].keeps != keeps) { continue; }
        for (std::uint32_t left = unsent(row); left > 0 && writes_.free_blocks() > 0; --left) { send_block(row); }
      }
    }
    status const sent = writes_.send(appended_.get(), mover, pool_, store_);
    written_bytes_ += writes_.sent_bytes();
    // What was refused is found when the batch ends, and sent again.
    return sent == status::device_lost ? sent : status::ok;
  }

  /// Whether copies of the row's blocks are under way to the host.
  [[nodiscard]] bool writes_fly(row_id row) const noexcept { return rows_[to_index(row)].flying != 0; }

  /// Whether the row's blocks could not be written in `max_write_tries` tries: it cannot go on.
  [[nodiscard]] bool write_failed(row_id row) const noexcept
  {
    return rows_[to_index(row)].write_tries >= max_write_tries;
  }

  /// Sleeps until a row's sealed blocks are all on the host.
  /// @status transfer_failed: some could not be written
  template <class Mover>
  status wait_written(row_id row, Mover& mover) noexcept
  {
    nanoseconds const deadline = backend_->now() + wait_limit_;
    row_blocks& state = rows_[to_index(row)];
    state.hurries = true;
    status result = status::ok;
    while (result == status::ok && state.written < sequences_[row].sealed) {
      result = write_failed(row) ? status::transfer_failed : write_back(mover);
      if (result == status::ok) { result = writes_.wait_oldest(deadline); }
      if (result == status::ok) { poll(); }
    }
    state.hurries = false;
    return result;
  }

  /// Sleeps until all that was written so far is done, or the deadline.
  status drain(nanoseconds deadline) noexcept
  {
    while (!writes_.idle()) {
      if (status const waited = writes_.wait_oldest(deadline); waited != status::ok) { return waited; }
      poll();
    }
    return status::ok;
  }

  /// Batches of blocks on their way to the host.
  [[nodiscard]] std::uint32_t write_backs() const noexcept { return writes_.flying(); }

  /// Whether the compute stream has work that has yet to run.
  [[nodiscard]] bool compute_is_busy() noexcept
  {
    if (backend_->record(compute_, settled_.get()) != status::ok) { return false; }
    return backend_->done(settled_.get()) == event_state::pending;
  }

  /// Sleeps until what the compute stream has been given so far has run, or the deadline.
  status wait_compute(nanoseconds deadline) noexcept
  {
    if (status const recorded = backend_->record(compute_, settled_.get()); recorded != status::ok) { return recorded; }
    typename B::event_ref const event = settled_.get();
    return backend_->wait_any({&event, 1}, deadline);
  }

  /// Whether `settle` with that many new tokens needs the row's sealed blocks on the host first.
  [[nodiscard]] bool leaves_device(row_id row, std::uint32_t new_tokens) const noexcept
  {
    return prompt_streams(row) || (turns_sparse(row, new_tokens) && !rows_[to_index(row)].keeps);
  }

  /// Whether the row's prompt comes in without staying resident: its sealed blocks are on the host, those that a step opens
  /// in slots.
  [[nodiscard]] bool prompt_streams(row_id row) const noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    return state.streams && state.mode == row_mode::dense_resident;
  }

  // -- between the modes

  /// Gives the slots of a row that keeps its blocks back but for a lease: those of its last selection stay. A row that does
  /// not select yet goes on and offloads once it does. Sleeps until its sealed blocks are on the host.
  /// @status invalid_state: the row offloads already, or never does; transfer_failed, drain_timeout: unchanged
  template <class Mover>
  status demote(row_id row, Mover& mover) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    if (!state.keeps) { return status::invalid_state; }
    if (state.mode == row_mode::dense_resident) {
      state.keeps = false;
      keep_back(row, row_slots::prompt);
      return status::ok;
    }
    if (status const written = wait_written(row, mover); written != status::ok) { return written; }
    status const chosen = backend_->launch(
      compute_,
      keep_previous{
        .row = row,
        .selection = books_.selection(),
        .kept = books_.kept(),
        .layers = geometry_.layers,
        .head_groups = geometry_.head_groups});
    if (chosen != status::ok) { return chosen; }
    state.warm = true;
    if (status const recorded = backend_->record(compute_, warmed_.get()); recorded != status::ok) { return recorded; }
    tell_written(row);
    status const left = leave_dense(row);
    state.keeps = left != status::ok;
    return left;
  }

  /// Whether the slots for every block of a row are free beside what is kept back.
  [[nodiscard]] bool all_slots_fit(row_id row) const
  {
    row_blocks const& state = rows_[to_index(row)];
    std::uint32_t const max_tokens = sequences_[row].max_tokens;
    std::uint64_t more = 0;  // of one layer, or of all where they share a pool
    bool fits = true;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      layer_group const group = geometry_.group_of(static_cast<layer_id>(layer));
      std::uint32_t const all = slots_of(group, state.prompt_tokens, max_tokens, row_slots::all);
      more +=
        (all - slots_of(group, state.prompt_tokens, max_tokens, state.slots)) * std::uint64_t{geometry_.head_groups};
      if (reserved_.size() > 1) {
        fits = fits && reserved_[layer] + more <= pool_.total_slots() / reserved_.size();
        more = 0;
      }
    }
    return fits && (reserved_.size() > 1 || reserved_[0] + more <= pool_.total_slots());
  }

  /// Lets a row that does not select yet keep its blocks once it does. @status capacity_exceeded: slots are lacking
  status keep_all(row_id row) noexcept
  {
    if (!all_slots_fit(row)) { return status::capacity_exceeded; }
    rows_[to_index(row)].keeps = true;
    keep_back(row, row_slots::all);
    return status::ok;
  }

  /// Sees to it that a sparse row has places for the blocks that its new tokens open, waiting where write-backs are slow.
  template <class Mover>
  status ensure_spares(row_id row, std::uint32_t new_tokens, Mover& mover) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    if (state.mode != row_mode::sparse_offloaded) { return status::ok; }
    std::uint32_t const needed = budget_.blocks(sequences_[row].tokens + new_tokens);
    std::uint32_t const opens = needed > state.opened ? needed - state.opened : 0;
    nanoseconds const deadline = backend_->now() + wait_limit_;
    while (count_ring(row, ring_state::spare) < opens) {
      if (status const freed = advance_ring(row, mover, deadline); freed != status::ok) { return freed; }
    }
    return status::ok;
  }

  status flush() noexcept { return staging_.flush(compute_); }
  void set_step(std::uint32_t number) noexcept { staging_.patch(compute_, books_.step(), number); }
  /// The launches that choose what stays resident of the rows have been enqueued on the compute stream.
  status mark_warm(row_list rows) noexcept
  {
    for (row_id const row : rows) { rows_[to_index(row)].warm = true; }
    return backend_->record(compute_, warmed_.get());
  }

  void place_freely(row_id row, bool freely) noexcept { rows_[to_index(row)].placed_freely = freely; }

  // -- slots by layer

  /// Leases that begin from here on have so many slots in each layer that selects, those of the ring included.
  /// @param slots [layers]   @status invalid_argument: below or above what a lane may have, or more than quota in the mean
  status spread_leases(std::span<std::uint32_t const> slots) noexcept
  {
    std::uint64_t sum = 0, layers = 0;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      if (kind_of(static_cast<layer_id>(layer)) != layer_kind::selected) { continue; }
      bool const fits =
        slots[layer] >= budget_.least_lease + budget_.ring && slots[layer] <= budget_.max_lease + budget_.ring;
      if (!fits) { return status::invalid_argument; }
      sum += slots[layer];
      ++layers;
    }
    if (sum > layers * budget_.quota) { return status::invalid_argument; }
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      if (kind_of(static_cast<layer_id>(layer)) != layer_kind::selected) { continue; }
      layer_lease_[layer] = slots[layer] - budget_.ring;
      least_given_ = std::min(least_given_, layer_lease_[layer]);
    }
    std::ranges::sort(by_lease_, {}, [this](layer_id layer) { return layer_lease_[to_index(layer)]; });
    return status::ok;
  }

  [[nodiscard]] std::uint32_t lease_of(layer_id layer) const noexcept { return layer_lease_[to_index(layer)]; }
  /// The smallest lease that a lane may have.
  [[nodiscard]] std::uint32_t least_lease() const noexcept { return least_given_; }

  /// Slots of a row in a layer, over its lanes: the lease and the ring.
  [[nodiscard]] std::uint32_t leased(row_id row, layer_id layer) noexcept
  {
    std::uint32_t slots = 0;
    for (std::uint32_t g = 0; g < geometry_.head_groups; ++g) {
      slots += leases_.lease_count(layer, lane_of(row, g, geometry_.head_groups)) + budget_.ring;
    }
    return slots;
  }

  /// Slots that are kept back for a row, or would be, over layers and lanes.
  [[nodiscard]] std::uint64_t kept_back(row_id row, row_slots kept) const
  {
    row_blocks const& state = rows_[to_index(row)];
    std::uint64_t sum = 0;
    for_reservation(
      state.prompt_tokens, sequences_[row].max_tokens, kept, [&](std::size_t, std::uint64_t slots) { sum += slots; });
    return sum;
  }

  [[nodiscard]] row_blocks const& row(row_id id) const noexcept { return rows_[to_index(id)]; }
  [[nodiscard]] sequence_book& sequences() noexcept { return sequences_; }
  [[nodiscard]] sequence_book const& sequences() const noexcept { return sequences_; }
  [[nodiscard]] device_books<B> const& books() const noexcept { return books_; }
  /// The lists of a layer's rows for attention.
  [[nodiscard]] block_table table(layer_id layer, part which) const noexcept
  {
    lane_table_ref const lists = books_.table();
    bool const landed = which == part::landed;
    std::uint64_t const first = to_index(layer) * geometry_.head_groups * sequences_.rows();
    return {
      .slots = landed ? lists.landed : lists.listed + first * lists.stride,
      .counts = landed ? lists.landed_count : lists.listed_count + first,
      .info = books_.info(),
      .pool = pool_.ref(),
      .layout = layout_,
      .layer = layer,
      .stride = landed ? books_.sizes().max_selected : lists.stride,
      .head_groups = geometry_.head_groups,
      .which = which};
  }
  [[nodiscard]] slot_pool<B> const& pool() const noexcept { return pool_; }
  [[nodiscard]] host_store<B> const& store() const noexcept { return store_; }
  /// See host_store::grow and adopt_growth.
  status grow_host_store(std::uint32_t blocks) noexcept { return store_.grow(blocks); }
  void adopt_growth() noexcept { static_cast<void>(store_.adopt_growth()); }
  [[nodiscard]] digest_store<B> const& digests() const noexcept { return digests_; }
  /// Checksums of what was written back; not enabled without options.verify.
  [[nodiscard]] checksum_ref checksums() const noexcept
  {
    if (sums_.data() == nullptr) { return {}; }
    return {
      .sums = sums_.template as<std::uint32_t>(),
      .head_groups = geometry_.head_groups,
      .blocks = store_.most_blocks(),
      .layout = layout_};
  }
  [[nodiscard]] lease_book& leases() noexcept { return leases_; }
  [[nodiscard]] block_layout const& layout() const noexcept { return layout_; }
  /// The i-th slot that prompts stream through, the same in each pool; neighbours in `i` are neighbours in the pool.
  [[nodiscard]] slot_id stream_slot(std::uint32_t i) const noexcept { return static_cast<slot_id>(i); }
  [[nodiscard]] std::uint64_t written_bytes() const noexcept { return written_bytes_; }
  [[nodiscard]] std::uint64_t failed_writes() const noexcept { return failed_writes_; }
  /// Times that a row had to wait for a place for its next block.
  [[nodiscard]] std::uint64_t spare_waits() const noexcept { return spare_waits_; }
  [[nodiscard]] std::uint64_t slots_in_use() const noexcept { return pool_.total_slots() - pool_.free_slots(); }
  [[nodiscard]] std::uint64_t slots_peak() const noexcept { return slots_peak_; }
  void reset_slots_peak() noexcept { slots_peak_ = slots_in_use(); }

  /// Recounts the host's books against one another. @return what is wrong, empty where nothing is
  [[nodiscard]] std::string audit()
  {
    if (std::string text = pool_.audit(); !text.empty()) { return text; }
    if (std::string text = store_.audit(); !text.empty()) { return text; }
    if (std::string text = digests_.audit(); !text.empty()) { return text; }
    std::uint64_t leased = 0;
    std::uint32_t extents = 0;
    std::vector<std::uint64_t> kept_back(reserved_.size(), budget_.stream_slots(geometry_.head_groups));
    for (std::uint32_t r = 0; r < sequences_.rows(); ++r) {
      auto const row = static_cast<row_id>(r);
      if (!sequences_[row].open()) { continue; }
      row_blocks const& state = rows_[r];
      for_reservation(
        state.prompt_tokens, sequences_[row].max_tokens, state.slots,
        [&](std::size_t pool, std::uint64_t slots) { kept_back[pool] += slots; });
      if (state.offloads) {
        extents += digests_.extents_for(budget_.blocks(sequences_[row].max_tokens)) -
          static_cast<std::uint32_t>(digests_.extents(row).size());
      }
      for_lanes(row, [&](layer_id layer, lane_id lane) {
        if (in_lease(state, layer)) {
          leased += leases_.lease_count(layer, lane) + budget_.ring;
        } else {
          for (std::uint32_t b = 0; b < state.opened; ++b) {
            leased += is_none(leases_.placed(layer, lane, b)) ? 0U : 1U;
          }
        }
      });
    }
    std::uint64_t held = 0;
    for (std::uint32_t layer = 0; layer < (pool_.per_layer() ? geometry_.layers : 1); ++layer) {
      block_counts const counts = pool_.counts(static_cast<layer_id>(layer));
      held += counts.held + counts.in_flight;
      if (kept_back[layer] != reserved_[layer]) {
        return std::to_string(reserved_[layer]) + " slots are reserved, rows keep " + std::to_string(kept_back[layer]) +
          " back";
      }
      if (reserved_[layer] > pool_.total_slots() / reserved_.size()) {
        return std::to_string(reserved_[layer]) + " slots are kept back of " +
          std::to_string(pool_.total_slots() / reserved_.size());
      }
      if (writes_.idle() && counts.held > reserved_[layer]) {
        return std::to_string(counts.held) + " slots are taken, " + std::to_string(reserved_[layer]) +
          " are kept back for rows and streams";
      }
    }
    if (extents != extents_reserved_) {
      return std::to_string(extents_reserved_) + " digest extents are reserved, rows keep " + std::to_string(extents) +
        " back";
    }
    if (writes_.idle() && held != leased + stream_slots()) {
      return std::to_string(held) + " slots are taken, rows lease " + std::to_string(leased) +
        ", prompts stream through " + std::to_string(stream_slots());
    }
    return {};
  }

 private:
  friend class sequence_mover<B, Replacement>;

  static constexpr std::uint32_t patches_per_place = 16384;
  static constexpr std::uint32_t lanes_per_place = 4;
  static constexpr std::uint32_t write_batches = 4;
  static constexpr std::uint32_t max_write_tries = 2;

  [[nodiscard]] static std::uint32_t write_blocks(manager_options const& options, slot_budget const& budget)
  {
    return budget.blocks(budget.max_prefill_tokens) + options.max_rows * budget.open_blocks + 1;
  }

  [[nodiscard]] static host_store_options store_options(manager_options const& options, slot_budget const& budget)
  {
    // A saved sequence holds its partial block beside the blocks that are kept back for its row.
    std::uint64_t const saved = options.saved_sequences == 0 ? options.max_rows : options.saved_sequences;
    std::uint64_t const all =
      budget.offloads(options.max_tokens) ? std::uint64_t{options.max_rows} * budget.max_blocks + saved : 1;
    std::uint64_t const least = budget.offloads(options.max_tokens) ? budget.blocks(budget.dense_tokens + 1) : 0;
    if (options.host_blocks != 0 && options.host_blocks < least) {
      throw configuration_error{
        std::to_string(options.host_blocks) + " host blocks; the shortest sequence that offloads, of " +
        std::to_string(budget.dense_tokens + 1) + " tokens, has " + std::to_string(least)};
    }
    return {
      .blocks = options.host_blocks == 0 ? all : options.host_blocks,
      .limit_bytes = options.host_limit_bytes,
      .most_blocks = options.max_host_blocks};
  }

  [[nodiscard]] static slot_pool_options pool_options(
    kv_geometry const& geometry, manager_options const& options, slot_budget const& budget)
  {
    std::uint64_t all = 0;
    std::uint64_t least = 0;
    std::uint64_t least_of_layer = 0;
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      layer_group const group = geometry.group_of(static_cast<layer_id>(layer));
      std::uint64_t const decode = std::uint64_t{budget.decode_slots(group, options.max_tokens)} * geometry.head_groups;
      std::uint64_t const resident =
        std::uint64_t{budget.resident_slots(group, options.max_tokens, options.max_tokens)} * geometry.head_groups;
      std::uint64_t const layer_slots =
        std::max<std::uint64_t>((options.max_rows - 1) * decode + std::max(resident, decode), 1);
      all += layer_slots;
      least += decode;
      least_of_layer = std::max(least_of_layer, decode);
    }
    if (!options.lent_slots.empty() && options.slots == 0) {
      throw configuration_error{
        std::to_string(options.lent_slots.size()) +
        " lent pools and 0 slots: say how many slots the lender's memory holds"};
    }
    bool const per_layer = options.lent_slots.size() > 1;
    std::uint64_t const stream = budget.stream_slots(geometry.head_groups);
    if (options.slots != 0 && options.slots < (per_layer ? least_of_layer : least) + stream) {
      throw configuration_error{
        std::to_string(options.slots) + " slots" + (per_layer ? " per layer" : "") + "; one row of " +
        std::to_string(options.max_tokens) + " tokens needs " + std::to_string(per_layer ? least_of_layer : least) +
        " once it decodes" +
        (stream == 0 ? std::string{}
                     : ", prompts stream through " + std::to_string(stream) + ": two halves of " +
             std::to_string(budget.stream_blocks) + " blocks in " + std::to_string(geometry.head_groups) +
             " head groups")};
    }
    std::uint64_t const wanted = options.slots != 0 ? options.slots : all + stream;
    validate_extent(wanted, 1);
    return {
      .slots = static_cast<std::uint32_t>(wanted), .slot_stride = options.slot_stride, .lent = options.lent_slots};
  }

  template <class F>
  void for_lanes(row_id row, F f) const
  {
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::uint32_t g = 0; g < geometry_.head_groups; ++g) {
        f(static_cast<layer_id>(layer), lane_of(row, g, geometry_.head_groups));
      }
    }
  }

  /// As for_lanes, in the layers that select, those first that get the fewest slots: what they give back serves the others, so
  /// that a row never holds more than is kept back for it.
  template <class F>
  void for_leases(row_id row, F f) const
  {
    for (layer_id const layer : by_lease_) {
      if (kind_of(layer) != layer_kind::selected) { continue; }
      for (std::uint32_t g = 0; g < geometry_.head_groups; ++g) { f(layer, lane_of(row, g, geometry_.head_groups)); }
    }
  }

  template <class F>
  void for_reservation(std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept, F f) const
  {
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
      layer_group const group = geometry_.group_of(static_cast<layer_id>(layer));
      f(reserved_.size() > 1 ? layer : 0,
        slots_of(group, prompt_tokens, max_tokens, kept) * std::uint64_t{geometry_.head_groups});
    }
  }

  /// Slots of one lane that are kept back in a layer.
  [[nodiscard]] std::uint32_t slots_of(
    layer_group const& group, std::uint32_t prompt_tokens, std::uint32_t max_tokens, row_slots kept) const
  {
    std::uint32_t const decode = budget_.decode_slots(group, max_tokens);
    if (kept == row_slots::lease) { return decode; }
    std::uint32_t const longest = kept == row_slots::all ? max_tokens : prompt_tokens;
    return std::max(
      decode,
      kept == row_slots::step ? budget_.step_slots(group, max_tokens)
                              : budget_.resident_slots(group, longest, max_tokens));
  }

  /// Changes what is kept back for a row.
  void keep_back(row_id row, row_slots kept) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    std::uint32_t const max_tokens = sequences_[row].max_tokens;
    for_reservation(state.prompt_tokens, max_tokens, state.slots, [&](std::size_t pool, std::uint64_t slots) {
      reserved_[pool] -= slots;
    });
    state.slots = kept;
    for_reservation(state.prompt_tokens, max_tokens, state.slots, [&](std::size_t pool, std::uint64_t slots) {
      reserved_[pool] += slots;
    });
  }

  /// Whether a row selects from the step on that appends so many tokens.
  [[nodiscard]] bool turns_sparse(row_id row, std::uint32_t new_tokens) const noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    sequence_state const& sequence = sequences_[row];
    return state.mode == row_mode::dense_resident && state.offloads && sequence.tokens >= state.prompt_tokens &&
      (state.streams || sequence.tokens + new_tokens > budget_.dense_tokens);
  }

  // -- slots that prompts stream through

  /// Takes them while every pool is free as a whole: the first of each, for as long as the keeper lives.
  void hold_stream_slots()
  {
    std::uint64_t const slots = budget_.stream_slots(geometry_.head_groups);
    for (std::size_t pool = 0; pool < reserved_.size(); ++pool) {
      for (std::uint64_t i = 0; i < slots; ++i) {
        slot_id const taken = take_slot(static_cast<layer_id>(pool));
        PULSEINFER_EXPECTS(
          taken == stream_slot(static_cast<std::uint32_t>(i)), "a fresh pool gives its slots in order");
        static_cast<void>(taken);
      }
      reserved_[pool] = slots;
    }
  }

  /// Those of all pools together.
  [[nodiscard]] std::uint64_t stream_slots() const noexcept
  {
    return budget_.stream_slots(geometry_.head_groups) * reserved_.size();
  }

  [[nodiscard]] layer_kind kind_of(layer_id layer) const { return geometry_.group_of(layer).kind; }
  /// Whether the device fills the slots of the row in this layer.
  [[nodiscard]] bool in_lease(row_blocks const& state, layer_id layer) const
  {
    return state.mode == row_mode::sparse_offloaded && kind_of(layer) == layer_kind::selected;
  }
  [[nodiscard]] std::uint32_t& window_begin(row_id row, std::uint32_t layer)
  {
    return window_begin_[to_index(row) * geometry_.layers + layer];
  }
  [[nodiscard]] slot_word* word(layer_id layer, slot_id slot) const
  {
    return books_.residency().slots + pool_.ref().word(layer, slot);
  }

  status clear_row(row_id row) noexcept
  {
    return backend_->launch(
      compute_,
      reset_row{
        .row = row,
        .residency = books_.residency(),
        .selection = books_.selection(),
        .table = books_.table(),
        .info = books_.info(),
        .host_blocks = books_.host_blocks(),
        .foresight = books_.foresight(),
        .head_groups = geometry_.head_groups});
  }

  void free_slot(layer_id layer, slot_id& slot) noexcept
  {
    if (!is_none(slot)) { static_cast<void>(pool_.release(layer, slot)); }
    slot = none<slot_id>;
  }
  void free_slot(layer_id layer, slot_id const& slot) noexcept
  {
    if (!is_none(slot)) { static_cast<void>(pool_.release(layer, slot)); }
  }
  void free_placed(layer_id layer, lane_id lane, std::uint32_t block) noexcept
  {
    free_slot(layer, leases_.placed(layer, lane, block));
  }

  [[nodiscard]] std::uint32_t count_ring(row_id row, ring_state state) noexcept
  {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < budget_.ring; ++i) { count += leases_.ring(row, i).state == state ? 1U : 0U; }
    return count;
  }

  [[nodiscard]] slot_id take_slot(layer_id layer) noexcept
  {
    slot_id const slot = pool_.acquire(layer);
    slots_peak_ = std::max(slots_peak_, slots_in_use());
    return slot;
  }

  // -- write-back

  [[nodiscard]] std::uint32_t unsent(row_id row) const noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    bool const may_send = state.offloads && sequences_[row].open() && !state.refused && !write_failed(row);
    bool const should_send = !state.keeps || state.hurries || slots_are_low();
    return may_send && should_send ? sequences_[row].sealed - state.sent : 0;
  }

  /// Whether rows that keep their blocks write them back too, so that they can give their slots up at once.
  [[nodiscard]] bool slots_are_low() const noexcept { return pool_.free_slots() < low_slots_; }

  void send_block(row_id row) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    sequence_state& sequence = sequences_[row];
    std::uint32_t const block = state.sent;
    if (is_none(sequence.host_blocks[block])) {
      host_block_id const before = block == 0 ? none<host_block_id> : sequence.host_blocks[block - 1];
      host_block_id const hint = is_none(before) ? before : static_cast<host_block_id>(to_number(before) + 1);
      sequence.host_blocks[block] = store_.acquire_reserved(hint, state.host_reserved);
      --state.host_reserved;
    }
    writes_.add_block(
      {.row = row, .sequence = sequence.id, .first = block, .last = block + 1}, sequence.host_blocks[block]);
    std::uint32_t ring = budget_.ring;
    if (state.mode == row_mode::sparse_offloaded) {
      ring = ring_of(row, block);
      leases_.ring(row, ring).state = ring_state::writing;
    }
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (kind_of(layer) != layer_kind::selected) { return; }
      slot_id const slot =
        ring == budget_.ring ? leases_.placed(layer, lane, block) : leases_.ring_slot(layer, lane, ring);
      auto const group = static_cast<std::uint32_t>(to_index(lane) % geometry_.head_groups);
      writes_.add_lane(
        layer, slot,
        copy_run{
          .target = store_.ref().address(layer, group, sequence.host_blocks[block]),
          .source = pool_.ref().address(layer, slot),
          .bytes = layout_.block_bytes},
        checksums().enabled() ? checksums().of(layer, group, sequence.host_blocks[block]) : nullptr);
    });
    ++state.sent;
    ++state.flying;
  }

  bool end_write_batch() noexcept
  {
    return writes_.end_oldest(pool_, store_, [&](write_part const& part, bool arrived) {
      if (sequences_[part.row].id != part.sequence) { return; }
      row_blocks& state = rows_[to_index(part.row)];
      state.flying -= part.last - part.first;
      if (!arrived) {
        ++failed_writes_;
        state.refused = true;
      }
      // The host has blocks [0, written) without a gap: what arrives behind one that did not is sent again with it.
      bool const counts = arrived && !state.refused;
      for (std::uint32_t i = 0; i < budget_.ring; ++i) {
        ring_place& place = leases_.ring(part.row, i);
        bool const named = place.state == ring_state::writing && to_index(place.block) >= part.first &&
          to_index(place.block) < part.last;
        if (named) { place.state = counts ? ring_state::written : ring_state::sealed; }
      }
      if (counts) {
        state.written = part.last;
        state.write_tries = 0;
      }
      if (state.refused && state.flying == 0) {
        state.sent = state.written;
        state.refused = false;
        ++state.write_tries;
      }
    });
  }

  /// The device learns which blocks are sealed, and their host blocks, in the order of the stream, before any slot of
  /// theirs may be refilled.
  void tell_written(row_id row) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    bool const dense = state.mode != row_mode::sparse_offloaded;
    // Sealed blocks of a prompt that streams are on the host and leave their slots in this very launch.
    bool const leaves = prompt_streams(row);
    for (; state.dirty < sequences_[row].sealed; ++state.dirty) {
      // One launch writes no word twice: a block that is on the host by now was never known to be dirty.
      if (!leaves && (!dense || state.dirty >= state.written)) { tell_state(row, state.dirty, slot_state::dirty); }
    }
    for (; state.known < state.written; ++state.known) {
      // A ring slot becomes clean by its exchange.
      if (dense && !leaves) { tell_state(row, state.known, slot_state::clean); }
      staging_.patch(
        compute_, books_.host_blocks() + to_index(row) * budget_.max_blocks + state.known,
        sequences_[row].host_blocks[state.known]);
    }
  }

  /// Writes the state of a block that the host has placed into the words of its slots, in the layers that are written back.
  void tell_state(row_id row, std::uint32_t block, slot_state value) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (kind_of(layer) != layer_kind::selected) { return; }
      slot_id const slot = in_lease(state, layer) ? leases_.ring_slot(layer, lane, ring_of(row, block))
                                                  : leases_.placed(layer, lane, block);
      staging_.patch(compute_, &word(layer, slot)->state, value);
    });
  }

  // -- the ring of a sparse row

  /// Takes back the slots that exchanges have freed.
  void take_exchanged(row_id row) noexcept
  {
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      ring_place& place = leases_.ring(row, i);
      if (place.state != ring_state::exchanging || !staging_.passed(place.serial)) { continue; }
      for_lanes(row, [&](layer_id layer, lane_id lane) {
        if (kind_of(layer) != layer_kind::selected) { return; }
        slot_id const given = books_.spare()[spare_index(layer, lane, i)];
        swap_lease(layer, lane, leases_.ring_slot(layer, lane, i), given);
        leases_.ring_slot(layer, lane, i) = given;
      });
      place = ring_place{};
    }
  }

  /// Takes freed slots in and starts the next exchange: one place of a row at a time.
  void turn_ring(row_id row) noexcept
  {
    take_exchanged(row);
    if (leases_.find_ring(row, ring_state::exchanging) != budget_.ring) { return; }
    std::uint32_t const next = leases_.find_ring(row, ring_state::written);
    if (next == budget_.ring || rows_[to_index(row)].known <= to_index(leases_.ring(row, next).block)) { return; }
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (kind_of(layer) != layer_kind::selected) { return; }
      staging_.exchange(
        compute_,
        {.layer = layer,
         .lane = lane,
         .written = leases_.ring_slot(layer, lane, next),
         .spare_place = static_cast<std::uint32_t>(spare_index(layer, lane, next))});
    });
    leases_.ring(row, next).state = ring_state::exchanging;
    leases_.ring(row, next).serial = staging_.serial();
  }

  /// Sleeps until no exchange of the row is under way, and takes the slots in.
  status finish_exchanges(row_id row) noexcept
  {
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      if (leases_.ring(row, i).state != ring_state::exchanging) { continue; }
      if (status const flushed = staging_.flush(compute_); flushed != status::ok) { return flushed; }
      if (status const waited = staging_.wait(leases_.ring(row, i).serial); waited != status::ok) { return waited; }
      take_exchanged(row);
    }
    return status::ok;
  }

  /// Sees to one spare ring place, waiting where all hold blocks on their way to the host.
  template <class Mover>
  status free_ring_place(row_id row, Mover& mover) noexcept
  {
    nanoseconds const deadline = backend_->now() + wait_limit_;
    while (leases_.find_ring(row, ring_state::spare) == budget_.ring) {
      if (status const freed = advance_ring(row, mover, deadline); freed != status::ok) { return freed; }
    }
    return status::ok;
  }

  /// One round of what brings a sparse row's ring on: write-back, exchange, or sleeping until one of them is complete.
  template <class Mover>
  status advance_ring(row_id row, Mover& mover, nanoseconds deadline) noexcept
  {
    ++spare_waits_;
    if (write_failed(row)) { return status::transfer_failed; }
    if (status const sent = write_back(mover); sent != status::ok) { return sent; }
    if (status const flushed = staging_.flush(compute_); flushed != status::ok) { return flushed; }
    std::uint32_t const exchanging = leases_.find_ring(row, ring_state::exchanging);
    if (exchanging != budget_.ring) {
      if (status const waited = staging_.wait(leases_.ring(row, exchanging).serial); waited != status::ok) {
        return waited;
      }
    } else if (!writes_.idle()) {
      if (status const waited = writes_.wait_oldest(deadline); waited != status::ok) { return waited; }
    } else if (leases_.find_ring(row, ring_state::written) == budget_.ring) {
      return status::stalled;
    }
    poll();
    tell_written(row);
    turn_ring(row);
    return backend_->now() > deadline ? status::stalled : status::ok;
  }

  /// The lease's member that left is replaced by the one that came, in the host's copy of the list.
  void swap_lease(layer_id layer, lane_id lane, slot_id came, slot_id left) noexcept
  {
    slot_id* const lease = leases_.lease(layer, lane);
    for (std::uint32_t i = 0; i < leases_.lease_count(layer, lane); ++i) {
      if (lease[i] == left) {
        lease[i] = came;
        return;
      }
    }
  }

  [[nodiscard]] std::uint64_t spare_index(layer_id layer, lane_id lane, std::uint32_t place) const
  {
    return books_.residency().lane_index(layer, lane) * budget_.ring + place;
  }

  // -- opening blocks

  status cover_digests(row_id row, std::uint32_t blocks) noexcept
  {
    std::uint32_t written = 0;
    if (status const covered = digests_.cover(row, blocks, extent_patches_, written); covered != status::ok) {
      return covered;
    }
    extents_reserved_ -= written;
    auto* const table = const_cast<std::int32_t*>(digests_.ref().extent_of);
    for (std::uint32_t i = 0; i < written; ++i) {
      staging_.patch(compute_, table + extent_patches_[i].index, static_cast<std::int32_t>(extent_patches_[i].value));
    }
    return status::ok;
  }

  /// Frees the slots of blocks that have left the windows of windowed layers.
  void release_windows(row_id row, std::uint32_t new_tokens) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    for (std::uint32_t l = 0; l < geometry_.layers; ++l) {
      auto const layer = static_cast<layer_id>(l);
      layer_group const group = geometry_.group_of(layer);
      if (group.kind != layer_kind::windowed) { continue; }
      std::uint32_t const first = first_window_block(
        sequences_[row].tokens + new_tokens, new_tokens, group.window_tokens, geometry_.block_tokens);
      std::uint32_t const sinks = sink_blocks(group.sink_tokens, geometry_.block_tokens);
      for (std::uint32_t& begin = window_begin(row, l); begin < std::min(first, state.opened); ++begin) {
        if (begin < sinks) { continue; }
        for (std::uint32_t g = 0; g < geometry_.head_groups; ++g) {
          lane_id const lane = lane_of(row, g, geometry_.head_groups);
          staging_.patch(compute_, books_.residency().slots_of_lane(layer, lane) + begin, none<slot_id>);
          free_placed(layer, lane, begin);
        }
      }
    }
  }

  /// Frees the slots that sealed blocks of a prompt have in the layers that stream them.
  void release_streamed(row_id row) noexcept
  {
    if (!prompt_streams(row)) { return; }
    row_blocks& state = rows_[to_index(row)];
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (kind_of(layer) != layer_kind::selected) { return; }
      for (std::uint32_t b = state.left; b < sequences_[row].sealed; ++b) {
        staging_.patch(compute_, books_.residency().slots_of_lane(layer, lane) + b, none<slot_id>);
        free_placed(layer, lane, b);
      }
    });
    state.left = std::max(state.left, sequences_[row].sealed);
  }

  /// Tables of the layers that stream a prompt list the blocks that the step opens, [left, blocks).
  void list_step(row_id row, std::uint32_t blocks) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    lane_table_ref const table = books_.table();
    std::uint32_t const count = blocks - state.left;
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (kind_of(layer) != layer_kind::selected) { return; }
      std::uint64_t const books = books_.residency().lane_index(layer, lane);
      for (std::uint32_t i = 0; i < std::max(count, state.step_listed); ++i) {
        slot_id const slot = i < count ? leases_.placed(layer, lane, state.left + i) : none<slot_id>;
        staging_.patch(compute_, table.listed + books * table.stride + i, slot);
      }
      staging_.patch(compute_, table.listed_count + books, count);
    });
    state.step_listed = count;
  }

  status open_block(row_id row, std::uint32_t block) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    bool const sparse = state.mode == row_mode::sparse_offloaded;
    std::uint32_t const ring = sparse ? leases_.find_ring(row, ring_state::spare) : budget_.ring;
    if (sparse && ring == budget_.ring) { return status::stalled; }
    if (sparse) { leases_.ring(row, ring) = {.state = ring_state::open, .block = static_cast<block_id>(block)}; }
    bool lacking = false;
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (!lacking && !place_block(row, layer, lane, block)) { lacking = true; }
    });
    if (!lacking) { return status::ok; }
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      if (!in_lease(state, layer)) { free_placed(layer, lane, block); }
    });
    if (sparse) { leases_.ring(row, ring) = ring_place{}; }
    return status::capacity_exceeded;
  }

  /// Tables of lanes that keep every block resident list all of them; they change when a block opens, and need no launch
  /// of their own in a step.
  void list_blocks(row_id row, std::uint32_t blocks) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    if (state.listed == blocks) { return; }
    lane_table_ref const table = books_.table();
    for_lanes(row, [&](layer_id layer, lane_id lane) {
      bool const by_step = kind_of(layer) == layer_kind::selected && prompt_streams(row);
      bool const selects = state.mode != row_mode::dense_resident && kind_of(layer) == layer_kind::selected;
      if (kind_of(layer) == layer_kind::windowed || selects || by_step) { return; }
      std::uint64_t const books = books_.residency().lane_index(layer, lane);
      for (std::uint32_t b = state.listed; b < blocks; ++b) {
        staging_.patch(compute_, table.listed + books * table.stride + b, leases_.placed(layer, lane, b));
      }
      for (std::uint32_t b = blocks; b < state.listed; ++b) {
        staging_.patch(compute_, table.listed + books * table.stride + b, none<slot_id>);
      }
      staging_.patch(compute_, table.listed_count + books, blocks);
    });
    state.listed = blocks;
  }

  /// Gives an open or resident block of one lane its slot, and tells the device. @return false: no slot is free
  [[nodiscard]] bool place_block(row_id row, layer_id layer, lane_id lane, std::uint32_t block) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    slot_id slot = none<slot_id>;
    if (in_lease(state, layer)) {
      slot = leases_.ring_slot(layer, lane, ring_of(row, block));
    } else {
      slot = take_slot(layer);
      leases_.placed(layer, lane, block) = slot;
    }
    if (is_none(slot)) { return false; }
    tell_placed(row, layer, lane, block, slot);
    return true;
  }

  void tell_placed(row_id row, layer_id layer, lane_id lane, std::uint32_t block, slot_id slot) noexcept
  {
    staging_.patch(compute_, &word(layer, slot)->block, static_cast<block_id>(block));
    staging_.patch(compute_, &word(layer, slot)->state, state_of(row, block));
    staging_.patch(compute_, books_.residency().slots_of_lane(layer, lane) + block, slot);
  }

  /// State of a block that the host has placed.
  [[nodiscard]] slot_state state_of(row_id row, std::uint32_t block) const noexcept
  {
    if (block >= sequences_[row].sealed) { return slot_state::open; }
    return block < rows_[to_index(row)].written ? slot_state::clean : slot_state::dirty;
  }

  /// The ring place that holds a block; ring_size() where none does.
  [[nodiscard]] std::uint32_t ring_of(row_id row, std::uint32_t block) noexcept
  {
    std::uint32_t place = 0;
    while (place < budget_.ring && leases_.ring(row, place).block != static_cast<block_id>(block)) { ++place; }
    return place;
  }

  /// Makes a row sparse whose blocks are on the host: a lease of empty slots, and ring places for blocks [sealed, opened).
  status lease_empty(row_id row, std::uint32_t sealed, std::uint32_t opened) noexcept
  {
    row_blocks& state = rows_[to_index(row)];
    state.mode = row_mode::sparse_offloaded;
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      leases_.ring(row, i) = sealed + i < opened
        ? ring_place{.state = ring_state::open, .block = static_cast<block_id>(sealed + i)}
        : ring_place{};
    }
    bool lacking = false;
    for_leases(row, [&](layer_id layer, lane_id lane) {
      if (lacking) { return; }
      std::uint32_t const lease = lease_of(layer);
      leased_slot* const list = staging_.lease(
        compute_, lease_change{.layer = layer, .lane = lane, .lease_count = lease, .held_count = budget_.ring});
      if (list == nullptr) {
        lacking = true;
        return;
      }
      for (std::uint32_t i = 0; i < lease + budget_.ring; ++i) {
        list[i] = {.slot = take_slot(layer)};
        lacking = lacking || is_none(list[i].slot);
        if (i < lease) {
          leases_.lease(layer, lane)[i] = list[i].slot;
        } else {
          leases_.ring_slot(layer, lane, i - lease) = list[i].slot;
        }
      }
      leases_.lease_count(layer, lane) = lease;
    });
    if (!lacking) { keep_back(row, row_slots::lease); }
    return lacking ? status::capacity_exceeded : staging_.flush(compute_);
  }

  // -- from dense to sparse

  /// Shrinks a row's slots to its quota: open blocks move into the ring, and of the sealed ones those stay that warm_up
  /// chose, then the first and the latest. All sealed blocks are on the host.
  status leave_dense(row_id row) noexcept
  {
    // Words that are still staged speak of the slots as they were.
    if (status const flushed = staging_.flush(compute_); flushed != status::ok) { return flushed; }
    row_blocks& state = rows_[to_index(row)];
    if (state.warm) {
      typename B::event_ref const chosen = warmed_.get();
      if (status const known = backend_->wait_any({&chosen, 1}, backend_->now() + wait_limit_); known != status::ok) {
        return known;
      }
    }
    std::uint32_t const sealed = sequences_[row].sealed;
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      bool const holds = sealed + i < state.opened;
      leases_.ring(row, i) =
        holds ? ring_place{.state = ring_state::open, .block = static_cast<block_id>(sealed + i)} : ring_place{};
    }
    bool lacking = false;
    for_leases(row, [&](layer_id layer, lane_id lane) {
      if (!lacking) { lacking = !shrink_lane(row, layer, lane, sealed); }
    });
    if (lacking) { return staging_.failure() == status::ok ? status::capacity_exceeded : staging_.failure(); }
    keep_back(row, row_slots::lease);
    state.mode = row_mode::sparse_offloaded;
    return staging_.flush(compute_);
  }

  [[nodiscard]] bool shrink_lane(row_id row, layer_id layer, lane_id lane, std::uint32_t sealed) noexcept
  {
    row_blocks const& state = rows_[to_index(row)];
    std::uint32_t const lease = lease_of(layer);
    std::uint32_t kept = 0;
    auto const keep = [&](std::uint32_t block) {
      bool const here = !is_none(leases_.placed(layer, lane, block));  // not so where a prompt has streamed in
      if (kept < lease && kept_mark_[block] == 0 && here) {
        kept_mark_[block] = 1;
        ++kept;
      }
    };
    for (std::uint32_t b = 0; b < sealed; ++b) { kept_mark_[b] = 0; }
    if (state.warm) {
      block_id const* const chosen =
        books_.kept() + books_.residency().lane_index(layer, lane) * books_.sizes().max_selected;
      for (std::uint32_t i = 0; i < books_.sizes().max_selected && !is_none(chosen[i]); ++i) {
        if (to_index(chosen[i]) < sealed) { keep(static_cast<std::uint32_t>(to_index(chosen[i]))); }
      }
    }
    if (sealed > 0) { keep(0); }
    for (std::uint32_t b = sealed; b > 0; --b) { keep(b - 1); }
    leased_slot* const list = staging_.lease(
      compute_,
      lease_change{
        .layer = layer, .lane = lane, .lease_count = lease, .held_count = budget_.ring, .blocks = state.opened});
    if (list == nullptr) { return false; }
    std::uint32_t filled = 0;
    for (std::uint32_t b = 0; b < sealed; ++b) {
      if (kept_mark_[b] != 0) {
        list[filled++] = {.slot = leases_.placed(layer, lane, b), .block = static_cast<block_id>(b)};
      } else {
        free_placed(layer, lane, b);
      }
      leases_.placed(layer, lane, b) = none<slot_id>;
    }
    bool lacking = false;
    auto const empty_slot = [&] {
      slot_id const slot = take_slot(layer);
      lacking = lacking || is_none(slot);
      return slot;
    };
    while (filled < lease) { list[filled++] = {.slot = empty_slot()}; }
    for (std::uint32_t i = 0; i < budget_.ring; ++i) {
      std::uint32_t const block = sealed + i;
      bool const holds = block < state.opened;
      slot_id const slot = holds ? leases_.placed(layer, lane, block) : empty_slot();
      list[filled++] = {.slot = slot, .block = holds ? static_cast<block_id>(block) : none<block_id>};
      leases_.ring_slot(layer, lane, i) = slot;
      if (holds) { leases_.placed(layer, lane, block) = none<slot_id>; }
    }
    for (std::uint32_t i = 0; i < lease; ++i) { leases_.lease(layer, lane)[i] = list[i].slot; }
    leases_.lease_count(layer, lane) = lease;
    return !lacking;
  }

  B* backend_;
  stream_ref compute_;
  kv_geometry geometry_;
  block_layout layout_;
  slot_budget budget_;
  nanoseconds wait_limit_;
  std::uint64_t low_slots_;
  slot_pool<B> pool_;
  host_store<B> store_;
  digest_store<B> digests_;
  device_books<B> books_;
  lease_book leases_;
  sequence_book sequences_;
  change_staging<B, Replacement> staging_;
  slab<B> sums_;  // [layers, head_groups, host blocks, planes] checksums, in verify mode
  write_back_queue<B> writes_;
  detail::owned_event<B> appended_;
  detail::owned_event<B> warmed_;  // behind the last choice of blocks that stay
  detail::owned_event<B> settled_;
  std::vector<row_blocks> rows_;
  std::vector<std::uint32_t> layer_lease_;  // [layers] of a lane whose lease begins next
  std::vector<layer_id> by_lease_;          // [layers] those of the smallest leases first
  std::uint32_t least_given_;               // smallest of all leases so far
  std::vector<std::uint64_t> reserved_;     // [layers] of pools lent per layer, else [1]: slots kept back for open rows
  std::vector<std::uint32_t>
    window_begin_;                       // [rows, layers] first block of a windowed layer that still may have a slot
  std::vector<std::uint8_t> kept_mark_;  // [max_blocks] of the lane being shrunk
  std::vector<extent_patch> extent_patches_;
  std::uint32_t extents_reserved_ = 0;
  std::uint64_t written_bytes_ = 0;
  std::uint64_t failed_writes_ = 0;
  std::uint64_t spare_waits_ = 0;
  std::uint64_t slots_peak_ = 0;
};

}  // namespace pulseinfer
