#pragma once

/// Moves the scattered blocks of all rows as one operation that reads the plan on the device.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/join_entries.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/order_entries.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/transfer/measure_gather.hpp>
#include <pulseinfer/transfer/measure_moves.hpp>
#include <pulseinfer/transfer/run_merge.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// What a gather_scatter_engine uses, and what it measured for that when it was bound.
struct transfer_report {
  std::uint32_t groups = 0;                          ///< thread groups of a gather
  std::uint64_t copy_engine_from_bytes = 0;          ///< run from which on the copy engine moves, host to device
  std::uint64_t copy_engine_to_host_from_bytes = 0;  ///< likewise, device to host
  std::vector<gather_rate> gather_rates = {};        ///< empty: the groups were given, or not to be measured
  std::vector<move_rate> move_rates = {};            ///< empty: the lengths were given, or not to be measured
};

/// The host neither waits for a recall's plan nor knows it: recalls are two launches. Bulk moves, whose plan the host has, go to
/// the copy engine in calls of merged runs, or by a kernel where runs are short. Any layout and alignment.
struct gather_scatter_engine {
  static constexpr plan_place plans_on = plan_place::device;
  static constexpr std::uint32_t groups_unmeasured = 8;
  /// @source measured: benchmarks/results/h200/recall.json
  static constexpr std::uint64_t copy_engine_unmeasured_bytes = 32768;

  /// Thread groups of a gather, see operation/gather_blocks.hpp. Absent: where launches are dear they are measured when it is
  /// bound (measure_gather), elsewhere `groups_unmeasured`. Give a number for set-ups that must come out alike each time.
  std::optional<std::uint32_t> groups = {};
  /// Rows gathered and then posted as landed together; 0: all of the plan. Absent: all where launches are dear
  /// (`prefers_few_launches`), else each row by itself, so that the first ones go on while the last ones travel.
  /// @source measured: on an H200 single rows win only above about 512 KiB a row and layer
  std::optional<std::uint32_t> rows_per_landing = {};
  /// Most runs of one call to the copy engine; long calls hide less of their cost. The first calls of a move are shorter.
  std::uint32_t runs_per_copy = 64;
  /// Whether a host block that several rows of a plan hold is read once and goes to a slot of each: one launch more, for plans
  /// that may have such blocks (recall_plan_ref::may_share) and rows that are gathered together. Absent: where launches are dear.
  std::optional<bool> join_shared = {};
  /// Mean length of merged runs from which on the copy engine moves them, in either direction; shorter ones go by move_runs. 0:
  /// all. Absent: where launches are dear it is measured when it is bound (measure_moves), elsewhere 0. Moves within the device
  /// always go to the copy engine, moves on a stream that is being captured never do where the backend says so (is_capturing).
  std::optional<std::uint64_t> copy_engine_from_bytes = {};
  /// False: what is absent is not measured but `groups_unmeasured`, `copy_engine_unmeasured_bytes` (0 where launches are cheap).
  bool measure = true;

  template <class B>
  class bound {
   public:
    bound(B& backend, transfer_limits const& limits, gather_scatter_engine const& options)
      : backend_{&backend},
        report_{report_of(backend, limits, options)},
        rows_per_landing_{options.rows_per_landing.value_or(prefers_few_launches<B> ? 0U : 1U)},
        max_rows_{limits.max_rows},
        merged_(options.runs_per_copy)
    {
      std::uint64_t const bytes = limits.layout.block_bytes;
      if (
        prefers_few_launches<B> && bytes > 0 && bytes < order_entries::ordered_below_bytes && limits.max_entries > 0) {
        ordered_entries_ = limits.max_entries;
        ordered_ = slab<B>{
          backend, memory_space::device,
          std::uint64_t{ordered_entries_} * sizeof(recall_entry) + 2 * sizeof(std::uint32_t)};
      }
      if (options.join_shared.value_or(prefers_few_launches<B>) && rows_per_landing_ != 1 && limits.max_rows > 1) {
        joins_.take(backend, limits.max_entries);
      }
    }

    /// Gathers and posts the plan's rows in their order. Blocks of less than 2 KiB are gathered in the order of their host
    /// addresses, and blocks that rows share are read once, where launches are dear: then calls go to one stream.
    /// @stream enqueues on `stream`; the plan's arrays must live until the work has run
    /// @status ok: every row will be posted, as landed, or as failed where its launch was refused. Else invalid_argument for
    ///         more rows than the limits name (nothing enqueued), or the backend's refusal of both the rows' gather and
    ///         their failing: the rows that are then not posted are still in flight, and the caller fails them with land_rows
    ///         or ends
    status recall_async(typename B::stream_ref stream, recall_plan_ref const& plan, landed_ref landed) noexcept
    {
      std::uint32_t const rows = plan.rows.count;
      if (rows > max_rows_) { return status::invalid_argument; }
      std::uint32_t const most = rows_per_landing_ == 0 ? rows : rows_per_landing_;
      for (std::uint32_t first = 0; first < rows;) {
        std::uint32_t const count = std::min(most, rows - first);
        status result = status::ok;
        if (plan.capacity > 0) { result = gather(stream, plan, first, count); }
        if (result == status::ok) {
          result = backend_->launch(
            stream,
            land_rows{
              .plan = plan,
              .landed = landed,
              .first_row = first,
              .row_count = count,
              .behind_gather = plan.capacity > 0});
        }
        if (result != status::ok) {
          status const failed = backend_->launch(
            stream,
            land_rows{
              .plan = plan, .landed = landed, .first_row = first, .row_count = rows - first, .how = landing::failed});
          return failed == status::ok ? status::ok : result;
        }
        first += count;
      }
      return status::ok;
    }

    /// Moves the runs, neighbours merged.
    /// @status the backend's first refusal; earlier runs may be enqueued then, so that all targets count as undefined
    status move_async(typename B::stream_ref stream, copy_list list) noexcept
    {
      std::span<copy_run const> runs{list.runs, list.count};
      bool const captured = is_capturing(stream);
      std::size_t call_runs = std::max<std::size_t>(1, merged_.size() / 8);
      while (!runs.empty()) {
        merge_result const done = merge_runs(runs, merged_);
        runs = runs.subspan(done.taken);
        if (done.written == 0) { break; }
        std::span<copy_run const> const merged{merged_.data(), done.written};
        status const result = captured || are_short(merged, list.direction)
          ? launch_moves(*backend_, stream, merged, list.direction, report_.groups)
          : copy(stream, merged, list.direction, call_runs);
        if (result != status::ok) { return result; }
      }
      return status::ok;
    }

    /// Thread groups of a gather.
    [[nodiscard]] std::uint32_t groups() const noexcept { return report_.groups; }
    /// What it uses, and what it measured.
    [[nodiscard]] transfer_report const& report() const noexcept { return report_; }

   private:
    /// The rows' entries, in the order of host memory and each source once where that is wanted.
    status gather(
      typename B::stream_ref stream, recall_plan_ref const& plan, std::uint32_t first, std::uint32_t count) noexcept
    {
      gather_blocks op{.plan = plan, .first_row = first, .row_count = count, .groups = report_.groups};
      op.plan.behind_plan = plan.behind_plan && first == 0;
      status result = status::ok;
      if (plan.capacity <= ordered_entries_) {
        auto* const entries = ordered_.template as<recall_entry>();
        auto* const begins = reinterpret_cast<std::uint32_t*>(entries + ordered_entries_);
        result = backend_->launch(
          stream,
          order_entries{.plan = plan, .first_row = first, .row_count = count, .ordered = entries, .row_begin = begins});
        set_list(op, entries, begins);
      }
      if (result == status::ok && plan.may_share && count > 1 && plan.capacity <= joins_.capacity) {
        join_entries const join = joins_.of(op);
        result = backend_->launch(stream, join);
        set_list(op, join.joined, join.row_begin);
        op.further = {.of = join.of, .targets = join.targets};
      }
      return result == status::ok ? backend_->launch(stream, op) : result;
    }

    /// In calls that double from `call_runs` on: the copies begin when the host has made the first call, and then hide the next one.
    status copy(
      typename B::stream_ref stream, std::span<copy_run const> runs, copy_direction direction,
      std::size_t& call_runs) noexcept
    {
      status result = status::ok;
      while (result == status::ok && !runs.empty()) {
        std::size_t const count = std::min(call_runs, runs.size());
        result = backend_->copy(
          stream, {.runs = runs.data(), .count = static_cast<std::uint32_t>(count), .direction = direction});
        runs = runs.subspan(count);
        call_runs = std::min(2 * call_runs, merged_.size());
      }
      return result;
    }

    static void set_list(gather_blocks& op, recall_entry const* entries, std::uint32_t const* begins) noexcept
    {
      op.plan.behind_plan = false;  // but behind what made this list
      op.plan.entries = entries;
      op.plan.row_begin = begins;
      op.first_row = 0;
      op.row_count = 1;
    }

    /// Lists and table of join_entries.
    struct join_lists {
      std::uint32_t capacity = 0;  // entries that there is room for
      slab<B> memory = {};

      void take(B& backend, std::uint32_t entries)
      {
        if (entries == 0) { return; }
        std::uint64_t const table = std::uint64_t{join_entries::table_places(entries)} * sizeof(join_entries::found);
        std::uint64_t const each =
          sizeof(recall_entry) + sizeof(target_span) + sizeof(join_entries::standing) + sizeof(slot_id);
        memory = slab<B>{backend, memory_space::device, entries * each + table + 3 * sizeof(std::uint32_t)};
        capacity = entries;
      }
      [[nodiscard]] join_entries of(gather_blocks const& op) const noexcept
      {
        auto* const entries = memory.template as<recall_entry>();
        auto* const spans = reinterpret_cast<target_span*>(entries + capacity);
        auto* const stands = reinterpret_cast<join_entries::standing*>(spans + capacity);
        auto* const targets = reinterpret_cast<slot_id*>(stands + capacity);
        auto* const begins = reinterpret_cast<std::uint32_t*>(targets + capacity);
        return {
          .plan = op.plan,
          .first_row = op.first_row,
          .row_count = op.row_count,
          .joined = entries,
          .of = spans,
          .targets = targets,
          .row_begin = begins,
          .table = reinterpret_cast<join_entries::found*>(begins + 3),
          .stands = stands};
      }
    };

    /// Whether the runs go by a kernel.
    [[nodiscard]] bool are_short(std::span<copy_run const> runs, copy_direction direction) const noexcept
    {
      if (direction == copy_direction::device_to_device) { return false; }
      std::uint64_t const from = direction == copy_direction::host_to_device ? report_.copy_engine_from_bytes
                                                                             : report_.copy_engine_to_host_from_bytes;
      std::uint64_t bytes = 0;
      for (copy_run const& run : runs) { bytes += run.bytes; }
      return bytes / runs.size() < from;
    }

    [[nodiscard]] bool is_capturing(typename B::stream_ref stream) const noexcept
    {
      if constexpr (requires { backend_->is_capturing(stream); }) {
        return backend_->is_capturing(stream);
      } else {
        return false;
      }
    }

    [[nodiscard]] static transfer_report report_of(
      B& backend, transfer_limits const& limits, gather_scatter_engine const& options)
    {
      bool const measures = options.measure && prefers_few_launches<B>;
      transfer_report report;
      if (measures && !options.groups) { report.gather_rates = measure_gather(backend, limits.layout.block_bytes); }
      report.groups = options.groups.value_or(choose_gather_groups(report.gather_rates, groups_unmeasured));
      if (measures && !options.copy_engine_from_bytes) {
        report.move_rates = measure_moves(backend, report.groups, options.runs_per_copy);
      }
      std::uint64_t const unmeasured = prefers_few_launches<B> ? copy_engine_unmeasured_bytes : 0;
      auto const from = [&](copy_direction direction) {
        return options.copy_engine_from_bytes.value_or(
          choose_copy_engine_from(report.move_rates, direction, unmeasured));
      };
      report.copy_engine_from_bytes = from(copy_direction::host_to_device);
      report.copy_engine_to_host_from_bytes = from(copy_direction::device_to_host);
      return report;
    }

    B* backend_;
    transfer_report report_;
    std::uint32_t rows_per_landing_;
    std::uint32_t max_rows_;
    std::vector<copy_run> merged_;       // [runs_per_copy]
    std::uint32_t ordered_entries_ = 0;  // that there is room for
    slab<B> ordered_;                    // [ordered_entries_] recall_entry, and two words: a plan in another order
    join_lists joins_;
  };

  /// Measures the device where that is asked for: some hundredths of a second.
  /// @throws configuration_error for options that are 0; resource_error where the measuring is refused
  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, transfer_limits const& limits) const
  {
    if (groups == 0U || runs_per_copy == 0) {
      throw configuration_error{
        "gather_scatter_engine of " + std::to_string(groups.value_or(groups_unmeasured)) + " groups and " +
        std::to_string(runs_per_copy) + " runs per copy; both need at least 1"};
    }
    return bound<B>{backend, limits, *this};
  }
};

static_assert(transfer_engine_for<gather_scatter_engine, archetype::backend>);

}  // namespace pulseinfer
