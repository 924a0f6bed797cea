#pragma once

/// Sealed blocks on their way to the host.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/block_layout.hpp>
#include <pulseinfer/operation/checksum_blocks.hpp>
#include <pulseinfer/store/host_store.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/store/slot_pool.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>

#include <cstdint>
#include <vector>

namespace pulseinfer {

/// Blocks [first, last) of a sequence that travel in one batch.
struct write_part {
  row_id row = none<row_id>;
  sequence_id sequence = none<sequence_id>;
  std::uint32_t first = 0;
  std::uint32_t last = 0;
};

/// Batches in order on one stream. What a batch names, slots and host blocks, is pinned until its copies are complete.
/// No call after construction allocates.
template <class B>
class write_back_queue {
 public:
  /// @param max_blocks most (block of a sequence) of one batch   @param lanes (layer, head group) pairs that are written
  /// @param layout of blocks whose checksums are taken on the way; plane_count 0: none are
  write_back_queue(
    B& backend, std::uint32_t batches, std::uint32_t max_blocks, std::uint32_t lanes, block_layout const& layout)
    : backend_{&backend},
      stream_{backend, stream_priority::low},
      max_blocks_{max_blocks},
      lanes_{lanes},
      layout_{layout},
      jobs_{
        backend, memory_space::pinned,
        layout.plane_count == 0 ? 0 : std::uint64_t{batches} * max_blocks * lanes * sizeof(checksum_job)}
  {
    runs_.reserve(std::uint64_t{max_blocks} * lanes);
    batches_.reserve(batches);
    for (std::uint32_t i = 0; i < batches; ++i) {
      batches_.push_back(batch{.event = detail::owned_event<B>{backend}});
      batches_.back().parts.reserve(max_blocks);
      batches_.back().slots.reserve(std::uint64_t{max_blocks} * lanes);
      batches_.back().blocks.reserve(max_blocks);
    }
  }

  /// Whether a batch can be opened now.
  [[nodiscard]] bool has_room() const noexcept { return begun_ - ended_ < batches_.size(); }
  /// Blocks that the open batch still takes.
  [[nodiscard]] std::uint32_t free_blocks() const noexcept
  {
    return max_blocks_ - static_cast<std::uint32_t>(current().blocks.size());
  }

  void open() noexcept
  {
    batch& b = batches_[begun_ % batches_.size()];
    b.parts.clear();
    b.slots.clear();
    b.blocks.clear();
    runs_.clear();
    ++begun_;
  }

  /// Adds one block of a sequence; `add_lane` follows for each of its lanes.
  void add_block(write_part const& part, host_block_id block) noexcept
  {
    batch& b = current();
    if (!b.parts.empty() && b.parts.back().row == part.row && b.parts.back().last == part.first) {
      b.parts.back().last = part.last;
    } else {
      b.parts.push_back(part);
    }
    b.blocks.push_back(block);
  }

  /// @param sums where the block's checksums go; not looked at where none are taken
  void add_lane(layer_id layer, slot_id slot, copy_run const& run, std::uint32_t* sums) noexcept
  {
    if (layout_.plane_count != 0) { current_jobs()[runs_.size()] = {.block = run.source, .sums = sums}; }
    current().slots.push_back({.layer = layer, .slot = slot});
    runs_.push_back(run);
  }

  /// Sends the open batch, behind `ready`; an empty one is dropped.
  template <class Mover>
  status send(typename B::event_ref ready, Mover& mover, slot_pool<B>& pool, host_store<B>& store) noexcept
  {
    batch& b = current();
    bytes_ = 0;
    if (b.blocks.empty()) {
      --begun_;
      return status::ok;
    }
    for (pinned_slot const& s : b.slots) { static_cast<void>(pool.pin(s.layer, s.slot)); }
    for (host_block_id const block : b.blocks) { static_cast<void>(store.pin(block)); }
    for (copy_run const& run : runs_) { bytes_ += run.bytes; }
    status result = backend_->wait(stream_.get(), ready);
    if (result == status::ok && layout_.plane_count != 0) {
      result = backend_->launch(
        stream_.get(),
        checksum_blocks{.jobs = current_jobs(), .count = static_cast<std::uint32_t>(runs_.size()), .layout = layout_});
    }
    for (std::size_t i = 0; i < runs_.size() && result == status::ok; i += runs_per_call) {
      std::size_t const count = runs_.size() - i < runs_per_call ? runs_.size() - i : runs_per_call;
      result = mover.move_async(
        stream_.get(),
        copy_list{
          .runs = runs_.data() + i,
          .count = static_cast<std::uint32_t>(count),
          .direction = copy_direction::device_to_host});
    }
    b.refused = result != status::ok;
    // The event stands behind whatever was enqueued, so that pins are held until the last copy that flies is done.
    status const recorded = mark(b);
    return result != status::ok ? result : recorded;
  }

  /// Ends the oldest batch if its copies are complete: unpins, then calls done(part, arrived) for each part.
  /// @return whether a batch has ended
  template <class Done>
  bool end_oldest(slot_pool<B>& pool, host_store<B>& store, Done done) noexcept
  {
    if (begun_ == ended_) { return false; }
    batch& b = batches_[ended_ % batches_.size()];
    if (!b.marked && mark(b) != status::ok) { return false; }
    event_state const state = backend_->done(b.event.get());
    if (state == event_state::pending) { return false; }
    ++ended_;
    for (pinned_slot const& s : b.slots) { static_cast<void>(pool.unpin(s.layer, s.slot)); }
    for (host_block_id const block : b.blocks) { static_cast<void>(store.unpin(block)); }
    for (write_part const& part : b.parts) { done(part, state == event_state::done && !b.refused); }
    return true;
  }

  /// Sleeps until the oldest batch is complete.
  status wait_oldest(nanoseconds deadline) noexcept
  {
    if (begun_ == ended_) { return status::ok; }
    batch& b = batches_[ended_ % batches_.size()];
    if (!b.marked) {
      if (status const said = mark(b); said != status::ok) { return said; }
    }
    typename B::event_ref const event = b.event.get();
    return backend_->wait_any({&event, 1}, deadline);
  }

  [[nodiscard]] bool idle() const noexcept { return begun_ == ended_; }
  [[nodiscard]] std::uint32_t flying() const noexcept { return static_cast<std::uint32_t>(begun_ - ended_); }
  [[nodiscard]] std::uint64_t sent_bytes() const noexcept { return bytes_; }  ///< of the last batch

 private:
  static constexpr std::size_t runs_per_call = 256;

  struct pinned_slot {
    layer_id layer = none<layer_id>;
    slot_id slot = none<slot_id>;
  };
  struct batch {
    detail::owned_event<B> event;
    std::vector<write_part> parts = {};
    std::vector<pinned_slot> slots = {};
    std::vector<host_block_id> blocks = {};
    bool refused = false;
    bool marked = false;  // its event stands behind its copies
  };

  /// Records the batch's event. What is refused is tried again before the event is asked.
  status mark(batch& b) noexcept
  {
    status const said = backend_->record(stream_.get(), b.event.get());
    b.marked = said == status::ok || said == status::device_lost;
    return said;
  }

  [[nodiscard]] checksum_job* current_jobs() const noexcept
  {
    return jobs_.template as<checksum_job>() + (begun_ - 1) % batches_.size() * max_blocks_ * lanes_;
  }
  [[nodiscard]] batch& current() noexcept { return batches_[(begun_ - 1) % batches_.size()]; }
  [[nodiscard]] batch const& current() const noexcept { return batches_[(begun_ - 1) % batches_.size()]; }

  B* backend_;
  detail::owned_stream<B> stream_;
  std::uint32_t max_blocks_;
  std::uint32_t lanes_;
  block_layout layout_;
  slab<B> jobs_;  // [batches, max_blocks * lanes], read by the device while its batch flies
  std::vector<copy_run> runs_;
  std::vector<batch> batches_;
  std::uint64_t begun_ = 0;
  std::uint64_t ended_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace pulseinfer
