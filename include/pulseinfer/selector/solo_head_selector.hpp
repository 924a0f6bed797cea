#pragma once

/// SoloHead selection: all heads of a lane read the same blocks, chosen by a vote of shares.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/fixed_tokens.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/selector/soft_vote.hpp>
#include <pulseinfer/store/set_up_copy.hpp>
#include <pulseinfer/store/slab.hpp>
#include <pulseinfer/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pulseinfer {

/// score of each block from its digest -> softmax share per head and query -> vote: shares summed over heads and queries,
/// e^hysteresis times for blocks of the previous selection -> the most votes, ties to the lowest id. Sink, recent and open
/// blocks are always selected and count towards the budget. A row that has no more blocks than its budget reads all.
/// @tparam Digest cuboid_mean, min_max, mean_key or log_mass   @tparam HeadRule soft_vote or designated_head   @tparam Budget fixed_tokens
template <class Digest = cuboid_mean, class HeadRule = soft_vote, class Budget = fixed_tokens>
struct solo_head_selector {
  std::uint32_t budget_tokens = 2048;  ///< sink, recent and open tokens included
  std::uint32_t sink_tokens = 16;
  std::optional<std::uint32_t> recent_tokens =
    {};  ///< absent: an eighth of the budget, at least 128, at most half of it
  std::optional<std::uint32_t> dense_tokens = {};  ///< rows of so many tokens stay dense; absent: budget_tokens
  float hysteresis = 0.25F;                        ///< nat by which blocks of the previous selection are favoured
  float scale = 0.0F;                              ///< of scores; 0: 1/sqrt(head_dim)
  Digest digest = {};
  HeadRule heads = {};
  Budget budget = {};

  /// The budget of a layer in blocks: the very numbers that a bound selector uses.
  /// @throws configuration_error
  [[nodiscard]] resolved_budget resolve(layer_id layer, std::uint32_t block_tokens, std::uint32_t step_tokens = 1) const
  {
    token_budget const tokens{
      .budget_tokens = budget_tokens,
      .sink_tokens = sink_tokens,
      .recent_tokens = recent_tokens,
      .dense_tokens = dense_tokens};
    return resolve_budget(budget.of_layer(tokens, layer), block_tokens, step_tokens);
  }

  template <class B>
  class bound;

  /// Checks the options and takes the memory for scores: max_rows x max_step_tokens x scoring heads x max_blocks floats.
  /// @throws configuration_error with the numbers, resource_error from the backend
  template <class B>
  [[nodiscard]] bound<B> bind(B& backend, selector_limits const& limits) const
  {
    return bound<B>{*this, backend, limits};
  }
};

/// The selector on a backend, which must outlive it. Calls on one stream follow one another; calls for different rows may
/// use different streams.
template <class Digest, class HeadRule, class Budget>
template <class B>
class solo_head_selector<Digest, HeadRule, Budget>::bound {
 public:
  bound(solo_head_selector const& options, B& backend, selector_limits const& limits)
    : backend_{&backend}, limits_{checked(options, limits)}, digest_{options.digest}
  {
    kv_geometry const& geometry = limits_.geometry;
    std::uint32_t most_heads = 0;
    for (std::uint32_t i = 0; i < geometry.layers; ++i) {
      auto const layer = static_cast<layer_id>(i);
      budgets_.push_back(options.resolve(layer, geometry.block_tokens, limits_.max_step_tokens));
      heads_.push_back(options.heads.of_layer(layer, geometry));
      most_heads = std::max(most_heads, heads_.back().count);
    }
    favour_ = std::exp(options.hysteresis);
    scale_ = options.scale == 0.0F ? 1.0F / std::sqrt(static_cast<float>(geometry.head_dim)) : options.scale;
    pitch_ = round_up(limits_.max_blocks, device::float_lanes::size);
    std::uint64_t const rows = limits_.max_rows;
    std::uint64_t const score_rows = rows * limits_.max_step_tokens * most_heads * geometry.query_group();
    scores_ = slab<B>{backend, memory_space::device, score_rows * pitch_ * sizeof(float)};
    votes_ = slab<B>{backend, memory_space::device, rows * geometry.head_groups * pitch_ * sizeof(float)};
    // A simulation runs the choice but not the votes: they must be numbers.
    slab<B> const zeros{backend, memory_space::pinned, votes_.bytes()};
    std::fill_n(zeros.data(), zeros.bytes(), std::byte{0});
    set_up_copy(backend, votes_.data(), zeros.data(), zeros.bytes());
  }

  /// The budget that a layer's selections keep to.
  [[nodiscard]] resolved_budget const& budget(layer_id layer) const noexcept { return budgets_[to_index(layer)]; }

  [[nodiscard]] std::uint32_t budget_blocks(layer_id layer) const noexcept { return budget(layer).budget_blocks; }
  [[nodiscard]] std::uint32_t dense_tokens() const noexcept { return budgets_.front().dense_tokens; }
  [[nodiscard]] std::uint64_t digest_bytes(layer_id layer) const noexcept
  {
    return digest_.block_bytes(limits_.geometry.head_dim, heads_[to_index(layer)].count);
  }

  /// Bytes of device memory that scores and votes take.
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept { return scores_.bytes() + votes_.bytes(); }

  /// Makes the digests of the blocks that this step's tokens touched, from the keys that earlier work on `stream` wrote.
  /// @status out_of_range for an unknown layer; what the backend's launch says
  status digest_async(typename B::stream_ref stream, digest_request const& request) noexcept
  {
    if (!known(request.layer)) { return status::out_of_range; }
    if (request.rows.count == 0 || request.most_touched == 0) { return status::ok; }
    return backend_->launch(
      stream,
      typename Digest::update_operation{
        .request = request,
        .heads = heads_[to_index(request.layer)],
        .head_groups = limits_.geometry.head_groups,
        .digest_type = digest_.type,
        .bounds_offset = digest_.bounds_offset(limits_.geometry.head_dim, heads_[to_index(request.layer)].count)});
  }

  /// Enqueues the selection of the request's rows: one launch where no row has more blocks than its budget,
  /// else three more for each pass of max_step_tokens query tokens.
  /// @status out_of_range for an unknown layer; capacity_exceeded for more rows or blocks than bound; invalid_argument for
  ///         queries of another shape; what the backend's launch says
  status select_async(typename B::stream_ref stream, select_request const& request) noexcept
  {
    if (!known(request.layer)) { return status::out_of_range; }
    if (request.rows.count == 0 || request.most_blocks == 0) { return status::ok; }
    if (request.rows.count > limits_.max_rows || request.most_blocks > limits_.max_blocks) {
      return status::capacity_exceeded;
    }
    if (request.most_blocks > budget_blocks(request.layer)) {
      if (
        request.queries.empty() || request.queries.heads != limits_.geometry.query_heads ||
        request.queries.dim != limits_.geometry.head_dim) {
        return status::invalid_argument;
      }
      for (std::uint32_t first = 0; first == 0 || first < request.most_queries; first += limits_.max_step_tokens) {
        if (status const result = vote_async(stream, request, first); result != status::ok) { return result; }
      }
    }
    resolved_budget const& sizes = budget(request.layer);
    return backend_->launch(
      stream,
      select_top_k{
        .layer = request.layer,
        .rows = request.rows,
        .info = request.info,
        .votes = votes_.template as<float>(),
        .selection = request.selection,
        .vote_pitch = pitch_,
        .head_groups = limits_.geometry.head_groups,
        .block_tokens = limits_.geometry.block_tokens,
        .budget_blocks = sizes.budget_blocks,
        .sink_blocks = sizes.sink_blocks,
        .recent_blocks = sizes.recent_blocks,
        .remember = request.remember});
  }

 private:
  [[nodiscard]] static selector_limits const& checked(solo_head_selector const& options, selector_limits const& limits)
  {
    validate(limits.geometry);
    options.digest.validate();
    options.heads.validate(limits.geometry);
    options.budget.validate(limits.geometry);
    auto const number = [](auto value) { return std::to_string(value); };
    if (!(options.hysteresis >= 0.0F) || options.hysteresis > 80.0F) {
      throw configuration_error{"a hysteresis of " + number(options.hysteresis) + " nat is not within 0 to 80"};
    }
    if (!(options.scale >= 0.0F) || !std::isfinite(options.scale)) {
      throw configuration_error{"a scale of " + number(options.scale) + " is not positive"};
    }
    if (limits.max_rows == 0 || limits.max_blocks == 0) {
      throw configuration_error{
        "a selector for " + number(limits.max_rows) + " rows of " + number(limits.max_blocks) + " blocks"};
    }
    return limits;
  }

  [[nodiscard]] bool known(layer_id layer) const noexcept
  {
    return !is_none(layer) && to_index(layer) < limits_.geometry.layers;
  }

  /// Votes of the query tokens from `first` on, added to those of the passes before.
  status vote_async(typename B::stream_ref stream, select_request const& request, std::uint32_t first) noexcept
  {
    scoring_heads const heads = heads_[to_index(request.layer)];
    std::uint32_t const most = limits_.max_step_tokens;
    std::uint32_t const rest = request.most_queries > first ? request.most_queries - first : 0;
    score_table const scores{
      .data = scores_.template as<float>(),
      .queries = most,
      .heads = heads.count * limits_.geometry.query_group(),
      .pitch = pitch_};
    query_pass const pass{.first = first, .last = rest <= most};
    std::uint32_t const budget = budget_blocks(request.layer);
    std::uint32_t const block_tokens = limits_.geometry.block_tokens;
    status result = backend_->launch(
      stream,
      typename Digest::score_operation{
        .request = request,
        .scores = scores,
        .pass = pass,
        .heads = heads,
        .query_group = limits_.geometry.query_group(),
        .block_tokens = block_tokens,
        .budget_blocks = budget,
        .digest_type = digest_.type,
        .scale = scale_});
    if (result != status::ok) { return result; }
    result = backend_->launch(
      stream,
      share_blocks{
        .rows = request.rows,
        .info = request.info,
        .scores = scores,
        .pass = pass,
        .most_queries = std::min(rest, most),
        .most_blocks = request.most_blocks,
        .block_tokens = block_tokens,
        .budget_blocks = budget});
    if (result != status::ok) { return result; }
    return backend_->launch(
      stream,
      vote_blocks{
        .layer = request.layer,
        .rows = request.rows,
        .info = request.info,
        .scores = scores,
        .votes = votes_.template as<float>(),
        .selection = request.selection,
        .pass = pass,
        .head_groups = limits_.geometry.head_groups,
        .most_blocks = request.most_blocks,
        .block_tokens = block_tokens,
        .budget_blocks = budget,
        .favour = favour_});
  }

  B* backend_;
  selector_limits limits_;
  Digest digest_;
  std::vector<resolved_budget> budgets_;  // [layers]
  std::vector<scoring_heads> heads_;      // [layers]
  float favour_ = 1.0F;
  float scale_ = 1.0F;
  std::uint32_t pitch_ = 0;  // floats of a row of scores or votes
  slab<B> scores_;           // [max_rows, max_step_tokens, scoring query heads, pitch] float
  slab<B> votes_;            // [lanes, pitch] float
};

static_assert(selector_for<solo_head_selector<>, archetype::backend>);

}  // namespace pulseinfer
