#pragma once

/// The manager that a host engine holds: binds the policies, owns the memory, and runs the loop over visits.

#include <pulseinfer/concepts/admission_policy.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/host_types.hpp>
#include <pulseinfer/concepts/layer_scheduler.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/detail/abandonment.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/background_filler.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/manager/block_stream.hpp>
#include <pulseinfer/manager/captured_step.hpp>
#include <pulseinfer/manager/captured_visit.hpp>
#include <pulseinfer/manager/list_arena.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/recall_driver.hpp>
#include <pulseinfer/manager/row_balancer.hpp>
#include <pulseinfer/manager/sequence_mover.hpp>
#include <pulseinfer/manager/slot_budget.hpp>
#include <pulseinfer/manager/step_loop.hpp>
#include <pulseinfer/manager/step_meter.hpp>
#include <pulseinfer/manager/stream_driver.hpp>
#include <pulseinfer/manager/tensor_shapes.hpp>
#include <pulseinfer/manager/visit_queue.hpp>
#include <pulseinfer/operation/append_tokens.hpp>
#include <pulseinfer/operation/keep_selection.hpp>
#include <pulseinfer/operation/select_window.hpp>
#include <pulseinfer/replacement/lru.hpp>
#include <pulseinfer/view/balance.hpp>
#include <pulseinfer/view/failure_record.hpp>
#include <pulseinfer/view/step_sample.hpp>
#include <pulseinfer/view/stream_part.hpp>
#include <pulseinfer/view/ticket.hpp>
#include <pulseinfer/view/visit.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pulseinfer {

/// A row of the step that begins.
struct step_row {
  row_id row = none<row_id>;
  std::uint32_t tokens = 1;        ///< tokens that the step appends
  std::uint32_t token_offset = 0;  ///< the row's first token in the engine's [tokens, heads, dim] tensors
};

/// How many of a row's new tokens stay.
struct commit_row {
  row_id row = none<row_id>;
  std::uint32_t accepted = 1;
};

/// A request's lengths.
struct sequence_options {
  std::uint32_t prompt_tokens = 0;  ///< while fewer are committed, every block stays resident: the prefill lease
  std::uint32_t max_tokens = 0;     ///< prompt and output
  bool keep_resident = false;       ///< every block keeps a slot also once the row selects, until `demote`
  /// A balancing admission policy says whether the row keeps its blocks, here and later (`balance`); keep_resident counts for
  /// nothing then. With other policies, and for prompts that stream, it changes nothing.
  bool place_freely = false;
  /// The prompt comes in without staying resident: in selected layers only the blocks that a step opens have slots, earlier
  /// ones come by through `stream_blocks`. Once the prompt is in, the row selects, however short it is. For requests that
  /// offload, of managers built with stream_tokens; others are rejected.
  bool stream_prompt = false;
};

/// Rows of a ticket, bit i of word i / 64 for the i-th row that was passed to begin_recall. Valid until the next call.
struct row_mask {
  std::span<std::uint64_t const> words = {};

  [[nodiscard]] bool test(std::uint32_t place) const { return ((words[place / 64] >> (place % 64)) & 1U) != 0; }
};

/// Device and host memory of a manager, in bytes.
struct memory_use {
  std::uint64_t slot_bytes = 0;       ///< slots in use
  std::uint64_t slot_bytes_peak = 0;  ///< since construction or reset_peak
  std::uint64_t digest_bytes = 0;     ///< digest extents in use
  std::uint64_t book_bytes = 0;       ///< ids, counts, tables
  std::uint64_t host_bytes = 0;       ///< host blocks in use
};

/// Work that names a manager's memory and is not complete.
struct work_in_flight {
  std::uint32_t recalls = 0;
  std::uint32_t write_backs = 0;  ///< batches of blocks on their way to the host
  bool moves = false;             ///< copies of a call that gave them up at the wait limit
  bool launches = false;          ///< on the compute stream

  [[nodiscard]] bool idle() const { return recalls == 0 && write_backs == 0 && !moves && !launches; }
};

/// Composes the policies over a backend. One thread drives it; `abort` and `close` may be called by any. The backend, the
/// compute stream and what the host engine lends must outlive it.
///
/// Stream order: what `begin_step` and `enter` enqueue goes to the compute stream given at construction, on which the host
/// engine enqueues its projections and attention too; copies run on streams of the manager's own.
template <
  class B, class Selector, class TransferEngine, class LayerScheduler, class AdmissionPolicy, class Replacement = lru>
class offload_manager {
  static_assert(backend<B>, "B must model backend; see explain_backend");
  static_assert(selector_for<Selector, B>, "Selector must model selector_for<B>; see explain_selector");
  static_assert(
    transfer_engine_for<TransferEngine, B>,
    "TransferEngine must model transfer_engine_for<B>; see explain_transfer_engine");
  static_assert(
    layer_scheduler<LayerScheduler>, "LayerScheduler must model layer_scheduler; see explain_layer_scheduler");
  static_assert(
    admission_policy<AdmissionPolicy>, "AdmissionPolicy must model admission_policy; see explain_admission_policy");
  static_assert(replacement<Replacement>, "Replacement must model replacement; see explain_replacement");

 public:
  using backend_type = B;
  using stream_ref = typename B::stream_ref;
  using transfer_engine = TransferEngine;
  using layer_scheduler = LayerScheduler;
  static constexpr bool hits_first = LayerScheduler::hits_first;
  /// The lists that the parts of this composition's visits have.
  static constexpr recall_lists default_lists = hits_first ? recall_lists::hits_then_landed : recall_lists::whole;

  /// @throws configuration_error with the numbers that do not fit; resource_error where memory or handles are lacking
  offload_manager(
    B& backend, stream_ref compute, kv_geometry const& geometry, manager_options const& options,
    Selector const& selector = {}, TransferEngine const& transfer = {}, LayerScheduler const& scheduler = {},
    AdmissionPolicy const& admission = {}, Replacement const& policy = {})
    : backend_{&backend},
      compute_{compute},
      geometry_{geometry},
      layout_{make_block_layout(geometry)},
      options_{options},
      admission_{admission},
      selector_{selector.bind(
        backend,
        selector_limits{
          .geometry = geometry,
          .layout = layout_,
          .max_rows = options.max_rows,
          .max_blocks = blocks_of_longest(geometry, options),
          .max_step_tokens = options.max_step_tokens})},
      budget_{make_slot_budget(
        geometry, options, selector_.dense_tokens(),
        [this](layer_id layer) { return selector_.budget_blocks(layer); })},
      keeper_{backend, compute, geometry, layout_, options, budget_, digest_bytes(geometry), policy},
      recalls_{backend, keeper_, geometry, options, budget_, transfer, policy},
      streams_{backend, compute, keeper_, geometry, options, budget_},
      mover_{
        backend, compute, keeper_, options.saved_sequences == 0 ? options.max_rows : options.saved_sequences,
        options.wait_limit},
      arena_{backend, std::uint64_t{options.max_rows} * geometry.layers * 8 + options.max_rows},
      meter_{options.max_rows, backend.now()},
      balancer_{options.max_rows, geometry.layers},
      filler_{backend, compute, keeper_, recalls_, selector_, geometry, options},
      queue_{backend, compute, keeper_, recalls_, arena_, meter_.running(), geometry.layers, options, scheduler},
      fixed_lists_{backend, memory_space::device, std::uint64_t{fixed_list_count} * options.max_rows * sizeof(row_id)},
      mask_words_(divide_up(options.max_rows, 64U)),
      named_(options.max_rows, 0),
      uses_(options.max_rows),
      driver_{std::this_thread::get_id()}
  {}

  offload_manager(offload_manager&&) = delete;

  /// Waits until nothing flies that names the manager's memory, at most options.wait_limit. What flies still keeps it all:
  /// the memory and the handles are lost then, on purpose, and a line on the standard error stream says so.
  ~offload_manager()
  {
    nanoseconds const deadline = backend_->now() + options_.wait_limit;
    status drained = drain(deadline);
    // A call that was refused says nothing of what is in flight.
    if (drained != status::ok && drained != status::device_lost && drained != status::drain_timeout) {
      drained = drain(deadline);
    }
    if (drained == status::ok || drained == status::device_lost) { return; }
    kept_.begin();
    std::fprintf(
      stderr, "pulseinfer: a manager ends with work in flight (%s); its memory stays allocated\n", name_of(drained));
  }

  // -- sequences, between steps

  /// Asks for a place for a request. `queued`: ask again before each step, since room comes back when a sequence ends and
  /// when a prompt is in; `rejected`: it can never fit, and `explain_refusal` says why. On `admitted`, `row` is its place, and
  /// all that it may need is kept back for it.
  [[nodiscard]] admission open(sequence_options const& asked, row_id& row) noexcept
  {
    row = none<row_id>;
    keeper_.adopt_growth();
    admission said = admission::admitted;
    sequence_options const request = placed(asked);
    row_id const place = place_for(request, said);
    if (is_none(place)) { return said; }
    if (keeper_.open(place, request.prompt_tokens, request.max_tokens, slots_of(request)) != status::ok) {
      return admission::queued;
    }
    take_row(place);
    keeper_.place_freely(place, request.place_freely);
    row = place;
    return admission::admitted;
  }

  /// Lets the admission policy deal out slots, where it is a balancing one: between the rows whose requests said `place_freely`
  /// and stand in no step, by `demote` and `promote`, at most one of each; and between layers, for leases that begin later
  /// (`manager_options::max_quota_tokens`). Call it between steps, before `open`. It sleeps as `demote` and `promote` do.
  /// @param waiting the request that stands first in the host engine's queue; null: nobody waits
  /// @status what demote or promote says; ok also where nothing was to be done
  [[nodiscard]] status balance(sequence_options const* waiting = nullptr) noexcept
  {
    if constexpr (balancing_admission<AdmissionPolicy>) {
      retire();
      return queue_.lost() ? status::device_lost : balance_with(admission_, waiting);
    } else {
      static_cast<void>(waiting);
      return status::ok;
    }
  }

  /// What keeps a request out now: what is lacking first, or why admission holds it back (explaining_admission), and all the
  /// numbers.
  [[nodiscard]] std::string explain_refusal(sequence_options const& request) const
  {
    auto const number = [](std::uint64_t value) { return std::to_string(value); };
    std::string const built_for = "; the manager is built for 1 to " + number(options_.max_tokens);
    if (request.max_tokens == 0) { return "asks for nothing: max_tokens is 0" + built_for; }
    if (request.max_tokens > options_.max_tokens) {
      return "is too long: max_tokens is " + number(request.max_tokens) + built_for;
    }
    if (request.prompt_tokens > request.max_tokens) {
      return "has " + number(request.prompt_tokens) + " prompt_tokens, which are more than its max_tokens, " +
        number(request.max_tokens) + built_for;
    }
    if (request.stream_prompt && !streams_.enabled()) {
      return "streams its prompt; the manager is built with stream_tokens 0";
    }
    if (request.stream_prompt && request.keep_resident) {
      return "streams its prompt and keeps every block resident: it does one or the other";
    }
    if (!may_stream(request)) {
      return "of " + number(request.max_tokens) + " tokens streams its prompt; those of up to " +
        number(budget_.has_selected_layers ? budget_.dense_tokens : options_.max_tokens) + " keep every block resident";
    }
    demand const wanted = keeper_.demand_of(request.prompt_tokens, request.max_tokens, slots_of(request));
    capacity const free = keeper_.capacity_now(running_rows());
    std::uint64_t const slots = std::max(wanted.slots_prefill, wanted.slots_decode);
    bool const slots_fit = keeper_.slots_fit(request.prompt_tokens, request.max_tokens, slots_of(request));
    char const* const lacking = slots > free.slots_total  ? "can never have its slots"
      : wanted.host_blocks > free.host_blocks_total       ? "can never have its host blocks"
      : wanted.digest_extents > free.digest_extents_total ? "can never have its digest extents"
      : free.rows_running >= free.rows_total              ? "lacks a row"
      : slots > free.slots_free || !slots_fit             ? "lacks slots"
      : wanted.host_blocks > free.host_blocks_free        ? "lacks host blocks"
      : wanted.digest_extents > free.digest_extents_free  ? "lacks digest extents"
                                                          : nullptr;
    std::string held;
    if constexpr (explaining_admission<AdmissionPolicy>) {
      if (lacking == nullptr) { held = admission_.explain(wanted, free); }
    }
    std::string const begin = lacking != nullptr ? lacking : held.empty() ? "lacks nothing" : "is held back: " + held;
    return begin + ": it needs a row (" + number(free.rows_running) + " of " + number(free.rows_total) + " run), " +
      number(slots) + " slots (" + number(free.slots_free) + " of " + number(free.slots_total) + " free), " +
      number(wanted.host_blocks) + " host blocks (" + number(free.host_blocks_free) + " of " +
      number(free.host_blocks_total) + " free) and " + number(wanted.digest_extents) + " digest extents (" +
      number(free.digest_extents_free) + " of " + number(free.digest_extents_total) + " free)";
  }

  /// Ends a row's sequence. Where copies of its blocks still fly, the row is given back once they are complete: at the next
  /// open, begin_step, poll or drain after that.
  ///
  /// Asked for by another thread than the one that drives the manager, the sequence ends as soon as that thread hands the
  /// next visit out, commits, begins a step, polls or drains, and the host engine does not have the row in hand: a row that
  /// was handed out is entered or committed first, and gets no further visit. Until the row is given back `row_status` says
  /// `aborted`. Whoever asks knows that the row still has the sequence that is meant.
  /// @status out_of_range, invalid_state: no open sequence there, or its end was asked for
  /// @thread_safety any thread, at any time
  status close(row_id row) noexcept
  {
    if (!keeper_.sequences().in_range(row)) { return status::out_of_range; }
    row_use was = row_use::open;
    bool const asked = uses_[to_index(row)].compare_exchange_strong(was, row_use::ending, std::memory_order_acq_rel);
    if (driver_.load(std::memory_order_relaxed) != std::this_thread::get_id()) {
      if (asked) { ends_asked_.store(true, std::memory_order_release); }
      return asked ? status::ok : status::invalid_state;
    }
    // What another thread asked for may be in wait of this one.
    if (was == row_use::idle || queue_[row].closing) { return status::invalid_state; }
    end_sequence(row);
    retire();
    return status::ok;
  }

  /// Takes a row off the device, its last partial block included, and frees the row: `resume` goes on where it was.
  /// Sleeps until everything is on the host.
  /// @status out_of_range; invalid_state: not open, or in a step; busy: no place for one more saved sequence;
  ///         capacity_exceeded: too few host blocks; transfer_failed, drain_timeout. The row is unchanged in these cases
  [[nodiscard]] status preempt(row_id row, saved_id& saved) noexcept
  {
    if (status const still = standing_quiet(row); still != status::ok) { return still; }
    if (status const kept = mover_.save(row, true, true, recalls_.mover(), saved); kept != status::ok) { return kept; }
    return close(row);
  }

  /// Brings a preempted sequence back. On `admitted`, `row` is its place and `saved` is gone.
  [[nodiscard]] admission resume(saved_id saved, row_id& row) noexcept
  {
    row = none<row_id>;
    saved_sequence const* const kept = mover_.find(saved);
    if (kept == nullptr) { return admission::rejected; }
    sequence_options const request{
      .prompt_tokens = kept->prompt_tokens,
      .max_tokens = kept->max_tokens,
      .keep_resident = kept->keeps,
      .stream_prompt = kept->streams};
    admission const said = adopt(saved, request, row);
    if (said == admission::admitted) { static_cast<void>(mover_.drop(saved)); }
    return said;
  }

  /// Keeps the full blocks of a row on the host for later sequences that begin with the same tokens. The row goes on. Which
  /// tokens those are is the host engine's own index to know.
  [[nodiscard]] status retain(row_id row, saved_id& saved) noexcept
  {
    if (status const still = standing_quiet(row); still != status::ok) { return still; }
    return mover_.save(row, false, false, recalls_.mover(), saved);
  }

  /// Begins a sequence whose first tokens are those of `saved`, which stays; full blocks are shared, not copied. The rest
  /// of the prompt follows in steps. `rejected` where `saved` is stale or longer than the request, and where the request
  /// will offload blocks and the saved sequence never would have: its digests were not kept.
  [[nodiscard]] admission adopt(saved_id saved, sequence_options const& request, row_id& row) noexcept
  {
    row = none<row_id>;
    saved_sequence const* const kept = mover_.find(saved);
    if (kept == nullptr || kept->tokens > request.max_tokens) { return admission::rejected; }
    if (lacks_digests(request, kept->offloads)) { return admission::rejected; }
    admission said = admission::admitted;
    row_id const place = place_for(request, said, mover_.shared_full_blocks(*kept, request.max_tokens));
    if (is_none(place)) { return said; }
    status const restored =
      mover_.restore(saved, place, request.prompt_tokens, request.max_tokens, slots_of(request), recalls_.mover());
    if (restored != status::ok) { return admission::queued; }
    take_row(place);
    row = place;
    return admission::admitted;
  }

  /// Gives a saved sequence up. @status stale_ticket
  status release(saved_id saved) noexcept { return mover_.drop(saved); }

  /// Begins a second sequence that shares everything with `from` so far; full blocks are held by both, a partial one is
  /// copied. `rejected` where `from` has no open sequence or stands in a step, and as by `adopt`. @param row its place, on
  /// `admitted`
  [[nodiscard]] admission fork(row_id from, sequence_options const& request, row_id& row) noexcept
  {
    row = none<row_id>;
    saved_id shared;
    if (standing_quiet(from) != status::ok) { return admission::rejected; }
    sequence_state const& sequence = keeper_.sequences()[from];
    bool const offloads = keeper_.row(from).offloads;
    if (sequence.tokens > request.max_tokens || lacks_digests(request, offloads)) { return admission::rejected; }
    // A fork that is not let in copies nothing.
    admission let_in = admission::admitted;
    std::uint32_t const blocks = offloads && budget_.offloads(request.max_tokens) ? sequence.sealed : 0;
    if (is_none(place_for(request, let_in, blocks))) { return let_in; }
    status const kept = mover_.save(from, true, false, recalls_.mover(), shared);
    if (kept != status::ok) { return kept == status::busy ? admission::queued : admission::rejected; }
    admission const said = adopt(shared, request, row);
    static_cast<void>(mover_.drop(shared));
    return said;
  }

  /// Cuts a row back to its first `tokens` tokens. A row that has turned sparse stays so, and appends as a decoding row
  /// does, also what is left of its prompt.
  /// @status see sequence_mover::cut; invalid_state also for a row that stands in a step
  [[nodiscard]] status truncate(row_id row, std::uint32_t tokens) noexcept
  {
    if (status const still = standing_quiet(row); still != status::ok) { return still; }
    return mover_.cut(row, tokens, recalls_.mover());
  }

  /// Lets the blocks of a row that was opened with `keep_resident`, or promoted, go to the host: from the next step on it
  /// recalls what it selects. The blocks of its last selection stay. Sleeps until its full blocks are on the host.
  /// @status out_of_range; invalid_state: not open, in a step, offloads already or never does; transfer_failed,
  ///         drain_timeout. The row is unchanged in these cases
  [[nodiscard]] status demote(row_id row) noexcept
  {
    status const quiet = standing_quiet(row);
    return quiet == status::ok ? keeper_.demote(row, recalls_.mover()) : quiet;
  }

  /// Brings every block of a row back into slots: from the next step on it selects and recalls nothing. Sleeps until the
  /// blocks are there.
  /// @status as `demote`, and invalid_state while the row's prompt streams in; capacity_exceeded: too few slots for the
  ///         longest that the row may become
  [[nodiscard]] status promote(row_id row) noexcept
  {
    status const quiet = standing_quiet(row);
    return quiet == status::ok ? mover_.promote(row, recalls_.mover()) : quiet;
  }

  // -- a step

  /// Begins a step for these rows: lengths, leases and write-backs, all that the host knows. Late rows of the step before
  /// stay in it and are not named again. On any status but ok nothing has begun, and where a row could not be made ready its
  /// row_status says so; on invalid ones nothing has changed. Without rows nothing is enqueued.
  /// @status out_of_range, invalid_state (not open, late, or named twice), invalid_argument (0 tokens, or more than the
  ///         row may append at once), capacity_exceeded (past max_tokens or max_total_tokens); transfer_failed (blocks of a
  ///         row could not be written to the host); stalled, drain_timeout where the device does not get on; busy: copies of a preempt, fork, cut or promotion
  ///         of a row that ended in drain_timeout are still under way; device_lost
  ///         for ever, once a call has met a sticky error: row_status says so of every row, and what the host has of the
  ///         sequences stays readable until they are closed
  status begin_step(std::span<step_row const> rows) noexcept
  {
    retire();
    if (status const sound = check_step(rows); sound != status::ok) { return sound; }
    if (queue_.lost()) { return status::device_lost; }
    keeper_.adopt_growth();
    // What a step before could not tell the device comes first.
    if (status const told = keeper_.flush(); told != status::ok) { return noted(told); }
    streams_.end();
    close_sample();
    queue_.note_lateness();
    begun_ = {};
    if (!rows.empty()) {
      arena_.next_step();
      keeper_.set_step(++step_);
    }
    status ready = status::ok;
    std::size_t prepared = 0;
    for (; prepared < rows.size() && ready == status::ok; ++prepared) { ready = prepare_row(rows[prepared]); }
    if (ready != status::ok) { queue_[rows[prepared - 1].row].code = ready; }
    // Also after a failure: a launch writes no word twice, so what was staged must not wait for the next try.
    status const flushed = keeper_.flush();
    if (ready == status::ok) { ready = flushed; }
    if (ready != status::ok) {
      for (std::size_t i = 0; i < prepared; ++i) { keeper_.sequences().drop(rows[i].row); }
      return noted(ready);
    }
    row_id* const list = arena_.take(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      queue_.begin(rows[i].row, rows[i].tokens, rows[i].token_offset);
      list[i] = rows[i].row;
    }
    begun_ = {.ids = list, .count = static_cast<std::uint32_t>(rows.size())};
    describe_step(rows);
    return status::ok;
  }

  /// The rows that the last begin_step named.
  [[nodiscard]] row_list rows() const noexcept { return begun_; }
  [[nodiscard]] layer_id first_layer() const noexcept { return layer_id{0}; }

  /// Appends the rows' keys and values at `layer`, updates digests and begins their recall; what the loop calls `enter`.
  /// @param keys [tokens, kv_heads, head_dim]   @param values [tokens, kv_heads, value_dim]; both empty where the host
  ///        engine writes its cache itself   @param queries [tokens, query_heads, head_dim]
  /// Rows that have failed in the step are passed over.
  /// @status out_of_range; invalid_argument: shapes that the geometry does not have; invalid_state: a row that is not due at
  ///         this layer, or named twice; nothing changed then
  template <host_tensor Keys, host_tensor Values, host_tensor Queries>
  status enter(layer_id layer, row_list rows, Keys const& keys, Values const& values, Queries const& queries) noexcept
  {
    return noted(enter_layer(
      layer, rows, tensor_traits<Keys>::view(keys), tensor_traits<Values>::view(values),
      tensor_traits<Queries>::view(queries)));
  }

  /// The visits of this step.
  [[nodiscard]] step_loop<offload_manager> step() noexcept { return step_loop<offload_manager>{*this}; }

  /// Keeps each row's accepted tokens; full blocks are sealed and start for the host. Late rows are passed over; a row
  /// whose last visit is in hand counts as sampled. A failed row's tokens are all dropped: it stands where it did before the
  /// step, and may be tried again. Where the stream waited for a recall in the host's stead, the row fails here if the recall
  /// did; where not even that is known yet, begin_step refuses the row later on, which cannot go on then.
  /// For rows that have streamed in the step this sleeps until what they streamed is there.
  /// @status out_of_range, invalid_argument: more accepted than appended; nothing changed
  status commit(std::span<commit_row const> rows) noexcept
  {
    drive();
    for (commit_row const& r : rows) {
      if (!keeper_.sequences().in_range(r.row)) { return status::out_of_range; }
      if (queue_.finished(r.row) && r.accepted > queue_[r.row].new_tokens) { return status::invalid_argument; }
    }
    for (commit_row const& r : rows) {
      if (queue_.finished(r.row)) { static_cast<void>(queue_.prove(r.row)); }
      bool failed = queue_[r.row].progress == row_progress::failed;
      if (!queue_.finished(r.row) && !failed) { continue; }
      failed = !settle_stream(r.row) || failed;
      if (status const kept = keeper_.commit(r.row, failed ? 0 : r.accepted); kept != status::ok) { return kept; }
      queue_.remove(r.row);
    }
    end_asked();
    // What is refused now is sent with the next commit.
    status const sent = keeper_.write_back(recalls_.mover());
    return sent == status::device_lost ? noted(sent) : status::ok;
  }

  /// While a row's prompt comes in: lets its last queries choose the blocks of `layer` that stay resident once it decodes.
  /// Moves nothing. Rows that never offload or whose prompt streams, and layers without selection, are passed over.
  /// @status out_of_range, invalid_argument: queries that the geometry does not have; invalid_state: a row outside a step, or named twice
  template <host_tensor Queries>
  status warm_up(layer_id layer, row_list rows, Queries const& queries) noexcept
  {
    tensor_view const view = tensor_traits<Queries>::view(queries);
    if (!has_layer(layer)) { return status::out_of_range; }
    if (status const sound = check_rows(rows, view); sound != status::ok) { return sound; }
    if (geometry_.group_of(layer).kind != layer_kind::selected) { return status::ok; }
    row_list const asking = sublist(rows, [&](row_id row) {
      row_blocks const& state = keeper_.row(row);
      return state.offloads && !state.streams && state.mode == row_mode::dense_resident;
    });
    if (asking.count == 0) { return status::ok; }
    if (asking.ids == nullptr) { return status::busy; }
    status result = backend_->launch(
      compute_,
      last_queries{
        .rows = asking,
        .info = keeper_.books().info(),
        .asking = keeper_.books().asking(),
        .queries = static_cast<std::int32_t>(options_.warm_up_queries)});
    if (result == status::ok) {
      select_request request = selection_of(layer, asking, view);
      request.info = keeper_.books().asking();
      request.most_queries = options_.warm_up_queries;
      result = selector_.select_async(compute_, request);
    }
    if (result == status::ok) {
      result = backend_->launch(
        compute_,
        keep_selection{
          .rows = asking,
          .selection = keeper_.books().selection(),
          .kept = keeper_.books().kept(),
          .layer = layer,
          .head_groups = geometry_.head_groups});
    }
    return result == status::ok ? keeper_.mark_warm(asking) : result;
  }

  /// Brings ahead of need what `queries` would select at `layer`: an estimate of the queries that the rows will have there,
  /// made from what the host engine knows one layer earlier. A block that is still under way when it is selected is waited
  /// for alone. No selection and no table changes: a wrong estimate costs bytes on the link only, counted in
  /// step_sample::background_blocks. Rows and layers without offloaded blocks are passed over.
  ///
  /// Demand goes first: background recalls travel behind the demand recalls begun before them, one at a time, at most
  /// `manager_options::background_bytes` and so many that every lane keeps slots for a whole selection; where `quota_tokens`
  /// leaves none, nothing travels. Of more rows than one block of each lane fits for, some travel, call by call others.
  /// @param queries [tokens, query_heads, head_dim], places as in the step's tensors
  /// @status out_of_range, invalid_argument, invalid_state as `begin_recall`; busy: the background recall before is still
  ///         under way. Nothing is enqueued in these cases
  template <host_tensor Queries>
  status prefetch(layer_id layer, row_list rows, Queries const& queries) noexcept
  {
    tensor_view const view = tensor_traits<Queries>::view(queries);
    if (!has_layer(layer)) { return status::out_of_range; }
    if (status const sound = check_rows(rows, view); sound != status::ok) { return sound; }
    row_list const asking = sublist(rows, [&](row_id row) { return travels(row, layer); });
    if (asking.count == 0 || recalls_.background_rows() == 0) { return status::ok; }
    if (asking.ids == nullptr || recalls_.background_flies()) { return status::busy; }
    row_list const travelling = recalls_.background_turn(asking);
    if (recalls_.background_blocks(travelling.count) == 0) { return status::ok; }
    ticket given;
    if (status const got = recalls_.take(given); got != status::ok) { return got; }
    select_request request = selection_of(layer, travelling, view);
    request.selection = keeper_.books().expected();
    request.remember = false;
    if (status const selected = selector_.select_async(compute_, request); selected != status::ok) { return selected; }
    recall<B>& r = recalls_.at(given.index);
    r.layer = layer;
    r.row_count = travelling.count;
    for (std::uint32_t i = 0; i < travelling.count; ++i) { r.rows[i] = travelling[i]; }
    return recalls_.bring_background(r, given, compute_);
  }

  // -- prompts that do not fit the slots

  /// Brings the earlier blocks of a row whose prompt streams in through the slots of stream_tokens, at a layer that the row
  /// has entered (or that it has been appended at) in this step:
  ///   for (stream_part const& part : kv.stream_blocks(visit.layer, row)) { attend part.table for part.rows; merge }
  /// All parts together are the blocks that the visit's own table does not list. Empty, with status ok, for any other row
  /// and for layers that do not select: their tables list everything. Call it before the visit's table is attended: copies
  /// begin at once, behind what was attended in their slots before.
  ///
  /// One stream at a time: another one begins once the last has ended, at its end or with the range's life. A range lives
  /// within its step. Where blocks cannot be brought the row has failed, as by a recall: it gets no further visit, `enter`
  /// passes it over, and commit drops its tokens.
  /// @status of the range: out_of_range; invalid_state: a row that does not stand at the layer; busy: another stream goes on;
  ///         what the row has failed with; see block_stream::status
  /// @stream parts are listed on the compute stream, behind their copies: attend them there
  [[nodiscard]] block_stream<offload_manager> stream_blocks(layer_id layer, row_id row) noexcept
  {
    status code = status::ok;
    std::uint64_t const serial = begin_stream(layer, row, code);
    return block_stream<offload_manager>{*this, serial, code};
  }

  /// Whether a row's prompt comes in without staying resident, so that its steps need stream_blocks.
  [[nodiscard]] bool prompt_streams(row_id row) const noexcept
  {
    return keeper_.sequences().in_range(row) && keeper_.prompt_streams(row);
  }

  // -- captured graphs: for backends whose streams can be captured

  /// A step's body to be captured once and replayed in later steps: see captured_step. It takes one of the places that
  /// manager_options::captured_steps keeps, until it ends.
  /// @throws configuration_error with the numbers: rows, tokens or lengths that the manager is not built for, a composition
  ///         whose steps need the host (a transfer engine that plans there, a scheduler that reads the mailbox); resource_error: no
  ///         place is free
  [[nodiscard]] captured_step<offload_manager> capture_step(capture_options const& options)
  {
    return captured_step<offload_manager>{*this, options};
  }

  /// A visit's work to be captured once and replayed whenever rows make that visit: see captured_visit.
  /// @param layer of the visit; none: what comes before the first layer
  /// @throws configuration_error with the numbers: rows, tokens or lengths that the manager is not built for, or no such visit
  [[nodiscard]] captured_visit<offload_manager> capture_visit(
    capture_options const& options, layer_id layer, part which = part::whole)
  {
    return captured_visit<offload_manager>{*this, options, layer, which};
  }

  // -- tickets: for engines with a loop of their own

  /// Appends the rows' keys and values at `layer` and updates digests: the part of `enter` that comes before the recall. Rows
  /// go through the layers by `append` in their order, each followed by what attention needs (`begin_recall`, `wait_on`,
  /// `table`), and with the last layer they are ready for `commit`; `enter` and the loop may take them at any layer between.
  /// @param keys [tokens, kv_heads, head_dim]   @param values [tokens, kv_heads, value_dim]; both empty where the host
  ///        engine writes its cache itself
  /// @status out_of_range, invalid_argument and invalid_state as `enter`; nothing changed then
  template <host_tensor Keys, host_tensor Values>
  status append(layer_id layer, row_list rows, Keys const& keys, Values const& values) noexcept
  {
    row_list kept;
    status const appended =
      append_layer(layer, rows, tensor_traits<Keys>::view(keys), tensor_traits<Values>::view(values), kept);
    if (appended != status::ok) { return appended; }
    for (row_id const row : kept) { queue_.pass(row, layer); }
    return status::ok;
  }

  /// Selects for these rows at `layer`, resolves, and starts the copies of what is missing.
  /// @param queries [tokens, query_heads, head_dim]   @param given the recall's ticket
  /// @param lists which tables `table(given, part)` can give: those that the scheduler's visits have, unless asked otherwise
  /// @status out_of_range, invalid_argument: queries that the geometry does not have; invalid_state: a row outside a step, or named twice;
  ///         busy: every place of the ring is in use
  /// @stream the selection is enqueued on `stream`, copies on the manager's own. `stream` is the compute stream, or one that
  ///         waits for an event behind `append`; what the compute stream is given next for these rows comes behind `stream`
  template <host_tensor Queries>
  status begin_recall(
    layer_id layer, row_list rows, Queries const& queries, stream_ref stream, ticket& given,
    recall_lists lists = default_lists) noexcept
  {
    tensor_view const view = tensor_traits<Queries>::view(queries);
    if (!has_layer(layer)) { return status::out_of_range; }
    if (status const sound = check_rows(rows, view); sound != status::ok) { return sound; }
    return start_recall(layer, rows, view, stream, given, lists);
  }

  /// Which of the ticket's rows have all their blocks; none of them where the ticket is stale.
  [[nodiscard]] row_mask landed(ticket t) noexcept
  {
    std::ranges::fill(mask_words_, 0);
    recall<B>* const r = recalls_.find(t);
    if (r != nullptr) {
      recalls_.issue_planned(*r);
      for (std::uint32_t i = 0; i < r->passed; ++i) { mask_words_[i / 64] |= std::uint64_t{1} << (i % 64); }
      for (std::uint32_t i = 0; i < r->row_count; ++i) {
        if (!recalls_.row_landed(*r, i)) {
          mask_words_[r->places[i] / 64] &= ~(std::uint64_t{1} << (r->places[i] % 64));
        }
      }
    }
    return {.words = mask_words_};
  }

  /// ok: every row's blocks are there; busy: some travel; stalled: a row's slots all hold what this step selected before, so
  /// that blocks have no place (told until the row begins another recall); transfer_failed, aborted, stale_ticket.
  [[nodiscard]] status status_of(ticket t) noexcept
  {
    recall<B>* const r = recalls_.find(t);
    if (r == nullptr) { return status::stale_ticket; }
    if (recalls_.is_aborted(*r)) { return status::aborted; }
    if (r->code != status::ok) { return r->code; }
    recalls_.issue_planned(*r);
    recalls_.settle(*r);
    bool travels = false;
    for (std::uint32_t i = 0; i < r->row_count; ++i) {
      if (recalls_.row_failed(*r, i)) { return status::transfer_failed; }
      if (recalls_.row_stalled(*r, i)) { return status::stalled; }
      travels = travels || !recalls_.row_landed(*r, i);
    }
    return travels ? status::busy : r->code;
  }

  /// Lets `stream` wait for the ticket's copies. An engine that plans on the host needs the plan first: this then sleeps
  /// until it is there.
  status wait_on(ticket t, stream_ref stream) noexcept
  {
    recall<B>* const r = recalls_.find(t);
    if (r == nullptr) { return status::stale_ticket; }
    if (status const issued = recalls_.issue_waiting(*r); issued != status::ok) { return issued; }
    return r->issued ? backend_->wait(stream, r->landed_event) : status::ok;
  }

  /// Gives the ticket up. Its copies complete all the same, and their blocks stay; only then is its memory used again.
  /// @status stale_ticket   @thread_safety any thread, at any time
  status abort(ticket t) noexcept { return recalls_.abort(t); }

  /// The table of a ticket's rows for attention: `part::whole`, behind `wait_on`, where its recall lists everything together;
  /// else `part::hits` at once and `part::landed` behind `wait_on`, to be merged. Valid until the rows' next recall.
  /// @param lists what attention reads; on any status but ok a table without lists
  /// @status stale_ticket; invalid_argument: a part that the recall has no list of, see `begin_recall`
  status table(ticket t, part which, block_table& lists) noexcept
  {
    lists = {};
    recall<B> const* const r = recalls_.find(t);
    if (r == nullptr) { return status::stale_ticket; }
    if (!has_part(r->lists, which)) { return status::invalid_argument; }
    lists = keeper_.table(r->layer, which);
    // Where no row selected, the lists of what landed are those of another layer.
    if (which == part::landed && r->row_count == 0) {
      lists.slots = keeper_.books().no_slots();
      lists.counts = keeper_.books().no_counts();
      lists.stride = 1;
    }
    return status::ok;
  }

  // -- looking in

  /// Books that follow from completed copies: call it when no step runs for a while.
  void poll() noexcept { retire(); }

  /// Sleeps until no copy and no launch is under way that names the manager's memory.
  /// @status drain_timeout: some still are at the deadline
  status drain(nanoseconds deadline) noexcept
  {
    if (status const arrived = recalls_.drain(deadline); arrived != status::ok) { return noted(arrived); }
    if (status const streamed = streams_.drain(deadline); streamed != status::ok) { return noted(streamed); }
    if (status const moved = mover_.drain(deadline); moved != status::ok) { return noted(moved); }
    status const drained = keeper_.drain(deadline);
    retire();
    status const settled = keeper_.wait_compute(deadline);
    return noted(drained != status::ok ? drained : settled);
  }

  /// What is under way that names the manager's memory: what drain would wait for.
  [[nodiscard]] work_in_flight in_flight() noexcept
  {
    retire();
    return {
      .recalls = recalls_.flying(),
      .write_backs = keeper_.write_backs(),
      .moves = mover_.flies(),
      .launches = keeper_.compute_is_busy()};
  }

  /// Blocks that could not be brought, oldest first, since the last `clear_failures`; at most `max_failures` are kept.
  [[nodiscard]] std::span<failure_record const> failures() const noexcept { return queue_.failures(); }
  void clear_failures() noexcept { queue_.clear_failures(); }
  static constexpr std::size_t max_failures = visit_queue<B, TransferEngine, LayerScheduler, Replacement>::max_failures;

  /// What a row last failed with; ok while nothing did. out_of_range for a row that is none of the manager's.
  [[nodiscard]] status row_status(row_id row) const noexcept
  {
    if (!keeper_.sequences().in_range(row)) { return status::out_of_range; }
    if (uses_[to_index(row)].load(std::memory_order_acquire) == row_use::ending) { return status::aborted; }
    return queue_.lost() && keeper_.sequences()[row].open() ? status::device_lost : queue_[row].code;
  }
  /// idle for a row without a sequence, or none of the manager's.
  [[nodiscard]] row_mode mode_of(row_id row) const noexcept
  {
    return keeper_.sequences().in_range(row) ? keeper_.row(row).mode : row_mode::idle;
  }
  /// Committed tokens; 0 for a row without a sequence.
  [[nodiscard]] std::uint32_t tokens_of(row_id row) const noexcept
  {
    return keeper_.sequences().in_range(row) ? keeper_.sequences()[row].tokens : 0;
  }
  /// Slots of a lane of the row in a layer where the row recalls, those included that the host keeps; 0 for other rows.
  [[nodiscard]] std::uint32_t leased_slots(row_id row, layer_id layer) noexcept
  {
    bool const leases = has_layer(layer) && keeper_.sequences().in_range(row) && travels(row, layer);
    return leases ? keeper_.leased(row, layer) / geometry_.head_groups : 0;
  }
  [[nodiscard]] bool is_late(row_id row) const noexcept
  {
    return keeper_.sequences().in_range(row) && queue_.is_late(row);
  }
  /// Figures of the last complete step.
  [[nodiscard]] step_sample const& last_sample() const noexcept { return meter_.last(); }
  /// Ends the sample of the step that has run, as the next begin_step would.
  step_sample const& finish_sample() noexcept
  {
    close_sample();
    return meter_.last();
  }
  [[nodiscard]] slot_budget const& budget() const noexcept { return budget_; }
  [[nodiscard]] kv_geometry const& geometry() const noexcept { return geometry_; }
  [[nodiscard]] block_layout const& layout() const noexcept { return layout_; }
  [[nodiscard]] device_books<B> const& books() const noexcept { return keeper_.books(); }
  [[nodiscard]] host_store<B> const& store() const noexcept { return keeper_.store(); }
  [[nodiscard]] slot_pool<B> const& pool() const noexcept { return keeper_.pool(); }
  [[nodiscard]] sequence_book const& sequences() const noexcept { return keeper_.sequences(); }
  [[nodiscard]] auto& selector() noexcept { return selector_; }
  /// The bound transfer engine; gather_scatter_engine's `report()` says what it measured.
  [[nodiscard]] auto const& transfer() const noexcept { return recalls_.mover(); }
  [[nodiscard]] AdmissionPolicy& admission_policy_state() noexcept { return admission_; }

  [[nodiscard]] memory_use memory() const noexcept
  {
    digest_store<B> const& digests = keeper_.digests();
    block_counts const host = keeper_.store().counts();
    std::uint64_t const slabs = std::uint64_t{geometry_.layers} * geometry_.head_groups;
    return {
      .slot_bytes = keeper_.slots_in_use() * layout_.block_bytes,
      .slot_bytes_peak = keeper_.slots_peak() * layout_.block_bytes,
      .digest_bytes = (digests.total_extents() - digests.free_extents()) * digests.extent_bytes(),
      .book_bytes = keeper_.books().device_bytes() + streams_.device_bytes(),
      .host_bytes = (std::uint64_t{host.held} + host.in_flight) * slabs * layout_.block_bytes};
  }
  void reset_peak() noexcept { keeper_.reset_slots_peak(); }

  /// Begins to make `blocks` more blocks of the host store, on a thread of the store's own; steps go on meanwhile. begin_step and
  /// open take over what has been made: `store().growth()` tells how many there are, `store().growth_refusal()` why a growth
  /// ended early.
  /// @status invalid_state without options.max_host_blocks; capacity_exceeded past them; busy while a growth is under way;
  ///         resource_exhausted where the system has no thread
  status grow_host_store(std::uint32_t blocks) noexcept
  {
    keeper_.adopt_growth();
    return keeper_.grow_host_store(blocks);
  }

  /// Recounts the host's books. While copies that a call gave up are under way, what the call had taken is between two states
  /// and nothing is counted. @return what is wrong, empty where nothing is
  [[nodiscard]] std::string audit()
  {
    if (mover_.flies()) { return {}; }
    std::string text = keeper_.audit();
    return text.empty() ? mover_.audit() : text;
  }

 private:
  friend class step_loop<offload_manager>;
  friend class block_stream<offload_manager>;
  friend class captured_step<offload_manager>;
  friend class captured_visit<offload_manager>;
  using driver = recall_driver<B, TransferEngine, Replacement>;

  enum class row_use : std::uint8_t { idle, open, ending };

  bool next_visit(visit& v) noexcept
  {
    drive();
    end_asked();
    return queue_.next(v, [this] { fill_background(); });
  }

  /// The calling thread drives the manager from here on.
  void drive() noexcept { driver_.store(std::this_thread::get_id(), std::memory_order_relaxed); }

  void end_sequence(row_id row) noexcept
  {
    queue_[row].closing = true;
    queue_.remove(row);
  }

  /// Ends the sequences of which other threads asked so, but for rows that the host engine has in hand.
  void end_asked() noexcept
  {
    if (!ends_asked_.exchange(false, std::memory_order_acquire)) { return; }
    bool left = false;
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      auto const row = static_cast<row_id>(r);
      if (uses_[r].load(std::memory_order_acquire) != row_use::ending || queue_[row].closing) { continue; }
      row_progress const progress = queue_[row].progress;
      bool const in_hand =
        progress == row_progress::begun || progress == row_progress::handed || progress == row_progress::done;
      if (in_hand) {
        left = true;
      } else {
        end_sequence(row);
      }
    }
    if (left) { ends_asked_.store(true, std::memory_order_relaxed); }
  }

  // -- what block_stream asks for

  /// @return number of the stream; 0 where there is none, with `code` saying why
  [[nodiscard]] std::uint64_t begin_stream(layer_id layer, row_id row, status& code) noexcept
  {
    code = status::ok;
    if (!has_layer(layer) || !keeper_.sequences().in_range(row)) { code = status::out_of_range; }
    if (code == status::ok) { code = streams_at(layer, row); }
    bool const nothing = code != status::ok || geometry_.group_of(layer).kind != layer_kind::selected ||
      !keeper_.prompt_streams(row) || keeper_.sequences()[row].sealed == 0;
    if (nothing) { return 0; }
    if (streams_.current() != 0) {
      code = status::busy;
      return 0;
    }
    code = lose(row, streams_.begin(row, layer, keeper_.sequences()[row].sealed, recalls_.mover()));
    return streams_.current();
  }

  /// Whether the row stands at the layer, so that its blocks may stream.
  [[nodiscard]] status streams_at(layer_id layer, row_id row) const noexcept
  {
    sequence_state const& sequence = keeper_.sequences()[row];
    row_runtime const& state = queue_[row];
    if (!sequence.open() || state.closing || sequence.pending == 0) { return status::invalid_state; }
    if (state.progress == row_progress::failed) { return state.code; }
    return queue_.stands_at(row, layer) ? status::ok : status::invalid_state;
  }

  bool next_part(std::uint64_t serial, stream_part& part, status& code) noexcept
  {
    if (streams_.current() != serial) {
      code = status::aborted;
      return false;
    }
    row_id const row = streams_.row();
    code = streams_at(streams_.layer(), row);
    bool has = false;
    if (code == status::ok) {
      code = lose(row, streams_.next(part, has, recalls_.mover()));
    } else {
      if (code == status::invalid_state) { code = status::aborted; }
      streams_.end();
    }
    return has;
  }

  void end_stream(std::uint64_t serial) noexcept
  {
    if (streams_.current() == serial) { streams_.end(); }
  }

  /// Fails a row whose streamed blocks could not be brought. @return the loss's code
  status lose(row_id row, stream_loss const& lost) noexcept
  {
    if (lost.code != status::ok) {
      queue_.lose_blocks(row, lost.layer, lost.first_block, lost.block_count, lost.code, lost.tries);
    }
    if (lost.code == status::device_lost) { queue_.lose(); }
    return lost.code;
  }

  /// At the end of a row's step. @return whether what it streamed is there; else the row has failed
  [[nodiscard]] bool settle_stream(row_id row) noexcept
  {
    if (!streams_.streamed(row)) { return true; }
    stream_loss const lost = streams_.settle(row, backend_->now() + options_.wait_limit);
    if (queue_[row].progress == row_progress::failed) { return false; }
    return lose(row, lost) == status::ok;
  }

  [[nodiscard]] static std::uint32_t blocks_of_longest(kv_geometry const& geometry, manager_options const& options)
  {
    return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(blocks_of(options.max_tokens, geometry.block_tokens), 0x7FFFFFFFU));
  }

  [[nodiscard]] std::vector<std::uint64_t> digest_bytes(kv_geometry const& geometry) const
  {
    std::vector<std::uint64_t> bytes(geometry.layers, 0);
    for (std::uint32_t layer = 0; layer < geometry.layers; ++layer) {
      auto const id = static_cast<layer_id>(layer);
      if (geometry.group_of(id).kind == layer_kind::selected) { bytes[layer] = selector_.digest_bytes(id); }
    }
    return bytes;
  }

  [[nodiscard]] bool has_layer(layer_id layer) const noexcept
  {
    return !is_none(layer) && to_index(layer) < geometry_.layers;
  }
  /// Whether a tensor has a place for each token of the row's step.
  [[nodiscard]] bool holds_tokens(tensor_view const& tensor, row_id row) const noexcept
  {
    row_runtime const& state = queue_[row];
    return std::uint64_t{state.token_offset} + state.new_tokens <= tensor.tokens;
  }
  /// Checks rows that stand in a step, and their queries.
  [[nodiscard]] status check_rows(row_list rows, tensor_view const& queries) noexcept
  {
    for (row_id const row : rows) {
      if (!keeper_.sequences().in_range(row)) { return status::out_of_range; }
    }
    if (!fits_queries(geometry_, queries)) { return status::invalid_argument; }
    for (row_id const row : rows) {
      sequence_state const& sequence = keeper_.sequences()[row];
      bool const steps = sequence.open() && sequence.pending != 0 && !queue_[row].closing;
      if (!steps) { return status::invalid_state; }
      if (!holds_tokens(queries, row)) { return status::invalid_argument; }
    }
    return names_twice(rows) ? status::invalid_state : status::ok;
  }
  /// Whether a list names a row more than once. Each row is in range.   @complexity rows
  [[nodiscard]] bool names_twice(row_list rows) noexcept
  {
    ++naming_;
    for (row_id const row : rows) {
      if (std::exchange(named_[to_index(row)], naming_) == naming_) { return true; }
    }
    return false;
  }
  [[nodiscard]] std::uint32_t running_rows() const noexcept
  {
    std::uint32_t running = 0;
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      running += keeper_.sequences()[static_cast<row_id>(r)].open() ? 1U : 0U;
    }
    return running;
  }

  /// A free row for a request that admission lets in; none where it does not, with `said` telling why.
  [[nodiscard]] row_id place_for(sequence_options const& request, admission& said, std::uint32_t shared = 0) noexcept
  {
    retire();
    said = admission::rejected;
    bool const sound = request.max_tokens != 0 && request.max_tokens <= options_.max_tokens &&
      request.prompt_tokens <= request.max_tokens && may_stream(request);
    if (!sound || queue_.lost()) { return none<row_id>; }
    demand wanted = keeper_.demand_of(request.prompt_tokens, request.max_tokens, slots_of(request));
    wanted.host_blocks -= std::min<std::uint64_t>(wanted.host_blocks, shared);
    said = admission_.admit(wanted, keeper_.capacity_now(running_rows()));
    if (said != admission::admitted) { return none<row_id>; }
    row_id const place = free_row();
    bool const fits =
      !is_none(place) && keeper_.slots_fit(request.prompt_tokens, request.max_tokens, slots_of(request));
    said = fits ? admission::admitted : admission::queued;
    return fits ? place : none<row_id>;
  }

  /// Digests are not kept for a sequence that never selects: they cannot be had back from the host's blocks alone.
  [[nodiscard]] bool lacks_digests(sequence_options const& request, bool offloads) const noexcept
  {
    return !offloads && keeper_.demand_of(request.prompt_tokens, request.max_tokens).digest_extents != 0;
  }

  /// Whether a request that streams its prompt can; true for all others.
  [[nodiscard]] bool may_stream(sequence_options const& request) const noexcept
  {
    bool const can = streams_.enabled() && budget_.offloads(request.max_tokens) && !request.keep_resident;
    return !request.stream_prompt || can;
  }

  [[nodiscard]] static row_slots slots_of(sequence_options const& request) noexcept
  {
    if (request.keep_resident) { return row_slots::all; }
    return request.stream_prompt ? row_slots::step : row_slots::prompt;
  }

  /// The request as the policy wants it placed.
  [[nodiscard]] sequence_options placed(sequence_options request) noexcept
  {
    if constexpr (balancing_admission<AdmissionPolicy>) {
      request.place_freely = request.place_freely && !request.stream_prompt;
      if (request.place_freely) {
        demand const all = keeper_.demand_of(request.prompt_tokens, request.max_tokens, row_slots::all);
        request.keep_resident = admission_.keeps_resident(all, keeper_.capacity_now(running_rows())) &&
          keeper_.slots_fit(request.prompt_tokens, request.max_tokens, row_slots::all);
      }
    } else {
      request.place_freely = false;
    }
    return request;
  }

  template <class Policy>
  [[nodiscard]] status balance_with(Policy& policy, sequence_options const* waiting) noexcept
  {
    balancer_.clear_rows();
    std::uint32_t offloaded = 0;
    for (std::uint32_t l = 0; l < geometry_.layers; ++l) { balancer_.layers()[l].slots = 0.0; }
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      auto const row = static_cast<row_id>(r);
      sequence_state const& sequence = keeper_.sequences()[row];
      row_blocks const& state = keeper_.row(row);
      if (!sequence.open() || queue_[row].closing) { continue; }
      bool const recalls = state.mode == row_mode::sparse_offloaded;
      if (recalls) {
        ++offloaded;
        for (std::uint32_t l = 0; l < geometry_.layers; ++l) {
          balancer_.layers()[l].slots +=
            static_cast<double>(keeper_.leased(row, static_cast<layer_id>(l))) / geometry_.head_groups;
        }
      }
      if (!state.placed_freely || !state.offloads || standing_still(row) != status::ok || mover_.names(row)) {
        continue;
      }
      bool const dense = state.mode == row_mode::dense_resident;  // its prompt's slots stay until it selects
      balancer_.add_row(
        {.row = row,
         .recalls = !state.keeps,
         .tokens = sequence.tokens,
         .max_tokens = sequence.max_tokens,
         .slots_now = keeper_.kept_back(row, state.slots),
         .slots_all = keeper_.kept_back(row, row_slots::all),
         .slots_lease = keeper_.kept_back(row, dense ? row_slots::prompt : row_slots::lease)});
    }
    for (std::uint32_t l = 0; l < geometry_.layers; ++l) {
      auto const layer = static_cast<layer_id>(l);
      auto const traffic = recalls_.take_traffic(layer);
      balancer_.note_layer(layer, traffic.missed, traffic.hits);
      layer_figures& figures = balancer_.layers()[l];
      figures.selects = geometry_.group_of(layer).kind == layer_kind::selected;
      figures.next_slots = keeper_.lease_of(layer) + budget_.ring;
      figures.slots = offloaded == 0 ? figures.next_slots : figures.slots / offloaded;
    }
    demand const first = waiting == nullptr
      ? demand{}
      : keeper_.demand_of(waiting->prompt_tokens, waiting->max_tokens, slots_of(*waiting));
    balance_answer const answer = policy.plan(
      balance_question{
        .rows = balancer_.rows(),
        .layers = balancer_.layers(),
        .waiting = waiting == nullptr ? nullptr : &first,
        .free = keeper_.capacity_now(running_rows()),
        .least_slots = budget_.least_lease + budget_.ring,
        .most_slots = budget_.max_lease + budget_.ring,
        .mean_slots = budget_.quota},
      balancer_.slots());
    if (answer.spread) {
      if (status const spread = keeper_.spread_leases(balancer_.slots()); spread != status::ok) { return spread; }
      balancer_.spread();
    }
    status result = is_none(answer.demote) ? status::ok : demote(answer.demote);
    if (result == status::ok && !is_none(answer.promote)) { result = promote(answer.promote); }
    return result;
  }

  void take_row(row_id row) noexcept
  {
    balancer_.begin(row, recalls_.box(row));
    filler_.forget(row);
    queue_[row] = row_runtime{};
    uses_[to_index(row)].store(row_use::open, std::memory_order_release);
  }

  /// Whether a row is open and stands in no step.
  [[nodiscard]] status standing_still(row_id row) const noexcept
  {
    if (!keeper_.sequences().in_range(row)) { return status::out_of_range; }
    row_runtime const& state = queue_[row];
    bool const still = keeper_.sequences()[row].open() && !state.closing && state.progress == row_progress::outside;
    return still ? status::ok : status::invalid_state;
  }

  /// As standing_still, and sleeps until no recall of the row is under way, nor copies into the slots of a stream: tickets
  /// and streams may have been left behind.
  [[nodiscard]] status standing_quiet(row_id row) noexcept
  {
    drive();
    nanoseconds const deadline = backend_->now() + options_.wait_limit;
    status result = standing_still(row);
    if (result == status::ok && mover_.names(row)) { result = status::busy; }
    if (result == status::ok) { result = recalls_.wait_row(row, deadline); }
    return result == status::ok ? streams_.wait(row, deadline) : result;
  }

  [[nodiscard]] row_id free_row() const noexcept
  {
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      if (!keeper_.sequences()[static_cast<row_id>(r)].open()) { return static_cast<row_id>(r); }
    }
    return none<row_id>;
  }

  /// Rows of `rows` that satisfy `wanted`, in the step's arena; ids is null where the arena is used up.
  template <class Wanted>
  [[nodiscard]] row_list sublist(row_list rows, Wanted wanted) noexcept
  {
    std::uint32_t count = 0;
    for (row_id const row : rows) { count += wanted(row) ? 1U : 0U; }
    if (count == 0) { return {}; }
    row_id* const list = arena_.take(count);
    if (list != nullptr) {
      std::uint32_t place = 0;
      for (row_id const row : rows) {
        if (wanted(row)) { list[place++] = row; }
      }
    }
    return {.ids = list, .count = count};
  }

  // -- beginning and ending

  [[nodiscard]] status check_step(std::span<step_row const> rows) noexcept
  {
    std::uint64_t total = 0;
    if (rows.size() > options_.max_rows) { return status::out_of_range; }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      step_row const& r = rows[i];
      if (!keeper_.sequences().in_range(r.row)) { return status::out_of_range; }
      sequence_state const& sequence = keeper_.sequences()[r.row];
      row_runtime const& state = queue_[r.row];
      if (!sequence.open() || state.closing || state.progress != row_progress::outside) {
        return status::invalid_state;
      }
      if (mover_.names(r.row)) { return status::busy; }
      for (std::size_t j = 0; j < i; ++j) {
        if (rows[j].row == r.row) { return status::invalid_state; }
      }
      // A sparse row that was cut back into its prompt has places for a decoding row's blocks only.
      row_blocks const& blocks = keeper_.row(r.row);
      bool const prefills = blocks.mode == row_mode::dense_resident && blocks.prompt_tokens > sequence.tokens;
      std::uint32_t const left = prefills ? blocks.prompt_tokens - sequence.tokens : 0;
      std::uint32_t const most = left == 0
        ? budget_.max_step_tokens
        : std::min(std::max(left, budget_.max_step_tokens), budget_.max_prefill_tokens);
      if (r.tokens == 0 || r.tokens > most) { return status::invalid_argument; }
      if (std::uint64_t{sequence.tokens} + r.tokens > sequence.max_tokens) { return status::capacity_exceeded; }
      total += r.tokens;
    }
    bool const too_many = options_.max_total_tokens != 0 && total > options_.max_total_tokens;
    return too_many ? status::capacity_exceeded : status::ok;
  }

  [[nodiscard]] status prepare_row(step_row const& r) noexcept
  {
    row_runtime& state = queue_[r.row];
    status const proven = queue_.prove(r.row);
    state.unsound = state.unsound || (proven != status::ok && proven != status::busy);
    if (state.unsound) {
      state.progress = row_progress::outside;
      return status::transfer_failed;
    }
    if (keeper_.leaves_device(r.row, r.tokens)) {
      if (status const written = keeper_.wait_written(r.row, recalls_.mover()); written != status::ok) {
        return written;
      }
    }
    if (status const settled = keeper_.settle(r.row, r.tokens); settled != status::ok) { return settled; }
    if (status const spare = keeper_.ensure_spares(r.row, r.tokens, recalls_.mover()); spare != status::ok) {
      return spare;
    }
    if (status const opened = keeper_.open_blocks(r.row, r.tokens); opened != status::ok) { return opened; }
    if (status const appended = keeper_.sequences().append(r.row, r.tokens); appended != status::ok) {
      return appended;
    }
    keeper_.tell_row(r.row, r.tokens, r.token_offset);
    return status::ok;
  }

  /// What the step's sample says of its rows.
  void describe_step(std::span<step_row const> rows) noexcept
  {
    step_sample& sample = meter_.running();
    sample.rows = static_cast<std::uint32_t>(queue_.rows().size());
    for (row_id const row : queue_.rows()) {
      sample.offloaded_rows += keeper_.row(row).mode == row_mode::sparse_offloaded ? 1U : 0U;
    }
    for (step_row const& r : rows) {
      std::uint32_t const prompt = keeper_.row(r.row).prompt_tokens;
      std::uint32_t const had = keeper_.sequences()[r.row].tokens;
      sample.prompt_tokens += prompt > had ? std::min(prompt - had, r.tokens) : 0;
    }
  }

  /// Ends the sample of the step that has run.
  void close_sample() noexcept
  {
    std::uint32_t late = 0;
    for (row_id const row : queue_.rows()) { late += queue_.is_late(row) ? 1U : 0U; }
    bool const counts = meter_.close(
      &recalls_.box(row_id{0}), &recalls_.background_box(row_id{0}),
      std::span{keeper_.books().totals(), keeper_.books().sizes().lanes()}, step_, late, layout_.block_bytes,
      keeper_.written_bytes(), backend_->now());
    if (!counts) { return; }
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      auto const row = static_cast<row_id>(r);
      balancer_.note_step(row, recalls_.box(row), keeper_.row(row).mode == row_mode::sparse_offloaded);
    }
    admission_.observe(meter_.last());
  }

  /// A sticky error of the device ends the manager for all rows.
  status noted(status said) noexcept
  {
    if (said == status::device_lost && !queue_.lost()) { queue_.lose(); }
    return said;
  }

  /// Gives rows back whose close waited for copies: what they name, slots and host blocks, is not another's before.
  void retire() noexcept
  {
    drive();
    end_asked();
    keeper_.poll();
    streams_.poll();
    recalls_.settle_all();
    status const told = keeper_.flush();
    if (told != status::ok && told != status::device_lost) { return; }
    for (std::uint32_t r = 0; r < options_.max_rows; ++r) {
      auto const row = static_cast<row_id>(r);
      if (!queue_[row].closing) { continue; }
      if (keeper_.writes_fly(row) || recalls_.flies(row) || streams_.flies(row) || mover_.names(row)) { continue; }
      queue_[row].closing = false;
      streams_.forget(row);
      keeper_.close(row);
      uses_[r].store(row_use::idle, std::memory_order_release);
    }
  }

  // -- entering a layer

  /// Whether a row has failed in the step, so that enter and append pass it over.
  [[nodiscard]] bool has_failed(row_id row) const noexcept
  {
    return queue_[row].progress == row_progress::failed && keeper_.sequences()[row].pending != 0;
  }

  [[nodiscard]] bool due_at(row_id row, layer_id layer) const noexcept
  {
    row_runtime const& state = queue_[row];
    if (state.progress == row_progress::begun) { return layer == first_layer(); }
    return state.progress == row_progress::handed && to_number(layer) == to_number(state.layer) + 1;
  }

  /// Enqueues the appending of the rows and the digests of what it touches. @param kept the rows, in the step's arena
  status append_layer(layer_id layer, row_list rows, tensor_view keys, tensor_view values, row_list& kept) noexcept
  {
    if (!has_layer(layer)) { return status::out_of_range; }
    if (!fits_keys(geometry_, keys, values)) { return status::invalid_argument; }
    for (row_id const row : rows) {
      if (!keeper_.sequences().in_range(row)) { return status::out_of_range; }
      if (has_failed(row)) { continue; }
      if (!due_at(row, layer)) { return status::invalid_state; }
      bool const held = (keys.empty() || holds_tokens(keys, row)) && (values.empty() || holds_tokens(values, row));
      if (!held) { return status::invalid_argument; }
    }
    if (names_twice(rows)) { return status::invalid_state; }
    kept = sublist(rows, [&](row_id row) { return !has_failed(row); });
    if (kept.count == 0) { return status::ok; }
    if (kept.ids == nullptr) { return status::busy; }
    status const appended = launch_append(layer, kept, keys, values, most_tokens(kept));
    return appended == status::ok ? digest(layer, kept) : appended;
  }

  status launch_append(
    layer_id layer, row_list rows, tensor_view keys, tensor_view values, std::uint32_t most_tokens) noexcept
  {
    if (keys.empty()) { return status::ok; }
    return backend_->launch(
      compute_,
      append_tokens{
        .layer = layer,
        .rows = rows,
        .info = keeper_.books().info(),
        .keys = keys,
        .values = values,
        .residency = keeper_.books().residency(),
        .pool = keeper_.pool().ref(),
        .layout = layout_,
        .head_groups = geometry_.head_groups,
        .most_tokens = most_tokens});
  }

  status enter_layer(layer_id layer, row_list rows, tensor_view keys, tensor_view values, tensor_view queries) noexcept
  {
    if (!has_layer(layer)) { return status::out_of_range; }
    if (status const sound = check_rows(rows, queries); sound != status::ok) { return sound; }
    row_list kept;
    if (status const appended = append_layer(layer, rows, keys, values, kept); appended != status::ok) {
      return appended;
    }
    if (kept.count == 0) { return status::ok; }
    ticket given;
    if (status const started = start_recall(layer, kept, queries, compute_, given, default_lists);
        started != status::ok) {
      return started;
    }
    queue_.stand(layer, kept, given.index, [&](row_id row) { return !travels(row, layer); });
    return status::ok;
  }

  [[nodiscard]] std::uint32_t most_tokens(row_list rows) const noexcept
  {
    std::uint32_t most = 1;
    for (row_id const row : rows) { most = std::max(most, queue_[row].new_tokens); }
    return most;
  }

  /// Whether the row selects in this layer.
  [[nodiscard]] bool selects(row_id row, layer_id layer) const noexcept
  {
    return is_sparse(row) && geometry_.group_of(layer).kind == layer_kind::selected;
  }
  [[nodiscard]] bool is_sparse(row_id row) const noexcept
  {
    row_mode const mode = keeper_.row(row).mode;
    return mode == row_mode::sparse_offloaded || mode == row_mode::sparse_resident;
  }

  /// Whether blocks of the row may have to travel in this layer.
  [[nodiscard]] bool travels(row_id row, layer_id layer) const noexcept
  {
    return keeper_.row(row).mode == row_mode::sparse_offloaded &&
      geometry_.group_of(layer).kind == layer_kind::selected;
  }

  status digest(layer_id layer, row_list rows) noexcept
  {
    if (geometry_.group_of(layer).kind != layer_kind::selected) { return status::ok; }
    row_list const digested = sublist(rows, [&](row_id row) { return keeper_.row(row).offloads; });
    if (digested.count == 0) { return status::ok; }
    if (digested.ids == nullptr) { return status::busy; }
    return launch_digest(layer, digested, most_tokens(digested));
  }

  status launch_digest(layer_id layer, row_list rows, std::uint32_t most_tokens) noexcept
  {
    return selector_.digest_async(
      compute_,
      digest_request{
        .layer = layer,
        .rows = rows,
        .info = keeper_.books().info(),
        .residency = keeper_.books().residency(),
        .pool = keeper_.pool().ref(),
        .layout = layout_,
        .digests = keeper_.digests().ref(),
        .most_touched = static_cast<std::uint32_t>(window_blocks(most_tokens, geometry_.block_tokens))});
  }

  [[nodiscard]] select_request selection_of(
    layer_id layer, row_list rows, tensor_view queries, std::uint32_t most_blocks,
    std::uint32_t most_queries) const noexcept
  {
    return {
      .layer = layer,
      .rows = rows,
      .info = keeper_.books().info(),
      .queries = queries,
      .digests = keeper_.digests().ref(),
      .selection = keeper_.books().selection(),
      .most_blocks = most_blocks,
      .most_queries = most_queries};
  }

  [[nodiscard]] select_request selection_of(layer_id layer, row_list rows, tensor_view queries) const noexcept
  {
    select_request request = selection_of(layer, rows, queries, 0, 1);
    for (row_id const row : rows) {
      sequence_state const& sequence = keeper_.sequences()[row];
      request.most_blocks = std::max(request.most_blocks, budget_.blocks(sequence.tokens + sequence.pending));
      request.most_queries = std::max(request.most_queries, queue_[row].new_tokens);
    }
    return request;
  }

  status start_recall(
    layer_id layer, row_list rows, tensor_view queries, stream_ref stream, ticket& given, recall_lists lists) noexcept
  {
    layer_group const group = geometry_.group_of(layer);
    row_list const choosing =
      sublist(rows, [&](row_id row) { return group.kind == layer_kind::windowed || selects(row, layer); });
    if (choosing.count != 0 && choosing.ids == nullptr) { return status::busy; }
    if (status const got = recalls_.take(given); got != status::ok) { return got; }
    recall<B>& r = recalls_.at(given.index);
    r.layer = layer;
    r.lists = lists;
    r.passed = rows.count;
    if (choosing.count == 0) { return status::ok; }
    if (group.kind == layer_kind::windowed) { return list_window(layer, choosing, stream, lists); }
    r.row_count = choosing.count;
    for (std::uint32_t i = 0; i < choosing.count; ++i) { recalls_.number_row(r, i, choosing[i]); }
    for (std::uint32_t i = 0, place = 0; i < choosing.count; ++place) {
      if (rows[place] == choosing[i]) { r.places[i++] = place; }
    }
    status selected = selector_.select_async(stream, selection_of(layer, choosing, queries));
    row_list recalling = {};
    if (filler_.enabled() && selected == status::ok) { selected = look_ahead(layer, choosing, stream, recalling); }
    r.code = selected == status::ok ? recalls_.bring(r, stream) : selected;
    if (r.code == status::ok && recalling.count != 0 && is_compute(stream)) {
      filler_.queue(layer, recalling);
      fill_background();
    }
    return r.code;
  }

  /// Lets the selections of the rows say what may come in the background, and leaves for later what may be.
  /// @param recalling the rows that recall
  status look_ahead(
    [[maybe_unused]] layer_id layer, [[maybe_unused]] row_list rows, [[maybe_unused]] stream_ref stream,
    [[maybe_unused]] row_list& recalling) noexcept
  {
    if constexpr (selector_tells_scores<Selector, B>) {
      bool const all = std::ranges::all_of(rows, [&](row_id row) { return travels(row, layer); });
      recalling = all ? rows : sublist(rows, [&](row_id row) { return travels(row, layer); });
      if (recalling.count == 0) { return status::ok; }
      if (recalling.ids == nullptr) { return status::busy; }
      for (row_id const row : recalling) {
        // What did not arrive is a miss again, and no recall that is yet to be proven asks for it.
        if (queue_[row].unproven_last == 0 && recalls_.background_failed(row, layer)) {
          recalls_.forgive_background(row, layer);
        }
      }
      return filler_.note(selector_.scores(layer), layer, recalling, stream);
    } else {
      return status::ok;
    }
  }

  /// Whether a stream is known to be the compute stream.
  [[nodiscard]] bool is_compute([[maybe_unused]] stream_ref stream) const noexcept
  {
    if constexpr (requires { stream == compute_; }) {
      return stream == compute_;
    } else {
      return false;
    }
  }

  /// Gives the background what rows of the step want, where it is free.
  void fill_background() noexcept
  {
    if (!filler_.enabled() || queue_.lost()) { return; }
    filler_.fill([this](row_id row, layer_id layer) {
      sequence_state const& sequence = keeper_.sequences()[row];
      row_runtime const& state = queue_[row];
      bool const steps = sequence.open() && sequence.pending != 0 && !state.closing &&
        state.progress != row_progress::failed && travels(row, layer);
      // What a late row selected some steps ago may be taken for idle; and of a recall that failed somebody may wait to hear.
      bool const waits = queue_.stands_at(row, layer) && (state.late_history & 1U) != 0;
      return steps && !waits && !recalls_.background_failed(row, layer);
    });
  }

  /// Lists what a windowed layer reads of the rows.
  status list_window(layer_id layer, row_list rows, stream_ref stream, recall_lists lists) noexcept
  {
    layer_group const group = geometry_.group_of(layer);
    status const listed = backend_->launch(
      stream,
      select_window{
        .rows = rows,
        .info = keeper_.books().info(),
        .selection = keeper_.books().selection(),
        .window_tokens = group.window_tokens,
        .sink_tokens = group.sink_tokens,
        .block_tokens = geometry_.block_tokens,
        .head_groups = geometry_.head_groups});
    return listed == status::ok ? recalls_.resolve(layer, rows, stream, lists) : listed;
  }

  // -- captured graphs

  /// @throws configuration_error
  void check_capture(capture_options const& options) const
  {
    auto const number = [](std::uint64_t value) { return std::to_string(value); };
    std::uint32_t const most_tokens = std::max(options_.max_step_tokens, options_.max_prefill_tokens);
    bool const fits = options.rows != 0 && options.rows <= options_.max_rows && options.tokens != 0 &&
      options.tokens <= most_tokens && options.max_tokens <= options_.max_tokens;
    if (fits) { return; }
    throw configuration_error{
      "a capture of " + number(options.rows) + " rows with " + number(options.tokens) + " new tokens, up to " +
      number(options.max_tokens) + " tokens long; the manager has " + number(options_.max_rows) +
      " rows, appends up to " + number(most_tokens) + " tokens and holds up to " + number(options_.max_tokens)};
  }

  /// Appends, digests and selects at a layer for lists that are filled at each replay. Resolving follows.
  status enter_captured(
    layer_id layer, captured_rows const& rows, tensor_view keys, tensor_view values, tensor_view queries) noexcept
  {
    status result = launch_append(layer, rows.all, keys, values, rows.most_tokens);
    if (result != status::ok || geometry_.group_of(layer).kind != layer_kind::selected) { return result; }
    result = launch_digest(layer, rows.offloading, rows.most_tokens);
    if (result != status::ok) { return result; }
    return selector_.select_async(
      compute_, selection_of(layer, rows.choosing, queries, rows.most_blocks, rows.most_tokens));
  }

  [[nodiscard]] captured_rows captured_bounds(capture_options const& options) const noexcept
  {
    return {
      .most_tokens = options.tokens,
      .most_blocks = budget_.blocks(options.max_tokens == 0 ? options_.max_tokens : options.max_tokens)};
  }

  /// Whether a row's step fits what has been captured.
  [[nodiscard]] status fits_capture(row_id row, captured_rows const& bounds, std::uint64_t tensor_tokens) const noexcept
  {
    row_runtime const& state = queue_[row];
    sequence_state const& sequence = keeper_.sequences()[row];
    if (keeper_.prompt_streams(row)) { return status::capture_unsupported; }
    std::uint32_t const blocks = budget_.blocks(sequence.tokens + sequence.pending);
    if (state.new_tokens > bounds.most_tokens || blocks > bounds.most_blocks) { return status::capacity_exceeded; }
    bool const held = std::uint64_t{state.token_offset} + state.new_tokens <= tensor_tokens;
    return held ? status::ok : status::invalid_argument;
  }

  /// Fills a list of `places` with the rows that satisfy `wanted`, and with `pad`.   @return rows among them
  template <class Wanted>
  static std::uint32_t fill_list(row_id* list, std::uint32_t places, row_list rows, row_id pad, Wanted wanted) noexcept
  {
    std::uint32_t count = 0;
    for (row_id const row : rows) {
      if (wanted(row)) { list[count++] = row; }
    }
    std::fill(list + count, list + places, pad);
    return count;
  }

  static constexpr std::uint32_t fixed_list_count = 3;  // all, offloading, choosing

  detail::abandonment kept_;  // first, so that it outlives what it keeps
  B* backend_;
  stream_ref compute_;
  kv_geometry geometry_;
  block_layout layout_;
  manager_options options_;
  AdmissionPolicy admission_;
  bound_selector_t<Selector, B> selector_;
  slot_budget budget_;
  block_keeper<B, Replacement> keeper_;
  recall_driver<B, TransferEngine, Replacement> recalls_;
  stream_driver<B, Replacement> streams_;
  sequence_mover<B, Replacement> mover_;
  list_arena<B> arena_;
  step_meter meter_;
  row_balancer balancer_;
  background_filler<B, TransferEngine, Replacement> filler_;
  visit_queue<B, TransferEngine, LayerScheduler, Replacement> queue_;
  slab<B> fixed_lists_;  // [fixed_list_count, max_rows] row_id: of the captured visit that runs
  std::vector<std::uint64_t> mask_words_;
  std::vector<std::uint64_t> named_;  // [max_rows] the last check that met the row
  std::uint64_t naming_ = 0;
  std::vector<std::atomic<row_use>> uses_;  // [max_rows]
  std::atomic<bool> ends_asked_ = false;    // `ending` in uses_ that the driving thread has not seen to
  std::atomic<std::thread::id> driver_;     // the thread that drives the manager
  row_list begun_ = {};
  std::uint32_t step_ = 0;
};

}  // namespace pulseinfer
