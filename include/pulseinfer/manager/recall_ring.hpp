#pragma once

/// The recalls under way, each with a ticket, a plan and two events.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/detail/handles.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/recall_plan.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/view/ticket.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// One recall. `rows` are those that select; rows that need nothing are not in the plan.
template <class B>
struct recall {
  std::uint32_t generation = 0;
  std::uint64_t order = 0;                      ///< recalls are numbered as they are given out
  std::uint32_t users = 0;                      ///< rows that stand at this recall
  bool active = false;                          ///< given out; its events mean something
  bool planned = false;                         ///< the plan's event has been recorded
  bool issued = false;                          ///< copies have been enqueued and the landed event recorded
  bool ordered = false;                         ///< what is enqueued on the copies' stream comes behind the plan
  bool failing = false;                         ///< its rows are being failed on the device
  bool unplanned = false;                       ///< its blocks have slots, and no plan names them: planning was refused
  bool owes = false;                            ///< its rows must still be failed on the device: that was refused
  bool over = false;                            ///< its copies were seen complete
  bool counted = false;                         ///< what it moved is in the traffic of its layer
  std::atomic<std::uint64_t>* given = nullptr;  ///< what other threads know of it, see recall_ring::abort
  recall_priority priority = recall_priority::demand;
  status code = status::ok;
  layer_id layer = none<layer_id>;
  recall_lists lists = recall_lists::whole;
  std::uint32_t row_count = 0;
  std::uint32_t passed = 0;            ///< rows that the recall was asked for, those in no plan included
  std::uint32_t* places = nullptr;     // [max_rows], pinned: place of each planned row among them
  row_id* rows = nullptr;              // [max_rows], pinned
  std::uint32_t* sequence = nullptr;   // [max_rows], pinned
  std::uint32_t* place_of = nullptr;   // [max_rows], by row: its place among `rows`, if that place names it
  std::uint32_t* row_begin = nullptr;  // [max_rows + 1], where the engine reads plans
  std::uint32_t* failed = nullptr;     // [max_entries], likewise
  recall_entry* failures = nullptr;    // [max_entries], pinned
  recall_failure* missed = nullptr;    // [max_rows], pinned: how it failed, by row
  recall_entry* entries = nullptr;     // [max_entries], where the engine reads plans
  typename B::stream_ref stream = {};  ///< on which it was resolved
  typename B::event_ref planned_event = {};
  typename B::event_ref landed_event = {};
};

/// A ring sized at construction. A place is given out again once no row stands at it and its copies are complete.
template <class B>
class recall_ring {
 public:
  /// @param kept places beside those of the ring, behind them, which are never given out: for captured steps
  /// @throws configuration_error, resource_error
  recall_ring(
    B& backend, std::uint32_t ring, std::uint32_t max_rows, std::uint32_t max_entries, plan_place where,
    std::uint32_t kept = 0)
    : backend_{&backend},
      ring_{ring},
      lists_{backend, memory_space::pinned, (std::uint64_t{ring} + kept) * max_rows * 3 * sizeof(std::uint32_t)},
      plans_{
        backend, where == plan_place::device ? memory_space::device : memory_space::pinned,
        (std::uint64_t{ring} + kept) * plan_bytes(max_rows, max_entries)},
      failures_{backend, memory_space::pinned, (std::uint64_t{ring} + kept) * max_entries * sizeof(recall_entry)},
      missed_{backend, memory_space::pinned, (std::uint64_t{ring} + kept) * max_rows * sizeof(recall_failure)},
      place_of_((std::size_t{ring} + kept) * max_rows, 0),
      given_(std::size_t{ring} + kept)
  {
    if (ring == 0 || max_rows == 0) {
      throw configuration_error{
        "recall ring of " + std::to_string(ring) + " places for " + std::to_string(max_rows) + " rows"};
    }
    std::uint32_t const places = ring + kept;
    recalls_.resize(places);
    events_.reserve(std::size_t{2} * places);
    for (std::uint32_t i = 0; i < places; ++i) {
      recall<B>& r = recalls_[i];
      r.rows = lists_.template as<row_id>() + std::uint64_t{i} * max_rows * 3;
      r.sequence = lists_.template as<std::uint32_t>() + std::uint64_t{i} * max_rows * 3 + max_rows;
      r.places = r.sequence + max_rows;
      r.place_of = place_of_.data() + std::size_t{i} * max_rows;
      std::byte* const plan = plans_.data() + i * plan_bytes(max_rows, max_entries);
      r.entries = reinterpret_cast<recall_entry*>(plan);
      r.failed = reinterpret_cast<std::uint32_t*>(plan + max_entries * sizeof(recall_entry));
      r.row_begin = r.failed + max_entries;
      r.failures = failures_.template as<recall_entry>() + std::uint64_t{i} * max_entries;
      r.missed = missed_.template as<recall_failure>() + std::uint64_t{i} * max_rows;
      r.given = &given_[i];
      r.planned_event = events_.emplace_back(backend).get();
      r.landed_event = events_.emplace_back(backend).get();
    }
  }

  recall_ring(recall_ring&&) = delete;

  /// A place for a new recall; waits for the oldest copies where all places fly.
  /// @param attend called with recalls whose place is wanted: brings on what can be brought on
  /// @status busy: every place has a row standing at it; drain_timeout; device_lost
  template <class Attend>
  status acquire(ticket& given, nanoseconds deadline, Attend attend) noexcept
  {
    std::uint32_t const size = ring_;
    // One place may be waited for twice: for its plan, then for its copies.
    constexpr int passes = 3;
    for (int pass = 0; pass < passes; ++pass) {
      std::uint32_t oldest = size;
      for (std::uint32_t i = 0; i < size; ++i) {
        std::uint32_t const place = (next_ + i) % size;
        recall<B>& r = recalls_[place];
        if (r.users != 0) { continue; }
        if (r.active) { attend(r); }
        bool free = !r.active || copies_done(r);
        if (free && r.active) {
          // What was told until the copies were seen complete is lost with the place.
          attend(r);
          free = copies_done(r);
        }
        if (free) {
          r.active = true;
          r.planned = r.issued = r.ordered = r.failing = r.over = r.counted = false;
          r.priority = recall_priority::demand;
          r.code = status::ok;
          r.lists = recall_lists::whole;
          r.row_count = 0;
          r.passed = 0;
          ++r.generation;
          r.given->store(given_word(r.generation), std::memory_order_release);
          r.order = ++given_out_;
          next_ = (place + 1) % size;
          given = {.index = place, .generation = r.generation};
          return status::ok;
        }
        if (oldest == size) { oldest = place; }
      }
      if (oldest == size || pass + 1 == passes) { return status::busy; }
      recall<B> const& r = recalls_[oldest];
      typename B::event_ref const& event = r.issued ? r.landed_event : r.planned_event;
      if (status const waited = backend_->wait_any({&event, 1}, deadline); waited != status::ok) { return waited; }
    }
    return status::busy;
  }

  /// The recall of a ticket; nullptr where it is stale.
  [[nodiscard]] recall<B>* find(ticket t) noexcept
  {
    if (t.index >= ring_ || recalls_[t.index].generation != t.generation || !recalls_[t.index].active) {
      return nullptr;
    }
    return &recalls_[t.index];
  }

  /// Marks a recall as given up.   @status stale_ticket   @thread_safety any thread, at any time
  status abort(ticket t) noexcept
  {
    if (t.index >= ring_) { return status::stale_ticket; }
    std::uint64_t expected = given_word(t.generation);
    std::uint64_t const marked = expected | aborted_bit;
    bool const done =
      given_[t.index].compare_exchange_strong(expected, marked, std::memory_order_acq_rel) || expected == marked;
    return done ? status::ok : status::stale_ticket;
  }
  [[nodiscard]] static bool is_aborted(recall<B> const& r) noexcept
  {
    return (r.given->load(std::memory_order_acquire) & aborted_bit) != 0;
  }

  [[nodiscard]] recall<B>& operator[](std::uint32_t index) noexcept { return recalls_[index]; }
  /// Places, those that are kept included.
  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(recalls_.size()); }
  /// Places that are given out; those that are kept stand behind them.
  [[nodiscard]] std::uint32_t ring() const noexcept { return ring_; }

  /// The oldest recall that has been planned and not issued; nullptr where there is none.
  [[nodiscard]] recall<B>* oldest_planned() noexcept
  {
    recall<B>* oldest = nullptr;
    for (recall<B>& r : recalls_) {
      bool const waits = r.active && r.planned && !r.issued;
      if (waits && (oldest == nullptr || r.order < oldest->order)) { oldest = &r; }
    }
    return oldest;
  }

  /// Whether nothing of the recall is left on a stream, or still to be enqueued.
  [[nodiscard]] bool copies_done(recall<B> const& r) noexcept
  {
    if (!r.active) { return true; }
    if (r.unplanned || r.owes) { return false; }
    if (r.issued) { return backend_->done(r.landed_event) != event_state::pending; }
    // A plan that failed is issued by nobody.
    return !r.planned || backend_->done(r.planned_event) == event_state::failed;
  }

 private:
  /// Entries, a flag for each, and the begin of each row.
  [[nodiscard]] static std::uint64_t plan_bytes(std::uint32_t max_rows, std::uint32_t max_entries)
  {
    std::uint64_t const words = std::uint64_t{max_entries} + max_rows + 1;
    return max_entries * sizeof(recall_entry) + round_up(words, std::uint64_t{4}) * sizeof(std::uint32_t);
  }

  static constexpr std::uint64_t aborted_bit = 1;

  /// A place that has been given out in a generation; 0 before the first.
  [[nodiscard]] static std::uint64_t given_word(std::uint32_t generation) noexcept
  {
    return (std::uint64_t{generation} << 2U) | 2U;
  }

  B* backend_;
  std::uint32_t ring_;
  slab<B> lists_;
  slab<B> plans_;
  slab<B> failures_;                            // [places, max_entries]
  slab<B> missed_;                              // [places, max_rows]
  std::vector<std::uint32_t> place_of_;         // [places, max_rows]
  std::vector<detail::owned_event<B>> events_;  // [places, 2]: those that the recalls name
  std::vector<recall<B>> recalls_;
  std::vector<std::atomic<std::uint64_t>> given_;  // [places]
  std::uint32_t next_ = 0;
  std::uint64_t given_out_ = 0;
};

}  // namespace pulseinfer
