#pragma once

/// A workload for a counts_backend: what rows miss, what of it was foreseen, and what may come later.

#include <pulseinfer/backend/sim/counts_backend.hpp>
#include <pulseinfer/backend/sim/machine.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/table.hpp>
#include <pulseinfer/workload/miss_generator.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace pulseinfer {

/// What moves in the background.
struct foresight_options {
  bool prefetch = false;  ///< fetch what the estimate of the next layer names while the link is free
  /// Fetch what stands just below each cut when nothing else moves, in parts of the budget: it serves the next step. None of it is
  /// taken for resident.
  double near_share = 0.0;
  double deferred_share = 0.0;  ///< newcomers of at most this share together come in the background; 0: none
  nanoseconds block_time{0};    ///< of the link, for one block
  std::uint32_t piece_blocks = 4;
};

/// Sums over all plans so far.
struct workload_totals {
  std::uint64_t plans = 0;       ///< recalls of a row in a layer
  std::uint64_t misses = 0;      ///< blocks that were not resident when nothing is foreseen: what a selection costs
  std::uint64_t demanded = 0;    ///< of them, blocks that a row waited for
  std::uint64_t prefetched = 0;  ///< of them, blocks that had come before they were asked for
  std::uint64_t deferred = 0;    ///< of them, blocks that were left for later
  std::uint64_t moved = 0;       ///< blocks that moved in the background
  std::uint64_t wasted = 0;      ///< of them, blocks that were not asked for
  double skipped_share = 0.0;    ///< of the softmax mass, not attended, over all plans
};

/// What has been added since.
[[nodiscard]] inline workload_totals difference(workload_totals const& now, workload_totals const& before) noexcept
{
  return {
    .plans = now.plans - before.plans,
    .misses = now.misses - before.misses,
    .demanded = now.demanded - before.demanded,
    .prefetched = now.prefetched - before.prefetched,
    .deferred = now.deferred - before.deferred,
    .moved = now.moved - before.moved,
    .wasted = now.wasted - before.wasted,
    .skipped_share = now.skipped_share - before.skipped_share};
}

/// Rows that step through the layers of a miss_generator. Background moves are whole pieces of one (row, layer): first what the
/// next layer is expected to ask, then what was left for later, then what stands below the cuts. A prefetch that is overtaken by its layer's plan is dropped, and
/// what is still missing is demanded; a deferred block that has not come when its row is back at the layer is demanded then.
class counted_workload final : public count_source, public background_source {
 public:
  counted_workload(miss_generator& generator, foresight_options const& options)
    : generator_{&generator},
      options_{options},
      cells_(std::size_t{generator.options().rows} * generator.options().layers),
      resident_(generator.options().rows, 0),
      found_(generator.options().budget_blocks),
      near_blocks_(static_cast<std::uint32_t>(options.near_share * generator.options().budget_blocks + 0.5))
  {}

  counted_workload(counted_workload&&) = delete;

  [[nodiscard]] miss_generator& generator() noexcept { return *generator_; }
  [[nodiscard]] workload_totals const& totals() const noexcept { return totals_; }
  [[nodiscard]] std::uint64_t waiting_blocks() const noexcept { return waiting_; }
  /// Skipped share of each plan, where someone wants them one by one.
  std::vector<float>* skipped = nullptr;

  /// The row begins its next step.
  void begin_step(row_id row) noexcept { generator_->next_step(row); }

  /// From now on every block of the row has a slot, or no longer.
  void set_resident(row_id row, bool resident) noexcept { resident_[to_index(row)] = resident ? 1 : 0; }

  counts plan(row_id row, layer_id layer) noexcept override
  {
    cell& c = at(row, layer);
    std::uint32_t const budget = generator_->options().budget_blocks;
    if (resident_[to_index(row)] != 0) {
      c.demanded = 0;
      return {.misses = 0, .hits = budget};
    }
    std::uint32_t const misses = generator_->misses(row, layer);
    ++totals_.plans;
    totals_.misses += misses;
    std::uint32_t left = misses;
    // What was fetched ahead for this step has come or is given up.
    std::uint32_t const near = near_hits(row, layer, c);
    std::uint32_t const ahead = std::min(c.good_landed + near, left);
    totals_.prefetched += ahead;
    totals_.wasted += c.prefetch_landed + c.near_landed - ahead;
    want_near(row, layer, c);
    waiting_ -= c.prefetch_left;
    c.prefetch_left = c.prefetch_landed = c.good_landed = 0;
    ++c.generation;
    left -= ahead;
    // What the last step left for later and has not come.
    std::uint32_t const overdue = c.deferred_left;
    waiting_ -= overdue;
    c.deferred_left = 0;
    ++c.deferred_generation;
    c.deferred_count = 0;
    std::uint32_t deferred = 0;
    if (options_.deferred_share > 0.0 && left > 0) { deferred = defer(row, layer, c, misses, ahead); }
    totals_.deferred += deferred;
    std::uint32_t const demanded = left - deferred + overdue;
    totals_.demanded += demanded;
    c.demanded = demanded;
    if (options_.prefetch && to_index(layer) + 1 < generator_->options().layers) {
      foresee(row, static_cast<layer_id>(to_number(layer) + 1));
    }
    return {.misses = demanded, .hits = budget - std::min(budget, demanded + deferred)};
  }

  /// The rows attend a part of a layer. @return blocks attended, in selections
  [[nodiscard]] double attend(row_id row, layer_id layer, part which) noexcept
  {
    cell& c = at(row, layer);
    double const landed = c.demanded / static_cast<double>(generator_->options().budget_blocks);
    if (which != part::hits && !c.attended) {
      totals_.skipped_share += c.absent_share;
      if (skipped != nullptr) { skipped->push_back(static_cast<float>(c.absent_share)); }
      c.attended = true;
    }
    // Blocks that are left for later are charged as if they were attended: the bound counts them too.
    switch (which) {
      case part::hits: return std::max(0.0, 1.0 - landed);
      case part::landed: return landed;
      case part::whole: return 1.0;
    }
    return 0.0;
  }

  bool next(piece& given) noexcept override
  {
    for (std::deque<request>* const queue : {&soon_, &later_, &below_}) {
      while (!queue->empty()) {
        request& r = queue->front();
        cell const& c = cells_[r.cell];
        std::uint32_t const present = queue == &soon_ ? c.generation
          : queue == &later_                          ? c.deferred_generation
                                                      : c.near_generation;
        if (r.generation != present || r.blocks == 0) {
          queue->pop_front();
          continue;
        }
        moving_ = r;
        moving_.blocks = std::min(r.blocks, options_.piece_blocks);
        moving_from_ = queue;
        r.blocks -= moving_.blocks;
        given = {options_.block_time * moving_.blocks, 0};
        return true;
      }
    }
    return false;
  }

  void done(std::uint64_t) noexcept override
  {
    totals_.moved += moving_.blocks;
    cell& c = cells_[moving_.cell];
    if (moving_from_ == &below_) {
      if (moving_.generation == c.near_generation) {
        c.near_landed += moving_.blocks;
      } else {
        totals_.wasted += moving_.blocks;
      }
      return;
    }
    if (moving_from_ == &soon_) {
      if (moving_.generation != c.generation) {
        totals_.wasted += moving_.blocks;
        return;
      }
      for (std::uint32_t i = 0; i < moving_.blocks; ++i) {
        // Good and wrong ones come in the order of a draw: nobody knows which is which.
        bool const good =
          workload_detail::next_bits(moving_.bits, c.prefetch_landed + 1) % (c.good_left + c.wrong_left) < c.good_left;
        --(good ? c.good_left : c.wrong_left);
        c.good_landed += good ? 1U : 0U;
        ++c.prefetch_landed;
      }
      c.prefetch_left -= moving_.blocks;
      waiting_ -= moving_.blocks;
      return;
    }
    if (moving_.generation != c.deferred_generation) {
      totals_.wasted += moving_.blocks;
      return;
    }
    for (std::uint32_t i = 0; i < moving_.blocks; ++i) { c.absent_share -= c.absent_share / (c.deferred_left - i); }
    c.deferred_left -= moving_.blocks;
    waiting_ -= moving_.blocks;
  }

 private:
  struct cell {
    std::uint32_t generation = 0;  ///< of prefetches: those of an earlier one are dropped
    std::uint32_t deferred_generation = 0;
    std::uint32_t near_generation = 0;
    std::uint32_t near_landed = 0;
    std::uint32_t demanded = 0;
    std::uint32_t prefetch_left = 0;
    std::uint32_t prefetch_landed = 0;
    std::uint32_t good_landed = 0;
    std::uint32_t good_left = 0;
    std::uint32_t wrong_left = 0;
    std::uint32_t deferred_left = 0;
    std::uint32_t deferred_count = 0;
    double absent_share = 0.0;  ///< of the deferred blocks that have not come
    bool attended = true;
  };
  struct request {
    std::uint32_t cell = 0;
    std::uint32_t generation = 0;
    std::uint32_t blocks = 0;
    std::uint64_t bits = 0;
  };

  [[nodiscard]] std::uint32_t index(row_id row, layer_id layer) const noexcept
  {
    return static_cast<std::uint32_t>(to_index(row) * generator_->options().layers + to_index(layer));
  }
  [[nodiscard]] cell& at(row_id row, layer_id layer) noexcept { return cells_[index(row, layer)]; }

  /// Leaves for later as many of the newcomers as their shares allow, the smallest first.
  std::uint32_t defer(row_id row, layer_id layer, cell& c, std::uint32_t misses, std::uint32_t ahead) noexcept
  {
    std::uint32_t const count = generator_->newcomers(row, layer, found_);
    auto const end = found_.begin() + count;
    // Which of them were fetched ahead is not told apart here: those of the largest shares, for which a prefetch is made.
    std::sort(found_.begin(), end, [](newcomer const& a, newcomer const& b) { return a.share < b.share; });
    std::uint32_t const open = misses - std::min(ahead, misses);
    std::uint32_t deferred = 0;
    c.absent_share = 0.0;
    while (deferred < open && c.absent_share + found_[deferred].share <= options_.deferred_share) {
      c.absent_share += found_[deferred++].share;
    }
    c.deferred_left = c.deferred_count = deferred;
    c.attended = false;
    if (deferred > 0) {
      later_.push_back({.cell = index(row, layer), .generation = c.deferred_generation, .blocks = deferred});
      waiting_ += deferred;
    }
    return deferred;
  }

  /// How many of the blocks that came from below the row's last cut miss now.
  [[nodiscard]] std::uint32_t near_hits(row_id row, layer_id layer, cell const& c) noexcept
  {
    if (c.near_landed == 0) { return 0; }
    std::uint32_t const count = generator_->newcomers(row, layer, found_);
    std::uint32_t good = 0;
    for (std::uint32_t i = 0; i < count; ++i) { good += found_[i].near ? 1U : 0U; }
    good = std::min(good, near_blocks_);
    // Those that came are any of those that were wanted.
    std::uint64_t const bits = workload_detail::bits_of({index(row, layer), c.near_generation, 19});
    std::uint32_t hits = 0;
    for (std::uint32_t i = 0; i < c.near_landed; ++i) {
      hits += workload_detail::next_bits(bits, i + 1) % (near_blocks_ - i) < good - hits ? 1U : 0U;
    }
    return hits;
  }

  /// What stands below the row's cut may come for its next step.
  void want_near(row_id row, layer_id layer, cell& c) noexcept
  {
    if (near_blocks_ == 0) { return; }
    c.near_landed = 0;
    ++c.near_generation;
    below_.push_back({.cell = index(row, layer), .generation = c.near_generation, .blocks = near_blocks_});
  }

  /// Fetches what the estimate of the row's next layer names.
  void foresee(row_id row, layer_id layer) noexcept
  {
    cell& c = at(row, layer);
    std::uint32_t const count = generator_->newcomers(row, layer, found_);
    std::uint32_t good = 0;
    std::uint32_t wrong = generator_->wrong_estimates(row, layer);
    if (options_.deferred_share > 0.0) {
      // What may come later need not come early.
      std::sort(
        found_.begin(), found_.begin() + count, [](newcomer const& a, newcomer const& b) { return a.share < b.share; });
      double sum = 0.0;
      std::uint32_t first = 0;
      while (first < count && sum + found_[first].share <= options_.deferred_share) { sum += found_[first++].share; }
      for (std::uint32_t i = first; i < count; ++i) { good += found_[i].estimated ? 1U : 0U; }
      wrong = count == 0 ? 0 : (wrong * (count - first) + count / 2) / count;
    } else {
      for (std::uint32_t i = 0; i < count; ++i) { good += found_[i].estimated ? 1U : 0U; }
    }
    if (good + wrong == 0) { return; }
    waiting_ -= c.prefetch_left;
    c.good_left = good;
    c.wrong_left = wrong;
    c.prefetch_left = good + wrong;
    c.prefetch_landed = c.good_landed = 0;
    ++c.generation;
    waiting_ += c.prefetch_left;
    soon_.push_back(
      {.cell = index(row, layer),
       .generation = c.generation,
       .blocks = good + wrong,
       .bits = workload_detail::bits_of({index(row, layer), c.generation, 17})});
  }

  miss_generator* generator_;
  foresight_options options_;
  std::vector<cell> cells_;             // [rows, layers]
  std::vector<std::uint8_t> resident_;  // [rows]
  std::vector<newcomer> found_;
  std::deque<request> soon_;
  std::deque<request> later_;
  std::deque<request> below_;
  std::uint32_t near_blocks_;
  request moving_ = {};
  std::deque<request> const* moving_from_ = nullptr;
  std::uint64_t waiting_ = 0;
  workload_totals totals_ = {};
};

}  // namespace pulseinfer
