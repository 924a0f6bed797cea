#pragma once

/// Selections, digests and previous bits for the rows of a cache, and selection written down slowly.

#include "support/cache.hpp"
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/operation/score_table.hpp>
#include <pulseinfer/selector/resolved_budget.hpp>
#include <pulseinfer/view/selection.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <numeric>
#include <vector>

namespace pulseinfer_test {

/// Memory behind selection_ref and digest_store_ref, begun with garbage that no test may see.
class selection_arrays {
 public:
  selection_arrays(cache const& c, std::uint32_t max_selected, std::vector<std::uint64_t> const& digest_bytes)
    : of_{&c},
      ids_(std::size_t{c.residency.lanes} * max_selected, static_cast<pulseinfer::block_id>(77777)),
      counts_(c.residency.lanes, 55555U),
      block_bytes_{digest_bytes.begin(), digest_bytes.end()}
  {
    words = (c.max_blocks + 31U) / 32U + 1U;
    previous.assign(std::size_t{c.geometry.layers} * c.residency.lanes * words, 0U);
    selection = {
      .ids = ids_.data(),
      .counts = counts_.data(),
      .previous = previous.data(),
      .max_selected = max_selected,
      .lanes = c.residency.lanes,
      .previous_words = words};
    constexpr std::uint32_t extent_blocks = 8;
    std::uint64_t bytes = 0;
    for (std::uint64_t const layer : block_bytes_) {
      offsets_.push_back(bytes);
      bytes += layer * extent_blocks;
    }
    std::uint32_t const extents = c.max_blocks / extent_blocks + 1U;
    auto const rows = static_cast<std::uint32_t>(c.info.size());
    for (std::uint32_t i = 0; i < rows * extents; ++i) {
      extent_of_.push_back(static_cast<std::int32_t>(rows * extents - 1U - i));
    }
    memory_.assign(static_cast<std::size_t>(bytes * rows * extents + 1), std::byte{0xFF});
    digests = {
      .base = memory_.data(),
      .extent_of = extent_of_.data(),
      .layer_offset = offsets_.data(),
      .block_bytes = block_bytes_.data(),
      .extent_bytes = bytes,
      .extent_blocks = extent_blocks,
      .max_extents = extents};
  }
  selection_arrays(selection_arrays&&) = delete;

  [[nodiscard]] std::vector<std::uint32_t> selected(std::uint32_t lane) const
  {
    std::vector<std::uint32_t> result;
    for (std::uint32_t i = 0; i < counts_[lane]; ++i) {
      result.push_back(static_cast<std::uint32_t>(pulseinfer::to_number(at(lane, i))));
    }
    return result;
  }
  [[nodiscard]] pulseinfer::block_id at(std::uint32_t lane, std::uint32_t place) const
  {
    return ids_.at(std::size_t{lane} * selection.max_selected + place);
  }
  /// Whether every place behind the lane's count holds none.
  [[nodiscard]] bool rest_is_none(std::uint32_t lane) const
  {
    for (std::uint32_t i = counts_[lane]; i < selection.max_selected; ++i) {
      if (!pulseinfer::is_none(at(lane, i))) { return false; }
    }
    return true;
  }
  [[nodiscard]] std::vector<std::uint32_t> remembered(std::uint32_t layer, std::uint32_t lane) const
  {
    std::vector<std::uint32_t> result;
    for (std::uint32_t block = 0; block < words * 32U; ++block) {
      std::uint32_t const* const bits =
        selection.previous_of(static_cast<pulseinfer::layer_id>(layer), static_cast<pulseinfer::lane_id>(lane));
      if ((bits[block / 32U] >> (block % 32U) & 1U) != 0U) { result.push_back(block); }
    }
    return result;
  }

  /// Touched blocks of a batch whose every token is new: all of them.
  [[nodiscard]] pulseinfer::digest_request digest_request(std::uint32_t layer, std::uint32_t most_touched) const
  {
    return {
      .layer = static_cast<pulseinfer::layer_id>(layer),
      .rows = of_->rows(),
      .info = of_->info.data(),
      .residency = of_->residency,
      .pool = of_->pool,
      .layout = of_->layout,
      .digests = digests,
      .most_touched = most_touched};
  }
  [[nodiscard]] pulseinfer::select_request select_request(
    std::uint32_t layer, pulseinfer::tensor_view const& queries) const
  {
    return {
      .layer = static_cast<pulseinfer::layer_id>(layer),
      .rows = of_->rows(),
      .info = of_->info.data(),
      .queries = queries,
      .digests = digests,
      .selection = selection,
      .most_blocks = of_->max_blocks,
      .most_queries = of_->most_new};
  }

  pulseinfer::selection_ref selection;
  pulseinfer::digest_store_ref digests;
  std::pmr::vector<std::uint32_t> previous;
  std::uint32_t words = 0;

 private:
  cache const* of_;
  std::pmr::vector<pulseinfer::block_id> ids_;
  std::pmr::vector<std::uint32_t> counts_;
  std::pmr::vector<std::uint64_t> block_bytes_;
  std::pmr::vector<std::uint64_t> offsets_;
  std::pmr::vector<std::int32_t> extent_of_;
  std::pmr::vector<std::byte> memory_;
};

/// Runs `body` with the cache's rows as if all their tokens were new, so that digests of all blocks are made.
template <class Body>
void with_all_tokens_new(cache& c, Body const& body)
{
  std::pmr::vector<pulseinfer::row_info> const before = c.info;
  for (pulseinfer::row_info& row : c.info) { row.new_tokens = row.tokens; }
  body();
  c.info = before;
}

/// Centre and mean distance of one channel over a block's valid keys, in double precision.
struct reference_digest {
  double centre = 0;
  double distance = 0;
};

inline reference_digest digest_of(
  cache const& c, std::uint32_t layer, std::uint32_t row, std::uint32_t kv_head, std::uint32_t block, std::uint32_t j)
{
  std::uint32_t const valid = c.info[row].valid_tokens(block, c.layout.block_tokens);
  double low = 1e300;
  double high = -1e300;
  for (std::uint32_t t = 0; t < valid; ++t) {
    double const key = static_cast<double>(c.key(layer, row, kv_head, block * c.layout.block_tokens + t, j));
    low = std::min(low, key);
    high = std::max(high, key);
  }
  reference_digest result{.centre = (low + high) / 2, .distance = 0};
  for (std::uint32_t t = 0; t < valid; ++t) {
    double const key = static_cast<double>(c.key(layer, row, kv_head, block * c.layout.block_tokens + t, j));
    result.distance += std::abs(result.centre - key) / valid;
  }
  return result;
}

/// Shares of a query head's blocks in double precision, from score(scaled q, kv head, block, channel) summed over channels.
template <class Score>
std::vector<double> shares_of(
  cache const& c, tensor const& queries, std::uint32_t row, std::uint64_t token, std::uint32_t head, double scale,
  Score const& score)
{
  std::vector<double> shares(c.info[row].blocks(c.layout.block_tokens));
  for (std::uint32_t block = 0; block < shares.size(); ++block) {
    double sum = std::log(c.info[row].valid_tokens(block, c.layout.block_tokens));
    for (std::uint32_t j = 0; j < c.geometry.head_dim; ++j) {
      sum += score(scale * static_cast<double>(queries.at(token, head, j)), head / c.geometry.query_group(), block, j);
    }
    shares[block] = sum;
  }
  double const top = *std::max_element(shares.begin(), shares.end());
  double total = 0;
  for (double& share : shares) { total += share = std::exp(share - top); }
  for (double& share : shares) { share /= total; }
  return shares;
}

/// Votes of a lane's blocks in double precision: shares summed over query tokens and the query heads of the KV heads.
inline std::vector<double> votes_of(
  cache const& c, tensor const& queries, std::uint32_t layer, std::uint32_t row, pulseinfer::scoring_heads heads,
  double scale, std::vector<std::uint32_t> const& previous, double hysteresis)
{
  std::uint32_t const blocks = c.info[row].blocks(c.layout.block_tokens);
  std::vector<double> votes(blocks, 0.0);
  std::uint32_t const share = c.geometry.query_group();
  for (std::uint32_t query = 0; query < static_cast<std::uint32_t>(c.info[row].new_tokens); ++query) {
    auto const token = static_cast<std::uint64_t>(c.info[row].token_offset) + query;
    for (std::uint32_t head = heads.first * share; head < (heads.first + heads.count) * share; ++head) {
      auto const shares = shares_of(
        c, queries, row, token, head, scale,
        [&](double q, std::uint32_t kv_head, std::uint32_t block, std::uint32_t j) {
          reference_digest const digest = digest_of(c, layer, row, kv_head, block, j);
          return q * digest.centre + std::abs(q) * digest.distance;
        });
      for (std::uint32_t block = 0; block < blocks; ++block) { votes[block] += shares[block]; }
    }
  }
  for (std::uint32_t const block : previous) {
    if (block < blocks) { votes[block] *= std::exp(hysteresis); }
  }
  return votes;
}

/// What a lane must select: open blocks, then recent, then sinks, then the most votes, ties to the lowest id.
template <class Vote>
std::vector<std::uint32_t> selection_of(
  pulseinfer::row_info const& info, std::uint32_t block_tokens, std::vector<Vote> const& votes, std::uint32_t budget,
  std::uint32_t sinks, std::uint32_t recent)
{
  std::uint32_t const blocks = info.blocks(block_tokens);
  std::uint32_t const open = static_cast<std::uint32_t>(info.tokens - info.new_tokens) / block_tokens;
  std::vector<std::uint32_t> order;
  auto const want = [&](std::uint32_t block) {
    if (order.size() < budget && std::find(order.begin(), order.end(), block) == order.end()) {
      order.push_back(block);
    }
  };
  for (std::uint32_t block = blocks; block > open; --block) { want(block - 1); }
  for (std::uint32_t block = open; block > 0 && block + recent > open; --block) { want(block - 1); }
  for (std::uint32_t block = 0; block < std::min(sinks, blocks); ++block) { want(block); }
  std::vector<std::uint32_t> rest(blocks);
  std::iota(rest.begin(), rest.end(), 0U);
  if (!votes.empty()) {
    std::stable_sort(rest.begin(), rest.end(), [&](std::uint32_t a, std::uint32_t b) { return votes[a] > votes[b]; });
  }
  for (std::uint32_t const block : rest) { want(block); }
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace pulseinfer_test
