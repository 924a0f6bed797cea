#pragma once

/// Brings the earlier blocks of rows whose prompts stream in through two halves of slots.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/land_stream.hpp>
#include <pulseinfer/operation/list_stream.hpp>
#include <pulseinfer/store/set_up_work.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/stream_box.hpp>
#include <pulseinfer/view/stream_part.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace pulseinfer {

/// Blocks of a row that a stream could not bring.
struct stream_loss {
  status code = status::ok;  ///< ok: nothing is lost
  layer_id layer = none<layer_id>;
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  std::uint32_t tries = 0;
};

/// One stream at a time: chunks of a row's sealed blocks at one layer, each copied into the half that attention has finished
/// with. It knows rows and layers, not steps. No call after construction allocates.
///
/// Stream order: lists of slots and the waits for copies go to the compute stream, copies to a stream of the driver's own. A
/// copy into a half waits for what the compute stream had been given when the part in it was passed; the next part waits
/// for its copy. So the host never waits, and a part is brought while the one before is attended.
template <class B, replacement Replacement>
class stream_driver {
 public:
  using stream_ref = typename B::stream_ref;

  /// @throws configuration_error, resource_error
  stream_driver(
    B& backend, stream_ref compute, block_keeper<B, Replacement>& keeper, kv_geometry const& geometry,
    manager_options const& options, slot_budget const& budget)
    : backend_{&backend},
      compute_{compute},
      keeper_{&keeper},
      half_{budget.stream_blocks},
      head_groups_{geometry.head_groups},
      max_tries_{options.max_tries},
      rows_(half_ == 0 ? 0 : options.max_rows)
  {
    if (half_ == 0) { return; }
    std::uint64_t const lanes = std::uint64_t{options.max_rows} * head_groups_;
    work_ = std::make_unique<work>(backend, lanes, half_, options.max_rows);
    runs_.reserve(std::uint64_t{half_} * head_groups_);
    for (std::uint32_t r = 0; r < options.max_rows; ++r) {
      work_->ids.template as<row_id>()[r] = static_cast<row_id>(r);
      work_->boxes.template as<stream_box>()[r] = stream_box{};
    }
    set_up_work(backend, "clearing the stream's tables", [&](stream_ref stream) {
      status const cleared = backend.launch(
        stream, fill_words{.target = work_->slots.data(), .count = work_->slots.bytes() / 4, .value = 0xFFFFFFFFU});
      if (cleared != status::ok) { return cleared; }
      return backend.launch(stream, fill_words{.target = work_->counts.data(), .count = lanes, .value = 0});
    });
  }

  stream_driver(stream_driver&&) = delete;

  /// Whether there are slots to stream through.
  [[nodiscard]] bool enabled() const noexcept { return half_ != 0; }
  /// Number of the stream that goes on; 0 where none does.
  [[nodiscard]] std::uint64_t current() const noexcept { return goes_on_ ? serial_ : 0; }
  [[nodiscard]] row_id row() const noexcept { return row_; }
  [[nodiscard]] layer_id layer() const noexcept { return layer_; }

  /// Begins to bring blocks [0, blocks) of the row at the layer, all of them on the host. Another stream has ended.
  /// @return what was lost where a call was refused: the stream has ended then
  template <class Mover>
  stream_loss begin(row_id row, layer_id layer, std::uint32_t blocks, Mover& mover) noexcept
  {
    ++serial_;
    goes_on_ = true;
    row_ = row;
    layer_ = layer;
    blocks_ = blocks;
    issued_ = handed_ = 0;
    row_state& state = rows_[to_index(row)];
    stream_loss lost;
    if (keeper_->checksums().enabled()) {
      // Checksums are looked up by the device's table of host blocks, which the step's begin may have changed.
      lost.code = backend_->record(compute_, work_->told.get());
      if (lost.code == status::ok) { lost.code = backend_->wait(work_->copies.get(), work_->told.get()); }
    }
    if (state.chunks == 0) { box(row) = stream_box{}; }
    for (std::uint32_t side = 0; side < halves && lost.code == status::ok && issued_ < blocks_; ++side) {
      lost = issue(side, mover);
    }
    if (lost.code != status::ok) { end(); }
    return lost;
  }

  /// Goes on to the next part. @param has whether there is one: else the stream has ended
  template <class Mover>
  stream_loss next(stream_part& part, bool& has, Mover& mover) noexcept
  {
    has = false;
    stream_loss lost;
    if (device::load_acquire(&box(row_).failed) != 0) {
      end();
      return loss_of(row_);
    }
    if (handed_ != 0) {
      std::uint32_t const side = half_of(handed_ - 1);
      lost.code = pass(side);
      if (lost.code == status::ok && issued_ < blocks_) { lost = issue(side, mover); }
    }
    if (lost.code == status::ok && handed_ < blocks_) {
      std::uint32_t const count = std::min(half_, blocks_ - handed_);
      lost.code = list(half_of(handed_), count);
      if (lost.code == status::ok) {
        part = part_of(handed_, count);
        work_->halves[half_of(handed_)].read = has = true;
        handed_ += count;
        return lost;
      }
    }
    end();
    return lost;
  }

  /// The stream that goes on ends here; its copies complete all the same.
  void end() noexcept
  {
    // Where this is refused the next copy into the half asks again.
    if (goes_on_ && handed_ != 0) { static_cast<void>(pass(half_of(handed_ - 1))); }
    goes_on_ = false;
  }

  /// Whether the row has streamed since its last `settle`.
  [[nodiscard]] bool streamed(row_id row) const noexcept { return enabled() && rows_[to_index(row)].chunks != 0; }

  /// At the end of the row's step: sleeps until what it streamed is there, and says what is not.
  stream_loss settle(row_id row, nanoseconds deadline) noexcept
  {
    if (goes_on_ && row_ == row) { end(); }
    stream_loss lost;
    lost.code = wait(row, deadline);
    if (lost.code != status::ok) { return lost; }
    row_state& state = rows_[to_index(row)];
    stream_box& words = box(row);
    if (device::load_acquire(&words.seen) != state.last.number && words.failed == 0) {
      words.failed = 1;  // nothing came behind it that could have missed it
      words.lost = state.last;
    }
    if (words.failed != 0) { lost = loss_of(row); }
    state.chunks = 0;
    state.last = {};
    return lost;
  }

  /// The row's sequence has ended, and none of its copies flies.
  void forget(row_id row) noexcept
  {
    if (!enabled()) { return; }
    rows_[to_index(row)].chunks = 0;
    rows_[to_index(row)].last = {};
  }

  /// Books that follow from copies which have completed. Never waits.
  void poll() noexcept
  {
    if (!enabled()) { return; }
    for (half_state& into : work_->halves) {
      if (into.serial <= arrived_) { continue; }
      if (!into.recorded) { into.recorded = backend_->record(work_->copies.get(), into.arrived.get()) == status::ok; }
      bool const complete = into.recorded && backend_->done(into.arrived.get()) != event_state::pending;
      if (complete) { arrived_ = into.serial; }
    }
  }

  /// Whether copies of the row's blocks are under way.
  [[nodiscard]] bool flies(row_id row) noexcept
  {
    if (!enabled() || rows_[to_index(row)].last_copy <= arrived_) { return false; }
    poll();
    return rows_[to_index(row)].last_copy > arrived_;
  }

  /// Sleeps until no copy of the row's blocks is under way.
  status wait(row_id row, nanoseconds deadline) noexcept
  {
    return enabled() ? wait_for(rows_[to_index(row)].last_copy, deadline) : status::ok;
  }

  /// Sleeps until no copy is under way.
  status drain(nanoseconds deadline) noexcept { return wait_for(copies_, deadline); }

  /// Bytes of device memory beside the slots.
  [[nodiscard]] std::uint64_t device_bytes() const noexcept
  {
    return enabled() ? work_->slots.bytes() + work_->counts.bytes() : 0;
  }

 private:
  static constexpr std::uint32_t halves = 2;
  static constexpr std::size_t runs_per_call = 256;

  struct half_state {
    detail::owned_event<B> arrived;  // behind the copies into it
    detail::owned_event<B> passed;   // behind the attention that read it
    std::uint64_t serial = 0;        // of the last copy into it
    bool recorded = true;            // whether `arrived` means that copy
    bool read = false;               // a part in it is or was out, and `passed` does not stand behind its attention yet
  };
  struct row_state {
    std::uint64_t last_copy = 0;  // number of the row's last copy among all
    std::uint32_t chunks = 0;     // that the row has streamed in its step
    stream_chunk last = {};
  };
  struct work {
    work(B& backend, std::uint64_t lanes, std::uint32_t half_slots, std::uint32_t rows)
      : slots{backend, memory_space::device, lanes * half_slots * sizeof(slot_id)},
        counts{backend, memory_space::device, lanes * sizeof(std::uint32_t)},
        ids{backend, memory_space::pinned, rows * sizeof(row_id)},
        boxes{backend, memory_space::pinned, rows * sizeof(stream_box)},
        told{backend},
        halves{
          half_state{detail::owned_event<B>{backend}, detail::owned_event<B>{backend}},
          half_state{detail::owned_event<B>{backend}, detail::owned_event<B>{backend}}},
        copies{backend, stream_priority::normal}
    {}

    slab<B> slots;   // [lanes, half_slots] of the part that is out
    slab<B> counts;  // [lanes]
    slab<B> ids;     // [rows] each row's number: lists of one row
    slab<B> boxes;   // [rows] stream_box
    detail::owned_event<B> told;
    std::array<half_state, stream_driver::halves> halves;
    detail::owned_stream<B> copies;  // goes first: runs out what names the rest
  };

  [[nodiscard]] stream_box& box(row_id row) const noexcept
  {
    return work_->boxes.template as<stream_box>()[to_index(row)];
  }
  /// The half that holds a block while it is out.
  [[nodiscard]] std::uint32_t half_of(std::uint32_t block) const noexcept { return block / half_ % halves; }
  /// First slot of a half; head group g has half_ slots from g * half_ on.
  [[nodiscard]] slot_id first_slot(std::uint32_t side) const noexcept
  {
    return keeper_->stream_slot(side * head_groups_ * half_);
  }

  [[nodiscard]] stream_loss loss_of(row_id row) const noexcept
  {
    stream_chunk const& lost = box(row).lost;
    return {
      .code = status::transfer_failed,
      .layer = lost.layer,
      .first_block = lost.first_block,
      .block_count = lost.block_count,
      .tries = 1};
  }

  /// What reads the half has been enqueued.
  status pass(std::uint32_t side) noexcept
  {
    half_state& state = work_->halves[side];
    if (!state.read) { return status::ok; }
    status const recorded = backend_->record(compute_, state.passed.get());
    state.read = recorded != status::ok;
    return recorded;
  }

  /// Enqueues the copies of the next chunk into a half.
  template <class Mover>
  stream_loss issue(std::uint32_t side, Mover& mover) noexcept
  {
    half_state& into = work_->halves[side];
    row_state& state = rows_[to_index(row_)];
    stream_chunk const chunk{
      .layer = layer_,
      .first_block = issued_,
      .block_count = std::min(half_, blocks_ - issued_),
      .number = state.chunks + 1};
    stream_loss lost{.layer = layer_, .first_block = chunk.first_block, .block_count = chunk.block_count, .tries = 0};
    lost.code = pass(side);
    if (lost.code == status::ok) { lost.code = backend_->wait(work_->copies.get(), into.passed.get()); }
    if (lost.code != status::ok) { return lost; }
    gather_runs(side, chunk);
    // From here on copies may be under way, whatever is refused behind them.
    into.serial = state.last_copy = ++copies_;
    do {
      lost.code = move(mover);
      ++lost.tries;
    } while (lost.code != status::ok && lost.code != status::device_lost && lost.tries < max_tries_);
    bool const refused = lost.code != status::ok;
    if (refused && lost.code != status::device_lost) { lost.code = status::transfer_failed; }
    if (!refused) {
      lost.code = backend_->launch(
        work_->copies.get(),
        land_stream{
          .box = &box(row_),
          .chunk = chunk,
          .before = state.last,
          .checksums = keeper_->checksums(),
          .pool = keeper_->pool().ref(),
          .host_blocks =
            keeper_->books().host_blocks() + to_index(row_) * keeper_->books().sizes().max_blocks + chunk.first_block,
          .first = first_slot(side),
          .stride = half_,
          .head_groups = head_groups_});
    }
    if (lost.code == status::ok) {
      // The device will count it, whatever is refused from here on.
      ++state.chunks;
      state.last = chunk;
    }
    status const recorded = backend_->record(work_->copies.get(), into.arrived.get());
    into.recorded = recorded == status::ok;
    if (lost.code == status::ok) { lost.code = recorded; }
    if (lost.code != status::ok) { return lost; }
    issued_ += chunk.block_count;
    return {};
  }

  /// Runs of a chunk, those merged that follow one another.
  void gather_runs(std::uint32_t side, stream_chunk const& chunk) noexcept
  {
    runs_.clear();
    std::uint64_t const bytes = keeper_->layout().block_bytes;
    sequence_state const& sequence = keeper_->sequences()[row_];
    for (std::uint32_t g = 0; g < head_groups_; ++g) {
      std::uint64_t const first = to_index(first_slot(side)) + std::uint64_t{g} * half_;
      for (std::uint32_t i = 0; i < chunk.block_count; ++i) {
        copy_run const run{
          .target = keeper_->pool().ref().address(layer_, static_cast<slot_id>(first + i)),
          .source = keeper_->store().ref().address(layer_, g, sequence.host_blocks[chunk.first_block + i]),
          .bytes = bytes};
        bool const follows = !runs_.empty() && runs_.back().target + runs_.back().bytes == run.target &&
          runs_.back().source + runs_.back().bytes == run.source;
        if (follows) {
          runs_.back().bytes += bytes;
        } else {
          runs_.push_back(run);
        }
      }
    }
  }

  template <class Mover>
  status move(Mover& mover) noexcept
  {
    for (std::size_t i = 0; i < runs_.size(); i += runs_per_call) {
      status const moved = mover.move_async(
        work_->copies.get(),
        copy_list{
          .runs = runs_.data() + i,
          .count = static_cast<std::uint32_t>(std::min(runs_.size() - i, runs_per_call)),
          .direction = copy_direction::host_to_device});
      if (moved != status::ok) { return moved; }
    }
    return status::ok;
  }

  /// The compute stream waits for the half's copies, then lists its slots.
  status list(std::uint32_t side, std::uint32_t count) noexcept
  {
    status const waits = backend_->wait(compute_, work_->halves[side].arrived.get());
    if (waits != status::ok) { return waits; }
    return backend_->launch(
      compute_,
      list_stream{
        .slots = work_->slots.template as<slot_id>(),
        .counts = work_->counts.template as<std::uint32_t>(),
        .row = row_,
        .first = first_slot(side),
        .count = count,
        .stride = half_,
        .head_groups = head_groups_});
  }

  [[nodiscard]] stream_part part_of(std::uint32_t first, std::uint32_t count) const noexcept
  {
    return {
      .layer = layer_,
      .rows = {.ids = work_->ids.template as<row_id>() + to_index(row_), .count = 1},
      .table =
        {.slots = work_->slots.template as<slot_id>(),
         .counts = work_->counts.template as<std::uint32_t>(),
         .info = keeper_->books().info(),
         .pool = keeper_->pool().ref(),
         .layout = keeper_->layout(),
         .layer = layer_,
         .stride = half_,
         .head_groups = head_groups_,
         .which = part::landed},
      .first_block = first,
      .block_count = count};
  }

  status wait_for(std::uint64_t copy, nanoseconds deadline) noexcept
  {
    for (poll(); arrived_ < copy; poll()) {
      half_state const& latest =
        *std::max_element(work_->halves.begin(), work_->halves.end(), [](half_state const& a, half_state const& b) {
          return a.serial < b.serial;
        });
      if (!latest.recorded) { return status::device_lost; }
      typename B::event_ref const event = latest.arrived.get();
      if (status const waited = backend_->wait_any({&event, 1}, deadline); waited != status::ok) { return waited; }
    }
    return status::ok;
  }

  B* backend_;
  stream_ref compute_;
  block_keeper<B, Replacement>* keeper_;
  std::uint32_t half_;  // blocks of one half; 0: nothing streams
  std::uint32_t head_groups_;
  std::uint32_t max_tries_;
  std::vector<row_state> rows_;
  std::unique_ptr<work> work_;
  std::vector<copy_run> runs_;
  std::uint64_t copies_ = 0;   // copies issued so far
  std::uint64_t arrived_ = 0;  // copies 1 .. arrived_ are complete
  std::uint64_t serial_ = 0;
  row_id row_ = none<row_id>;
  layer_id layer_ = none<layer_id>;
  std::uint32_t blocks_ = 0;  // that the stream brings
  std::uint32_t issued_ = 0;
  std::uint32_t handed_ = 0;
  bool goes_on_ = false;
};

}  // namespace pulseinfer
