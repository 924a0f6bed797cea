#pragma once

/// Baseline: one copy for each head of each block, planned on the host.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/transfer_engine.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/transfer/block_fragments.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/copy_list.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// What systems do that select by head and drive the copy engine: the host waits for the plan and copies each fragment (a KV
/// head's keys, its values) of each block by itself. The measure for gather_scatter_engine. Not for captured streams.
struct fragment_copy_engine {
  static constexpr plan_place plans_on = plan_place::host;

  std::uint32_t fragments_per_copy =
    1;  ///< fragments of one call to the copy engine: 1 is a copy call each, more is a batch
  std::uint32_t rows_per_landing = 1;  ///< rows that are posted as landed together; 0: all rows of the plan

  template <class B>
  class bound {
   public:
    bound(B& backend, transfer_limits const& limits, fragment_copy_engine const& options)
      : backend_{&backend},
        rows_per_landing_{options.rows_per_landing},
        max_rows_{limits.max_rows},
        fragments_{block_fragments(limits.layout)},
        batch_(options.fragments_per_copy)
    {}

    /// Copies and posts the plan's rows in their order. The plan is complete and readable when this is called.
    /// @status ok: every row will be posted, as landed, or as failed with the blocks of which a copy was refused. Else
    ///         invalid_argument for more rows than the limits name (nothing enqueued), or the backend's refusal of a posting:
    ///         the rows from there on are still in flight, and the caller fails them with land_rows or ends
    status recall_async(typename B::stream_ref stream, recall_plan_ref const& plan, landed_ref landed) noexcept
    {
      std::uint32_t const rows = plan.rows.count;
      if (rows > max_rows_) { return status::invalid_argument; }
      std::uint32_t const most = rows_per_landing_ == 0 ? rows : rows_per_landing_;
      for (std::uint32_t first = 0; first < rows; first += most) {
        std::uint32_t const count = std::min(most, rows - first);
        for (std::uint32_t place = first; place < first + count; ++place) { copy_row(stream, plan, place); }
        status const result =
          backend_->launch(stream, land_rows{.plan = plan, .landed = landed, .first_row = first, .row_count = count});
        if (result != status::ok) { return result; }
      }
      return status::ok;
    }

    /// Copies the runs as they are.
    /// @status the backend's first refusal; earlier runs are enqueued then, so that all targets count as undefined
    status move_async(typename B::stream_ref stream, copy_list list) noexcept
    {
      std::size_t held = 0;
      status result = status::ok;
      for (std::uint32_t i = 0; i < list.count && result == status::ok; ++i) {
        result = add(stream, list.runs[i], list.direction, held);
      }
      return result == status::ok ? flush(stream, list.direction, held) : result;
    }

   private:
    /// Copies what it can; blocks of which a copy is refused are marked in the plan.
    void copy_row(typename B::stream_ref stream, recall_plan_ref const& plan, std::uint32_t place) noexcept
    {
      constexpr copy_direction direction = copy_direction::host_to_device;
      std::size_t held = 0;
      std::uint32_t first = plan.row_begin[place];  // first entry with a fragment in the batch that is being filled
      auto const settle = [&](status result, std::uint32_t last) {
        for (; first < last; ++first) { plan.failed[first] |= result == status::ok ? 0U : 1U; }
      };
      for (std::uint32_t i = plan.row_begin[place]; i < plan.row_begin[place + 1]; ++i) {
        if (held == 0) { first = i; }
        recall_entry const& entry = plan.entries[i];
        std::uint32_t const group = static_cast<std::uint32_t>(to_index(entry.lane) % plan.head_groups);
        std::byte const* const source = plan.host.address(plan.layer, group, entry.source);
        std::byte* const target = plan.pool.address(plan.layer, entry.target);
        for (block_fragment const& fragment : fragments_) {
          copy_run const run{
            .target = target + fragment.offset, .source = source + fragment.offset, .bytes = fragment.bytes};
          status const result = add(stream, run, direction, held);
          if (result != status::ok) { settle(result, i + 1); }
          if (held == 0) { first = i; }
        }
      }
      settle(flush(stream, direction, held), plan.row_begin[place + 1]);
    }

    status add(typename B::stream_ref stream, copy_run const& run, copy_direction direction, std::size_t& held) noexcept
    {
      if (run.bytes == 0) { return status::ok; }
      batch_[held++] = run;
      return held == batch_.size() ? flush(stream, direction, held) : status::ok;
    }

    status flush(typename B::stream_ref stream, copy_direction direction, std::size_t& held) noexcept
    {
      if (held == 0) { return status::ok; }
      copy_list const list{.runs = batch_.data(), .count = static_cast<std::uint32_t>(held), .direction = direction};
      held = 0;
      return backend_->copy(stream, list);
    }

    B* backend_;
    std::uint32_t rows_per_landing_;
    std::uint32_t max_rows_;
    std::vector<block_fragment> fragments_;
    std::vector<copy_run> batch_;  // [fragments_per_copy]
  };

  /// @throws configuration_error for a batch of 0 fragments
  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, transfer_limits const& limits) const
  {
    if (fragments_per_copy == 0) { throw configuration_error{"fragment_copy_engine with 0 fragments per copy"}; }
    return bound<B>{backend, limits, *this};
  }
};

static_assert(transfer_engine_for<fragment_copy_engine, archetype::backend>);

}  // namespace pulseinfer
