#include "capacity.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace plan_capacity {

namespace {

constexpr std::uint32_t most_rows = 4096;
constexpr double hot_exponent = 0.9;  // misses fall so with hot slots over the budget; published ranges: 0.7 to 1.2

/// Bytes of a token's cache over all layers.
double token_bytes(setting const& s) { return double{s.cache_bytes} * s.model.cache_elements() * s.model.layers; }

double longest(setting const& s) { return double{1.0} * s.prompt_tokens + s.output_tokens; }
double mean_tokens(setting const& s) { return s.prompt_tokens + 0.5 * s.output_tokens; }

/// Bytes of weights that a step of so many rows reads: the experts that at least one row is routed to.
double weights_read(setting const& s, std::uint32_t rows)
{
  if (s.model.experts == 0) { return s.model.parameters * s.weight_bytes; }
  double const idle = 1.0 - double{1.0} * s.model.experts_per_token / s.model.experts;
  double const touched = 1.0 - std::pow(idle, rows);
  return (s.model.shared_parameters + touched * (s.model.parameters - s.model.shared_parameters)) * s.weight_bytes;
}

double cache_room(setting const& s)
{
  return s.gpu.memory_bytes * s.memory_share - s.model.parameters * s.weight_bytes;
}

void check(setting const& s)
{
  auto const gib = [](double bytes) { return std::to_string(bytes / 1073741824.0) + " GiB"; };
  auto const positive = [](double value, char const* name) {
    if (!(value > 0.0) || !std::isfinite(value)) {
      throw std::invalid_argument{std::string{name} + " is " + std::to_string(value)};
    }
  };
  positive(s.prompt_tokens, "the prompt's length");
  positive(s.budget_tokens, "the budget");
  positive(s.block_tokens, "the block size");
  positive(s.gpu.link_bytes_per_second, "the link's rate");
  positive(s.cache_bytes, "the bytes of a cached element");
  if (s.hot_tokens < s.budget_tokens) {
    throw std::invalid_argument{
      std::to_string(s.hot_tokens) + " hot tokens, fewer than the budget of " + std::to_string(s.budget_tokens)};
  }
  if (!(s.miss_ratio >= 0.0) || s.miss_ratio > 1.0) {
    throw std::invalid_argument{"a miss ratio of " + std::to_string(s.miss_ratio) + " is not within 0 to 1"};
  }
  if (cache_room(s) <= 0.0) {
    throw std::invalid_argument{
      std::string{s.model.name} + " has " + gib(s.model.parameters * s.weight_bytes) + " of weights, " + s.gpu.name +
      " has room for " + gib(s.gpu.memory_bytes * s.memory_share)};
  }
}

}  // namespace

char const* name_of(way w)
{
  switch (w) {
    case way::resident_dense: return "resident, dense";
    case way::resident_sparse: return "resident, sparse";
    case way::offload_all: return "offload all";
    case way::adaptive: return "adaptive";
  }
  return "";
}

operating_point point(setting const& s, std::uint32_t resident, std::uint32_t offloaded, bool sparse)
{
  operating_point p{.rows = resident + offloaded, .offloaded = offloaded};
  double const token = token_bytes(s);
  bool const selects = sparse && mean_tokens(s) > s.budget_tokens;
  double const digests = selects ? s.digest_share * token : 0.0;  // of a token
  double const read = selects ? s.budget_tokens * token + mean_tokens(s) * digests : mean_tokens(s) * token;
  double const reach = s.gpu.memory_bytes_per_second * s.read_share;
  p.compute = s.step_overhead + (weights_read(s, p.rows) + p.rows * read) / reach;
  double const hot = std::pow(double{1.0} * s.hot_tokens / s.budget_tokens / 3.0, -hot_exponent);
  double const missed = selects ? std::min(1.0, s.miss_ratio * hot) * s.budget_tokens * token : 0.0;
  double const written = selects ? token : 0.0;  // each new token goes to the host once
  p.recall = offloaded * (missed + written) / s.gpu.link_bytes_per_second;
  p.step = std::max(p.compute, p.recall) + s.exposed * std::min(p.compute, p.recall);
  p.tokens_per_second = p.rows / p.step;
  double const slots = std::min<double>(s.hot_tokens, longest(s)) * token;
  p.device_bytes = resident * longest(s) * token + offloaded * slots + p.rows * longest(s) * digests;
  p.host_bytes = offloaded * longest(s) * token;
  return p;
}

capacity_plan plan(setting const& s, way how)
{
  check(s);
  capacity_plan result{.how = how};
  bool const sparse = how != way::resident_dense;
  auto const fits = [&](operating_point const& p) {
    if (p.device_bytes > cache_room(s)) {
      result.limit = "GPU memory";
      return false;
    }
    if (p.host_bytes > s.host_bytes) {
      result.limit = "host memory";
      return false;
    }
    return true;
  };
  result.limit = std::to_string(most_rows) + " requests, as far as this program looks";
  for (std::uint32_t rows = 1; rows <= most_rows; ++rows) {
    operating_point chosen;
    if (how == way::adaptive) {
      // As few offloaded as memory allows: each costs recalls and frees memory for others.
      for (std::uint32_t offloaded = 0; offloaded <= rows && chosen.rows == 0; ++offloaded) {
        operating_point const p = point(s, rows - offloaded, offloaded, true);
        if (fits(p)) { chosen = p; }
      }
    } else {
      operating_point const p = how == way::offload_all ? point(s, 0, rows, true) : point(s, rows, 0, sparse);
      if (fits(p)) { chosen = p; }
    }
    if (chosen.rows == 0) { break; }
    result.curve.push_back(chosen);
    bool const in_time = s.target_seconds == 0.0 || chosen.step <= s.target_seconds;
    if (in_time && chosen.tokens_per_second > result.best.tokens_per_second) { result.best = chosen; }
  }
  return result;
}

}  // namespace plan_capacity
