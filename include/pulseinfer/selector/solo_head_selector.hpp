#pragma once

/// SoloHead selection: all heads of a lane read the same blocks, chosen by a vote of shares.

#include <pulseinfer/concepts/archetypes.hpp>
#include <pulseinfer/concepts/backend.hpp>
#include <pulseinfer/concepts/selector.hpp>
#include <pulseinfer/device/block_bounds.hpp>
#include <pulseinfer/device/lanes.hpp>
#include <pulseinfer/error.hpp>
#include <pulseinfer/operation/certify_skipped.hpp>
#include <pulseinfer/operation/choose_blocks.hpp>
#include <pulseinfer/operation/combine_shares.hpp>
#include <pulseinfer/operation/fill_words.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/operation/select_top_k.hpp>
#include <pulseinfer/operation/select_top_p.hpp>
#include <pulseinfer/operation/share_blocks.hpp>
#include <pulseinfer/operation/vote_blocks.hpp>
#include <pulseinfer/selector/cuboid_mean.hpp>
#include <pulseinfer/selector/fixed_tokens.hpp>
#include <pulseinfer/selector/head_choice.hpp>
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
/// @tparam Digest cuboid_mean, min_max, mean_key or log_mass, or split of one   @tparam HeadRule soft_vote, designated_head,
/// few_heads, max_share or calibrated_heads   @tparam Budget fixed_tokens or top_p
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
    : backend_{&backend}, limits_{checked(options, limits)}, digest_{options.digest}, budget_policy_{options.budget}
  {
    kv_geometry const& geometry = limits_.geometry;
    std::uint32_t most_heads = 0;
    std::uint32_t weights = 0;
    for (std::uint32_t i = 0; i < geometry.layers; ++i) {
      auto const layer = static_cast<layer_id>(i);
      budgets_.push_back(options.resolve(layer, geometry.block_tokens, limits_.max_step_tokens));
      head_choice const choice = options.heads.of_layer(layer, geometry);
      pulseinfer::validate(choice, layer, geometry);
      heads_.push_back(
        {.count = static_cast<std::uint32_t>(choice.kv_heads.size()),
         .first_run = static_cast<std::uint32_t>(runs_.size()),
         .first_weight = choice.weights.empty() ? no_weights : weights,
         .largest = choice.combination == share_combination::largest});
      append_runs(choice.kv_heads);
      heads_.back().runs = static_cast<std::uint32_t>(runs_.size()) - heads_.back().first_run;
      most_heads = std::max(most_heads, heads_.back().count);
      weights += static_cast<std::uint32_t>(choice.weights.size());
    }
    favour_ = std::exp(options.hysteresis);
    scale_ = options.scale == 0.0F ? 1.0F / std::sqrt(static_cast<float>(geometry.head_dim)) : options.scale;
    pitch_ = round_up(limits_.max_blocks, device::float_lanes::size);
    std::uint64_t const rows = limits_.max_rows;
    std::uint64_t const score_rows = rows * limits_.max_step_tokens * most_heads * geometry.query_group();
    scores_ = slab<B>{backend, memory_space::device, score_rows * pitch_ * sizeof(float)};
    votes_ = slab<B>{backend, memory_space::device, rows * geometry.head_groups * pitch_ * sizeof(float)};
    if (weights != 0) {
      slab<B> const given{backend, memory_space::pinned, weights * sizeof(float)};
      weights_ = slab<B>{backend, memory_space::device, given.bytes()};
      auto* next = given.template as<float>();
      for (std::uint32_t i = 0; i < geometry.layers; ++i) {
        head_choice const choice = options.heads.of_layer(static_cast<layer_id>(i), geometry);
        next = std::copy(choice.weights.begin(), choice.weights.end(), next);
      }
      set_up_copy(backend, weights_.data(), given.data(), given.bytes());
    }
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

  /// Bytes of device memory that scores, votes and weights take.
  [[nodiscard]] std::uint64_t allocated_bytes() const noexcept
  {
    return scores_.bytes() + votes_.bytes() + weights_.bytes();
  }

  /// From here on a selection leaves the shares behind that it was made by. Enqueues their first contents on `stream`.
  /// @status what the backend's launch says
  status keep_shares(typename B::stream_ref stream)
  {
    keeps_shares_ = true;
    // A simulation runs what reads the shares but not what makes them: they must be numbers.
    return backend_->launch(stream, fill_words{.target = scores_.data(), .count = scores_.bytes() / 4, .value = 0});
  }

  /// Votes and shares of the layer's last selection, in the order of the stream that it was enqueued on.
  [[nodiscard]] selection_scores scores(layer_id layer) const noexcept
  {
    score_table const table = scores_of(layer);
    resolved_budget const& blocks = budget(layer);
    return {
      .votes = votes_.template as<float>(),
      .shares = keeps_shares_ ? table.data : nullptr,
      .vote_pitch = pitch_,
      .share_pitch = table.pitch,
      .queries = table.queries,
      .heads = table.heads,
      .every_head = heads_[to_index(layer)].count == limits_.geometry.kv_heads,
      .budget_blocks = blocks.budget_blocks,
      .sink_blocks = blocks.sink_blocks,
      .recent_blocks = blocks.recent_blocks};
  }

  /// Query heads of the KV heads that choose in a layer: those that a certificate speaks of.
  [[nodiscard]] std::uint32_t certified_heads(layer_id layer) const noexcept
  {
    return heads_[to_index(layer)].count * limits_.geometry.query_group();
  }

  /// Bounds and estimates the mass that the request's selections leave out, for each query head that chooses; device::certify
  /// makes a certificate of a sum and of attention's log-sum-exp. A slow pass, off the step's path.
  /// @param table heads: certified_heads(layer)
  /// @status invalid_state where digests have no bounds; out_of_range, invalid_argument as select_async; what the backend's
  ///         launch says
  status certify_async(
    typename B::stream_ref stream, select_request const& request, certificate_table const& table) noexcept
  {
    if (!known(request.layer)) { return status::out_of_range; }
    if (!digest_.bounds) { return status::invalid_state; }
    kv_geometry const& geometry = limits_.geometry;
    layer_heads const& heads = heads_[to_index(request.layer)];
    if (
      request.queries.empty() || request.queries.heads != geometry.query_heads ||
      request.queries.dim != geometry.head_dim || table.heads != certified_heads(request.layer)) {
      return status::invalid_argument;
    }
    for (std::uint32_t i = 0; i < heads.runs && request.rows.count != 0; ++i) {
      head_run const& run = runs_[heads.first_run + i];
      certify_skipped<typename Digest::form, typename Digest::spread, Digest::pieces> op{
        .request = request,
        .table = table,
        .heads = run.heads,
        .first_head = run.place * geometry.query_group(),
        .query_group = geometry.query_group(),
        .group_heads = geometry.group_heads(),
        .head_groups = geometry.head_groups,
        .block_tokens = geometry.block_tokens,
        .bounds_offset = bounds_of(heads, run),
        .digest_type = digest_.type,
        .scale = scale_};
      op.request.digests.base += run.place * digest_.head_bytes(geometry.head_dim);
      if (status const result = backend_->launch(stream, op); result != status::ok) { return result; }
    }
    return status::ok;
  }

  /// Makes the digests of the blocks that this step's tokens touched, from the keys that earlier work on `stream` wrote: one
  /// launch for each run of neighbouring KV heads that choose.
  /// @status out_of_range for an unknown layer; what the backend's launch says
  status digest_async(typename B::stream_ref stream, digest_request const& request) noexcept
  {
    if (!known(request.layer)) { return status::out_of_range; }
    if (request.rows.count == 0 || request.most_touched == 0) { return status::ok; }
    layer_heads const& heads = heads_[to_index(request.layer)];
    for (std::uint32_t i = 0; i < heads.runs; ++i) {
      head_run const& run = runs_[heads.first_run + i];
      typename Digest::update_operation op{
        .request = request,
        .heads = run.heads,
        .head_groups = limits_.geometry.head_groups,
        .digest_type = digest_.type,
        .bounds_offset = bounds_of(heads, run)};
      op.request.digests.base += run.place * digest_.head_bytes(limits_.geometry.head_dim);
      if (status const result = backend_->launch(stream, op); result != status::ok) { return result; }
    }
    return status::ok;
  }

  /// Enqueues the selection of the request's rows: one launch where no row has more blocks than its budget,
  /// else for each pass of max_step_tokens query tokens two more, and one for each run of neighbouring KV heads that choose.
  /// Where launches are dear and lists short (choose_blocks::fits), one besides those of the runs.
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
      if (chooses_at_once(request)) {
        status const scored = score_async(stream, request, {});
        if (scored != status::ok) { return scored; }
        return backend_->launch(
          stream,
          choose_blocks{
            .choose = choice(request),
            .scores = scores_of(request.layer),
            .votes = votes_.template as<float>(),
            .most_blocks = request.most_blocks,
            .favour = favour_});
      }
      for (std::uint32_t first = 0; first == 0 || first < request.most_queries; first += limits_.max_step_tokens) {
        if (status const result = vote_async(stream, request, first); result != status::ok) { return result; }
      }
    }
    if constexpr (budget_follows_mass) {
      return backend_->launch(
        stream,
        select_top_p{
          .most = choice(request),
          .sizes = budget_policy_.sizes(budget_blocks(request.layer), limits_.geometry.block_tokens),
          .share = static_cast<float>(budget_policy_.share),
          .favour = favour_,
          .most_blocks = request.most_blocks});
    } else {
      return backend_->launch(stream, choice(request));
    }
  }

 private:
  /// Neighbouring KV heads that choose, and the place of the first among the layer's.
  struct head_run {
    scoring_heads heads = {};
    std::uint32_t place = 0;
  };

  static constexpr std::uint32_t no_weights = ~0U;
  static constexpr bool budget_follows_mass = requires(Budget const& policy) { policy.sizes(0U, 0U); };

  struct layer_heads {
    std::uint32_t count = 0;
    std::uint32_t first_run = 0;
    std::uint32_t runs = 0;
    std::uint32_t first_weight = no_weights;
    bool largest = false;
  };

  /// Bytes from the digest of a run's first head to its bounds; 0 where none are kept.
  [[nodiscard]] std::uint64_t bounds_of(layer_heads const& heads, head_run const& run) const
  {
    if (!digest_.bounds) { return 0; }
    std::uint64_t const behind = (heads.count - run.place) * digest_.head_bytes(limits_.geometry.head_dim);
    return behind + run.place * Digest::head_bounds_bytes;
  }

  void append_runs(std::vector<std::uint32_t> const& kv_heads)
  {
    for (std::uint32_t place = 0; place < kv_heads.size(); ++place) {
      std::uint32_t const head = kv_heads[place];
      if (place > 0 && head == kv_heads[place - 1] + 1) {
        ++runs_.back().heads.count;
      } else {
        runs_.push_back({.heads = {.first = head, .count = 1}, .place = place});
      }
    }
  }

  [[nodiscard]] static selector_limits const& checked(solo_head_selector const& options, selector_limits const& limits)
  {
    validate(limits.geometry);
    options.digest.validate(limits.geometry.block_tokens);
    options.heads.validate(limits.geometry);
    if constexpr (requires { options.heads.validate_digest(""); }) {
      options.heads.validate_digest(Digest::form::name);
    }
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

  [[nodiscard]] select_top_k choice(select_request const& request) const noexcept
  {
    resolved_budget const& blocks = budget(request.layer);
    return {
      .layer = request.layer,
      .rows = request.rows,
      .info = request.info,
      .votes = votes_.template as<float>(),
      .selection = request.selection,
      .vote_pitch = pitch_,
      .head_groups = limits_.geometry.head_groups,
      .block_tokens = limits_.geometry.block_tokens,
      .budget_blocks = blocks.budget_blocks,
      .sink_blocks = blocks.sink_blocks,
      .recent_blocks = blocks.recent_blocks,
      .remember = request.remember};
  }

  [[nodiscard]] score_table scores_of(layer_id layer) const noexcept
  {
    return {
      .data = scores_.template as<float>(),
      .queries = limits_.max_step_tokens,
      .heads = heads_[to_index(layer)].count * limits_.geometry.query_group(),
      .pitch = pitch_};
  }

  /// Whether shares, votes and choice are one launch.
  [[nodiscard]] bool chooses_at_once(select_request const& request) const noexcept
  {
    layer_heads const& heads = heads_[to_index(request.layer)];
    std::uint32_t const voters =
      request.most_queries * heads.count * limits_.geometry.query_group() / limits_.geometry.head_groups;
    return prefers_few_launches<B> && !keeps_shares_ && !budget_follows_mass && !heads.largest &&
      heads.first_weight == no_weights && request.most_queries <= limits_.max_step_tokens &&
      choose_blocks::fits(request.most_blocks, voters);
  }

  /// Scores of the pass's query tokens.
  status score_async(typename B::stream_ref stream, select_request const& request, query_pass pass) noexcept
  {
    layer_heads const& heads = heads_[to_index(request.layer)];
    for (std::uint32_t i = 0; i < heads.runs; ++i) {
      head_run const& run = runs_[heads.first_run + i];
      typename Digest::score_operation op{
        .request = request,
        .scores = scores_of(request.layer),
        .pass = pass,
        .heads = run.heads,
        .query_group = limits_.geometry.query_group(),
        .block_tokens = limits_.geometry.block_tokens,
        .budget_blocks = budget_blocks(request.layer),
        .digest_type = digest_.type,
        .scale = scale_};
      op.request.digests.base += run.place * digest_.head_bytes(limits_.geometry.head_dim);
      op.scores.data += std::uint64_t{run.place} * limits_.geometry.query_group() * pitch_;
      if (status const result = backend_->launch(stream, op); result != status::ok) { return result; }
    }
    return status::ok;
  }

  /// Votes of the query tokens from `first` on, added to those of the passes before.
  status vote_async(typename B::stream_ref stream, select_request const& request, std::uint32_t first) noexcept
  {
    layer_heads const& heads = heads_[to_index(request.layer)];
    std::uint32_t const most = limits_.max_step_tokens;
    std::uint32_t const rest = request.most_queries > first ? request.most_queries - first : 0;
    score_table const scores = scores_of(request.layer);
    query_pass const pass{.first = first, .last = rest <= most};
    std::uint32_t const budget = budget_blocks(request.layer);
    std::uint32_t const block_tokens = limits_.geometry.block_tokens;
    if (status const scored = score_async(stream, request, pass); scored != status::ok) { return scored; }
    status const shared = backend_->launch(
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
    if (shared != status::ok) { return shared; }
    if (heads.largest || heads.first_weight != no_weights) {
      return backend_->launch(
        stream,
        combine_shares{
          .layer = request.layer,
          .rows = request.rows,
          .info = request.info,
          .scores = scores,
          .weights = heads.first_weight == no_weights ? nullptr : weights_.template as<float>() + heads.first_weight,
          .votes = votes_.template as<float>(),
          .selection = request.selection,
          .pass = pass,
          .head_groups = limits_.geometry.head_groups,
          .query_group = limits_.geometry.query_group(),
          .most_blocks = request.most_blocks,
          .block_tokens = block_tokens,
          .budget_blocks = budget,
          .favour = favour_,
          .largest = heads.largest});
    }
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
  Budget budget_policy_;
  std::vector<resolved_budget> budgets_;  // [layers]
  std::vector<layer_heads> heads_;        // [layers]
  std::vector<head_run> runs_;            // of all layers, one after the other
  float favour_ = 1.0F;
  float scale_ = 1.0F;
  bool keeps_shares_ = false;
  std::uint32_t pitch_ = 0;  // floats of a row of scores or votes
  slab<B> scores_;           // [max_rows, max_step_tokens, scoring query heads, pitch] float
  slab<B> votes_;            // [lanes, pitch] float
  slab<B> weights_;          // [scoring KV heads of the layers that have weights] float
};

static_assert(selector_for<solo_head_selector<>, archetype::backend>);
static_assert(selector_tells_scores<solo_head_selector<>, archetype::backend>);

}  // namespace pulseinfer
