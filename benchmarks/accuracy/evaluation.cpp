#include "evaluation.hpp"

#include <pulseinfer/device/kept_blocks.hpp>
#include <pulseinfer/device/lanes.hpp>

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

namespace accuracy {

using pulseinfer::block_id;
using pulseinfer::device::float_lanes;

namespace {

constexpr std::uint32_t warm_up = 64;     // steps whose recalls don't count: the slots fill
constexpr std::uint32_t mass_stride = 8;  // every so many tokens the mass is measured
constexpr std::uint32_t error_stride = 16;

std::vector<std::uint32_t> every(std::uint32_t stride, std::uint32_t count)
{
  std::vector<std::uint32_t> result;
  for (std::uint32_t i = 0; i < count; i += stride) { result.push_back(i); }
  return result;
}

std::vector<pulseinfer::half> narrowed(std::vector<float> const& values)
{
  std::vector<pulseinfer::half> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) { result[i] = pulseinfer::half{values[i]}; }
  return result;
}

share_table widened(std::vector<pulseinfer::half> const& values, std::uint32_t tokens, std::uint32_t pitch)
{
  share_table result{.tokens = tokens, .pitch = pitch, .values = std::vector<float>(values.size())};
  for (std::size_t i = 0; i < values.size(); i += float_lanes::size) {
    float_lanes lanes;
    lanes.load(values.data() + i);
    lanes.store(result.values.data() + i);
  }
  return result;
}

// [rows, outputs] = in[rows, inputs] * matrix[outputs, inputs]^T
std::vector<float> multiply(std::vector<float> const& in, std::vector<float> const& matrix, std::size_t inputs)
{
  std::size_t const rows = in.size() / inputs, outputs = matrix.size() / inputs;
  std::vector<float> out(rows * outputs);
  auto const m = static_cast<blasint>(rows), n = static_cast<blasint>(outputs), k = static_cast<blasint>(inputs);
  cblas_sgemm(
    CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0F, in.data(), k, matrix.data(), k, 0.0F, out.data(), n);
  return out;
}

// Adds up `count` terms, in pieces that are summed in floats and then added in double.
// @param add_lanes (float_lanes& sum, at): adds the terms from `at` on, one to each lane   @param term (at) -> double
template <class AddLanes, class Term>
double sum_in_pieces(std::size_t count, AddLanes add_lanes, Term term)
{
  double total = 0.0;
  constexpr std::size_t piece = 4096;
  for (std::size_t begin = 0; begin < count; begin += piece) {
    std::size_t const end = std::min(begin + piece, count);
    float_lanes sum;
    std::size_t at = begin;
    for (; at + float_lanes::size <= end; at += float_lanes::size) { add_lanes(sum, at); }
    total += double{sum.sum()};
    for (; at < end; ++at) { total += term(at); }
  }
  return total;
}

// sum over the vocabulary of p (log p - log q), p dense
double divergence(float const* dense_log, float const* sparse_log, std::size_t count)
{
  return sum_in_pieces(
    count,
    [&](float_lanes& sum, std::size_t at) {
      float_lanes dense, sparse, part;
      dense.load(dense_log + at);
      sparse.load(sparse_log + at);
      part = dense;
      part.exponential_below(0.0F);
      dense.subtract(sparse);
      sum.add_product(part, dense);
    },
    [&](std::size_t at) { return std::exp(double{dense_log[at]}) * (double{dense_log[at]} - double{sparse_log[at]}); });
}

// ln of the mass that the centres of digests give blocks, over their true mass.
double centre_mass(
  layer_cache const& cache, std::uint32_t head, float const* query, std::span<block_id const> blocks,
  configuration const& options)
{
  std::uint32_t const dim = cache.geometry().head_dim;
  std::uint32_t const piece = options.digest_tokens == 0 ? options.block_tokens : options.digest_tokens;
  auto const scale = double{cache.geometry().scale()};
  std::vector<double> truth, centres;
  for (block_id const block : blocks) {
    std::size_t const first = static_cast<std::size_t>(pulseinfer::to_number(block)) * options.block_tokens;
    for (std::size_t begin = first; begin < first + options.block_tokens; begin += piece) {
      std::vector<double> logits(piece);
      double centre = 0.0;
      for (std::uint32_t j = 0; j < dim; ++j) {
        float low = cache.keys(head)[begin * dim + j], high = low;
        for (std::uint32_t token = 0; token < piece; ++token) {
          float const key = cache.keys(head)[(begin + token) * dim + j];
          low = std::min(low, key);
          high = std::max(high, key);
          logits[token] += scale * double{query[j]} * double{key};
        }
        centre += scale * double{query[j]} * 0.5 * (double{low} + double{high});
      }
      truth.insert(truth.end(), logits.begin(), logits.end());
      centres.push_back(centre + std::log(static_cast<double>(piece)));
    }
  }
  auto const log_sum = [](std::vector<double> const& values) {
    double const top = *std::max_element(values.begin(), values.end());
    double sum = 0.0;
    for (double const value : values) { sum += std::exp(value - top); }
    return top + std::log(sum);
  };
  return log_sum(centres) - log_sum(truth);
}

std::size_t largest(float const* values, std::size_t count)
{
  return static_cast<std::size_t>(std::max_element(values, values + count) - values);
}

}  // namespace

void histogram::add(double value)
{
  double const place = std::clamp(value, 0.0, 1.0) * static_cast<double>(bins);
  ++counts_[static_cast<std::size_t>(place)];
  sum_ += value;
  ++count_;
}

void histogram::add(histogram const& other)
{
  for (std::size_t i = 0; i <= bins; ++i) { counts_[i] += other.counts_[i]; }
  sum_ += other.sum_;
  count_ += other.count_;
}

double histogram::quantile(double part) const
{
  double const wanted = part * static_cast<double>(count_);
  double seen = 0.0;
  for (std::size_t i = 0; i <= bins; ++i) {
    seen += counts_[i];
    if (seen >= wanted) { return (static_cast<double>(i) + 0.5) / static_cast<double>(bins); }
  }
  return 1.0;
}

attention_geometry geometry_of(host_engine::llama_geometry const& model)
{
  return {.query_heads = model.query_heads, .kv_heads = model.kv_heads, .head_dim = model.head_dim};
}

void log_softmax(float* logits, std::size_t count)
{
  float const top = logits[largest(logits, count)];
  double const total = sum_in_pieces(
    count,
    [&](float_lanes& sum, std::size_t at) {
      float_lanes lanes;
      lanes.load(logits + at);
      lanes.exponential_below(top);
      sum.add(lanes);
    },
    [&](std::size_t at) { return std::exp(double{logits[at] - top}); });
  auto const shift = static_cast<float>(double{top} + std::log(total));
  for (std::size_t at = 0; at < count; ++at) { logits[at] -= shift; }
}

document_run::document_run(host_engine::llama_weights const& weights, document const& text, std::uint32_t extra)
  : weights_{&weights}, text_{&text}, geometry_{geometry_of(weights.geometry)}
{
  auto const tokens = static_cast<std::uint32_t>(text.tokens.size());
  if (text.scored == 0 || text.scored > chunk || text.scored + 2 > tokens) {
    throw std::invalid_argument{
      "document " + text.name + " of " + std::to_string(tokens) + " tokens has " + std::to_string(text.scored) +
      " scored ones; 1 to " + std::to_string(chunk) + " behind a prompt are served"};
  }
  capacity_ = tokens + extra;
  if (capacity_ > weights.geometry.context_tokens) {
    throw std::invalid_argument{
      "document " + text.name + " reaches " + std::to_string(capacity_) + " tokens, the model's context has " +
      std::to_string(weights.geometry.context_tokens)};
  }
  position_ = tokens - text.scored - 1;
  for (std::uint32_t layer = 0; layer < weights.geometry.layers; ++layer) {
    caches_.emplace_back(geometry_, capacity_);
  }
}

template <class Attend>
void document_run::forward(
  host_engine::llama_engine& engine, std::span<std::int32_t const> tokens, std::uint32_t position, Attend&& attend,
  std::uint32_t first_layer)
{
  constexpr std::uint32_t row[] = {0};
  auto const count = static_cast<std::uint32_t>(tokens.size());
  if (first_layer == 0) {
    engine.feed(0, tokens, position);
  } else {
    engine.resume(0, dense_hidden_.at(first_layer), position, first_layer);
  }
  for (std::uint32_t layer = first_layer; layer < weights_->geometry.layers; ++layer) {
    engine.project(layer, row);
    caches_[layer].write(position, count, engine.keys().data, engine.values().data);
    attend(layer, engine.queries().data, engine.attended(0).data());
    engine.feed_forward(layer, row);
  }
}

void document_run::read_prompt(host_engine::llama_engine& engine)
{
  for (std::uint32_t at = 0; at < position_; at += chunk) {
    std::uint32_t const count = std::min(chunk, position_ - at);
    auto const all = every(1, count);
    forward(
      engine, std::span{text_->tokens}.subspan(at, count), at,
      [&](std::uint32_t layer, float const* queries, float* attended) {
        accuracy::attend_densely(caches_[layer], queries, at, all, 16, nullptr, attended, scratch_);
      });
  }
}

void document_run::attend_densely(host_engine::llama_engine& engine, configuration const& options, bool keep_shares)
{
  read_prompt(engine);
  std::uint32_t const count = text_->scored;
  auto const all = every(1, count);
  share_table shares;
  if (keep_shares) {
    true_shares_.resize(caches_.size());
    estimated_shares_.resize(caches_.size());
  }
  dense_hidden_.resize(caches_.size());
  forward(
    engine, std::span{text_->tokens}.subspan(position_, count), position_,
    [&](std::uint32_t layer, float const* queries, float* attended) {
      dense_hidden_[layer].assign(engine.hidden(0).begin(), engine.hidden(0).end());
      if (keep_shares) {
        shares.resize(geometry_.query_heads, count, pulseinfer::divide_up(capacity_, options.block_tokens));
      }
      accuracy::attend_densely(
        caches_[layer], queries, position_, all, options.block_tokens, keep_shares ? &shares : nullptr, attended,
        scratch_);
      if (!keep_shares) { return; }
      true_shares_[layer] = narrowed(shares.values);
      layer_digests digests{geometry_, options, capacity_};
      digests.estimate(caches_[layer], queries, position_, count, all_heads, shares);
      estimated_shares_[layer] = narrowed(shares.values);
    });
  std::size_t const vocabulary = weights_->geometry.vocabulary;
  dense_log_.resize(count * vocabulary);
  engine.token_logits(0, 0, count, dense_log_.data());
  for (std::size_t i = 0; i < count; ++i) { log_softmax(dense_log_.data() + i * vocabulary, vocabulary); }
}

double document_run::recalled_bytes(configuration const& options, std::vector<recall_counts> const& recalls) const
{
  std::uint64_t const block_bytes =
    std::uint64_t{2} * options.block_tokens * geometry_.head_dim * 2 * (geometry_.kv_heads / options.head_groups);
  double bytes = 0.0;
  for (recall_counts const& layer : recalls) {
    if (layer.steps != 0) {
      bytes += static_cast<double>(layer.missing * block_bytes) / static_cast<double>(layer.steps);
    }
  }
  return bytes;
}

outcome document_run::evaluate(
  host_engine::llama_engine& engine, configuration const& options, choice_observer const& observer, bool guess)
{
  return evaluate_from(engine, options, observer, guess, 0);
}

outcome document_run::evaluate_layer(host_engine::llama_engine& engine, configuration options, std::uint32_t layer)
{
  options.dense_layers.clear();
  for (std::uint32_t other = 0; other < weights_->geometry.layers; ++other) {
    if (other != layer) { options.dense_layers.push_back(other); }
  }
  return evaluate_from(engine, options, {}, false, layer);
}

outcome document_run::evaluate_from(
  host_engine::llama_engine& engine, configuration const& options, choice_observer const& observer, bool guess,
  std::uint32_t first_layer)
{
  if (dense_log_.empty()) { throw std::logic_error{"the dense pass comes first"}; }
  std::uint32_t const count = text_->scored, layers = weights_->geometry.layers;
  std::uint32_t const most_blocks = pulseinfer::divide_up(capacity_, options.block_tokens);
  auto const all = every(1, count), measured = every(mass_stride, count), checked = every(error_stride, count);
  bool const oracle = options.scores == score_source::oracle;
  outcome result;
  result.head_mass.assign(std::size_t{layers} * geometry_.query_heads, 0.0);
  result.recalls.resize(layers);
  share_table shares, truth, guessed;
  shares.resize(geometry_.query_heads, count, most_blocks);
  std::vector<block_id> unread;
  std::vector<float> dense_out(checked.size() * geometry_.query_width()), difference(dense_out.size()), scratch;
  std::vector<float> guessed_queries(guess ? count * geometry_.query_width() : 0);
  bool guess_is_there = false;

  forward(
    engine, std::span{text_->tokens}.subspan(position_, count), position_,
    [&](std::uint32_t layer, float const* queries, float* attended) {
      layer_cache const& cache = caches_[layer];
      if (options.dense(layer)) {
        accuracy::attend_densely(cache, queries, position_, all, options.block_tokens, nullptr, attended, scratch_);
        guess_is_there = false;
        return;
      }
      if (oracle) {
        accuracy::attend_densely(cache, queries, position_, all, options.block_tokens, &shares, nullptr, scratch_);
      } else {
        truth.resize(geometry_.query_heads, static_cast<std::uint32_t>(measured.size()), most_blocks);
        accuracy::attend_densely(cache, queries, position_, measured, options.block_tokens, &truth, nullptr, scratch_);
        layer_digests digests{geometry_, options, capacity_};
        digests.estimate(
          cache, queries, position_, count, options.deferred_share > 0.0 ? all_heads : options.mask(layer), shares);
        if (guess && guess_is_there) {
          guessed.resize(geometry_.query_heads, count, most_blocks);
          digests.estimate(cache, guessed_queries.data(), position_, count, options.mask(layer), guessed);
        }
      }
      layer_choice choice{
        geometry_, options, layer, most_blocks, pulseinfer::divide_up(position_, options.block_tokens)};
      std::uint32_t const lane_heads = geometry_.kv_heads / choice.lanes(), group = geometry_.query_group();
      for (std::uint32_t i = 0; i < count; ++i) {
        std::uint32_t const position = scored_position(i);
        choice.choose(shares, i, position, i >= std::min(warm_up, count / 2));
        if (observer) {
          observer(
            {.layer = layer,
             .index = i,
             .position = position,
             .choice = choice,
             .shares = shares,
             .guessed = guess && guess_is_there ? &guessed : nullptr});
        }
        for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
          std::size_t const at = i * geometry_.query_width() + std::size_t{head} * group * geometry_.head_dim;
          attend_chosen(
            cache, head, queries + at, choice.read(head / lane_heads), options.block_tokens, position + 1,
            attended + at, scratch);
        }
        if (i % mass_stride != 0) { continue; }
        share_table const& exact = oracle ? shares : truth;
        std::uint32_t const row = oracle ? i : i / mass_stride;
        for (std::uint32_t head = 0; head < geometry_.query_heads; ++head) {
          float const* const mass = exact.row(head, row);
          std::uint32_t const lane = head / group / lane_heads;
          double sum = 0.0;
          for (block_id const block : choice.read(lane)) { sum += double{mass[pulseinfer::to_number(block)]}; }
          result.mass.add(std::min(sum, 1.0));
          result.head_mass[std::size_t{layer} * geometry_.query_heads + head] +=
            std::min(sum, 1.0) / static_cast<double>(measured.size());
          if (choice.read(lane).size() < choice.chosen(lane).size()) {
            double skipped = 0.0, told = 0.0;
            unread.clear();
            std::set_difference(
              choice.chosen(lane).begin(), choice.chosen(lane).end(), choice.read(lane).begin(),
              choice.read(lane).end(), std::back_inserter(unread));
            for (block_id const block : unread) {
              skipped += double{mass[pulseinfer::to_number(block)]};
              told += double{shares.row(head, i)[pulseinfer::to_number(block)]};
            }
            float const* const query = queries + i * geometry_.query_width() + std::size_t{head} * geometry_.head_dim;
            double const beside = centre_mass(cache, head / group, query, unread, options);
            auto const logarithm = [](double part) { return static_cast<float>(std::log(std::max(part, 1e-12))); };
            result.skipped.push_back(
              {.layer = layer,
               .head = head,
               .index = i,
               .truth = logarithm(skipped),
               .told = logarithm(told),
               .centres = static_cast<float>(beside) + logarithm(skipped)});
          }
        }
      }
      result.recalls[layer] = choice.counts();

      accuracy::attend_densely(
        cache, queries, position_, checked, options.block_tokens, nullptr, dense_out.data(), scratch_);
      for (std::size_t i = 0; i < checked.size(); ++i) {
        for (std::size_t j = 0; j < geometry_.query_width(); ++j) {
          std::size_t const at = i * geometry_.query_width() + j;
          difference[at] = dense_out[at] - attended[checked[i] * geometry_.query_width() + j];
        }
      }
      std::size_t const hidden = weights_->geometry.hidden;
      std::vector<float> const lost = multiply(difference, weights_->layers[layer].output, geometry_.query_width());
      std::vector<float> const whole = multiply(dense_out, weights_->layers[layer].output, geometry_.query_width());
      for (std::size_t i = 0; i < checked.size(); ++i) {
        auto const norm = [&](std::vector<float> const& values) {
          return std::sqrt(std::inner_product(
            values.begin() + static_cast<std::ptrdiff_t>(i * hidden),
            values.begin() + static_cast<std::ptrdiff_t>((i + 1) * hidden),
            values.begin() + static_cast<std::ptrdiff_t>(i * hidden), 0.0));
        };
        result.error.add(norm(lost) / std::max(norm(whole), 1e-30));
      }
      if (guess && layer + 1 < layers) {
        // What stands before this layer, not behind it: the guess is there a layer early.
        engine.guess_queries(0, layer + 1, guessed_queries.data());
        guess_is_there = true;
      }
    },
    first_layer);
  result.recalled_bytes = recalled_bytes(options, result.recalls);
  compare_logits(engine, result);
  result.done = true;
  return result;
}

void document_run::compare_logits(host_engine::llama_engine& engine, outcome& result)
{
  std::uint32_t const count = text_->scored;
  std::size_t const vocabulary = weights_->geometry.vocabulary;
  constexpr std::uint32_t slice = 64;
  std::vector<float> sparse(slice * vocabulary);
  std::size_t agree = 0;
  for (std::uint32_t first = 0; first < count; first += slice) {
    std::uint32_t const now = std::min(slice, count - first);
    engine.token_logits(0, first, now, sparse.data());
    for (std::uint32_t i = 0; i < now; ++i) {
      float* const log_sparse = sparse.data() + i * vocabulary;
      float const* const log_dense = dense_log_.data() + (first + i) * vocabulary;
      log_softmax(log_sparse, vocabulary);
      auto const target = static_cast<std::size_t>(text_->tokens[position_ + first + i + 1]);
      result.kl.push_back(static_cast<float>(divergence(log_dense, log_sparse, vocabulary)));
      result.loss -= double{log_sparse[target]} / count;
      result.dense_loss -= double{log_dense[target]} / count;
      agree += largest(log_sparse, vocabulary) == largest(log_dense, vocabulary) ? 1U : 0U;
    }
  }
  result.same_top = static_cast<double>(agree) / count;
}

double document_run::replay(configuration const& options) const
{
  std::uint32_t const count = text_->scored, most_blocks = pulseinfer::divide_up(capacity_, options.block_tokens);
  std::uint32_t const pitch = pulseinfer::round_up(most_blocks, 16);
  std::vector<recall_counts> recalls(caches_.size());
  auto const& stored = options.scores == score_source::oracle ? true_shares_ : estimated_shares_;
  for (std::uint32_t layer = 0; layer < stored.size(); ++layer) {
    if (options.dense(layer)) { continue; }
    share_table const shares = widened(stored[layer], count, pitch);
    layer_choice choice{geometry_, options, layer, most_blocks, pulseinfer::divide_up(position_, options.block_tokens)};
    for (std::uint32_t i = 0; i < count; ++i) {
      choice.choose(shares, i, scored_position(i), i >= std::min(warm_up, count / 2));
    }
    recalls[layer] = choice.counts();
  }
  return recalled_bytes(options, recalls);
}

std::vector<double> document_run::covered(configuration const& options, std::vector<head_mask> const& masks) const
{
  std::uint32_t const count = text_->scored, most_blocks = pulseinfer::divide_up(capacity_, options.block_tokens);
  std::uint32_t const pitch = pulseinfer::round_up(most_blocks, 16), group = geometry_.query_group();
  std::vector<double> result(caches_.size() * (masks.size() + 1));
  std::vector<float> target(pitch), votes(pitch);
  std::vector<std::uint32_t> order(pitch);
  for (std::uint32_t layer = 0; layer < caches_.size(); ++layer) {
    share_table const truth = widened(true_shares_[layer], count, pitch);
    share_table const estimated = widened(estimated_shares_[layer], count, pitch);
    for (std::uint32_t i = 0; i < count; i += mass_stride) {
      pulseinfer::row_info const row{.tokens = static_cast<std::int32_t>(scored_position(i) + 1), .new_tokens = 1};
      auto const kept = pulseinfer::device::keep_blocks(
        row, options.block_tokens, options.layer_blocks(layer),
        pulseinfer::divide_up(options.sink_tokens, options.block_tokens),
        pulseinfer::divide_up(options.recent_tokens, options.block_tokens));
      if (kept.chosen == 0) { continue; }
      auto const sum = [&](share_table const& shares, head_mask mask, std::vector<float>& to) {
        std::fill(to.begin(), to.end(), 0.0F);
        for (std::uint32_t head = 0; head < geometry_.query_heads; ++head) {
          if ((mask >> head / group & 1U) == 0U) { continue; }
          for (std::uint32_t b = kept.head; b < kept.tail; ++b) { to[b] += shares.row(head, i)[b]; }
        }
      };
      auto const mass_of_best = [&](std::vector<float> const& by) {
        order.resize(kept.tail - kept.head);
        std::iota(order.begin(), order.end(), kept.head);
        std::nth_element(
          order.begin(), order.begin() + kept.chosen, order.end(),
          [&](std::uint32_t a, std::uint32_t b) { return by[a] != by[b] ? by[a] > by[b] : a < b; });
        double mass = 0.0;
        for (std::uint32_t at = 0; at < kept.chosen; ++at) { mass += double{target[order[at]]}; }
        return mass;
      };
      sum(truth, all_heads, target);
      double* const to = result.data() + layer * (masks.size() + 1);
      for (std::size_t m = 0; m < masks.size(); ++m) {
        sum(estimated, masks[m], votes);
        to[m] += mass_of_best(votes);
      }
      to[masks.size()] += mass_of_best(target);
    }
  }
  return result;
}

generated_text document_run::generate(
  host_engine::llama_engine& engine, configuration const& options, std::uint32_t count, double temperature,
  std::uint64_t seed, std::function<bool()> const& more)
{
  read_prompt(engine);
  std::uint32_t const layers = weights_->geometry.layers, group = geometry_.query_group();
  std::uint32_t const most_blocks = pulseinfer::divide_up(capacity_, options.block_tokens);
  std::size_t const vocabulary = weights_->geometry.vocabulary;
  if (position_ + count + 1 > capacity_) {
    throw std::invalid_argument{
      std::to_string(count) + " tokens behind " + std::to_string(position_) + " in a cache of " +
      std::to_string(capacity_)};
  }
  std::vector<layer_digests> digests;
  std::vector<layer_choice> choices;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    digests.emplace_back(geometry_, options, capacity_);
    choices.emplace_back(
      geometry_, options, layer, most_blocks, pulseinfer::divide_up(position_, options.block_tokens));
  }
  generated_text result;
  std::vector<float> sparse_log(count * vocabulary), scratch;
  std::vector<double> weights(vocabulary);
  std::mt19937_64 random{seed};
  share_table shares;
  shares.resize(geometry_.query_heads, 1, most_blocks);
  constexpr std::uint32_t first[] = {0};
  std::int32_t next = text_->tokens[position_];
  std::vector<std::int32_t> inputs;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (more && !more()) {
      count = i;
      break;
    }
    std::uint32_t const position = position_ + i;
    inputs.push_back(next);
    forward(engine, std::span{&next, 1}, position, [&](std::uint32_t layer, float const* queries, float* attended) {
      layer_cache const& cache = caches_[layer];
      if (options.dense(layer)) {
        accuracy::attend_densely(cache, queries, position, first, options.block_tokens, nullptr, attended, scratch_);
        return;
      }
      if (options.scores == score_source::oracle) {
        accuracy::attend_densely(cache, queries, position, first, options.block_tokens, &shares, nullptr, scratch_);
      } else {
        digests[layer].estimate(cache, queries, position, 1, all_heads, shares);
      }
      layer_choice& choice = choices[layer];
      choice.choose(shares, 0, position, false);
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        std::size_t const at = std::size_t{head} * group * geometry_.head_dim;
        attend_chosen(
          cache, head, queries + at, choice.read(head / (geometry_.kv_heads / choice.lanes())), options.block_tokens,
          position + 1, attended + at, scratch);
      }
    });
    float* const log = sparse_log.data() + i * vocabulary;
    engine.token_logits(0, 0, 1, log);
    log_softmax(log, vocabulary);
    if (temperature <= 0.0) {
      next = static_cast<std::int32_t>(largest(log, vocabulary));
    } else {
      double sum = 0.0;
      for (std::size_t v = 0; v < vocabulary; ++v) {
        sum += std::exp(double{log[v]} / temperature);
        weights[v] = sum;
      }
      double const drawn = static_cast<double>(random() >> 11U) * 0x1p-53 * sum;
      next = static_cast<std::int32_t>(std::upper_bound(weights.begin(), weights.end() - 1, drawn) - weights.begin());
    }
    result.tokens.push_back(next);
  }
  std::vector<float> dense(std::size_t{64} * vocabulary);
  for (std::uint32_t at = 0; at < count; at += chunk) {
    std::uint32_t const now = std::min(chunk, count - at);
    auto const all = every(1, now);
    forward(
      engine, std::span{inputs}.subspan(at, now), position_ + at,
      [&](std::uint32_t layer, float const* queries, float* attended) {
        accuracy::attend_densely(caches_[layer], queries, position_ + at, all, 16, nullptr, attended, scratch_);
      });
    for (std::uint32_t from = 0; from < now; from += 64) {
      std::uint32_t const part = std::min(64U, now - from);
      engine.token_logits(0, from, part, dense.data());
      for (std::uint32_t i = 0; i < part; ++i) {
        log_softmax(dense.data() + i * vocabulary, vocabulary);
        result.kl.push_back(static_cast<float>(
          divergence(dense.data() + i * vocabulary, sparse_log.data() + (at + from + i) * vocabulary, vocabulary)));
      }
    }
  }
  return result;
}

}  // namespace accuracy
