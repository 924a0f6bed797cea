#pragma once

/// Brings unasked, in the background, what selections left for later and what stands just below their cuts.

#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/replacement.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/device/atomic.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/layout/kv_geometry.hpp>
#include <pulseinfer/manager/block_keeper.hpp>
#include <pulseinfer/manager/options.hpp>
#include <pulseinfer/manager/recall_driver.hpp>
#include <pulseinfer/operation/defer_blocks.hpp>
#include <pulseinfer/operation/list_wanted_blocks.hpp>
#include <pulseinfer/operation/want_near_blocks.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/foresight.hpp>
#include <pulseinfer/view/row_list.hpp>
#include <pulseinfer/view/ticket.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pulseinfer {

namespace detail {

/// A bound selector of those that selector_tells_scores asks for.
template <class BoundSelector, class Stream>
concept tells_scores = requires(BoundSelector& selector, Stream stream, layer_id layer) {
  selector.keep_shares(stream);
  selector.scores(layer);
};

}  // namespace detail

/// What lanes want is known to the device alone: the host keeps the layers whose rows may want something, in the order in which
/// they selected, and gives them to the background one after the other, again where something was left. Without
/// `deferred_share` and `near_share` it does nothing and holds no memory.
template <class B, class TransferEngine, replacement Replacement>
class background_filler {
 public:
  using stream_ref = typename B::stream_ref;
  using driver = recall_driver<B, TransferEngine, Replacement>;

  /// @param selector asked to keep its shares where blocks may be deferred
  /// @throws configuration_error where the options are out of range, or the selector does not tell what they need; resource_error
  template <class BoundSelector>
  background_filler(
    B& backend, stream_ref compute, block_keeper<B, Replacement>& keeper, driver& recalls, BoundSelector& selector,
    kv_geometry const& geometry, manager_options const& options)
    : backend_{&backend},
      compute_{compute},
      keeper_{&keeper},
      recalls_{&recalls},
      head_groups_{geometry.head_groups},
      block_tokens_{geometry.block_tokens},
      deferred_share_{options.deferred_share},
      near_share_{options.near_share}
  {
    check(selector, geometry);
    if (!enabled()) { return; }
    row_words_ = divide_up(options.max_rows, 64U);
    rows_.assign(std::size_t{geometry.layers} * row_words_, 0);
    queued_.assign(geometry.layers, 0);
    order_.reserve(geometry.layers);
    chosen_.reserve(options.max_rows);
    last_.reserve(options.max_rows);
    if constexpr (detail::tells_scores<BoundSelector, stream_ref>) {
      status const kept = defers() ? selector.keep_shares(compute) : status::ok;
      if (kept == status::ok) { return; }
      throw resource_error{std::string{"the first contents of a selector's shares: "} + name_of(kept)};
    }
  }

  background_filler(background_filler&&) = delete;

  [[nodiscard]] bool defers() const noexcept { return deferred_share_ > 0.0F; }
  [[nodiscard]] bool looks_below() const noexcept { return near_share_ > 0.0F; }
  [[nodiscard]] bool enabled() const noexcept { return defers() || looks_below(); }

  /// The rows have selected at `layer`, and nothing has been resolved: enqueues what finds out what they want, and shortens
  /// their selections by what may come later.
  /// @param rows those that recall, at an address that the device reads   @param scores of that selection
  status note(selection_scores const& scores, layer_id layer, row_list rows, stream_ref stream) noexcept
  {
    device_books<B> const& books = keeper_->books();
    status result = status::ok;
    if (looks_below()) {
      auto const near = static_cast<std::uint32_t>(near_share_ * static_cast<float>(scores.budget_blocks) + 0.5F);
      result = backend_->launch(
        stream,
        want_near_blocks{
          .layer = layer,
          .rows = rows,
          .info = books.info(),
          .selection = books.selection(),
          .scores = scores,
          .foresight = books.foresight(),
          .head_groups = head_groups_,
          .block_tokens = block_tokens_,
          .near_blocks = std::max(near, 1U)});
    }
    if (result == status::ok && defers()) {
      result = backend_->launch(
        stream,
        defer_blocks{
          .layer = layer,
          .rows = rows,
          .info = books.info(),
          .selection = books.selection(),
          .scores = scores,
          .residency = books.residency(),
          .foresight = books.foresight(),
          .head_groups = head_groups_,
          .block_tokens = block_tokens_,
          .most_share = deferred_share_,
          .wants_others = looks_below()});
    }
    return result;
  }

  /// What the rows want at `layer` comes as soon as the background is free.
  void queue(layer_id layer, row_list rows) noexcept
  {
    for (row_id const row : rows) { mark(layer, row); }
    push(layer);
  }

  /// Gives the layer that has waited longest to the background, where that is free. Never waits.
  /// @param usable (row, layer) whether the row's slots in the layer may change in the order of the compute stream
  template <class Usable>
  void fill(Usable usable) noexcept
  {
    if ((order_.empty() && last_.empty()) || recalls_->background_flies()) { return; }
    take_left();
    while (!order_.empty()) {
      layer_id const layer = order_.front();
      order_.erase(order_.begin());
      queued_[to_index(layer)] = 0;
      chosen_.clear();
      std::uint64_t* const words = rows_.data() + to_index(layer) * row_words_;
      for (std::uint32_t w = 0; w < row_words_; ++w) {
        for (std::uint64_t bits = words[w]; bits != 0; bits &= bits - 1) {
          auto const row =
            static_cast<row_id>(std::uint64_t{w} * 64 + static_cast<std::uint32_t>(__builtin_ctzll(bits)));
          if (usable(row, layer)) { chosen_.push_back(row); }
        }
      }
      if (chosen_.empty()) { continue; }
      // The rest has its turn when the layer has.
      std::uint32_t const most = recalls_->background_rows();
      bool const all = chosen_.size() <= most;
      if (!all) { chosen_.resize(most); }
      if (bring(layer) != status::ok || (!all && most != 0)) { push(layer); }
      return;
    }
  }

  /// The row's sequence has ended.
  void forget(row_id row) noexcept
  {
    for (std::size_t first = 0; first < rows_.size(); first += row_words_) {
      rows_[first + to_index(row) / 64] &= ~(std::uint64_t{1} << (to_index(row) % 64));
    }
    std::erase(last_, row);
  }

 private:
  template <class BoundSelector>
  void check([[maybe_unused]] BoundSelector const& selector, kv_geometry const& geometry) const
  {
    auto const number = [](auto value) { return std::to_string(value); };
    for (float const part : {deferred_share_, near_share_}) {
      bool const sound = part >= 0.0F && part <= 1.0F;
      if (sound) { continue; }
      throw configuration_error{
        "deferred_share is " + number(deferred_share_) + " and near_share " + number(near_share_) +
        "; both are parts, from 0 to 1"};
    }
    if (!enabled()) { return; }
    if constexpr (detail::tells_scores<BoundSelector, stream_ref>) {
      for (std::uint32_t l = 0; l < geometry.layers && defers(); ++l) {
        auto const layer = static_cast<layer_id>(l);
        selection_scores const scores = selector.scores(layer);
        if (geometry.group_of(layer).kind != layer_kind::selected || scores.every_head) { continue; }
        throw configuration_error{
          "deferred_share is " + number(deferred_share_) + ", and in layer " + number(l) + " " + number(scores.heads) +
          " of " + number(geometry.query_heads) +
          " query heads choose: what is left for later must be of little share in every head"};
      }
    } else {
      throw configuration_error{
        "deferred_share is " + number(deferred_share_) + " and near_share " + number(near_share_) +
        "; the selector does not tell the scores that they need"};
    }
  }

  void mark(layer_id layer, row_id row) noexcept
  {
    rows_[to_index(layer) * row_words_ + to_index(row) / 64] |= std::uint64_t{1} << (to_index(row) % 64);
  }

  void push(layer_id layer) noexcept
  {
    if (queued_[to_index(layer)] != 0) { return; }
    queued_[to_index(layer)] = 1;
    order_.push_back(layer);
  }

  /// What the last listing had no room for waits again, behind the others.
  void take_left() noexcept
  {
    bool any = false;
    for (row_id const row : last_) {
      std::uint32_t left = 0;
      for (std::uint32_t g = 0; g < head_groups_; ++g) {
        left += device::load_acquire(&keeper_->books().totals()[to_index(lane_of(row, g, head_groups_))].left);
      }
      if (left == 0) { continue; }
      mark(last_layer_, row);
      any = true;
    }
    if (any) { push(last_layer_); }
    last_.clear();
  }

  /// A background recall of what the chosen rows want.
  status bring(layer_id layer) noexcept
  {
    auto const count = static_cast<std::uint32_t>(chosen_.size());
    if (count == 0) { return status::ok; }
    device_books<B> const& books = keeper_->books();
    std::uint32_t const most = std::min(recalls_->background_blocks(count), books.sizes().max_selected);
    if (most == 0) { return status::ok; }  // no lane has slots to spare
    ticket given;
    if (status const got = recalls_->take(given, backend_->now()); got != status::ok) { return got; }
    recall<B>& r = recalls_->at(given.index);
    r.layer = layer;
    r.row_count = count;
    std::ranges::copy(chosen_, r.rows);
    status const listed = backend_->launch(
      compute_,
      list_wanted_blocks{
        .layer = layer,
        .rows = {.ids = r.rows, .count = count},
        .listed = books.expected(),
        .foresight = books.foresight(),
        .residency = books.residency(),
        .host_blocks = books.host_blocks(),
        .head_groups = head_groups_,
        .most_blocks = most});
    if (listed != status::ok) { return listed; }
    for (row_id const row : chosen_) {
      rows_[to_index(layer) * row_words_ + to_index(row) / 64] &= ~(std::uint64_t{1} << (to_index(row) % 64));
    }
    last_layer_ = layer;
    last_ = chosen_;
    return recalls_->bring_background(r, given, compute_);
  }

  B* backend_;
  stream_ref compute_;
  block_keeper<B, Replacement>* keeper_;
  driver* recalls_;
  std::uint32_t head_groups_;
  std::uint32_t block_tokens_;
  float deferred_share_;
  float near_share_;
  std::uint32_t row_words_ = 0;
  std::vector<std::uint64_t> rows_;   // [layers, row_words] rows that may want something
  std::vector<std::uint8_t> queued_;  // [layers]
  std::vector<layer_id> order_;       // layers that wait, the longest first
  std::vector<row_id> chosen_;
  layer_id last_layer_ = none<layer_id>;  // of the last listing
  std::vector<row_id> last_;              // its rows; empty once they have been asked what is left
};

}  // namespace pulseinfer
