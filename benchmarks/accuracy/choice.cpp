#include "choice.hpp"

#include <pulseinfer/device/block_score.hpp>
#include <pulseinfer/device/cuboid_mean.hpp>
#include <pulseinfer/device/digest_values.hpp>
#include <pulseinfer/device/group.hpp>
#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/log_mass.hpp>
#include <pulseinfer/device/logarithm.hpp>
#include <pulseinfer/device/mean_key.hpp>
#include <pulseinfer/device/min_max.hpp>
#include <pulseinfer/device/remember_selection.hpp>
#include <pulseinfer/device/share.hpp>
#include <pulseinfer/device/top_k.hpp>
#include <pulseinfer/device/vote.hpp>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace accuracy {

namespace device = pulseinfer::device;
using device::float_lanes;
using pulseinfer::block_id;
using pulseinfer::dtype;

namespace {

std::uint32_t parts_of(digest_kind kind) { return kind == digest_kind::mean_key ? 1 : 2; }

}  // namespace

layer_digests::layer_digests(attention_geometry const& geometry, configuration const& options, std::uint32_t capacity)
  : geometry_{geometry},
    kind_{options.digest},
    type_{options.digest_type},
    block_tokens_{options.digest_tokens == 0 ? options.block_tokens : options.digest_tokens},
    block_parts_{options.block_tokens / block_tokens_},
    capacity_blocks_{pulseinfer::divide_up(capacity, block_tokens_)},
    elements_{device::digest_elements(options.digest_type, parts_of(options.digest), geometry.head_dim)},
    digests_(std::size_t{geometry.kv_heads} * capacity_blocks_ * elements_),
    open_(elements_),
    spread_(std::size_t{4} * geometry.query_group() * elements_),
    temp_(std::max(std::size_t{3} * geometry.head_dim, device::share_temp_floats(capacity_blocks_, 1))),
    stored_(device::digest_bytes(dtype::float32, 2, geometry.head_dim))
{
  if (block_parts_ * block_tokens_ != options.block_tokens) {
    throw std::invalid_argument{
      "digests of " + std::to_string(block_tokens_) + " tokens for blocks of " + std::to_string(options.block_tokens)};
  }
  if (!device::is_digest_type(type_)) { throw std::invalid_argument{std::string{"digests of "} + name_of(type_)}; }
}

template <class Form, class Value>
void layer_digests::make(
  layer_cache const& cache, std::uint32_t head, std::uint32_t block, std::uint32_t tokens, float* digest)
{
  std::uint32_t const dim = geometry_.head_dim;
  device::digest_values<Value> const values{reinterpret_cast<Value*>(stored_.data()), elements_};
  Form::make(
    device::solo_group{}, cache.keys(head) + std::size_t{block} * block_tokens_ * dim, dim * sizeof(float), tokens, dim,
    values, temp_.data());
  for (std::uint32_t j = 0; j < elements_; j += float_lanes::size) {
    float_lanes lanes;
    values.load(j, lanes);
    lanes.store(digest + j);
  }
}

void layer_digests::make_digest(
  layer_cache const& cache, std::uint32_t head, std::uint32_t block, std::uint32_t tokens, float* digest)
{
  device::visit_digests(type_, [&](auto stored) {
    using value = typename decltype(stored)::type;
    switch (kind_) {
      case digest_kind::cuboid_mean: make<device::cuboid_mean_form, value>(cache, head, block, tokens, digest); break;
      case digest_kind::min_max: make<device::min_max_form, value>(cache, head, block, tokens, digest); break;
      case digest_kind::mean_key: make<device::mean_key_form, value>(cache, head, block, tokens, digest); break;
      case digest_kind::log_mass: make<device::log_mass_form, value>(cache, head, block, tokens, digest); break;
    }
  });
}

void layer_digests::estimate(
  layer_cache const& cache, float const* queries, std::uint32_t position, std::uint32_t count, head_mask heads,
  share_table& shares)
{
  if (block_parts_ == 1) {
    estimate_parts(cache, queries, position, count, heads, shares);
    return;
  }
  parts_.resize(geometry_.query_heads, count, capacity_blocks_);
  estimate_parts(cache, queries, position, count, heads, parts_);
  for (std::uint32_t head = 0; head < geometry_.query_heads; ++head) {
    if ((heads >> head / geometry_.query_group() & 1U) == 0U) { continue; }
    for (std::uint32_t token = 0; token < count; ++token) {
      float* const row = shares.row(head, token);
      std::fill(row, row + shares.pitch, 0.0F);
      for (std::uint32_t part = 0; part < capacity_blocks_; ++part) {
        row[part / block_parts_] += parts_.row(head, token)[part];
      }
    }
  }
}

void layer_digests::estimate_parts(
  layer_cache const& cache, float const* queries, std::uint32_t position, std::uint32_t count, head_mask heads,
  share_table& shares)
{
  std::uint32_t const group = geometry_.query_group(), dim = geometry_.head_dim;
  std::uint32_t const full = (position + count) / block_tokens_;
  for (; full_blocks_ < full; ++full_blocks_) {
    for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
      make_digest(
        cache, head, full_blocks_, block_tokens_,
        digests_.data() + (std::size_t{head} * capacity_blocks_ + full_blocks_) * elements_);
    }
  }
  std::uint32_t const stride = device::digest_stride(type_, dim);
  float const full_mass = device::logarithm(static_cast<float>(block_tokens_));
  constexpr std::uint32_t together = device::score_quad;  // tokens
  for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    if ((heads >> head & 1U) == 0U) { continue; }
    float const* const digests = digests_.data() + std::size_t{head} * capacity_blocks_ * elements_;
    for (std::uint32_t first = 0; first < count; first += together) {
      std::uint32_t const tokens = std::min(together, count - first), pairs = tokens * group;
      for (std::uint32_t pair = 0; pair < pairs; ++pair) {
        float const* const query =
          queries + (first + pair / group) * geometry_.query_width() + std::size_t{head * group + pair % group} * dim;
        float* const spread = spread_.data() + std::size_t{pair} * elements_;
        auto const write = [&](auto how) {
          device::spread_query<decltype(how)>(
            device::solo_group{}, query, dtype::float32, dim, geometry_.scale(), spread, stride, elements_);
        };
        switch (kind_) {
          case digest_kind::log_mass: write(device::square_spread{}); break;
          case digest_kind::mean_key: write(device::plain_spread{}); break;
          default: write(device::absolute_spread{}); break;
        }
      }
      auto const score =
        [&](std::uint32_t begin, std::uint32_t end, std::uint32_t block, float const* digest, float mass) {
          for (std::uint32_t pair = begin; pair < end; pair += device::score_quad) {
            float const* spread[device::score_quad];
            float scores[device::score_quad];
            for (std::uint32_t i = 0; i < device::score_quad; ++i) {
              spread[i] = spread_.data() + std::size_t{std::min(pair + i, end - 1)} * elements_;
            }
            device::block_scores(spread, device::digest_values<float const>{digest, elements_}, elements_, scores);
            for (std::uint32_t i = 0; i < device::score_quad && pair + i < end; ++i) {
              shares.row(head * group + (pair + i) % group, first + (pair + i) / group)[block] = scores[i] + mass;
            }
          }
        };
      std::uint32_t const common = (position + first + 1) / block_tokens_;
      for (std::uint32_t block = 0; block < common; ++block) {
        score(0, pairs, block, digests + std::size_t{block} * elements_, full_mass);
      }
      for (std::uint32_t i = 0; i < tokens; ++i) {
        std::uint32_t const seen = position + first + i + 1;
        for (std::uint32_t block = common; block * block_tokens_ < seen; ++block) {
          std::uint32_t const valid = std::min(block_tokens_, seen - block * block_tokens_);
          make_digest(cache, head, block, valid, open_.data());
          score(i * group, (i + 1) * group, block, open_.data(), device::logarithm(static_cast<float>(valid)));
        }
      }
      for (std::uint32_t pair = 0; pair < pairs; ++pair) {
        std::uint32_t const token = first + pair / group;
        float* const row = shares.row(head * group + pair % group, token);
        std::uint32_t const blocks = pulseinfer::divide_up(position + token + 1, block_tokens_);
        device::share(device::solo_group{}, row, blocks, temp_.data());
        std::fill(row + blocks, row + shares.pitch, 0.0F);
      }
    }
  }
}

slot_cache::slot_cache(std::uint32_t slots, std::uint32_t capacity_blocks, std::uint32_t written_blocks)
  : slots_{slots}, written_{written_blocks}, stamps_(capacity_blocks, 0)
{
  for (std::uint32_t block = written_blocks > slots ? written_blocks - slots : 0; block < written_blocks; ++block) {
    stamps_[block] = clock_++;
    ++held_;
  }
}

void slot_cache::use(std::span<block_id const> blocks)
{
  ++clock_;
  for (block_id const block : blocks) {
    auto const at = static_cast<std::size_t>(pulseinfer::to_number(block));
    if (stamps_[at] == 0) { ++held_; }
    stamps_[at] = clock_;
    written_ = std::max(written_, at + 1);
  }
  while (held_ > slots_) {
    std::size_t oldest = 0;
    std::uint32_t least = clock_;
    for (std::size_t at = 0; at < written_; ++at) {
      if (stamps_[at] != 0 && stamps_[at] < least) {
        least = stamps_[at];
        oldest = at;
      }
    }
    if (least == clock_) { return; }  // a step may need more than there is
    stamps_[oldest] = 0;
    --held_;
  }
}

void recall_counts::add(recall_counts const& other)
{
  steps += other.steps;
  selected += other.selected;
  missing += other.missing;
  deferred += other.deferred;
  skipped_share += other.skipped_share;
  skipped_most = std::max(skipped_most, other.skipped_most);
}

layer_choice::layer_choice(
  attention_geometry const& geometry, configuration const& options, std::uint32_t layer, std::uint32_t capacity_blocks,
  std::uint32_t written_blocks)
  : geometry_{geometry},
    options_{&options},
    budget_{options.layer_blocks(layer)},
    sinks_{pulseinfer::divide_up(options.sink_tokens, options.block_tokens)},
    recent_{pulseinfer::divide_up(options.recent_tokens, options.block_tokens)},
    heads_{options.mask(layer)},
    favour_{std::exp(options.hysteresis)},
    votes_(pulseinfer::round_up(capacity_blocks, 32)),
    temp_(device::top_k_temp_words(1)),
    ids_(capacity_blocks)
{
  if (geometry.kv_heads % options.head_groups != 0) {
    throw std::invalid_argument{
      std::to_string(options.head_groups) + " head groups for " + std::to_string(geometry.kv_heads) + " KV heads"};
  }
  std::size_t const choosers = options.rule == head_rule::headwise ? geometry.query_heads / options.head_groups : 1;
  for (std::uint32_t lane = 0; lane < options.head_groups; ++lane) {
    lanes_.push_back(
      {.previous = std::vector(choosers, std::vector<std::uint32_t>(pulseinfer::divide_up(capacity_blocks, 32))),
       .slots = slot_cache{options.slot_blocks(), capacity_blocks, written_blocks}});
  }
}

void layer_choice::pick(
  lane_state& lane, std::size_t chooser, pulseinfer::row_info const& row, std::vector<block_id>& ids)
{
  device::solo_group const group;
  auto const kept = device::keep_blocks(row, options_->block_tokens, budget_, sinks_, recent_);
  auto& previous = lane.previous[chooser];
  ids.resize(kept.head + kept.chosen + (kept.blocks - kept.tail));
  for (std::uint32_t i = 0; i < kept.head; ++i) { ids[i] = static_cast<block_id>(i); }
  std::uint32_t count = kept.head;
  if (kept.chosen != 0) {
    device::favour_previous(group, previous.data(), 0, kept.blocks, favour_, votes_.data());
    count += device::top_k(
      group, votes_.data() + kept.head, kept.tail - kept.head, kept.chosen, kept.head, ids.data() + count,
      temp_.data());
  }
  for (std::uint32_t block = kept.tail; block < kept.blocks; ++block) { ids[count++] = static_cast<block_id>(block); }
  device::remember_selection(group, ids.data(), count, previous.data(), static_cast<std::uint32_t>(previous.size()));
}

void layer_choice::choose(share_table const& shares, std::uint32_t index, std::uint32_t position, bool count_recalls)
{
  pulseinfer::row_info const row{.tokens = static_cast<std::int32_t>(position + 1), .new_tokens = 1};
  std::uint32_t const blocks = row.blocks(options_->block_tokens), heads = geometry_.query_heads / lanes();
  for (std::uint32_t l = 0; l < lanes(); ++l) {
    lane_state& lane = lanes_[l];
    std::uint32_t const first = l * heads, last = first + heads;
    if (options_->rule == head_rule::headwise) {
      lane.chosen.clear();
      for (std::uint32_t head = first; head < last; ++head) {
        std::copy_n(shares.row(head, index), blocks, votes_.begin());
        pick(lane, head - first, row, ids_);
        merged_.clear();
        std::set_union(lane.chosen.begin(), lane.chosen.end(), ids_.begin(), ids_.end(), std::back_inserter(merged_));
        std::swap(lane.chosen, merged_);
      }
    } else {
      std::fill_n(votes_.begin(), blocks, 0.0F);
      for (std::uint32_t head = first; head < last; ++head) {
        if ((heads_ >> head / geometry_.query_group() & 1U) == 0U) { continue; }
        float const* const voter = shares.row(head, index);
        if (options_->rule == head_rule::soft_vote) {
          device::vote(device::solo_group{}, voter, 0, 1, blocks, votes_.data());
        } else {
          for (std::uint32_t b = 0; b < blocks; ++b) { votes_[b] = std::max(votes_[b], voter[b]); }
        }
      }
      plain_votes_.assign(votes_.begin(), votes_.begin() + blocks);
      pick(lane, 0, row, lane.chosen);
    }
    lane.missing.clear();
    std::copy_if(lane.chosen.begin(), lane.chosen.end(), std::back_inserter(lane.missing), [&](block_id block) {
      return !lane.slots.holds(block);
    });
    lane.read = lane.chosen;
    std::size_t deferred = 0;
    if (options_->deferred_share > 0.0 && !lane.missing.empty()) {
      defer(lane, shares, index, first, last);
      deferred = lane.chosen.size() - lane.read.size();
    }
    lane.slots.use(lane.chosen);
    if (count_recalls) {
      counts_.selected += lane.chosen.size();
      counts_.missing += lane.missing.size();
      counts_.deferred += deferred;
    }
  }
  if (count_recalls) { ++counts_.steps; }
}

void layer_choice::defer(
  lane_state& lane, share_table const& shares, std::uint32_t index, std::uint32_t first, std::uint32_t last)
{
  order_.clear();
  for (block_id const block : lane.missing) {
    float most = 0.0F;
    for (std::uint32_t head = first; head < last; ++head) {
      most = std::max(most, shares.row(head, index)[pulseinfer::to_number(block)]);
    }
    order_.emplace_back(most, block);
  }
  std::sort(order_.begin(), order_.end());
  std::vector<double> sums(last - first);
  double skipped = 0.0;
  merged_.clear();
  for (auto const& [share, block] : order_) {
    double most = 0.0;
    for (std::uint32_t head = first; head < last; ++head) {
      most = std::max(most, sums[head - first] + double{shares.row(head, index)[pulseinfer::to_number(block)]});
    }
    if (most > options_->deferred_share) { break; }
    for (std::uint32_t head = first; head < last; ++head) {
      sums[head - first] += double{shares.row(head, index)[pulseinfer::to_number(block)]};
    }
    skipped = most;
    merged_.push_back(block);
  }
  std::sort(merged_.begin(), merged_.end());
  lane.read.clear();
  std::set_difference(
    lane.chosen.begin(), lane.chosen.end(), merged_.begin(), merged_.end(), std::back_inserter(lane.read));
  counts_.skipped_share += skipped;
  counts_.skipped_most = std::max(counts_.skipped_most, skipped);
}

}  // namespace accuracy
