#pragma once

/// Selection by the host engine: from ids or scores of its own indexer, or from another rank.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/select_imported.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>
#include <pulseinfer/view/tensor_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace pulseinfer {

/// Has no digests and scores nothing. Open blocks are always selected and count towards the budget; sink and recent ones
/// only where scores decide. A row that has no more blocks than the budget reads all.
struct external_selector {
  std::uint32_t budget_tokens = 2048;              ///< open tokens included, and kept ones where scores decide
  std::uint32_t sink_tokens = 0;                   ///< used with scores
  std::uint32_t recent_tokens = 0;                 ///< used with scores
  std::optional<std::uint32_t> dense_tokens = {};  ///< rows of so many tokens stay dense; absent: budget_tokens

  /// The budget in blocks: the very numbers that a bound selector uses.
  /// @throws configuration_error
  [[nodiscard]] resolved_budget resolve(std::uint32_t block_tokens, std::uint32_t step_tokens = 1) const
  {
    return resolve_budget(
      {.budget_tokens = budget_tokens,
       .sink_tokens = sink_tokens,
       .recent_tokens = recent_tokens,
       .dense_tokens = dense_tokens},
      block_tokens, step_tokens);
  }

  template <class B>
  class bound;

  /// @throws configuration_error with the numbers, resource_error from the backend
  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

/// The selector on a backend, which must outlive it. An import serves one selection, the next that is remembered (a
/// prefetch leaves it), and stays in memory that the device reads when that selection runs: import for the same row and
/// layer again only after that.
template <class B>
class external_selector::bound {
 public:
  bound(external_selector const& options, B& backend, selector_limits const& limits)
    : backend_{&backend},
      limits_{checked(limits)},
      budget_{options.resolve(limits_.geometry.block_tokens, limits_.max_step_tokens)},
      scores_(limits_.geometry.layers),
      sorted_(budget_.budget_blocks),
      ids_{backend, memory_space::pinned, places() * budget_.budget_blocks * sizeof(block_id)},
      counts_{backend, memory_space::pinned, places() * sizeof(std::uint32_t)},
      imported_(static_cast<std::size_t>(places()), 0)
  {
    std::fill_n(counts_.template as<std::uint32_t>(), places(), 0U);
  }

  [[nodiscard]] resolved_budget const& budget(layer_id) const noexcept { return budget_; }

  [[nodiscard]] std::uint32_t budget_blocks(layer_id) const noexcept { return budget_.budget_blocks; }
  [[nodiscard]] std::uint32_t dense_tokens() const noexcept { return budget_.dense_tokens; }
  [[nodiscard]] std::uint64_t digest_bytes(layer_id) const noexcept { return 0; }

  /// Gives the blocks that a lane reads in its next selection of `layer`.
  /// @param lane row * head_groups + group   @param ids in any order, open blocks among them or not
  /// @param blocks of the row in that step, the open ones included
  /// @status out_of_range for an unknown layer or lane, for more blocks than bound and for an id that is not below
  ///         `blocks`; invalid_argument for an id given twice; capacity_exceeded where the ids and the open blocks that a
  ///         step may have don't fit the budget. Nothing changes in any of these cases
  status import_selection(layer_id layer, lane_id lane, std::span<block_id const> ids, std::uint32_t blocks) noexcept
  {
    if (!known(layer) || is_none(lane) || to_index(lane) >= lanes() || blocks > limits_.max_blocks) {
      return status::out_of_range;
    }
    for (block_id const id : ids) {
      if (is_none(id) || to_index(id) >= blocks) { return status::out_of_range; }
    }
    if (ids.size() > sorted_.size()) { return status::capacity_exceeded; }
    auto const end = std::copy(ids.begin(), ids.end(), sorted_.begin());
    std::sort(sorted_.begin(), end);
    if (std::adjacent_find(sorted_.begin(), end) != end) { return status::invalid_argument; }
    // Open blocks are the last ones, how many is known when the selection runs.
    std::uint32_t const sealed = blocks > budget_.open_blocks ? blocks - budget_.open_blocks : 0;
    auto const before_open = std::count_if(sorted_.begin(), end, [&](block_id id) { return to_index(id) < sealed; });
    if (
      blocks > budget_.budget_blocks &&
      static_cast<std::uint64_t>(before_open) + budget_.open_blocks > budget_.budget_blocks) {
      return status::capacity_exceeded;
    }

    std::uint64_t const place = to_index(layer) * lanes() + to_index(lane);
    std::copy(sorted_.begin(), end, ids_.template as<block_id>() + place * budget_.budget_blocks);
    counts_.template as<std::uint32_t>()[place] = static_cast<std::uint32_t>(ids.size());
    imported_[static_cast<std::size_t>(place)] = 1;
    return status::ok;
  }

  /// Gives scores for all rows of the next selection of `layer`; ids that were imported for it are then not used.
  /// @param scores [rows, head_groups, blocks] float32 without gaps between rows, row r in place r, device memory that lives
  ///        until the selection has run; the last dimension is at least the most blocks of a row; NaN is never chosen
  ///        before a number
  /// @status out_of_range for an unknown layer, invalid_argument for another shape or type
  status import_scores(layer_id layer, tensor_view const& scores) noexcept
  {
    if (!known(layer)) { return status::out_of_range; }
    if (
      scores.empty() || scores.type != dtype::float32 || scores.heads != limits_.geometry.head_groups ||
      scores.head_stride % sizeof(float) != 0 || scores.head_stride < scores.dim * sizeof(float) ||
      scores.token_stride != scores.head_stride * scores.heads) {
      return status::invalid_argument;
    }
    scores_[to_index(layer)] = scores;
    return status::ok;
  }

  status digest_async(typename B::stream_ref, digest_request const&) noexcept { return status::ok; }

  /// Enqueues the selection of the request's rows, from scores where the layer has them, else from ids: one launch.
  /// @status out_of_range for an unknown layer; capacity_exceeded for more blocks than bound or scored; invalid_state where
  ///         a row has no import; what the backend's launch says
  status select_async(typename B::stream_ref stream, select_request const& request) noexcept
  {
    if (!known(request.layer)) { return status::out_of_range; }
    if (request.rows.count == 0 || request.most_blocks == 0) { return status::ok; }
    if (request.most_blocks > limits_.max_blocks) { return status::capacity_exceeded; }
    return scores_[to_index(request.layer)].empty() ? select_ids(stream, request) : select_scores(stream, request);
  }

 private:
  [[nodiscard]] static selector_limits const& checked(selector_limits const& limits)
  {
    validate(limits.geometry);
    if (limits.max_rows == 0 || limits.max_blocks == 0) {
      throw configuration_error{
        "a selector for " + std::to_string(limits.max_rows) + " rows of " + std::to_string(limits.max_blocks) +
        " blocks"};
    }
    return limits;
  }

  [[nodiscard]] bool known(layer_id layer) const noexcept
  {
    return !is_none(layer) && to_index(layer) < limits_.geometry.layers;
  }
  [[nodiscard]] std::uint64_t lanes() const noexcept
  {
    return std::uint64_t{limits_.max_rows} * limits_.geometry.head_groups;
  }
  [[nodiscard]] std::uint64_t places() const noexcept { return limits_.geometry.layers * lanes(); }

  status select_scores(typename B::stream_ref stream, select_request const& request) noexcept
  {
    tensor_view& scores = scores_[to_index(request.layer)];
    if (request.most_blocks > scores.dim) { return status::capacity_exceeded; }
    for (row_id const row : request.rows) {
      if (to_index(row) >= scores.tokens) { return status::invalid_state; }
    }
    status const result = backend_->launch(
      stream,
      select_top_k{
        .layer = request.layer,
        .rows = request.rows,
        .info = request.info,
        .votes = reinterpret_cast<float const*>(scores.data),
        .selection = request.selection,
        .vote_pitch = scores.head_stride / sizeof(float),
        .head_groups = limits_.geometry.head_groups,
        .block_tokens = limits_.geometry.block_tokens,
        .budget_blocks = budget_.budget_blocks,
        .sink_blocks = budget_.sink_blocks,
        .recent_blocks = budget_.recent_blocks,
        .remember = request.remember});
    if (result == status::ok && request.remember) { scores = {}; }
    return result;
  }

  status select_ids(typename B::stream_ref stream, select_request const& request) noexcept
  {
    std::uint32_t const groups = limits_.geometry.head_groups;
    std::uint64_t const first = to_index(request.layer) * lanes();
    for (row_id const row : request.rows) {
      for (std::uint32_t group = 0; group < groups; ++group) {
        std::uint64_t const lane = to_index(lane_of(row, group, groups));
        if (lane >= lanes() || imported_[static_cast<std::size_t>(first + lane)] == 0) { return status::invalid_state; }
      }
    }
    status const result = backend_->launch(
      stream,
      select_imported{
        .layer = request.layer,
        .rows = request.rows,
        .info = request.info,
        .ids = ids_.template as<block_id>() + first * budget_.budget_blocks,
        .id_counts = counts_.template as<std::uint32_t>() + first,
        .selection = request.selection,
        .id_pitch = budget_.budget_blocks,
        .head_groups = groups,
        .block_tokens = limits_.geometry.block_tokens,
        .budget_blocks = budget_.budget_blocks,
        .remember = request.remember});
    if (result != status::ok || !request.remember) { return result; }
    for (row_id const row : request.rows) {
      for (std::uint32_t group = 0; group < groups; ++group) {
        imported_[static_cast<std::size_t>(first + to_index(lane_of(row, group, groups)))] = 0;
      }
    }
    return result;
  }

  B* backend_;
  selector_limits limits_;
  resolved_budget budget_;
  std::vector<tensor_view> scores_;     // [layers] empty where none wait
  std::vector<block_id> sorted_;        // [budget_blocks] place to sort in
  slab<B> ids_;                         // [layers, lanes, budget_blocks] block_id
  slab<B> counts_;                      // [layers, lanes] std::uint32_t
  std::vector<std::uint8_t> imported_;  // [layers, lanes] ids wait
};

static_assert(selector_for<external_selector, archetype::backend>);

}  // namespace pulseinfer
