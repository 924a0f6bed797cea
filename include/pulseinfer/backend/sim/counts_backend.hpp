#pragma once

/// A simulation that knows how many blocks travel and not which: a million (row, layer) visits a second.

#include <pulseinfer/backend/observation.hpp>
#include <pulseinfer/backend/sim/sim_backend.hpp>
#include <pulseinfer/concepts/operation.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/operation/gather_blocks.hpp>
#include <pulseinfer/operation/land_rows.hpp>
#include <pulseinfer/operation/plan_recall.hpp>
#include <pulseinfer/operation/resolve_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/mailbox.hpp>
#include <pulseinfer/view/recall_plan.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <type_traits>

namespace pulseinfer {

/// Says what each row needs in place of selection and residency.
class count_source {
 public:
  struct counts {
    std::uint32_t misses = 0;  ///< blocks that the row waits for
    std::uint32_t hits = 0;    ///< blocks that it has
  };
  /// The row has selected in `layer`. Called once for each recall of a row, when the plan is made in virtual time.
  [[nodiscard]] virtual counts plan(row_id row, layer_id layer) noexcept = 0;

 protected:
  ~count_source() = default;
};

/// How a counts simulation stands for the operations of a recall.
struct counts_options {
  nanoseconds select_chain{0};  ///< from a layer's queries to the posted plan: selection, resolve, plan
  /// One launch gathers all rows of a recall and posts each row when its last block is there. Else each launch of the transfer
  /// engine costs what an operation costs.
  bool fused_gather = true;
  /// Rows with fewer blocks first, so that many are ready early. Else in the order of the recall.
  bool smallest_first = true;
};

namespace detail {

/// plan_recall with counts. Where the plan's entries would lie, it keeps the order in which rows travel.
struct post_counts {
  static constexpr char const* name = "post_counts";
  static constexpr operation_kind kind = operation_kind::metadata;

  plan_recall plan = {};
  layer_id layer = none<layer_id>;
  count_source* source = nullptr;
  nanoseconds chain{0};
  bool smallest_first = true;

  [[nodiscard]] launch_shape shape() const { return plan.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {.device_ns = chain.count()}; }

  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {
    std::uint32_t const rows = plan.rows.count;
    for (std::uint32_t place = 0; place < rows; ++place) {
      count_source::counts const counted = source->plan(plan.rows[place], layer);
      row_mailbox& box = plan.mailbox[to_index(plan.rows[place])];
      box.bytes = counted.misses * plan.block_bytes;
      box.misses = counted.misses;
      box.flying = 0;
      box.hits = counted.hits;
      box.stalled = 0;
      if (plan.outcome != nullptr) {
        plan.outcome[place].planned = counted.misses;
        plan.outcome[place].hits = counted.hits;
      }
      device::add_relaxed(&box.total_misses, counted.misses);
      device::add_relaxed(&box.total_hits, counted.hits);
      device::store_release(&box.posted, plan.sequence[place]);
      place_of(place) = place;
    }
    if (smallest_first) {
      std::sort(plan.failed, plan.failed + rows, [&](std::uint32_t a, std::uint32_t b) {
        std::uint32_t const of_a = misses_of(a), of_b = misses_of(b);
        return of_a != of_b ? of_a < of_b : a < b;
      });
    }
    plan.row_begin[0] = 0;
    for (std::uint32_t i = 0; i < rows; ++i) { plan.row_begin[i + 1] = plan.row_begin[i] + misses_of(place_of(i)); }
  }

 private:
  [[nodiscard]] std::uint32_t& place_of(std::uint32_t i) const { return plan.failed[i]; }
  [[nodiscard]] std::uint32_t misses_of(std::uint32_t place) const
  {
    return plan.mailbox[to_index(plan.rows[place])].misses;
  }
};

struct gather_counts {
  static constexpr char const* name = "gather_counts";
  static constexpr operation_kind kind = operation_kind::data;

  gather_blocks gather = {};
  bool fused = true;

  [[nodiscard]] launch_shape shape() const { return gather.shape(); }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const
  {
    std::uint32_t const* const begin = gather.plan.row_begin;
    std::uint64_t const blocks = begin[gather.first_row + gather.row_count] - begin[gather.first_row];
    return {
      .link_bytes = blocks * gather.plan.block_bytes,
      .link_runs = blocks,
      .continues = fused && begin[gather.first_row] != 0};
  }
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {}
};

struct land_counts {
  static constexpr char const* name = "land_counts";
  static constexpr operation_kind kind = operation_kind::metadata;

  land_rows land = {};

  [[nodiscard]] launch_shape shape() const { return {.items = land.row_count == 0 ? 0U : 1U, .group_threads = 1}; }
  [[nodiscard]] std::size_t scratch_bytes(std::uint32_t) const { return 0; }
  [[nodiscard]] operation_cost cost() const { return {}; }
  template <thread_group Group>
  void operator()(Group const&, std::uint64_t, scratch_ref) const
  {
    for (std::uint32_t i = land.first_row; i < land.first_row + land.row_count; ++i) {
      std::uint32_t const place = land.plan.failed[i];
      row_mailbox& box = land.landed.mailbox[to_index(land.plan.rows[place])];
      std::uint32_t const number = land.landed.sequence[place];
      if (land.how == landing::landed) {
        device::store_release(&box.landed, number);
      } else if (box.landed != number && box.failed != number) {
        box.failed_blocks = 0;
        device::store_release(&box.failed, number);
      }
    }
  }
};

template <class Op>
inline constexpr bool is_resolve = false;
template <class Replacement>
inline constexpr bool is_resolve<resolve_blocks<Replacement>> = true;

}  // namespace detail

/// sim_backend with counts in place of blocks: what chooses, resolves, plans and lands blocks is replaced by operations that ask
/// a count_source and post what it says. The manager above is the very same one. Everything else is as in sim_backend.
/// @thread_safety none
class counts_backend : public sim_backend {
 public:
  /// @param source must outlive the backend   @throws configuration_error as sim_backend
  counts_backend(sim_options options, counts_options counts, count_source& source)
    : sim_backend{options}, counts_{counts}, source_{&source}
  {}

  /// When each gather ran, where someone wants it: for timelines. Allocates.
  std::deque<observation>* gathers = nullptr;

  template <operation Op>
  status launch(stream_ref stream, Op const& op, observation* observed = nullptr) noexcept
  {
    if constexpr (detail::is_resolve<Op>) {
      layer_ = op.layer;  // the plan that follows at once is of this layer
      return status::ok;
    } else if constexpr (std::is_same_v<Op, plan_recall>) {
      return sim_backend::launch(
        stream,
        detail::post_counts{
          .plan = op,
          .layer = layer_,
          .source = source_,
          .chain = counts_.select_chain,
          .smallest_first = counts_.smallest_first},
        observed);
    } else if constexpr (std::is_same_v<Op, gather_blocks>) {
      if (observed == nullptr && gathers != nullptr) { observed = &gathers->emplace_back(); }
      return sim_backend::launch(stream, detail::gather_counts{.gather = op, .fused = counts_.fused_gather}, observed);
    } else if constexpr (std::is_same_v<Op, land_rows>) {
      return sim_backend::launch(stream, detail::land_counts{.land = op}, observed);
    } else {
      return sim_backend::launch(stream, op, observed);
    }
  }

 private:
  counts_options counts_;
  count_source* source_;
  layer_id layer_ = none<layer_id>;
};

static_assert(observed_backend<counts_backend>);

/// Stands for a selector on a counts_backend: it has a budget, its digests take memory, and it chooses nothing.
struct counted_selector {
  std::uint32_t blocks = 128;
  std::uint64_t digest = 0;  ///< bytes of a block's, in each layer

  template <class B>
  struct bound {
    std::uint32_t blocks = 0;
    std::uint64_t digest = 0;

    [[nodiscard]] std::uint32_t budget_blocks(layer_id) const noexcept { return blocks; }
    [[nodiscard]] std::uint32_t dense_tokens() const noexcept { return 0; }
    [[nodiscard]] std::uint64_t digest_bytes(layer_id) const noexcept { return digest; }
    status digest_async(typename B::stream_ref, digest_request const&) noexcept { return status::ok; }
    status select_async(typename B::stream_ref, select_request const&) noexcept { return status::ok; }
  };

  template <class B>
  [[nodiscard]] bound<B> bind(B&, selector_limits const&) const
  {
    return {blocks, digest};
  }
};

static_assert(selector_for<counted_selector, counts_backend>);

}  // namespace pulseinfer
